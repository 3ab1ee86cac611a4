"""Events in, actions out."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from shadowsup.supervisor.policy.model import Desired, Ending, How, NurseryState, WorkerSettings
from shadowsup.supervisor.policy.suspicion import Look
from shadowsup.supervisor.protocol import Recovery
from shadowsup.wire.engine import Beat, Canaried, Canary, Drain, Failed, Fence, Fenced, FirstToken, Hurry, Promote, Promoted, Release, Stop

if TYPE_CHECKING:
    from shadowsup.supervisor.policy.past import Past

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
    """There is no process. ``how``: what was tried; a fork that failed is not counted as a failed start, and held against its nursery."""

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
    report: Promoted | FirstToken | Fenced | Canaried | Failed


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
class Stuck:
    """A process of the engine that was killed has not left its memory: the kernel keeps it (D state), nobody knows for how long."""

    engine: str


@dataclass(frozen=True)
class Gone:
    """No process of the tree is left. ``status``: return code of its leader; ``output``: its last lines."""

    engine: str
    status: int | None = None
    output: tuple[str, ...] = ()
    oom: bool = False
    """The kernel counted an OOM kill in its control group."""


@dataclass(frozen=True)
class Explained:
    """The exit status of an engine that is gone already: its nursery reaped it late."""

    engine: str
    status: int


@dataclass(frozen=True)
class Examined:
    """Answer to `Examine`; None: there is no such process, or it cannot be looked at."""

    engine: str
    look: Look | None


@dataclass(frozen=True)
class NurseryChanged:
    """``revision``: of the settings whose engines it forks; empty: of those in force."""

    state: NurseryState
    revision: str = ""


@dataclass(frozen=True)
class GpusQuarantined:
    """These GPUs (UUIDs) are out of use: nothing may be started or promoted onto them."""

    gpus: frozenset[str]
    why: str = "a process that cannot be killed holds it"


@dataclass(frozen=True)
class GpusReleased:
    """What held these GPUs (UUIDs) has ended after all: they are in use again."""

    gpus: frozenset[str]


class GpuTrouble(str, enum.Enum):
    """What a sensor can find wrong with a GPU."""

    XID = "xid"
    """The driver reported an error; it has a number."""
    ECC = "ecc"
    """Uncorrectable memory errors, or remapped rows, grow."""
    PCIE = "pcie"
    """The link to the machine is narrower or slower than it was."""
    LOST = "lost"
    """It has fallen off the bus, or does not answer any more."""


@dataclass(frozen=True, kw_only=True)
class GpuNotice:
    """Something is wrong with a GPU, as its sensor sees it. The same (``uuid``, ``kind``, ``number``) is the same trouble, seen again.

    ``number``: of an Xid; lanes that are left of a PCIe link; how many errors for ECC; else 0. ``text``: for people; for Xid 154 it holds
    the recovery action that NVML asks for. ``since_s``: when it was first seen, monotonic.
    """

    uuid: str
    kind: GpuTrouble
    number: int = 0
    text: str = ""
    since_s: float = 0.0


@dataclass(frozen=True)
class GpuWarned:
    """The sensor reports trouble, for the first time or again. What is done about it: `shadowsup.supervisor.policy.severity`."""

    notice: GpuNotice


@dataclass(frozen=True)
class GpuCleared:
    """The trouble is over. ``kind`` None: every kind of it."""

    uuid: str
    kind: GpuTrouble | None = None


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
    """Replace every engine, through shadows where there are some. The operator says that GPUs which have failed are well again.

    ``held``: (GPU, why) of those that a process holds which cannot be ended. No word makes these free.
    """

    held: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class FailOver:
    """Planned: hand over to a parked shadow."""


@dataclass(frozen=True)
class Drill:
    """The operator sends a signal to an engine."""

    engine: str
    signal: int


@dataclass(frozen=True, kw_only=True)
class FoundEngine:
    """An engine that another supervisor started. ``beat``: what it has said since; None: nothing. ``alive``: its leader runs."""

    id: str
    seq: int
    how: How
    pid: int
    spawned_s: float
    alive: bool
    beat: Beat | None = None
    refill: bool = False
    ending: Ending | None = None
    """How far its end had been pushed."""
    revision: str = ""
    """Of the settings it was started with; empty: not recorded."""
    gpus: tuple[str, ...] | None = None
    """Spares that it was started on; None: on what the config says."""


@dataclass(frozen=True, kw_only=True)
class Adopt:
    """Go on with a worker that another supervisor has left. The first event of a worker, if it comes at all.

    ``seq``: the largest that was ever used. ``epoch``, ``owner``: what the ledger's header names, or the newest that is known. ``kv_set``:
    id of the set that the keeper would give to a newcomer; empty: it has none. ``upstream``: where a command serves; empty: it does not.
    """

    engines: tuple[FoundEngine, ...] = ()
    seq: int = 0
    epoch: int = 0
    owner: int = 0
    kv_set: str = ""
    desired: Desired = Desired.RUN
    cold_start_s: float | None = None
    upstream: str = ""
    past: Past | None = None
    """What it has been through; None: nothing is known of that."""


@dataclass(frozen=True)
class Reconfigure:
    """Settings that need no new engine: their revision is that in force."""

    settings: WorkerSettings


@dataclass(frozen=True)
class RollOut:
    """Bring an engine with these settings up beside those that serve, and touch nothing else.

    ``nursery``: state of the one that forks such engines. ``gap``: there is no room for one engine more; nothing is done before the commit.
    """

    settings: WorkerSettings
    nursery: NurseryState = NurseryState.NONE
    gap: bool = False


@dataclass(frozen=True)
class CommitRollOut:
    """Hand over to the engine with the new settings."""


@dataclass(frozen=True)
class FinishRollOut:
    """The new settings stay: replace what is left with the old ones."""


@dataclass(frozen=True)
class TakeBack:
    """The old settings stay."""

    reason: str


RollOutOrder = Reconfigure | RollOut | CommitRollOut | FinishRollOut | TakeBack

WorkerEvent = (
    Tick
    | Adopt
    | Spawned
    | SpawnFailed
    | Beaten
    | Reported
    | Died
    | Frozen
    | Stuck
    | Gone
    | Explained
    | Examined
    | NurseryChanged
    | GpusQuarantined
    | GpusReleased
    | GpuWarned
    | GpuCleared
    | Ready
    | RunWorker
    | StopWorker
    | DrainWorker
    | RestartWorker
    | FailOver
    | Drill
    | RollOutOrder
)


# --- actions: what to do --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Spawn:
    """``refill``: nobody waits for it, run it at low priority."""

    engine: str
    seq: int
    how: How
    refill: bool = False
    revision: str = ""
    """Of the settings to start it with."""
    beside: bool = False
    """Engines with other settings may hold other KV, which stays good."""
    gpus: tuple[str, ...] | None = None
    """Where, if not where its settings say."""
    verify: bool = False
    """Every byte of kept weights is to be checked: the device has had errors."""
    hurry: bool = False
    """Clients have lost their engine and wait for this one: see `EngineSpec.hurry`."""


@dataclass(frozen=True)
class Send:
    engine: str
    order: Promote | Hurry | Fence | Canary | Drain | Release | Stop


@dataclass(frozen=True)
class Examine:
    """Look at the process of the engine's step loop now, and say what is seen: `Examined`.

    ``front``: look at the server in front of it instead.
    """

    engine: str
    front: bool = False


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
    """These GPUs are out of use, for every worker of the node. ``engine``: the one that cannot be killed, or what else is the reason."""

    engine: str
    gpus: tuple[str, ...]
    why: str = "a process that cannot be killed holds it"


@dataclass(frozen=True)
class Unquarantine:
    """The reason of this name is gone. GPUs that no other one keeps out of use come back."""

    engine: str


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
class TidyMemory:
    """No engine with other settings is left: order the keeper to free what only those used. ``keep``: the KV set in use."""

    keep: str


@dataclass(frozen=True)
class PublishRoutes:
    """What the gateway must know has changed."""


WorkerAction = (
    Spawn
    | Send
    | Examine
    | Signal
    | KillTree
    | Quarantine
    | Unquarantine
    | Forget
    | Announce
    | Record
    | FreeMemory
    | TidyMemory
    | PublishRoutes
)
