"""One supervised process: spawned or adopted, watched by pidfd and lifeline, signalled by pidfd only."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from shadowsup.supervisor.identity import Identity


class Lifeline:
    """A socketpair: one end stays here, the other lives and dies with the process. EOF here is its death.

    ``theirs`` is the fd number to write into the engine's spec (`EngineSpec.lifeline_fd`): a spawn passes it on under the same number.
    """

    def __init__(self) -> None: ...

    @property
    def theirs(self) -> int:
        """The fd for the process; -1 once given away (`give`)."""
        raise NotImplementedError

    def give(self) -> None:
        """Close the process's end here, after it was passed on: only then can EOF come."""

    def close(self) -> None:
        """Close both ends."""


@dataclass(frozen=True, kw_only=True)
class SpawnPlan:
    """How to start one process.

    ``stdout``/``stderr``: fds, duplicated into the process and not closed here; None = /dev/null. ``nice`` is added to ours.
    ``env`` is the whole environment.
    """

    what: str
    argv: Sequence[str]
    env: Mapping[str, str]
    cwd: Path | None = None
    nice: int = 0
    pass_fds: Sequence[int] = ()
    stdout: int | None = None
    stderr: int | None = None
    lifeline: Lifeline | None = None


class Child:
    """One process under supervision. Needs a running asyncio loop; one owner, no locks.

    ``on_lifeline_eof()`` and ``on_exit(returncode)`` are called on the loop, each at most once, whichever comes first first.
    ``returncode`` follows `subprocess`: the status, or minus the signal. It is None while unknown: the status of a process that is
    not our child comes from its nursery (`exited`) or never. ``on_status`` is called when it arrives after ``on_exit(None)``.
    """

    on_lifeline_eof: Callable[[], None] | None
    on_exit: Callable[[int | None], None] | None
    on_status: Callable[[int], None] | None
    what: str
    identity: Identity
    pgid: int
    pidfd: int

    @classmethod
    def spawn(cls, plan: SpawnPlan) -> Child:
        """Start a process in a session of its own. Main thread only.

        Raises:
            SupervisorError: no such program, no permission, no such folder, out of processes or memory.
        """
        raise NotImplementedError

    @classmethod
    def adopt(cls, identity: Identity, *, what: str, pidfd: int | None = None, lifeline: Lifeline | None = None) -> Child:
        """Watch a process that someone else started (nursery, an earlier supervisor). Takes ownership of ``pidfd``.

        Raises:
            SupervisorError: it is gone already.
        """
        raise NotImplementedError

    @property
    def pid(self) -> int:
        raise NotImplementedError

    @property
    def alive(self) -> bool:
        """False as soon as the pidfd says so. (A lifeline EOF alone does not end it: its teardown may take a while.)"""
        raise NotImplementedError

    @property
    def returncode(self) -> int | None:
        raise NotImplementedError

    def exited(self, returncode: int) -> None:
        """Told by the nursery: the process has ended with this. Ignored when its status is known."""
        raise NotImplementedError

    def signal(self, number: int) -> bool:
        """Send a signal to the process. Returns False when it is gone."""
        raise NotImplementedError

    def signal_group(self, number: int) -> bool:
        """Send a signal to its whole process group (µs; the first blow of a freeze). Returns False when nobody got it."""
        raise NotImplementedError

    async def lost(self) -> None:
        """Wait for the first sign of death: lifeline EOF or exit."""
        raise NotImplementedError

    async def wait(self) -> int | None:
        """Wait until the process is gone. Returns the returncode, None when unknown."""
        raise NotImplementedError

    def close(self) -> None:
        """Stop watching and close the fds; the process itself is left alone. Idempotent."""
        raise NotImplementedError


async def terminate(child: Child, *, signal_number: int, timeout_s: float, escalated: Callable[[], None] | None = None) -> int | None:
    """Signal, wait ``timeout_s``, then SIGKILL the group (after calling ``escalated``) and wait until it is gone.

    Returns the returncode. A process that survives SIGKILL (D state) makes this raise TimeoutError after `tree.FENCE_TIMEOUT_S`.
    """
    raise NotImplementedError
