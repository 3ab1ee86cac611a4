"""Orphans of our trees are ours: PR_SET_CHILD_SUBREAPER, and reaping what nobody here waits for."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
from collections.abc import Callable, Collection
from pathlib import Path

from shadowsup.supervisor import identity as ids
from shadowsup.supervisor.errors import SupervisorError
from shadowsup.supervisor.holders import pids
from shadowsup.supervisor.identity import Identity
from shadowsup.supervisor.process import watched_pids

_PR_SET_CHILD_SUBREAPER = 36  # include/uapi/linux/prctl.h

ORPHAN_GRACE_S = 1.0
"""A zombie is left alone this long: it may be a child of `subprocess`, whose own wait comes any moment and must get the status."""


def become_subreaper() -> None:
    """Make orphaned descendants our children instead of init's, so that their ends are seen and their statuses known.

    Raises:
        SupervisorError: the kernel refuses.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        reason = os.strerror(ctypes.get_errno())
        raise SupervisorError(f"cannot become the subreaper of this node's processes: {reason}")


def children() -> list[int]:
    """Return the pids of our direct children, zombies too."""
    found: list[int] = []
    try:
        # One list for each of our threads: a child belongs to the thread that forked it.
        for task in Path("/proc/self/task").iterdir():
            found += map(int, (task / "children").read_text().split())
    except FileNotFoundError:  # a kernel without CONFIG_PROC_CHILDREN, or a thread that ended just now
        me = os.getpid()
        found = [pid for pid in pids() if (stat := ids.read_stat(pid)) is not None and stat.ppid == me]
    return sorted(found)


class Reaper:
    """Reaps orphans that the kernel gave to us, never a process that someone here waits for.

    Args:
        known: pids of supervised children: they are left to their pidfds.
        on_orphan: called on the loop with each orphan that was reaped and its returncode.
        grace_s: see `ORPHAN_GRACE_S`.
    """

    def __init__(
        self,
        known: Callable[[], Collection[int]] = watched_pids,
        on_orphan: Callable[[Identity, int], None] | None = None,
        grace_s: float = ORPHAN_GRACE_S,
    ) -> None:
        self._known = known
        self._on_orphan = on_orphan
        self._grace_s = grace_s
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._waiting: set[Identity] = set()

    def start(self) -> None:
        """Begin on the running loop (installs its SIGCHLD handler; main thread)."""
        self._loop = asyncio.get_running_loop()
        self._loop.add_signal_handler(signal.SIGCHLD, self._schedule)
        self._schedule()

    def strays(self) -> list[Identity]:
        """Return living children that are not known: what engines detached (double fork) and did not take along."""
        known = self._known()
        found = []
        for pid in children():
            stat = ids.read_stat(pid)
            if pid not in known and stat is not None and not stat.dead:
                found.append(Identity(pid=pid, start_time=stat.start_time, boot_id=ids.boot_id()))
        return found

    def close(self) -> None:
        """Stop reaping. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._loop is not None:
            self._loop.remove_signal_handler(signal.SIGCHLD)
            self._loop = None

    def _schedule(self) -> None:
        if self._loop is not None and self._timer is None:
            self._timer = self._loop.call_later(self._grace_s, self._sweep)

    def _sweep(self) -> None:
        """Reap the orphans that were zombies a grace period ago; those that are new have to wait for the next look."""
        self._timer = None
        known = self._known()
        zombies = set()
        for pid in children():
            stat = ids.read_stat(pid)
            if pid not in known and stat is not None and stat.dead:
                zombies.add(Identity(pid=pid, start_time=stat.start_time, boot_id=ids.boot_id()))
        for identity in zombies & self._waiting:
            self._reap(identity)
        self._waiting = zombies - self._waiting
        if self._waiting:
            self._schedule()

    def _reap(self, identity: Identity) -> None:
        try:
            result = os.waitid(os.P_PID, identity.pid, os.WEXITED | os.WNOHANG)
        except ChildProcessError:  # its waiter came after all
            return
        if result is not None and self._on_orphan is not None:
            self._on_orphan(identity, result.si_status if result.si_code == os.CLD_EXITED else -result.si_status)
