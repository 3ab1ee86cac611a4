"""Hangs: from what looks wrong in the beats, through two looks at the process and a canary, to a verdict."""

from __future__ import annotations

from abc import ABC, abstractmethod

from shadowsup.supervisor.policy import messages as m
from shadowsup.supervisor.policy.detector import Finding, History, Kind, may_be_silent, works
from shadowsup.supervisor.policy.model import EngineRecord, WorkerSettings
from shadowsup.supervisor.policy.standing import NEVER_S, Standing
from shadowsup.supervisor.policy.suspicion import (
    CONFIRM_S,
    LATE_TICK_S,
    MOST_DOUBTS,
    UNANSWERED_S,
    Explanation,
    Suspicion,
    patience_s,
)
from shadowsup.wire.engine import Canary, EngineState, Phase
from shadowsup.wire.faults import Fault

IDLE_GPU_S = 0.5
"""A device with nothing to do for this long, while requests are in flight, is a suspicion."""
CANARY_AGAIN_S = 5.0
"""After a canary came back: no other one before."""
TURNING_S = 0.1
"""A loop that turns without doing anything has ended its last step no longer ago than this."""
STOPPED_AGAIN_S = 1.0
"""Between looks whether an engine is stopped that has not spoken yet, or loads and is silent."""
TOGETHER_S = 0.1
"""Deadlines that are likely to be postponed anyway fall on multiples of this."""
LOOK_AGAIN_S = 0.05
"""While a fresh beat is waited for."""


