"""Which process: a pid alone may be recycled, a pid with its start time and boot cannot.

Reads ``/proc`` only. A pidfd pins the identity for as long as it is open; the pair written to a file finds the process again later.
"""

from __future__ import annotations

import errno
import functools
import os
from pathlib import Path

import msgspec

_GONE = frozenset({errno.ESRCH, errno.EINVAL, errno.ENOENT})
"""What Linux answers for a pid that is dying or dead: ESRCH, and EINVAL while its thread group leader is being released."""


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """One process of one boot. ``start_time``: clock ticks since boot, field 22 of ``/proc/PID/stat``."""

    pid: int
    start_time: int
    boot_id: str


class Stat(msgspec.Struct, frozen=True, kw_only=True):
    """What ``/proc/PID/stat`` says. ``state``: one letter, ``Z`` and ``X`` are dead, ``D`` cannot be killed just now."""

    pid: int
    comm: str
    state: str
    ppid: int
    pgid: int
    session: int
    start_time: int

    @property
    def dead(self) -> bool:
        return self.state in "ZXx"


@functools.cache
def boot_id() -> str:
    """Return the kernel's random id of this boot."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def read_stat(pid: int) -> Stat | None:
    """Return the stat of ``pid``, None when there is no such process (any more)."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            raw = file.read()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The command name is in parentheses and may hold spaces and parentheses itself: cut at the last one.
    head, _, tail = raw.rpartition(b")")
    fields = tail.split()
    if len(fields) < 20:
        return None
    return Stat(
        pid=pid,
        comm=head.partition(b"(")[2].decode(errors="replace"),
        state=fields[0].decode(),
        ppid=int(fields[1]),
        pgid=int(fields[2]),
        session=int(fields[3]),
        start_time=int(fields[19]),
    )


def of(pid: int) -> Identity | None:
    """Return the identity of the process that has ``pid`` now (a zombie has one too), None when there is none."""
    stat = read_stat(pid)
    return None if stat is None else Identity(pid=pid, start_time=stat.start_time, boot_id=boot_id())


def alive(identity: Identity) -> bool:
    """Return whether that very process still runs; a zombie does not."""
    if identity.boot_id != boot_id():
        return False
    stat = read_stat(identity.pid)
    return stat is not None and stat.start_time == identity.start_time and not stat.dead


def open_pidfd(pid: int) -> int | None:
    """Return a pidfd (close-on-exec, owned by the caller) of whatever process has ``pid`` now, None when it is gone.

    Raises:
        OSError: anything but "no such process" (out of fds, no pidfd support).
    """
    try:
        return os.pidfd_open(pid)
    except OSError as error:
        if error.errno in _GONE:
            return None
        raise


def open_identity(identity: Identity) -> int | None:
    """Return a pidfd of exactly that process, None when it is gone or its pid belongs to another one now.

    Raises:
        OSError: as `open_pidfd`.
    """
    if identity.boot_id != boot_id():
        return None
    pidfd = open_pidfd(identity.pid)
    if pidfd is None:
        return None
    # Looked at after the open: if the pid still has that start time now, the fd cannot be of a later process.
    stat = read_stat(identity.pid)
    if stat is None or stat.start_time != identity.start_time:
        os.close(pidfd)
        return None
    return pidfd
