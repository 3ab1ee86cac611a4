"""One supervised process: spawned or adopted, watched by pidfd and lifeline, signalled by pidfd only.

A raw pid is never signalled: between look and kill it may have become a stranger's. A pidfd stays with its process for ever, and with
PIDFD_SIGNAL_PROCESS_GROUP (Linux 6.9) with its group even after the leader was reaped.
"""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path

from shadowsup.supervisor import exit_status
from shadowsup.supervisor import identity as ids
from shadowsup.supervisor.errors import SupervisorError
from shadowsup.supervisor.identity import Identity
from shadowsup.supervisor.spawn import SpawnPlan, spawn

__all__ = ["Child", "Ended", "Lifeline", "SpawnPlan", "terminate", "watched_pids"]

KILL_TIMEOUT_S = 5.0
"""How long a SIGKILL may take to work before the process counts as unkillable (D state)."""

_PIDFD_SIGNAL_PROCESS_GROUP = 4  # include/uapi/linux/pidfd.h

_watched: set[int] = set()


def watched_pids() -> frozenset[int]:
    """Return the pids of every `Child` of this process whose end has not been seen: nobody else may reap these."""
    return frozenset(_watched)


class Lifeline:
    """A socketpair: one end stays here, the other lives and dies with the process. EOF here is its death.

    EOF comes in under a millisecond where a GPU process's pidfd takes a tenth of a second: the driver tears down its memory in between.
    ``theirs`` is the fd number to write into the engine's spec (`EngineSpec.lifeline_fd`): a spawn passes it on under the same number.
    """

    def __init__(self) -> None:
        self._ours, self._theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self._ours.setblocking(False)

    @property
    def ours(self) -> int:
        """The fd that stays here; -1 once closed."""
        return self._ours.fileno()

    @property
    def theirs(self) -> int:
        """The fd for the process; -1 once given away (`give`)."""
        return self._theirs.fileno()

    def give(self) -> None:
        """Close the process's end here, after it was passed on: only then can EOF come."""
        self._theirs.close()

    def at_eof(self) -> bool:
        """Read whatever is there and return whether the other end is gone. Never blocks."""
        try:
            while self._ours.recv(4096):  # nothing is ever said on a lifeline, but bytes must not look like life for ever
                pass
        except BlockingIOError:
            return False
        except OSError:
            return True
        return True

    def close(self) -> None:
        """Close both ends. Idempotent."""
        self._theirs.close()
        self._ours.close()


