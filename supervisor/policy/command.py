"""The policy of a ``command`` worker: any server, without kept memory. One process tree: start, ready, restart, stop."""

from __future__ import annotations

from shadowsup.supervisor.policy import ladder
from shadowsup.supervisor.policy import messages as m
from shadowsup.supervisor.policy.adoption import DIED_ALONE
from shadowsup.supervisor.policy.command_rolling import CommandRolling
from shadowsup.supervisor.policy.model import Desired, EngineRecord, How, WorkerSettings, WorkerState, exit_text
from shadowsup.supervisor.policy.past import Past
from shadowsup.supervisor.policy.placing import restart_refused
from shadowsup.supervisor.policy.restart import NextStart, RestartBook
from shadowsup.supervisor.policy.rollout import RollOut
from shadowsup.wire.engine import EngineState, Role


class CommandPolicy(CommandRolling):
    """Same events and actions as `WorkerPolicy`, as far as they make sense without kept memory."""

    def __init__(self, settings: WorkerSettings) -> None:
        self.settings = settings
        self.engines: dict[str, EngineRecord] = {}
        self.desired = Desired.STOP
        self.state = WorkerState.STOPPED
        self.down_reason = ""
        self.last_failure = ""
        self.upstream = ""
        self.quarantined: set[str] = set()
        """GPUs that nothing may be started onto."""
        self.epoch = 0
        self.cold_start_s: float | None = None
        self.deadline_s = float("inf")
        self._book = RestartBook(settings.backoff_s, settings.max_failures, settings.window_s)
        self._next_seq = 1
        self._down_by_quarantine = False
        self.quarantined_why: dict[str, str] = {}
        self.spares_taken: dict[str, str] = {}
        """Shared by the workers of a node; it takes none."""
        self._current: str | None = None
        self._served_once = False
        self._restart = False
        self._actions: list[m.WorkerAction] = []
        self._routes_key: object = None
        self.rollout: RollOut | None = None
        """The newest roll-out of new settings, running or ended."""

    @property
    def last_seq(self) -> int:
        """The K of ``NAME.K`` that was given last; 0: none."""
        return self._next_seq - 1

    @property
    def past(self) -> Past:
        """What another supervisor must know to judge as this one would."""
        down = "" if self._down_by_quarantine else self.down_reason
        return Past(service=self._book.state, down=down, last_failure=self.last_failure)

    @property
    def active(self) -> EngineRecord | None:
        return self.engines.get(self._current) if self._current else None

    @property
    def give_up_after_s(self) -> float:
        if self.settings.give_up_after_s is not None:
            return self.settings.give_up_after_s
        return max(60.0, 2 * (self.cold_start_s or 0.0))

    @property
    def reason(self) -> str:
        if self.state is WorkerState.DOWN:
            return self.down_reason
        return self.last_failure if self.state in (WorkerState.BACKOFF, WorkerState.RECOVERING, WorkerState.STARTING) else ""

    @property
    def settled(self) -> bool:
        return self.desired is Desired.STOP and all(e.state is EngineState.QUARANTINED for e in self.engines.values())

    def routable(self) -> list[EngineRecord]:
        """Return nothing: the gateway speaks HTTP to ``upstream``."""
        return []

    @property
    def started(self) -> int:
        """How many processes were started since the node is up."""
        return self._next_seq - 1

    @property
    def backoff(self) -> NextStart | None:
        """The start that waits for the end of a pause; None: none does."""
        if self.desired is not Desired.RUN or self.down_reason or self.engines or not self._book.in_a_row:
            return None
        return NextStart("start an engine", self._book.not_before_s, self._book.in_a_row)

    def refusal(self, event: m.WorkerEvent) -> tuple[str, str] | None:
        """Return why an operator's request cannot be granted now (message, hint), or None."""
        name = self.settings.name
        if isinstance(event, m.FailOver):
            return f"worker {name} is a command: it has no shadow to hand over to", "use restart"
        if isinstance(event, m.RestartWorker) and not (held := dict(event.held)).keys().isdisjoint(self.settings.gpus):
            return restart_refused(name, held, self.settings.gpus)
        if isinstance(event, m.RestartWorker) and self.rollout is not None and self.rollout.open:
            return f"worker {name} is being given new settings ({self.rollout.stage.value})", "wait until shadowsup reload is done"
        if isinstance(event, m.Drill) and (event.engine not in self.engines or self.engines[event.engine].pid is None):
            return f"no running engine {event.engine}", "see `shadowsup status`"
        return None

    def handle(self, event: m.WorkerEvent, now_s: float) -> list[m.WorkerAction]:
        """Take one event, return what to do."""
        self._actions = []
        match event:
            case m.Adopt():
                self._adopt(event, now_s)
            case m.RunWorker():
                self._forgive()
                self.desired = Desired.RUN
            case m.RestartWorker(held=held):
                self._forgive()
                self.quarantined_why = dict(held)
                self.quarantined = set(self.quarantined_why)
                self.desired = Desired.RUN
                self._restart = bool(self.engines)
            case m.StopWorker(hurry=hurry):
                self.desired = Desired.STOP
                if hurry:
                    ladder.skip(self.engines.values(), self.settings, now_s)
            case m.DrainWorker():
                self.desired = Desired.STOP
            case m.Spawned():
                if event.engine in self.engines:
                    engine = self.engines[event.engine]
                    engine.pid, engine.killed_s, engine.state = event.pid, None, EngineState.LOADING
            case m.SpawnFailed():
                self._spawn_failed(event, now_s)
            case m.Ready():
                self._ready(event, now_s)
            case m.Died(engine=name, status=status):
                self._ended(self.engines.get(name), status, now_s)
            case m.Gone():
                self._gone(event, now_s)
            case m.GpusQuarantined(gpus=gpus, why=why):
                self.quarantined |= gpus
                self.quarantined_why |= {uuid: self.quarantined_why.get(uuid, why) for uuid in gpus}
            case m.GpusReleased(gpus=gpus):
                self.quarantined -= gpus
                for uuid in gpus:
                    self.quarantined_why.pop(uuid, None)
                if self._down_by_quarantine and self.quarantined.isdisjoint(self.settings.gpus):
                    self._forgive()
            case m.Drill(engine=name, signal=number):
                if name in self.engines:
                    self.engines[name].excused = True
                    self._actions.append(m.Signal(name, number))
            case m.Reconfigure() | m.RollOut() | m.CommitRollOut() | m.FinishRollOut() | m.TakeBack():
                self._take_rollout_order(event)
            case _:
                pass
        self._reconcile(now_s)
        return self._actions

    def _adopt(self, found: m.Adopt, now_s: float) -> None:
        """Take over what another supervisor has left: the newest living engine is the one, what is left of others is ended."""
        self.desired, self.epoch, self.cold_start_s = found.desired, found.epoch, found.cold_start_s
        self._served_once = found.epoch > 0
        self._next_seq = max(self._next_seq, 1 + max([found.seq, *(engine.seq for engine in found.engines)]))
        if found.past is not None:
            self._book.resume(found.past.service)
            self.down_reason, self.last_failure = found.past.down, found.past.last_failure
        living: list[EngineRecord] = []
        for each in sorted(found.engines, key=lambda each: each.seq):
            record = EngineRecord(id=each.id, seq=each.seq, how=each.how, spawned_s=each.spawned_s, refill=False, kv_set=0, pid=each.pid)
            record.state = EngineState.LOADING
            record.revision = each.revision or self.settings.revision
            self.engines[each.id] = record
            if each.alive:
                living.append(record)
        if living:
            current = living[-1]
            self._current = current.id
            if found.upstream:
                current.state, current.role, current.promoted_s = EngineState.ACTIVE, Role.ACTIVE, now_s
                self.upstream = found.upstream
        # The config was changed while there was no supervisor.
        self._restart = bool(living) and living[-1].revision != self.settings.revision
        for engine in list(self.engines.values()):
            if engine not in living:
                engine.excused = True
                self._ended(engine, None, now_s, DIED_ALONE)
            elif engine is not living[-1]:
                ladder.begin(engine, now_s)

    def _forgive(self) -> None:
        self.down_reason = self.last_failure = ""
        self._down_by_quarantine = False
        self._book.reset()

    def _spawn_failed(self, event: m.SpawnFailed, now_s: float) -> None:
        engine = self.engines.pop(event.engine, None)
        if engine is None:
            return
        self.last_failure = f"{engine.id}: {event.message}" + (f" ({event.hint})" if event.hint else "")
        self._actions.append(m.Announce("engine.spawn_failed", self.last_failure, "error", engine.id))
        self._actions.append(m.Forget(engine.id))
        if self._blame(engine, self.last_failure):
            return
        if event.fatal:
            self.down_reason = self.last_failure
        elif not engine.dying:
            self._book.failed(now_s)

    def _ready(self, event: m.Ready, now_s: float) -> None:
        engine = self.engines.get(event.engine)
        if engine is None or not engine.live:
            return
        engine.state, engine.role, engine.promoted_s = EngineState.ACTIVE, Role.ACTIVE, now_s
        self.upstream = event.upstream
        self.epoch += 1
        self._served_once = True
        self.last_failure = ""
        if self.cold_start_s is None:
            self.cold_start_s = now_s - engine.spawned_s
        text = f"{engine.id} is active"
        self._actions.append(m.Announce("engine.state", text, engine=engine.id, epoch=self.epoch, data={"state": "active"}))

    def _ended(self, engine: EngineRecord | None, status: int | None, now_s: float, cause: str = "engine process died") -> None:
        if engine is None or engine.dying:
            return
        expected = engine.stop is not None
        engine.exit = engine.exit or exit_text(status)
        engine.verdict_s, engine.cause = now_s, "stopped" if expected else cause
        served = engine.promoted_s is not None
        engine.state, engine.role = EngineState.STOPPING, Role.RETIRING
        if engine.id == self._current:
            self.upstream = ""
        if expected:
            return
        self.last_failure = f"{engine.id}: {engine.cause}" + (f" ({engine.exit})" if engine.exit else "")
        self._actions.append(m.Announce("engine.verdict", self.last_failure, "warning", engine.id, data={"cause": cause}))
        if self._blame(engine, self.last_failure):
            return
        if not engine.excused and not (served and now_s - (engine.promoted_s or 0.0) >= self.settings.healthy_after_s):
            self._book.failed(now_s)

    def _gone(self, event: m.Gone, now_s: float) -> None:
        engine = self.engines.get(event.engine)
        if engine is None:
            return
        self._ended(engine, event.status, now_s)
        engine.exit = engine.exit or exit_text(event.status)
        del self.engines[engine.id]
        if event.output and not engine.excused and engine.stop is None:
            output = "\n".join(event.output)
            self.last_failure = f"{engine.id} ended with {engine.exit or 'an unknown status'}; its last output:\n{output}"
            if self.rollout is not None and engine.id in self.rollout.blamed:
                self.rollout.reason = self.last_failure
        text = f"{engine.id} is gone ({engine.exit or 'status unknown'})"
        self._actions.append(m.Announce("engine.gone", text, "info", engine.id, data={"exit": engine.exit}))
        self._actions.append(m.Forget(engine.id))

    def _reconcile(self, now_s: float) -> None:
        self.deadline_s = float("inf")
        for engine in self.engines.values():
            late_s = engine.spawned_s + self.settings.startup_s
            if engine.live and engine.promoted_s is None:
                if now_s >= late_s:
                    self._ended(engine, None, now_s, f"not ready within {self.settings.startup_s:g} s")
                else:
                    self.deadline_s = min(self.deadline_s, late_s)
            if engine.live and (self._restart or self.down_reason or self.desired is Desired.STOP):
                ladder.begin(engine, now_s)
                self.upstream = ""
            actions, again_s = ladder.push(engine, self.settings, now_s)
            self._actions += actions
            self.deadline_s = min(self.deadline_s, again_s)
            if engine.state is EngineState.QUARANTINED:
                self.quarantined |= set(self.settings.gpus)  # the node tells everyone, us too, but a little later
        self._restart = False
        self._roll_out()
        self._start(now_s)
        self._tell(now_s)

    def _start(self, now_s: float) -> None:
        """One process at a time: the port, and whatever else it holds, belongs to the old one until that is gone."""
        if self.desired is not Desired.RUN or self.down_reason:
            return
        if any(e.state is not EngineState.QUARANTINED for e in self.engines.values()):
            return
        if stuck := sorted(self.quarantined & set(self.settings.gpus)):
            why = self.quarantined_why.get(stuck[0], "a process that cannot be killed holds it")
            self.down_reason = f"GPU {', '.join(stuck)} is quarantined: {why}"
            self._down_by_quarantine = True
            return
        if self._book.exhausted(now_s):
            limit = f"gave up after {self.settings.max_failures} restarts within {self.settings.window_s:g} s"
            self.down_reason = f"{limit}; last: {self.last_failure}"
            return
        if now_s < self._book.not_before_s:
            self.deadline_s = min(self.deadline_s, self._book.not_before_s)
            return
        seq = self._next_seq
        self._next_seq += 1
        name, revision = self.settings.name, self.settings.revision
        engine = EngineRecord(id=f"{name}.{seq}", seq=seq, how=How.COLD, spawned_s=now_s, refill=False, kv_set=0, revision=revision)
        self.engines[engine.id] = engine
        self._current = engine.id
        self.deadline_s = min(self.deadline_s, now_s + self.settings.startup_s)
        self._actions.append(m.Spawn(engine.id, seq, How.COLD, revision=revision))
        text = f"{engine.id} is spawning"
        self._actions.append(m.Announce("engine.state", text, engine=engine.id, data={"state": "spawning"}))

    def _tell(self, now_s: float) -> None:
        state = self._worker_state(now_s)
        if state is not self.state:
            was, self.state = self.state, state
            level = "error" if state is WorkerState.DOWN else "warning" if state in _WORRYING else "info"
            text = f"{self.settings.name} is {state.value}" + (f": {self.reason}" if self.reason else "")
            self._actions.append(m.Announce("worker.state", text, level, epoch=self.epoch, data={"state": state.value, "was": was.value}))
        key = (self.state, self.epoch, self.upstream, self.reason, self.give_up_after_s)
        if key != self._routes_key:
            self._routes_key = key
            self._actions.append(m.PublishRoutes())

    def _worker_state(self, now_s: float) -> WorkerState:
        if self.desired is Desired.STOP:
            return WorkerState.STOPPED if self.settled else WorkerState.STOPPING
        if self.down_reason:
            return WorkerState.DOWN
        if self.upstream:
            return WorkerState.HEALTHY
        if now_s < self._book.not_before_s and not self.engines:
            return WorkerState.BACKOFF
        return WorkerState.RECOVERING if self._served_once else WorkerState.STARTING


_WORRYING = (WorkerState.BACKOFF, WorkerState.RECOVERING)