class Watch(Standing, ABC):
    """Watches every engine of a worker, shadows and loading ones like the active (P34)."""

    def _look_for_hangs(self, engine: EngineRecord, now_s: float) -> None:
        """Suspect, examine, condemn. A tick is asked for when there is more to do."""
        if engine.stop is not None:
            return
        if engine.vitals.beat is None or may_be_silent(engine.vitals.beat):
            self._look_for_a_stop(engine, now_s)
            if engine.dying or engine.vitals.beat is None:
                return
        else:
            engine.unheard = None
        settings, vitals = self.settings_of(engine), engine.vitals
        limits, util = settings.hang, self.loads.util(self.gpus_of(engine), now_s)
        finding = vitals.find(self.history_of(engine), limits, util, now_s, CONFIRM_S, hurry=engine.state is EngineState.PROMOTING)
        if finding is None:
            engine.suspicion, engine.doubts = None, 0
            if engine.id == self.succession.active:
                self._look_by_canary(engine, util, now_s)
            self.deadline_s = min(self.deadline_s, max(self._hang_due_s(engine, now_s), now_s + LOOK_AGAIN_S))
            return
        if now_s < self._judge_from_s:
            self._at(self._judge_from_s)
            return
        self._investigate(engine, finding, now_s)

    def _look_for_a_stop(self, engine: EngineRecord, now_s: float) -> None:
        """What loads, or has not spoken yet, may be silent for long: its silence proves nothing. That its process is stopped does."""
        since_s = engine.vitals.last_sign_s() or max(engine.spawned_s, engine.adopted_s)
        due_s = since_s + self.settings_of(engine).hang.floor_s
        if engine.pid is None or now_s < due_s:
            engine.unheard = None
            if engine.vitals.beat is None and engine.pid is not None:
                self._at(due_s)
            return
        seen = engine.unheard
        if seen is None or (seen.asked_s is not None and now_s >= seen.asked_s + UNANSWERED_S):
            seen = engine.unheard = Suspicion(now_s, Kind.SILENT, None)
        elif seen.asked_s is not None:
            self._at(seen.asked_s + UNANSWERED_S)
            return
        stopped = seen.second is not None and seen.second.stopped
        if seen.explain() is Explanation.STOPPED and seen.looked_twice and now_s >= self._judge_from_s:
            engine.evidence |= {"silent_s": round(now_s - since_s, 3), "process": Explanation.STOPPED.value}
            text = f"no sign of life for {now_s - since_s:.2f} s (it was {engine.state.value}); {Explanation.STOPPED.value}"
            self._condemn(engine, text, now_s, Fault.STOPPED)
            return
        again_s = seen.second.at_s + (CONFIRM_S if stopped else STOPPED_AGAIN_S) if seen.second is not None else now_s
        if now_s < again_s:
            self._at(again_s)
            return
        seen.asked_s = now_s
        self._do(m.Examine(engine.id))
        self._at(now_s + UNANSWERED_S)

    def postponed(self, now_s: float) -> bool:
        """Take a deadline that came only for beats that have come meanwhile: set the next one. False: there is something to do.

        Deadlines are not moved by beats, so that those cost next to nothing; this is what a busy engine costs instead, twice a second.
        """
        if self._wake_s <= now_s:
            return False
        due_s = NEVER_S
        for engine in self.engines.values():
            if engine.stop is None and not engine.dying and engine.vitals.beat is not None:
                due_s = min(due_s, self._hang_due_s(engine, now_s))
        if due_s <= now_s:
            return False
        # Never later than due, and together with other workers' where that is still to come: waking up costs more than looking.
        together_s = due_s - due_s % TOGETHER_S
        self.deadline_s = min(self._wake_s, together_s if together_s > now_s else due_s)
        return True

    def _hang_due_s(self, engine: EngineRecord, now_s: float) -> float:
        """Return when to look at an engine again if it says no more."""
        vitals, settings = engine.vitals, self.settings_of(engine)
        limits, gpus = settings.hang, self.gpus_of(engine)
        beat = vitals.beat
        assert beat is not None
        util, hurry = self.loads.util(gpus, now_s), engine.state is EngineState.PROMOTING
        due_s = vitals.due_s(self.history_of(engine), limits, util, CONFIRM_S, hurry=hurry)
        if may_be_silent(beat) and engine.pid is not None:
            due_s = min(due_s, vitals.last_sign_s() + limits.floor_s)
        if engine.canary_s is not None or engine.id != self.succession.active or not engine.fence_sent or not works(beat):
            return due_s
        suspect_s = NEVER_S
        if beat.stalled_since_s:
            suspect_s = beat.stalled_since_s + limits.floor_s
        if (idle_s := self.loads.idle_s(gpus, now_s)) > 0.0:
            suspect_s = min(suspect_s, max(now_s - idle_s, vitals.progress_s) + IDLE_GPU_S)
        return min(due_s, max(suspect_s, engine.canary_after_s))

    def _investigate(self, engine: EngineRecord, finding: Finding, now_s: float) -> None:
        suspicion = engine.suspicion
        if suspicion is None or suspicion.kind is not finding.kind:
            engine.suspicion = Suspicion(now_s, finding.kind, now_s)
            self._do(m.Examine(engine.id, front=finding.kind is Kind.FRONT))
            self._at(now_s + CONFIRM_S)
            return
        if suspicion.asked_s is not None:
            if now_s < suspicion.asked_s + UNANSWERED_S:
                self._at(suspicion.asked_s + UNANSWERED_S)
                return
            suspicion.take(None)
        if now_s < suspicion.ready_s:
            self._at(suspicion.ready_s)
            return
        beat = engine.vitals.beat
        assert beat is not None
        why = suspicion.explain()
        enough_s = patience_s(finding, why, self.settings_of(engine).hang.ceiling_s)
        if suspicion.looked and finding.for_s >= enough_s:
            # A step (or a server) that stands still is told by a beat of after the suspicion: it may have gone on since the last one.
            if finding.kind is Kind.SILENT or beat.sent_s >= suspicion.since_s:
                self._condemn_hung(engine, finding, why, now_s)
            else:
                self._at(now_s + LOOK_AGAIN_S)
            return
        if suspicion.looked and why not in (Explanation.STARVED, Explanation.RUNNING):
            self._at(now_s + max(enough_s - finding.for_s, LOOK_AGAIN_S))
            return
        suspicion.asked_s = now_s
        self._do(m.Examine(engine.id, front=finding.kind is Kind.FRONT))
        self._at(now_s + UNANSWERED_S)

    def _condemn_hung(self, engine: EngineRecord, finding: Finding, why: Explanation, now_s: float) -> None:
        beat = engine.vitals.beat
        assert beat is not None
        if finding.kind is Kind.STUCK:
            engine.sign_s = engine.vitals.progress_s
        elif finding.kind is Kind.FRONT:
            engine.sign_s = beat.front_s
            engine.evidence["server"] = f"the API server (pid {engine.pid}) had {beat.front_open} requests"
        engine.evidence |= {
            "phase": beat.phase.value,
            f"{finding.kind.value}_s": round(finding.for_s, 3),
            "plausible_s": round(finding.bound_s, 3),
            "step": beat.step,
            "inflight": beat.inflight,
            "queued": beat.queued,
            "process": why.value or "cannot be looked at",
        }
        text = finding.text(beat) + (f"; {why.value}" if why.value else "")
        self._condemn(engine, text, now_s, Fault.STOPPED if why is Explanation.STOPPED else Fault.HANG)

    def _was_late(self, late_s: float) -> None:
        """A tick came late: what was suspected is looked into anew, now that this process runs again."""
        if late_s <= LATE_TICK_S:
            return
        for engine in self.engines.values():
            engine.unheard = None
            if engine.suspicion is not None and engine.doubts < MOST_DOUBTS:
                engine.suspicion = None
                engine.doubts += 1

    # --- the canary -------------------------------------------------------------------------------------------------------------

    def _look_by_canary(self, engine: EngineRecord, util: float | None, now_s: float) -> None:
        """Where the loop seems to turn, or a step is not late yet, but nothing comes of it: ask for one token.

        A loop that is stuck in a step answers no more than it finishes the step; so an answer proves everything and none proves
        nothing more than that. The bound of the step under way holds for the canary, too, and that may be another step by now.
        """
        beat = engine.vitals.beat
        assert beat is not None
        if engine.canary_s is not None:
            due_s, progress_s = engine.canary_s + engine.canary_bound_s, engine.vitals.progress_s
            turns = beat.stalled_since_s and beat.sent_s - progress_s < TURNING_S
            if not turns:  # in a step that does something: a prompt may have come, which takes its time
                due_s = max(due_s, progress_s + self.history_of(engine).step_bound_s(beat, self.settings_of(engine).hang, util))
            if not works(beat) or beat.phase is Phase.WARMING:
                engine.canary_s = None  # it has nothing in flight now, or says that it compiles
            elif not beat.stalled_since_s and progress_s > engine.canary_s:
                self._canary_cleared(engine, f"has finished a step {progress_s - engine.canary_s:.2f} s after it was asked", now_s)
            elif now_s < max(due_s, self._judge_from_s):
                self._at(max(due_s, self._judge_from_s))
            else:
                text = f"hang: a canary of one token was not answered in {now_s - engine.canary_s:.2f} s, sent because {engine.canary_why}"
                engine.sign_s = engine.canary_s
                self._condemn(engine, text, now_s, Fault.HANG)
            return
        if not works(beat) or beat.phase is Phase.WARMING or not engine.fence_sent:
            return
        why = self._idle_though_busy(engine, now_s)
        if not why:
            return
        if now_s < engine.canary_after_s:
            return
        # By the clock, which goes on from one supervisor to the next: an engine may still have a canary of the one before.
        self._last_canary = max(self._last_canary + 1, round(now_s * 1000))
        engine.canary_s, engine.canary_why = now_s, why
        engine.canary_bound_s = self.history_of(engine).step_bound_s(beat, self.settings_of(engine).hang, util)
        self._do(m.Announce("engine.suspected", f"{engine.id}: {why}; asked for one token", "warning", engine.id, engine.epoch))
        self._do(m.Send(engine.id, Canary(number=self._last_canary)))
        self._at(now_s + engine.canary_bound_s)

    def _idle_though_busy(self, engine: EngineRecord, now_s: float) -> str:
        """Return why an engine with requests in flight is suspected of doing nothing; empty: it is not, or it is not known yet."""
        beat = engine.vitals.beat
        assert beat is not None
        settings = self.settings_of(engine)
        if beat.stalled_since_s:
            stalled_s = now_s - beat.stalled_since_s
            if stalled_s >= settings.hang.floor_s:
                return f"its steps have done nothing for {stalled_s:.2f} s with {beat.inflight + beat.queued} requests in flight"
        idle_s = self.loads.idle_s(self.gpus_of(engine), now_s)
        if idle_s <= 0.0:
            return ""
        # Idle devices are no news between steps, or before there was something to do.
        idle_s = min(idle_s, now_s - engine.vitals.progress_s)
        if idle_s < IDLE_GPU_S:
            return ""
        return f"its GPUs have had nothing to do for {idle_s:.2f} s with {beat.inflight + beat.queued} requests in flight"

    def _canaried(self, engine: EngineRecord, number: int, now_s: float) -> None:
        if engine.canary_s is None or number != self._last_canary:
            return
        self._canary_cleared(engine, f"answered with a token after {now_s - engine.canary_s:.2f} s", now_s)

    def _canary_cleared(self, engine: EngineRecord, how: str, now_s: float) -> None:
        self._do(m.Announce("engine.cleared", f"{engine.id} {how}", engine=engine.id, epoch=engine.epoch))
        engine.canary_s = None
        engine.canary_after_s = now_s + CANARY_AGAIN_S

    def history_of(self, engine: EngineRecord) -> History:
        """Return what is known of the steps of engines like this one."""
        found = self.histories.get(engine.revision)
        if found is None:
            found = self.histories[engine.revision] = History()
        return found

    @abstractmethod
    def settings_of(self, engine: EngineRecord) -> WorkerSettings:
        """Return what this engine was started with."""

    @abstractmethod
    def gpus_of(self, engine: EngineRecord) -> tuple[str, ...]:
        """Return the devices that an engine is on."""

    @abstractmethod
    def _condemn(self, engine: EngineRecord, cause: str, now_s: float, fault: Fault = Fault.UNKNOWN) -> None:
        """Pass the verdict: this engine is dead, or will be at once."""
