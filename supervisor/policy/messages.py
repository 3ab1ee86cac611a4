"""Events in, actions out."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from shadowsup.supervisor.policy.model import How, NurseryState
from shadowsup.supervisor.protocol import Recovery
from shadowsup.wire.engine import Beat, Drain, Failed, Fence, Fenced, FirstToken, Promote, Promoted, Release, Stop

# --- events: what happened ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tick:
    """The deadline came. ``late_s``: how much later than asked for."""

    late_s: float = 0.0


@dataclass(frozen=True)
class Spawned:
    engine: str
    pid: int


@dataclass(frozen=True)
class SpawnFailed:
    """There is no process. ``how``: what was tried; a failed fork is followed by a cold spawn and not counted."""

    engine: str
    how: How
    message: str
    hint: str = ""
    fatal: bool = False


@dataclass(frozen=True)
class Beaten:
    beat: Beat


@dataclass(frozen=True)
class Reported:
    report: Promoted | FirstToken | Fenced | Failed


@dataclass(frozen=True)
class Died:
    """The first sign of the death of any process of an engine: EOF of a lifeline or a pidfd, whichever was first."""

    engine: str
    status: int | None = None
    frozen: bool = False
    """Its last lifeline has ended too."""


@dataclass(frozen=True)
class Frozen:
    """Every lifeline of the engine has ended: no process maps the ledger any more."""

    engine: str


@dataclass(frozen=True)
class Gone:
    """No process of the tree is left. ``status``: return code of its leader; ``output``: its last lines."""

    engine: str
    status: int | None = None
    output: tuple[str, ...] = ()


@dataclass(frozen=True)
class NurseryChanged:
    state: NurseryState


@dataclass(frozen=True)
class GpusQuarantined:
    """A process that cannot be killed holds these GPUs (UUIDs): nothing may be started or promoted onto them."""

    gpus: frozenset[str]


@dataclass(frozen=True)
class Ready:
    """Command engines: the probe has answered; ``upstream`` is where it serves."""

    engine: str
    upstream: str


@dataclass(frozen=True)
class RunWorker:
    """Desired: serve. Clears ``down`` and every backoff."""


@dataclass(frozen=True)
class StopWorker:
    """Desired: nothing runs. ``hurry``: SIGKILL now, whatever is in flight."""

    hurry: bool = False


@dataclass(frozen=True)
class DrainWorker:
    pass


@dataclass(frozen=True)
class RestartWorker:
    """Replace every engine, through shadows where there are some."""


@dataclass(frozen=True)
class FailOver:
    """Planned: hand over to a parked shadow."""


@dataclass(frozen=True)
class Drill:
    """The operator sends a signal to an engine."""

    engine: str
    signal: int


WorkerEvent = (
    Tick
    | Spawned
    | SpawnFailed
    | Beaten
    | Reported
    | Died
    | Frozen
    | Gone
    | NurseryChanged
    | GpusQuarantined
    | Ready
    | RunWorker
    | StopWorker
    | DrainWorker
    | RestartWorker
    | FailOver
    | Drill
)


# --- actions: what to do --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Spawn:
    """``refill``: nobody waits for it, run it at low priority."""

    engine: str
    seq: int
    how: How
    refill: bool = False


@dataclass(frozen=True)
class Send:
    engine: str
    order: Promote | Fence | Drain | Release | Stop


@dataclass(frozen=True)
class Signal:
    """To the leader of the engine alone."""

    engine: str
    signal: int


@dataclass(frozen=True)
class KillTree:
    """SIGKILL to every process of the engine. Idempotent."""

    engine: str


@dataclass(frozen=True)
class Quarantine:
    """The engine cannot be killed: its GPUs are out of use, for every worker of the node."""

    engine: str
    gpus: tuple[str, ...]


@dataclass(frozen=True)
class Forget:
    """The engine is gone: remove its files."""

    engine: str


@dataclass(frozen=True)
class Announce:
    """An event for people and programs."""

    event: str
    message: str
    level: str = "info"
    engine: str | None = None
    epoch: int | None = None
    data: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Record:
    """A recovery was opened or has new figures. ``done``: it has its last ones."""

    recovery: Recovery
    done: bool = False


@dataclass(frozen=True)
class FreeMemory:
    """The worker is stopped: order the keeper to free all that is its own."""


@dataclass(frozen=True)
class PublishRoutes:
    """What the gateway must know has changed."""


WorkerAction = Spawn | Send | Signal | KillTree | Quarantine | Forget | Announce | Record | FreeMemory | PublishRoutes