class Child:
    """One process under supervision. Needs a running asyncio loop; one owner, no locks.

    ``on_lifeline_eof()`` and ``on_exit(returncode)`` are called on the loop, each at most once, in the order in which they happen.
    ``returncode`` follows `subprocess`: the status, or minus the signal. It is None while unknown: the status of a process that is
    not our child comes from its nursery (`exited`) or never. ``on_status`` is called when it arrives after ``on_exit(None)``.
    """

    def __init__(self, identity: Identity, pidfd: int, what: str, lifeline: Lifeline | None) -> None:
        """Use `spawn` or `adopt`. Takes ownership of ``pidfd`` and ``lifeline``."""
        self.what = what
        self.identity = identity
        self.pidfd = pidfd
        """-1 once closed."""
        self.on_lifeline_eof: Callable[[], None] | None = None
        self.on_exit: Callable[[int | None], None] | None = None
        self.on_status: Callable[[int], None] | None = None
        self._lifeline = lifeline
        self._returncode: int | None = None
        self._alive = True
        self._loop = asyncio.get_running_loop()
        self._lost = asyncio.Event()
        self._gone = asyncio.Event()
        _watched.add(identity.pid)
        self._loop.add_reader(pidfd, self._pidfd_readable)
        if lifeline is not None:
            lifeline.give()
            self._loop.add_reader(lifeline.ours, self._lifeline_readable)

    @classmethod
    def spawn(cls, plan: SpawnPlan, lifeline: Lifeline | None = None) -> Child:
        """Start a process in a session of its own, with core dumps off and signals at their defaults. Main thread only.

        ``lifeline``: its far end is passed on under the number `Lifeline.theirs` and closed here; it is closed if the spawn fails.

        Raises:
            SupervisorError: no such program, no permission, no such folder, out of processes or memory.
        """
        try:
            pid, pidfd = spawn(plan, () if lifeline is None else (lifeline.theirs,))
        except BaseException:
            if lifeline is not None:
                lifeline.close()
            raise
        identity = ids.of(pid)
        # Not reaped by anyone yet, so it has an entry in /proc even if it has exited by now.
        assert identity is not None
        return cls(identity, pidfd, plan.what, lifeline)

    @classmethod
    def adopt(cls, identity: Identity, *, what: str, pidfd: int | None = None, lifeline: Lifeline | None = None) -> Child:
        """Watch a process that someone else started (a nursery, an earlier supervisor). Takes ownership of ``pidfd`` and ``lifeline``.

        With a ``pidfd`` it may have died meanwhile: that is reported like any exit.

        Raises:
            SupervisorError: there is no ``pidfd`` and the process is gone.
        """
        if pidfd is None:
            pidfd = ids.open_identity(identity)
        if pidfd is None:
            if lifeline is not None:
                lifeline.close()
            raise SupervisorError(f"{what} (pid {identity.pid}) is gone")
        return cls(identity, pidfd, what, lifeline)

    @property
    def pid(self) -> int:
        return self.identity.pid

    @property
    def pgid(self) -> int:
        """Its process group: spawned processes and a nursery's engines lead one of their own (`signal_group` checks)."""
        return self.identity.pid

    @property
    def alive(self) -> bool:
        """False as soon as the pidfd said so. (A lifeline EOF alone does not end it: its teardown may take a while.)"""
        return self._alive

    @property
    def returncode(self) -> int | None:
        return self._returncode

    def exited(self, returncode: int) -> None:
        """Told by the nursery: the process has ended with this. Ignored when its status is known."""
        if self._returncode is not None:
            return
        self._returncode = returncode
        if not self._alive and self.on_status is not None:
            self.on_status(returncode)

    def signal(self, number: int) -> bool:
        """Send a signal to the process. Returns False when it is gone.

        Raises:
            SupervisorError: not permitted (it runs as another user now).
        """
        return self.pidfd >= 0 and send_signal(self.pidfd, number, self.what)

    def signal_group(self, number: int) -> bool:
        """Send a signal to its whole process group (µs: the first blow of a freeze). Returns False when nobody got it.

        Works after the leader is gone, as long as the group is not. A process without a group of its own gets it alone.
        """
        if self.pidfd < 0:
            return False
        try:
            signal.pidfd_send_signal(self.pidfd, number, None, _PIDFD_SIGNAL_PROCESS_GROUP)
        except ProcessLookupError:
            return self.signal(number)  # leads no group
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise SupervisorError(f"cannot signal the group of {self.what} (pid {self.pid}): {error.strerror}") from error
            return self._signal_group_by_number(number)
        return True

    def _signal_group_by_number(self, number: int) -> bool:
        """Before Linux 6.9. The number is safe only while our process still has it; otherwise `tree` finds the members one by one."""
        stat = ids.read_stat(self.pid)
        if stat is None or stat.start_time != self.identity.start_time or stat.pgid != self.pid:
            return self.signal(number)
        try:
            os.killpg(self.pid, number)
        except ProcessLookupError:
            return False
        return True

    def renice(self, nice: int) -> bool:
        """Set the priority of the process's session, 0 to 19, where it can be taken back later. Returns whether anything was set.

        A session has its own scheduling group (autogroup), between which the nice value of a *process* counts for nothing; the group's
        can be lowered and raised without privilege. The process's own is set too where we are allowed to raise it again.
        """
        if not self._alive:
            return False
        done = False
        try:
            Path(f"/proc/{self.pid}/autogroup").write_text(str(nice))
            done = True
        except OSError:  # no autogroups in this kernel, or asked too often (EAGAIN, 10 a second)
            pass
        if os.geteuid() == 0:
            try:
                os.setpriority(os.PRIO_PGRP, self.pid, nice)
                done = True
            except OSError:
                pass
        return done

    async def lost(self) -> None:
        """Wait for the first sign of death: lifeline EOF or exit."""
        await self._lost.wait()

    async def wait(self) -> int | None:
        """Wait until the process is gone. Returns the returncode, None when unknown."""
        await self._gone.wait()
        return self._returncode

    def close(self) -> None:
        """Stop watching and close the fds; the process itself is left alone. Idempotent."""
        _watched.discard(self.identity.pid)
        if self.pidfd >= 0:
            self._loop.remove_reader(self.pidfd)
            os.close(self.pidfd)
            self.pidfd = -1
        self._close_lifeline()

    def _close_lifeline(self) -> None:
        if self._lifeline is not None:
            self._loop.remove_reader(self._lifeline.ours)
            self._lifeline.close()
            self._lifeline = None

    def _lifeline_readable(self) -> None:
        if self._lifeline is None or not self._lifeline.at_eof():
            return
        self._close_lifeline()
        self._lost.set()
        if self.on_lifeline_eof is not None:
            self.on_lifeline_eof()

    def _pidfd_readable(self) -> None:
        self._loop.remove_reader(self.pidfd)
        self._alive = False
        if self._returncode is None:
            self._returncode = collect(self.pidfd)
        if self._returncode is None:  # not our child
            self._returncode = exit_status.of(self.pidfd, self.identity)
        _watched.discard(self.identity.pid)
        self._lost.set()
        self._gone.set()
        if self.on_exit is not None:
            self.on_exit(self._returncode)


