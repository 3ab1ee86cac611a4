"""What the policy knows: settings, engine records, states."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from shadowsup.supervisor.policy.detector import HangLimits, Vitals
from shadowsup.supervisor.policy.suspicion import Suspicion
from shadowsup.wire.engine import EngineState, Role
from shadowsup.wire.faults import Fault


class WorkerState(str, enum.Enum):
    STARTING = "starting"
    HEALTHY = "healthy"
    DEGRADED = "degraded"
    RECOVERING = "recovering"
    BACKOFF = "backoff"
    DOWN = "down"
    DRAINING = "draining"
    STOPPING = "stopping"
    STOPPED = "stopped"


class Desired(enum.Enum):
    """What the operator wants. It wins over every restart (P13)."""

    RUN = "run"
    DRAIN = "drain"
    STOP = "stop"


class How(str, enum.Enum):
    """How an engine process comes into being."""

    NURSERY = "nursery"
    COLD = "cold"


class Ending(str, enum.Enum):
    """What is noted of an engine that is to end, for a supervisor that adopts it."""

    STOP = "stop"
    RELEASE = "release"
    KILL = "kill"


class RecoveryKind(str, enum.Enum):
    SHADOW = "shadow"
    RESPAWN = "respawn"
    COLD = "cold"
    SPARE = "spare"


class NurseryState(enum.Enum):
    NONE = "none"
    STARTING = "starting"
    READY = "ready"
    DOWN = "down"


FREEZE_BOUND_S = 0.1
"""After a verdict, how long to wait for the last EOF of a tree that is stuck in the kernel before its KV is given up (architecture,
Failover)."""
FREEZE_MOST_S = 1.0
"""The same for a tree that is not known to be stuck: what was killed and waits for a processor, to end on it, ends soon. To compute the KV
again takes such a machine longer than this."""
PROMOTE_BOUND_S = 10.0
"""A promotion takes milliseconds; far beyond that another engine is tried."""
FIRST_BEAT_S = 10.0
"""A fork of a healthy nursery beats within 0.1 s; one that hung in a lock it inherited never does."""
FORKS_TRIED = 1
"""So often a shadow, for which nobody waits, tries the nursery again after a fork that did not come up: it may have been chance."""
REFILL_DELAY_S = 1.0
"""A refill waits for the first token of the successor, at most this long (there may be no traffic)."""
ORDER_GRACE_S = 5.0
"""Between the order to stop and the stop signal; at most half of the stop timeout."""
KILL_BOUND_S = 10.0
"""After SIGKILL a process that is still there is stuck in the kernel: its engine is quarantined."""
KILL_AGAIN_S = 1.0
PROVEN_PARKED_S = 1.0
"""A shadow that stayed parked this long has shown that it starts; its later death is not a failed start."""
ORDER_AGAIN_S = 1.0
"""An order that was not answered is repeated this often: engines take each of them any number of times."""
PLANNED = "planned hand-over"
"""Cause of a failover that was asked for."""
LATE_S = 1.0
"""A timer later than this means that the supervisor itself was stopped: silence proves nothing then."""


@dataclass(frozen=True, kw_only=True)
class WorkerSettings:
    """What the config says of one worker. ``stop_signal``: number; ``give_up_after_s`` None: auto."""

    name: str
    shadows: int = 1
    gpus: tuple[str, ...] = ()
    spares: tuple[str, ...] = ()
    """GPUs to move to, in this order."""
    heartbeat_s: float = 0.2
    hang: HangLimits = field(default_factory=HangLimits)
    startup_s: float = 600.0
    backoff_s: tuple[float, ...] = (0.0, 1.0, 2.0, 5.0, 15.0, 60.0)
    max_failures: int = 10
    window_s: float = 600.0
    healthy_after_s: float = 60.0
    stop_signal: int = 15
    stop_timeout_s: float = 30.0
    give_up_after_s: float | None = None
    revision: str = ""
    """Of what its engines are started with; two settings with one revision differ in what takes effect in place."""


@dataclass(kw_only=True)
class StopLadder:
    """How far the end of an engine has been pushed: order, signal, SIGKILL."""

    began_s: float
    ordered: bool = False
    signalled: bool = False
    release: bool = False
    """A planned hand-over: the end of it is a failover, not a stop."""


@dataclass(kw_only=True)
class EngineRecord:
    """One engine, from the decision to spawn it until every process of its tree is gone."""

    id: str
    seq: int
    how: How
    spawned_s: float
    refill: bool
    kv_set: int
    """Generation of the KV set it holds or will map; -1: unknown, it must not keep what it finds."""
    revision: str = ""
    """Of the settings it was started with."""
    state: EngineState = EngineState.SPAWNING
    role: Role = Role.SHADOW
    pid: int | None = None
    vitals: Vitals = field(default_factory=Vitals)
    epoch: int = 0
    """The epoch it was ordered to own; 0: never promoted."""
    parked_s: float | None = None
    promote_sent_s: float | None = None
    promoted_s: float | None = None
    keep_kv: bool = True
    committed: bool = False
    """Has finished a step for a request: the worker works."""
    stale: bool = False
    """To be replaced when there is a better one."""
    fork_blamed: bool = False
    """That it did not come up was held against its nursery."""
    hurried_pid: int = 0
    """It was a refill, and this process of it was told that somebody waits for it: in vLLM another one beats once EngineCore is there."""
    excused: bool = False
    """Its end was asked for (drill, order): never counted as a failure."""
    stop: StopLadder | None = None
    drain_sent: bool = False
    fence_sent: bool = False
    """It was told that it may use every block, or was promoted as one that may."""
    fenced: bool = False
    """It has said that it does."""
    fence_told: int = 0
    """The epoch whose fence was announced. It may be said any number of times, by reports and by beats."""
    order_again_s: float = 0.0
    """When the order to fence is repeated."""
    message: str = ""
    """What it said of its own failure."""
    hint: str = ""
    fatal: bool = False
    suspicion: Suspicion | None = None
    """It looks hung; being looked into."""
    unheard: Suspicion | None = None
    """It says nothing, and may for a long time yet; whether it is stopped is looked at."""
    doubts: int = 0
    """How often that was begun anew, because this supervisor itself was late."""
    canary_s: float | None = None
    """When the canary was sent that has not been answered; never more than one."""
    canary_why: str = ""
    canary_bound_s: float = 0.0
    canary_after_s: float = 0.0
    """No other one before this."""
    verdict_s: float | None = None
    cause: str = ""
    fault: Fault = Fault.UNKNOWN
    decision: str = ""
    """What was decided for it; see `severity`."""
    evidence: dict[str, object] = field(default_factory=dict)
    """What its own report and its end say, for the record of the recovery."""
    gpus: tuple[str, ...] | None = None
    """Where it was started; None: where the config says."""
    adopted_s: float = 0.0
    """When it was taken over without having said a word: its silence counts from then."""
    sign_s: float | None = None
    """When it last did what it should have, where the last beat is not it."""
    killed_s: float | None = None
    kill_again_s: float = 0.0
    frozen_s: float | None = None
    stuck: bool = False
    """Killed, it hangs in the kernel: when it leaves its memory is not known."""
    exit: str = ""

    @property
    def dying(self) -> bool:
        """A verdict was passed: this engine will not serve again."""
        return self.verdict_s is not None

    @property
    def ending(self) -> Ending | None:
        """How far its end has been pushed."""
        if self.dying:
            return Ending.KILL
        return None if self.stop is None else Ending.RELEASE if self.stop.release else Ending.STOP

    @property
    def live(self) -> bool:
        return not self.dying and self.stop is None

    @property
    def loading(self) -> bool:
        return self.live and self.state in (EngineState.SPAWNING, EngineState.LOADING, EngineState.WARMING)

    @property
    def parked(self) -> bool:
        return self.live and self.state is EngineState.PARKED

    @property
    def serving(self) -> bool:
        return self.state in (EngineState.ACTIVE, EngineState.DRAINING) and not self.dying


def exit_text(status: int | None) -> str:
    """Return ``signal 9`` or ``status 1`` for a return code as of `subprocess`; empty for None."""
    if status is None:
        return ""
    return f"signal {-status}" if status < 0 else f"status {status}"
