"""The supervisor's side of a nursery (protocol: `shadowsup.wire.nursery`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from shadowsup.supervisor.identity import Identity
from shadowsup.wire.engine import EngineSpec


@dataclass(frozen=True, kw_only=True)
class Forked:
    """A new engine process. ``pidfd`` is the caller's."""

    identity: Identity
    pidfd: int


class NurseryClient:
    """Needs a running loop. One connection; requests one at a time."""

    on_exited: Callable[[str, int, int], None] | None
    """(engine, pid, returncode as `subprocess` has it)."""
    on_lost: Callable[[], None] | None

    def __init__(self, socket_path: Path) -> None: ...

    async def connect(self, timeout_s: float = 10.0) -> None:
        """Raises SupervisorError: nobody answers."""
        raise NotImplementedError

    async def fork(
        self, spec: EngineSpec, *, env: Mapping[str, str], stdout: int, stderr: int, lifeline: int, timeout_s: float = 10.0
    ) -> Forked:
        """Fork an engine. The fds stay the caller's.

        Raises:
            SupervisorError: refused (with the nursery's words), lost, or no answer in time: spawn it cold then.
        """
        raise NotImplementedError

    def close(self) -> None: ...