class Ended:
    """What a `Child` is of a process that was gone before anyone here watched it: there may be more of its tree than of itself."""

    def __init__(self, identity: Identity) -> None:
        self.identity = identity
        self.alive = False
        self.returncode: int | None = None
        self.on_lifeline_eof: Callable[[], None] | None = None
        self.on_exit: Callable[[int | None], None] | None = None
        self.on_status: Callable[[int], None] | None = None

    @property
    def pid(self) -> int:
        return self.identity.pid

    def exited(self, returncode: int) -> None:
        """As `Child.exited`."""
        if self.returncode is None:
            self.returncode = returncode
            if self.on_status is not None:
                self.on_status(returncode)

    def signal(self, number: int) -> bool:
        return False

    def signal_group(self, number: int) -> bool:
        """Return False: the number may be a stranger's by now; `shadowsup.supervisor.tree` finds the members one by one."""
        return False

    def renice(self, nice: int) -> bool:
        return False

    async def wait(self) -> int | None:
        return self.returncode

    def close(self) -> None:
        """There is nothing to close."""


def collect(pidfd: int) -> int | None:
    """Reap the process if it is our child and has ended. Returns its returncode, None when it is not ours to know.

    It is ours too when its nursery died and the kernel gave it to us (`shadowsup.supervisor.subreaper`).
    """
    try:
        result = os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOHANG)
    except ChildProcessError:
        return None
    if result is None:
        return None
    return result.si_status if result.si_code == os.CLD_EXITED else -result.si_status


def send_signal(pidfd: int, number: int, what: str) -> bool:
    """Send a signal. Returns False when the process is gone.

    Raises:
        SupervisorError: not permitted.
    """
    try:
        signal.pidfd_send_signal(pidfd, number)
    except ProcessLookupError:
        return False
    except PermissionError as error:
        raise SupervisorError(f"not permitted to signal {what}", "it runs as another user: use that user, or root") from error
    return True


async def terminate(
    child: Child,
    *,
    signal_number: int = signal.SIGTERM,
    timeout_s: float,
    kill_timeout_s: float = KILL_TIMEOUT_S,
    escalated: Callable[[], None] | None = None,
) -> int | None:
    """Signal, wait ``timeout_s``, then SIGKILL the group (after calling ``escalated``) and wait until it is gone.

    Returns the returncode.

    Raises:
        TimeoutError: it has not gone ``kill_timeout_s`` after SIGKILL: D state. Its memory is still in use.
    """
    child.signal(signal_number)
    try:
        async with asyncio.timeout(timeout_s):
            return await child.wait()
    except TimeoutError:
        pass
    if escalated is not None:
        escalated()
    child.signal_group(signal.SIGKILL)
    async with asyncio.timeout(kill_timeout_s):
        return await child.wait()
