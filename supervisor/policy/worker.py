"""The policy of one worker with kept memory: one active engine, N parked shadows, one successor an epoch.

This half takes the events and updates the records; what follows from the records is said in `upkeep`.
"""

from __future__ import annotations

from shadowsup.supervisor.policy import ladder, severity
from shadowsup.supervisor.policy import messages as m
from shadowsup.supervisor.policy.adoption import CUT_SHORT, picture
from shadowsup.supervisor.policy.detector import hurries
from shadowsup.supervisor.policy.model import (
    LATE_S,
    PLANNED,
    PROVEN_PARKED_S,
    Desired,
    EngineRecord,
    How,
    NurseryState,
    WorkerState,
    exit_text,
)
from shadowsup.supervisor.policy.rollout import Stage
from shadowsup.supervisor.policy.timeline import Timeline
from shadowsup.supervisor.policy.upkeep import Upkeep
from shadowsup.wire import engine as w
from shadowsup.wire.engine import EngineState, Role
from shadowsup.wire.faults import Fault, known_fault


class WorkerPolicy(Upkeep):
    """Decides for one worker. Call `handle` with each event and carry out what it returns, in order.

    ``deadline_s`` is when a `Tick` is due (monotonic; ``inf``: none). Beats go through `beat`, which is cheap when nothing changes.
    """

    # --- events -----------------------------------------------------------------------------------------------------------------

    def beat(self, beat: w.Beat, now_s: float) -> list[m.WorkerAction]:
        """Take a heartbeat; works only when the state changed or something waits for it."""
        engine = self.engines.get(beat.engine)
        if engine is None:
            return []
        last = engine.vitals.beat
        first = last is None
        moved = engine.parked and last is not None and last.kv_set != beat.kv_set
        self.history_of(engine).note(beat, last)
        engine.vitals.note(beat, now_s)
        if last is not None and hurries(beat) and not hurries(last) and not engine.dying and engine.stop is None:
            self.deadline_s = min(self.deadline_s, self._hang_due_s(engine, now_s))  # what it may take now is less than when that was set
        if beat.step > 0 and beat.epoch > 0:
            engine.committed = True
        if beat.epoch > 0 and beat.epoch == engine.epoch:
            engine.fenced = beat.fenced
        if engine.id == self.succession.active and engine.promoted_s is not None and beat.state is EngineState.ACTIVE:
            self.succession.name(engine, beat.kv_set)
        if moved:  # it follows the worker to a newer set by itself
            self._identify(engine)
            return self.handle(m.Beaten(beat), now_s)
        on_trial = self.rollout is not None and self.rollout.stage is Stage.PROVING
        if not first and (engine.state is beat.state or not engine.live) and self.desired is not Desired.DRAIN and not on_trial:
            return []
        return self.handle(m.Beaten(beat), now_s)

    def handle(self, event: m.WorkerEvent, now_s: float) -> list[m.WorkerAction]:
        """Take one event, return what to do."""
        self._actions = []
        # The tick need not be what comes first after this process was stopped.
        late_s = event.late_s if isinstance(event, m.Tick) else now_s - self.deadline_s
        if late_s > LATE_S:
            self._judge_from_s = now_s + max(LATE_S, 3 * self.settings.heartbeat_s)
        match event:
            case m.Tick():
                self._was_late(late_s)
            case m.Adopt():
                self._adopt(event, now_s)
            case m.Spawned():
                self._spawned(event)
            case m.SpawnFailed():
                self._spawn_failed(event, now_s)
            case m.Beaten(beat=beat):
                self._beaten(beat, now_s)
            case m.Reported(report=report):
                self._reported(report, now_s)
            case m.Died():
                self._died(event, now_s)
            case m.Frozen():
                self._frozen(self.engines.get(event.engine), now_s)
            case m.Stuck(engine=name):
                if name in self.engines:
                    self.engines[name].stuck = True
            case m.Gone():
                self._gone(event, now_s)
            case m.NurseryChanged():
                self._nursery_changed(event)
            case m.Explained():
                self._explained(event)
            case m.Examined(engine=name, look=look):
                if name in self.engines:
                    for suspicion in (self.engines[name].suspicion, self.engines[name].unheard):
                        if suspicion is not None and suspicion.asked_s is not None:
                            suspicion.take(look)
            case m.GpusQuarantined(gpus=gpus, why=why):
                self.quarantined |= gpus
                self.quarantined_why |= {uuid: self.quarantined_why.get(uuid, why) for uuid in gpus}
            case m.GpusReleased(gpus=gpus):
                self._released(gpus)
            case m.GpuWarned(notice=notice):
                self._warned(notice, now_s)
            case m.GpuCleared(uuid=uuid, kind=kind):
                self._cleared(uuid, kind)
            case m.Drill():
                if event.engine in self.engines:
                    self.engines[event.engine].excused = True
                    self._do(m.Signal(event.engine, event.signal))
            case m.Ready():
                pass
            case m.Reconfigure() | m.RollOut() | m.CommitRollOut() | m.FinishRollOut() | m.TakeBack():
                self._take_rollout_order(event, now_s)
            case _:
                self._ordered(event, now_s)
        self._reconcile(now_s)
        return self._actions

    def _adopt(self, found: m.Adopt, now_s: float) -> None:
        """Take over what another supervisor has left."""
        stands = picture(found, now_s)
        self.engines |= stands.engines
        self.desired = stands.desired
        self.succession.resume(stands.active, stands.epoch, kv_set=stands.kv_set, kv_known=stands.kv_known, name=stands.kv_name)
        self.cold_start_s = found.cold_start_s
        self._next_seq = max(self._next_seq, 1 + max([found.seq, *(engine.seq for engine in found.engines)]))
        self._memory_used = bool(found.engines or found.kv_set)
        for engine in self.engines.values():
            # What was recorded by a version that knew no revisions is taken for what the config wants.
            engine.revision = engine.revision or self.settings.revision
            engine.stale = engine.revision != self.settings.revision
        for engine in self.engines.values():
            engine.gpus = engine.gpus or self.settings.gpus
        # Who serves is where the worker is, else who was started last: what an earlier one left may be all that is not on the spare.
        last = sorted(self.engines.values(), key=lambda e: (e.id == self.succession.active, e.seq), reverse=True)
        before = dict(found.past.moved) if found.past is not None else {}
        there = tuple(before.get(uuid, uuid) for uuid in self.settings.gpus)
        moved = next((e.gpus for e in last if e.gpus and len(e.gpus) == len(self.settings.gpus)), there)
        self.moved = {old: new for old, new in zip(self.settings.gpus, moved, strict=False) if old != new}
        self.spares_taken.update(dict.fromkeys(self.moved.values(), self.settings.name))
        if found.past is not None:
            self._remember(found.past, now_s)
        self._tidy_due = True  # the other may have been in the middle of a roll-out
        for name, cause in stands.condemned:
            self._condemn(self.engines[name], cause, now_s)
            if name in stands.frozen:
                self._frozen(self.engines[name], now_s)
        self._finish_recovery(now_s)

    def _finish_recovery(self, now_s: float) -> None:
        """The supervisor died in the middle of a failover: what is left of it is recorded as one, counted from here."""
        active = self.active
        lost = [e for e in self.engines.values() if e.dying and e.epoch > 0]
        if self.timeline is not None or active is None or active.fence_sent or not lost:
            return
        old = max(lost, key=lambda e: e.seq)
        old.cause = CUT_SHORT
        self.timeline = Timeline(self.settings.name, old, self.epoch, now_s, wants_refill=self.settings.shadows > 0, gpus=self.gpus)
        self.timeline.ordered(active, self.epoch, self.gpus)
        if active.promoted_s is not None:
            self.timeline.promoted(None, now_s)
        self._do(m.Record(self.timeline.recovery))

    def _ordered(self, event: m.WorkerEvent, now_s: float) -> None:
        """Take a wish of the operator."""
        match event:
            case m.RunWorker():
                self._forgive_failures()
                self.desired = Desired.RUN
            case m.StopWorker(hurry=hurry):
                self.desired = Desired.STOP
                if hurry:
                    ladder.skip(self.engines.values(), self.settings, now_s)
            case m.DrainWorker():
                self.desired = Desired.DRAIN
            case m.RestartWorker(held=held):
                self._forgive_failures()
                self.quarantined_why = dict(held)
                self.quarantined = set(self.quarantined_why)
                self.desired = Desired.RUN
                for engine in self.engines.values():
                    engine.stale = True
            case m.FailOver():
                if self.refusal(event) is None and self.active is not None:
                    self._release(self.active, now_s)

    def _released(self, gpus: frozenset[str]) -> None:
        """What kept these out of use is over. A worker that is down for nothing else runs again."""
        self.quarantined -= gpus
        for uuid in gpus:
            self.quarantined_why.pop(uuid, None)
        if self._down_by_quarantine and not self._blocked():
            self._forgive_failures()

    def _forgive_failures(self) -> None:
        self.down_reason = self.shadow_reason = self.last_failure = ""
        self._down_by_quarantine = False
        self._service.reset()
        self._shadow.reset()
        self._forks_failed.clear()

    def _nursery_changed(self, event: m.NurseryChanged) -> None:
        rollout, revision = self.rollout, event.revision or self.settings.revision
        if revision == self.settings.revision:
            self.nursery = event.state
        if rollout is not None and revision == rollout.target.revision:
            rollout.nursery = event.state
        if rollout is not None and revision == rollout.origin.revision:
            rollout.origin_nursery = event.state
        if event.state is NurseryState.READY:
            self._forks_failed.pop(revision, None)

    def _spawned(self, event: m.Spawned) -> None:
        engine = self.engines.get(event.engine)
        if engine is not None:
            engine.pid = event.pid
            engine.killed_s = None  # a verdict before there was a pid killed nothing

    def _spawn_failed(self, event: m.SpawnFailed, now_s: float) -> None:
        engine = self.engines.pop(event.engine, None)
        if engine is None:
            return
        self._do(m.Announce("engine.spawn_failed", f"{engine.id} could not be started: {event.message}", "error", engine.id))
        self._do(m.Forget(engine.id))
        if event.how is How.NURSERY:
            self._distrust_fork(engine)
        elif not engine.dying:
            engine.message, engine.hint, engine.fatal = event.message, event.hint, event.fatal
            if not self._blame(engine, "could not be started", now_s):
                self._count(engine, now_s)

    def _beaten(self, beat: w.Beat, now_s: float) -> None:
        engine = self.engines.get(beat.engine)
        if engine is None or engine.dying:
            return
        if engine.pid is None:
            engine.pid = beat.pid
        if engine.stop is not None:
            return
        match beat.state:
            case EngineState.LOADING | EngineState.WARMING if engine.epoch == 0 and engine.parked_s is None:
                self._set_state(engine, beat.state)
            case EngineState.PARKED if engine.epoch == 0:
                self._set_state(engine, beat.state)
                if engine.parked_s is None:
                    self._parked(engine, now_s)
            case EngineState.ACTIVE | EngineState.DRAINING if engine.id != self.succession.active:
                self._condemn(engine, "serves without an order", now_s, Fault.DISOBEDIENT)
            case EngineState.ACTIVE if engine.promoted_s is None and beat.epoch == engine.epoch:
                self._promoted(engine, None, now_s)
            case EngineState.DRAINING if engine.drain_sent:
                self._set_state(engine, beat.state)
                if beat.inflight == 0 and beat.queued == 0 and self.desired is Desired.DRAIN:
                    self._do(m.Announce("worker.drained", f"{self.settings.name} has finished every request", engine=engine.id))
                    self.desired = Desired.STOP
            case EngineState.STOPPING:
                # Somebody else told it to stop. It gets the time of a planned end; the failover starts when it is dead.
                stop = ladder.begin(engine, now_s, release=True)
                stop.ordered = stop.signalled = True

    def _identify(self, engine: EngineRecord) -> None:
        """Learn which KV set a parked engine holds."""
        if engine.vitals.beat is not None:
            owner = self.active.revision if self.active is not None else self.settings.revision
            self.succession.identify(engine, engine.vitals.beat.kv_set, self.engines.values(), alike=engine.revision == owner)

    def _parked(self, engine: EngineRecord, now_s: float) -> None:
        engine.parked_s = now_s
        if engine.how is How.NURSERY:
            self._forks_failed.pop(engine.revision, None)
        self._verify = False
        self._identify(engine)
        if self.cold_start_s is None:
            self.cold_start_s = now_s - engine.spawned_s
        if self.timeline is not None and self.active is not None and self._missing() <= 0:
            self.timeline.refill(now_s)
            self._do(m.Record(self.timeline.recovery))

    def _reported(self, report: w.Promoted | w.FirstToken | w.Fenced | w.Canaried | w.Failed, now_s: float) -> None:
        engine = self.engines.get(report.engine)
        if engine is None:
            return
        match report:
            case w.Failed():
                engine.message, engine.hint, engine.fatal = report.message, report.hint, report.fatal
                engine.evidence |= {"stage": report.stage, "message": report.message, **report.evidence}
                fault = Fault.REFUSED if report.fatal else known_fault(report.fault)
                self._condemn(engine, f"failed to {report.stage}: {report.message}", now_s, fault)
            case w.Promoted():
                if engine.dying:
                    return
                if engine.id != self.succession.active or report.epoch != engine.epoch:
                    self._condemn(engine, f"took epoch {report.epoch} without an order", now_s, Fault.DISOBEDIENT)
                else:
                    self._promoted(engine, report, now_s)
            case w.FirstToken():
                engine.committed = True
                if self.timeline is not None and engine.id == self.succession.active and report.epoch == engine.epoch:
                    self.timeline.first_token(report)
                    self._do(m.Record(self.timeline.recovery))
            case w.Canaried(number=number):
                self._canaried(engine, number, now_s)
            case w.Fenced():
                engine.fenced = engine.fenced or report.epoch == engine.epoch
                if report.epoch != engine.epoch or engine.fence_told == report.epoch:
                    return
                engine.fence_told = report.epoch
                text = f"{engine.id} uses every block again, {report.reserve} of them set aside for the next failover"
                self._do(m.Announce("engine.fenced", text, engine=engine.id, epoch=report.epoch))

    def _promoted(self, engine: EngineRecord, report: w.Promoted | None, now_s: float) -> None:
        again = engine.promoted_s is not None  # the beat may be ahead of the report
        engine.promoted_s = engine.promoted_s if engine.promoted_s is not None else now_s
        if not again:
            self._set_state(engine, EngineState.ACTIVE)
            self.succession.confirm(engine)
            self.last_failure = ""
        if self.timeline is not None:
            self.timeline.promoted(report, engine.promoted_s)
            self._do(m.Record(self.timeline.recovery))

    def _died(self, event: m.Died, now_s: float) -> None:
        engine = self.engines.get(event.engine)
        if engine is None:
            return
        if not engine.exit:
            engine.exit = exit_text(event.status)
        self._condemn(engine, "stopped" if engine.stop is not None else "engine process died", now_s)
        if event.frozen:
            self._frozen(engine, now_s)

    def _condemn(self, engine: EngineRecord, cause: str, now_s: float, fault: Fault = Fault.UNKNOWN) -> None:
        """Pass the verdict: this engine is dead, or will be at once."""
        if engine.dying:
            return
        expected = engine.stop is not None
        engine.verdict_s, engine.cause, engine.fault = now_s, cause, Fault.PLANNED if expected else fault
        if notices := self._evidence_near(engine, now_s):
            engine.evidence["gpu"] = notices
        engine.role = Role.RETIRING
        was = engine.state
        if was is not EngineState.QUARANTINED:
            engine.state = EngineState.STOPPING
        if not expected:
            self._draw_conclusions(engine, now_s)
            text = f"{engine.id} ({was.value}): {cause}"
            data = {"cause": cause, "state": was.value, "fault": engine.fault.value, "decision": engine.decision}
            self._do(m.Announce("engine.verdict", text, "warning", engine.id, engine.epoch or None, data))
            if not self._blame(engine, cause, now_s):
                self._count(engine, now_s)
        if engine.id == self.succession.active:
            if not expected:
                self._note_death(engine, now_s)
            self._lost_active(engine, now_s)

    def _lost_active(self, engine: EngineRecord, now_s: float) -> None:
        if self.desired is Desired.STOP:
            self.succession.leave()
            return
        pending = self.timeline if self.timeline is not None and engine.promoted_s is None else None
        if pending is None and engine.promoted_s is None:
            # The very first promotion failed: no service was lost, only a start.
            self.succession.vacate()
            return
        if engine.stop is not None and self.gpus_of(engine) == self.gpus:
            self._draw_conclusions(engine, now_s)  # an order to go says nothing of the memory that is left
        self.succession.vacate()
        if pending is not None:
            pending.recovery.epoch = self.epoch  # the same failover, one rung further
            return
        self._close_timeline()
        if engine.stop is not None:
            engine.cause, self._planned_why = self._planned_why or PLANNED, ""
        wants_refill = self.settings.shadows > 0
        self.timeline = Timeline(self.settings.name, engine, self.epoch, now_s, wants_refill=wants_refill, gpus=self.gpus_of(engine))
        self._do(m.Record(self.timeline.recovery))

    def _frozen(self, engine: EngineRecord | None, now_s: float) -> None:
        if engine is not None and engine.frozen_s is None:
            engine.frozen_s = now_s
            if self.timeline is not None and engine.id == self.timeline.old:
                self.timeline.frozen(now_s)

    def _gone(self, event: m.Gone, now_s: float) -> None:
        engine = self.engines.get(event.engine)
        if engine is None:
            return
        engine.exit = exit_text(event.status) or engine.exit
        self._condemn(engine, "stopped" if engine.stop is not None else "engine process died", now_s)
        self._frozen(engine, now_s)
        if engine.exit:
            engine.evidence["exit"] = engine.exit
        if event.oom:
            engine.evidence["oom_kill"] = "counted in its control group"
        if engine.fault is Fault.UNKNOWN:
            engine.fault = Fault.KILLED if engine.excused else severity.fault_of_end(event.status, oom=event.oom)
            if engine.fault is Fault.UNKNOWN:
                self._unexplained[engine.id] = engine
            else:
                self._note_cause(engine)
        if engine.state is EngineState.QUARANTINED:
            self._do(m.Unquarantine(engine.id))
        del self.engines[engine.id]
        self._learn(engine)
        output = "\n".join(event.output)
        self._blame_more(engine, output)
        if output and not engine.excused and not engine.committed and not engine.message:
            how = engine.exit or "an unknown status"
            self._explain(f"{engine.id} ended with {how}; its last output:\n{output}")
        self._do(
            m.Announce(
                "engine.gone",
                f"{engine.id} is gone ({engine.exit or 'status unknown'})",
                "info",
                engine.id,
                data={"exit": engine.exit, "fault": engine.fault.value},
            )
        )
        self._do(m.Forget(engine.id))

    def _explained(self, event: m.Explained) -> None:
        engine = self._unexplained.pop(event.engine, None)
        if engine is None:
            return
        engine.exit, engine.fault = exit_text(event.status), severity.fault_of_end(event.status, oom=False)
        engine.evidence["exit"] = engine.exit
        self._note_cause(engine)
        self._learn(engine)

    def _learn(self, engine: EngineRecord) -> None:
        """What is known of the end of an engine goes into the record of its recovery."""
        if self.timeline is not None and engine.id == self.timeline.old:
            self.timeline.learn(engine)
            self._do(m.Record(self.timeline.recovery))
        elif (timeline := self._causeless.get(engine.id)) is not None:
            timeline.learn(engine)
            done = engine.fault is not Fault.UNKNOWN or engine.id not in self._unexplained
            if done:
                del self._causeless[engine.id]
            self._do(m.Record(timeline.recovery, done=done))

    def _count(self, engine: EngineRecord, now_s: float) -> None:
        """Account for an engine that ended without an order; only one that never worked counts as a failed start."""
        hint = f" ({engine.hint})" if engine.hint else ""
        what = engine.message + hint if engine.message else engine.cause or "could not be started"
        for_shadow = engine.epoch == 0 and self.active is not None and self.active.id != engine.id
        if engine.fatal:
            if for_shadow or any(e.parked for e in self.engines.values()):
                self.shadow_reason = what
            else:
                self.down_reason = what
        if engine.excused or engine.committed:
            return
        if engine.how is How.NURSERY and engine.parked_s is None:
            self._distrust_fork(engine)  # whatever it was, the next one shall not have inherited it
        self._explain(f"{engine.id}: {what}")
        if engine.parked_s is not None and engine.epoch == 0 and now_s - engine.parked_s >= PROVEN_PARKED_S:
            return
        (self._shadow if for_shadow else self._service).failed(now_s)

    def _explain(self, text: str) -> None:
        self.last_failure = text
        if self.down_reason and self.state is WorkerState.DOWN:
            self.down_reason = f"{self.down_reason.splitlines()[0]}\n{text}"
