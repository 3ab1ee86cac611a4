"""What a check says, and what it is asked to look for."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shadowsup.supervisor.doctor.machine import Machine


class Level(str, enum.Enum):
    """How bad it is. ``note``: worth knowing, costs something at most. ``warning``: it may fail. ``failed``: it will."""

    OK = "ok"
    NOTE = "note"
    WARNING = "warning"
    FAILED = "failed"


@dataclass(frozen=True)
class Finding:
    """One line. ``evidence``: what was seen. ``remedy``: what to type or change; a warning and a failure always have one."""

    check: str
    level: Level
    evidence: str
    remedy: str = ""

    def as_dict(self) -> dict[str, str]:
        """Return the JSON form."""
        return {"check": self.check, "level": self.level.value, "evidence": self.evidence, "remedy": self.remedy}


@dataclass(frozen=True, kw_only=True)
class WantedWorker:
    """What one worker of the config asks of the machine. ``python``: its interpreter, None: this one."""

    name: str
    engine: str
    python: str | None = None
    gpus: tuple[str, ...] = ()
    model: str | None = None
    engines: int = 1
    """Processes at once: active and shadows."""


@dataclass(frozen=True, kw_only=True)
class Wants:
    """What a config asks for. Without one (``config`` None) a machine is judged by what any node would ask for.

    ``listen``: HOST:PORT, empty for a Unix socket. ``running``: a supervisor serves this node now, so its port is its own.
    """

    config: Path | None = None
    listen: str = "127.0.0.1:8000"
    running: bool = False
    max_inflight: int = 256
    state_dir: Path = Path("~/.local/state/shadowsup")
    workers: tuple[WantedWorker, ...] = field(default_factory=tuple)

    @property
    def gpus(self) -> bool:
        """Whether any worker names a GPU."""
        return any(worker.gpus for worker in self.workers)

    def severity(self, *, certain: bool) -> Level:
        """Return ``failed`` where the config makes it certain, else ``warning``."""
        return Level.FAILED if certain and self.config is not None else Level.WARNING


Check = Callable[["Machine", Wants], Iterable[Finding]]
