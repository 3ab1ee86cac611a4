"""The engine's end of its lifeline: a socket that nobody writes to, whose end of file tells the supervisor that this process is dead.

Linux closes the files of a dying process by descending number (task work runs last in, first out), and CUDA's device files take the driver
tens of milliseconds each way: a line whose number is below theirs ends 23 to 55 ms after a SIGKILL, one above them 0.3 to 0.7 ms (H200,
`benchmarks/gpu_facts.py`). Hence `Lifeline.renew`: a number above all others. A child of the engine (data loader, helper) must not keep the
line open after the engine's death, so every fork closes it. The other direction means nothing: an engine outlives its supervisor.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import resource
import weakref
from collections.abc import Iterator

_TOP = 4096
"""Numbers below this, or below the limit of this process: the kernel's table of descriptors grows to the highest one in use."""
_ROOM = 16


class Lifeline:
    """Takes ownership of ``fd``; -1 makes a lifeline that does nothing (an engine started by hand)."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        if fd >= 0:
            os.set_inheritable(fd, False)
        _open.add(self)

    def renew(self) -> None:
        """Give the line a number above all that this process will open. It is never closed in between."""
        if self._fd >= 0:
            older, self._fd = self._fd, _duplicate_high(self._fd)
            os.close(older)

    @contextlib.contextmanager
    def copy(self) -> Iterator[int]:
        """Lend a copy of it, which no fork closes, to a child that is forked meanwhile and is as much the engine as this process is: the
        line ends with the last who has it. -1: there is none."""
        fd = fcntl.fcntl(self._fd, fcntl.F_DUPFD_CLOEXEC, 3) if self._fd >= 0 else -1
        try:
            yield fd
        finally:
            if fd >= 0:
                os.close(fd)

    def close(self) -> None:
        """Idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def _duplicate_high(fd: int) -> int:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    top = _TOP if limit == resource.RLIM_INFINITY else min(limit, _TOP)
    try:
        return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, max(3, top - _ROOM))
    except OSError:  # all of them are taken: any number is better than none
        return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3)


_open: weakref.WeakSet[Lifeline] = weakref.WeakSet()


def _close_in_child() -> None:
    for lifeline in list(_open):
        lifeline.close()


# Children that only fork: those that execute another program lose the descriptor by its close-on-exec flag.
os.register_at_fork(after_in_child=_close_in_child)
