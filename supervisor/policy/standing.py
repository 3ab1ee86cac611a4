"""What a worker is, as far as others may ask: the state that the two halves of its policy share, and what is read from it."""

from __future__ import annotations

from collections import Counter, deque

from shadowsup.supervisor.policy import messages as m
from shadowsup.supervisor.policy.detector import History
from shadowsup.supervisor.policy.gpus import GpuLoads
from shadowsup.supervisor.policy.model import FORKS_TRIED, Desired, EngineRecord, NurseryState, WorkerSettings, WorkerState
from shadowsup.supervisor.policy.past import Past
from shadowsup.supervisor.policy.restart import NextStart, RestartBook
from shadowsup.supervisor.policy.rollout import RollOut
from shadowsup.supervisor.policy.succession import Succession
from shadowsup.supervisor.policy.timeline import Timeline
from shadowsup.wire.engine import Death, EngineState

NEVER_S = float("inf")

GpuKey = tuple[str, m.GpuTrouble, int]
"""What makes a notice the same as another."""


class Standing:
    """The state of one worker."""

    def __init__(self, settings: WorkerSettings, *, nursery: NurseryState = NurseryState.NONE) -> None:
        self.settings = settings
        self.engines: dict[str, EngineRecord] = {}
        self.succession = Succession()
        self.desired = Desired.STOP
        self.nursery = nursery
        self.state = WorkerState.STOPPED
        self.down_reason = ""
        self.shadow_reason = ""
        self.last_failure = ""
        self.cold_start_s: float | None = None
        self.timeline: Timeline | None = None
        self.deadline_s = NEVER_S
        self._wake_s = NEVER_S
        self.quarantined: set[str] = set()
        """GPUs that nothing may be started or promoted onto."""
        self.histories: dict[str, History] = {}
        """By revision of the settings: other settings make other steps."""
        self.loads = GpuLoads()
        self._last_canary = 0
        """Number of the newest."""
        self.quarantined_why: dict[str, str] = {}
        self.moved: dict[str, str] = {}
        """Configured GPU → the spare that stands for it."""
        self.spares_taken: dict[str, str] = {}
        """Spare → the worker that is on it; shared by the workers of a node."""
        self.paused_s: float | None = None
        """Since when no new requests are admitted, so that those that run can finish; None: they are."""
        self._warnings: dict[GpuKey, tuple[float, m.GpuNotice]] = {}
        """Trouble that lasts, and since when."""
        self._handled: set[GpuKey] = set()
        """Warnings that have been answered with a hand-over."""
        self._doubted: dict[str, float] = {}
        """GPU → when it said that memory had an error."""
        self._reloads: deque[float] = deque()
        self._evidence: deque[tuple[float, str, m.GpuNotice]] = deque(maxlen=64)
        self._deaths: deque[tuple[float, Death]] = deque(maxlen=32)
        self._unexplained: dict[str, EngineRecord] = {}
        """Engines that are gone, and whose exit status is not known."""
        self._causeless: dict[str, Timeline] = {}
        """Recoveries that are complete but for the cause, by the engine that was lost."""
        self._planned_why = ""
        self._verify = False
        """The next engine makes sure of its weights."""
        self._down_by_quarantine = False
        self._forks_failed: Counter[str] = Counter()
        """Revision → engines in a row that its nursery forked and that did not park."""
        self._service = RestartBook(settings.backoff_s, settings.max_failures, settings.window_s)
        self._shadow = RestartBook(settings.backoff_s, settings.max_failures, settings.window_s)
        self._next_seq = 1
        self._memory_used = False
        self._judge_from_s = 0.0
        self._actions: list[m.WorkerAction] = []
        self._routes_key: object = None
        self.rollout: RollOut | None = None
        """The newest roll-out of new settings, running or ended."""
        self._tidy_due = False

    def _distrust_fork(self, engine: EngineRecord) -> None:
        """What ended ``engine`` may be something that it has from its nursery."""
        if engine.fork_blamed:
            return
        engine.fork_blamed = True
        self._forks_failed[engine.revision] += 1
        count = self._forks_failed[engine.revision]
        if count <= FORKS_TRIED:
            text = f"{engine.id}, forked by the nursery, has not come up: the next engine that clients wait for is started without it"
        elif count == FORKS_TRIED + 1:
            name = self.settings.name
            text = f"{count} engines of {name} that the nursery forked have not come up, at last {engine.id}: no more are forked"
        else:
            return
        self._do(m.Announce("nursery.distrusted", f"{text}, which takes longer; the engine's log may say why", "warning", engine.id))

    # --- from one supervisor to the next ----------------------------------------------------------------------------------------

    @property
    def past(self) -> Past:
        """What another supervisor must know to judge as this one would."""
        return Past(
            service=self._service.state,
            shadow=self._shadow.state,
            down="" if self._down_by_quarantine else self.down_reason,
            last_failure=self.last_failure,
            shadow_reason=self.shadow_reason,
            deaths=tuple(self._deaths),
            reloads=tuple(self._reloads),
            distrusted=self.succession.distrusted,
            verify=self._verify,
            xids=tuple(n for key, (_, n) in self._warnings.items() if key[1] is m.GpuTrouble.XID and key not in self._handled),
            moved=tuple(self.moved.items()),
        )

    def _remember(self, past: Past, now_s: float) -> None:
        """Go on with what another supervisor has noted."""
        self._service.resume(past.service)
        self._shadow.resume(past.shadow)
        self.down_reason, self.last_failure, self.shadow_reason = past.down, past.last_failure, past.shadow_reason
        self._deaths.extend(past.deaths)
        self._reloads.extend(past.reloads)
        self._verify = past.verify
        if past.distrusted:
            self.succession.distrust()
        for notice in past.xids:
            self._warnings[notice.uuid, notice.kind, notice.number] = (notice.since_s or now_s, notice)

    # --- what is seen from outside ----------------------------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        return self.succession.epoch

    @property
    def last_seq(self) -> int:
        """The K of ``NAME.K`` that was given last; 0: none."""
        return self._next_seq - 1

    @property
    def active(self) -> EngineRecord | None:
        return self.engines.get(self.succession.active) if self.succession.active else None

    @property
    def give_up_after_s(self) -> float:
        """How long the gateway holds a request: as configured, else max(60 s, twice the measured cold start)."""
        if self.settings.give_up_after_s is not None:
            return self.settings.give_up_after_s
        return max(60.0, 2 * (self.cold_start_s or 0.0))

    @property
    def reason(self) -> str:
        """Why the worker is not healthy, for people; empty when it is."""
        if self.state is WorkerState.DOWN:
            return self.down_reason
        if self.state is WorkerState.RECOVERING and self.timeline is not None and not self._service.in_a_row:
            return f"{self.timeline.old}: {self.timeline.recovery.cause}"
        if self.state in (WorkerState.BACKOFF, WorkerState.RECOVERING, WorkerState.STARTING):
            return self.last_failure
        if self.state is WorkerState.DEGRADED:
            return self.shadow_reason or self.last_failure
        return ""

    @property
    def started(self) -> int:
        """How many engines were started since the node is up, and so the K of the newest ``NAME.K``."""
        return self._next_seq - 1

    @property
    def backoff(self) -> NextStart | None:
        """The start that waits for the end of a pause; None: none does."""
        if self.desired is not Desired.RUN or self.down_reason or any(e.loading for e in self.engines.values()):
            return None
        serves = self.active is not None
        book = self._shadow if serves else self._service
        if not book.in_a_row or (serves and sum(1 for e in self.engines.values() if e.parked) >= self.settings.shadows):
            return None
        return NextStart("start a shadow" if serves else "start an engine", book.not_before_s, book.in_a_row)

    @property
    def settled(self) -> bool:
        """Nothing of this worker runs any more, except what the kernel does not let go."""
        return self.desired is Desired.STOP and all(e.state is EngineState.QUARANTINED for e in self.engines.values())

    def routable(self) -> list[EngineRecord]:
        """Return the engines that the gateway keeps a link to: those that serve or may serve next."""
        states = (EngineState.PARKED, EngineState.PROMOTING, EngineState.ACTIVE, EngineState.DRAINING)
        return [
            e
            for e in self.engines.values()
            if not e.dying and (e.state in states or (e.stop is not None and e.id == self.succession.active))
        ]

    def _do(self, action: m.WorkerAction) -> None:
        self._actions.append(action)

    def _at(self, when_s: float) -> None:
        """There is something to do then, whatever the beats say until then."""
        self._wake_s = min(self._wake_s, when_s)
        self.deadline_s = min(self.deadline_s, when_s)

    def refusal(self, event: m.WorkerEvent) -> tuple[str, str] | None:
        """Return why an operator's request cannot be granted now (message, hint), or None."""
        name = self.settings.name
        if isinstance(event, m.FailOver):
            if self.active is None or not self.active.serving or self.active.stop is not None:
                return f"worker {name} has no active engine to hand over from", f"its state is {self.state.value}"
            if not any(e.parked for e in self.engines.values()):
                return f"worker {name} has no parked shadow to hand over to", "wait until it is healthy, or use restart"
        rolling = self.rollout if self.rollout is not None and self.rollout.open else None
        if rolling is not None and (isinstance(event, m.RestartWorker) or (isinstance(event, m.FailOver) and rolling.stage.committed)):
            return f"worker {name} is being given new settings ({rolling.stage.value})", "wait until shadowsup reload is done"
        if isinstance(event, m.DrainWorker) and (self.active is None or self.desired is Desired.STOP):
            return f"worker {name} does not serve: there is nothing to drain", f"its state is {self.state.value}"
        if isinstance(event, m.Drill) and (event.engine not in self.engines or self.engines[event.engine].pid is None):
            return f"no running engine {event.engine}", "see `shadowsup status`"
        return None
