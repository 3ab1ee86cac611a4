"""How a process ended that is not our child: an adopted engine, whose parent is init or a nursery.

Until its parent has reaped it, /proc still shows its status; after that its pidfd knows it (Linux 6.15).
"""

from __future__ import annotations

import fcntl
import os
import struct

from shadowsup.supervisor import identity as ids
from shadowsup.supervisor.identity import Identity

_INFO = struct.Struct("=QQ11Ii")
"""``struct pidfd_info`` of include/uapi/linux/pidfd.h in its first size: mask, cgroup id, eleven ids, exit code."""
_EXIT = 1 << 3
"""PIDFD_INFO_EXIT."""
_GET_INFO = (3 << 30) | (_INFO.size << 16) | (0xFF << 8) | 11
"""PIDFD_GET_INFO: _IOWR(0xFF, 11, struct pidfd_info)."""
_STATUS_FIELD = 52
"""Of /proc/PID/stat (proc(5)), counted from 1."""


def of(pidfd: int, identity: Identity) -> int | None:
    """Return the returncode, as `subprocess` has it, of a process that has ended; None: nobody can tell."""
    status = _of_zombie(identity)
    if status is None:
        status = _of_pidfd(pidfd)
    return None if status is None else os.waitstatus_to_exitcode(status)


def _of_zombie(identity: Identity) -> int | None:
    stat = ids.read_stat(identity.pid)
    if stat is None or not stat.dead or stat.start_time != identity.start_time:
        return None
    try:
        with open(f"/proc/{identity.pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    # Two fields come before those. Looked at once more: it may have been reaped in between, and its number given away.
    again = ids.read_stat(identity.pid)
    if len(fields) <= _STATUS_FIELD - 3 or again is None or again.start_time != identity.start_time:
        return None
    return int(fields[_STATUS_FIELD - 3])


def _of_pidfd(pidfd: int) -> int | None:
    info = bytearray(_INFO.pack(_EXIT, *[0] * 13))
    try:
        fcntl.ioctl(pidfd, _GET_INFO, info)
    except OSError:
        return None
    mask, *_, status = _INFO.unpack(info)
    return int(status) if mask & _EXIT else None
