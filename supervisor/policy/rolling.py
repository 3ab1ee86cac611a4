"""New settings for a worker with kept memory, rolled out through its shadows.

Nothing that serves is touched before an engine with the new settings is parked beside it. Then the active hands over, the successor
proves itself (a first token, or `PROVE_S` without requests), and only when told so are the engines with the old settings retired: until
then they can take the service back. Who gives the orders (begin, commit, finish, take back) sees all workers of the node.

Level-triggered like `upkeep`: `_roll_out` is asked after every event and finds what is due.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from shadowsup.supervisor.policy import ladder
from shadowsup.supervisor.policy import messages as m
from shadowsup.supervisor.policy.model import (
    REFILL_DELAY_S,
    Desired,
    EngineRecord,
    How,
    NurseryState,
    WorkerSettings,
)
from shadowsup.supervisor.policy.placing import Placing
from shadowsup.supervisor.policy.rollout import RollOut, Stage, Way
from shadowsup.wire.engine import EngineState

PROVE_S = REFILL_DELAY_S
"""A successor that has no request and is still there after this long has proved what it can."""


class Rolling(Placing, ABC):
    """What a roll-out adds to the policy of one worker."""

    # --- orders -----------------------------------------------------------------------------------------------------------------

    def _take_rollout_order(self, event: m.RollOutOrder, now_s: float) -> None:
        rollout = self.rollout
        match event:
            case m.Reconfigure(settings=settings):
                self._reconfigure(settings)
            case m.RollOut():
                self._begin(event, now_s)
            case m.CommitRollOut() if rollout is not None and rollout.stage in (Stage.WAITING, Stage.STARTING, Stage.READY):
                self._commit(rollout, now_s)
            case m.FinishRollOut() if rollout is not None and rollout.stage is Stage.PROVEN:
                self._end_roll_out(Stage.DONE)
            case m.TakeBack(reason=reason) if rollout is not None and rollout.open:
                self._fail(reason, now_s)

    def _reconfigure(self, settings: WorkerSettings) -> None:
        self.settings = settings
        if self.rollout is not None and self.rollout.open and settings.revision == self.rollout.origin.revision:
            self.rollout.origin = settings
        for book in (self._service, self._shadow):
            book.configure(settings.backoff_s, settings.max_failures, settings.window_s)

    def _begin(self, event: m.RollOut, now_s: float) -> None:
        running = self.rollout
        if running is not None and running.open:
            if running.target.revision == event.settings.revision and running.stage is not Stage.TAKING_BACK:
                running.target = event.settings  # what comes up already is what is wanted
                return
            for engine in self._newcomers():
                if engine.id != self.succession.active:
                    ladder.begin(engine, now_s)
        idle = self.desired is not Desired.RUN or bool(self.down_reason) or self._hopeless(now_s)
        way = Way.FRESH if idle else Way.GAP if event.gap else Way.SURGE
        self.rollout = RollOut(
            target=event.settings,
            origin=self.settings,
            nursery=event.nursery,
            origin_nursery=self.nursery,
            way=way,
            stage=Stage.WAITING if way is Way.SURGE else Stage.READY,
            origin_down=self.down_reason,
        )
        self._announce_stage("")
        for engine in self.engines.values():
            if engine.revision == event.settings.revision:
                engine.stale = False  # not retired yet since the last change: just what is wanted

    def _hopeless(self, now_s: float) -> bool:
        """Say whether nobody serves and the starts with the present settings fail: there is nothing to wait for."""
        return self.active is None and self._service.in_a_row > 0

    def _commit(self, rollout: RollOut, now_s: float) -> None:
        self.nursery = rollout.nursery
        self._reconfigure(rollout.target)
        if self.desired is not Desired.RUN:
            self._enter(Stage.PROVEN)
            return
        self._enter(Stage.HANDING_OVER)
        if rollout.way is Way.SURGE:
            return
        self._forgive_failures()
        for engine in self.engines.values():
            if engine.live and engine.revision != rollout.target.revision and engine.id != self.succession.active:
                ladder.begin(engine, now_s)
        active = self.active
        if active is not None and active.stop is None and not active.dying:
            self._release(active, now_s)

    def _fail(self, reason: str, now_s: float) -> None:
        """Take it back: what is there with the old settings serves on or serves again."""
        rollout = self.rollout
        assert rollout is not None
        if rollout.stage is Stage.TAKING_BACK:
            return
        rollout.reason = reason
        was_committed = rollout.stage.committed
        rollout.returns = was_committed and rollout.way is not Way.FRESH
        self._enter(Stage.TAKING_BACK)
        if was_committed:
            self.nursery = rollout.origin_nursery
            self._reconfigure(rollout.origin)
            self._forgive_failures()
            self.down_reason = rollout.origin_down

    # --- what follows -----------------------------------------------------------------------------------------------------------

    def _roll_out(self, now_s: float) -> bool:
        """Do what is due. Returns whether it is further than before, so that other things may be due now."""
        rollout = self.rollout
        if rollout is None or rollout.stage.ended:
            self._shed(now_s)
            self._tidy()
            return False
        before = rollout.stage
        if self.desired is not Desired.RUN and rollout.way is not Way.FRESH and rollout.stage is not Stage.TAKING_BACK:
            if not rollout.stage.committed:
                self._fail(f"{self.settings.name} was told to {self.desired.value} meanwhile", now_s)
            elif rollout.stage is not Stage.PROVEN:
                self._enter(Stage.PROVEN)  # nothing is left that could show more
        match rollout.stage:
            case Stage.WAITING | Stage.STARTING | Stage.READY:
                self._prepare(rollout, now_s)
            case Stage.HANDING_OVER:
                self._hand_over(rollout, now_s)
            case Stage.PROVING:
                self._prove(rollout, now_s)
            case Stage.TAKING_BACK:
                self._return_to_origin(rollout, now_s)
            case _:
                pass
        stage: Stage = self.rollout.stage if self.rollout is not None else before
        if stage.ended:
            self._tidy()  # nothing more may happen for a long time
        return stage is not before

    def _prepare(self, rollout: RollOut, now_s: float) -> None:
        if rollout.way is not Way.SURGE:
            return
        newcomers = self._newcomers()
        if any(e.parked or e.id == self.succession.active for e in newcomers):
            self._enter(Stage.READY)
            return
        if newcomers:
            return
        if self.down_reason or self._hopeless(now_s):
            rollout.way, rollout.origin_down = Way.FRESH, self.down_reason
            self._enter(Stage.READY)
            return
        stuck = sorted(self.quarantined & set(self.placed(rollout.target)))
        if stuck:
            self._fail(f"GPU {', '.join(stuck)} is quarantined: a process that cannot be killed holds it", now_s)
            return
        why = self._busy()
        if why:
            rollout.reason = why
            self._enter(Stage.WAITING)
            return
        rollout.reason = ""
        self._enter(Stage.STARTING)
        self._spawn(now_s, refill=True, settings=rollout.target)

    def _busy(self) -> str:
        """Return what must be over before an engine more is started; empty: nothing."""
        active = self.active
        if active is None or active.promoted_s is None or not active.serving:
            return "no engine serves yet"
        if active.stop is not None:
            return f"{active.id} is handing over"
        if any(e.loading for e in self.engines.values()):
            return "a shadow is loading"
        # Shadows that cannot come up may be just what the new settings mend.
        if self.timeline is not None and not self._shadow.in_a_row and not self.shadow_reason:
            return f"the recovery from the loss of {self.timeline.old} is under way"
        return ""

    def _hand_over(self, rollout: RollOut, now_s: float) -> None:
        active = self.active
        if active is not None and active.revision == rollout.target.revision:
            if active.promoted_s is not None:
                self._enter(Stage.PROVING)
                self._prove(rollout, now_s)
            return
        if self.down_reason:
            self._fail(self.down_reason, now_s)
            return
        if rollout.way is not Way.SURGE or active is None:
            return  # the service is started, or the parked one is promoted, as always
        if not any(e.parked for e in self._newcomers()):
            self._fail("the engine with the new settings was lost before it could take over", now_s)
        elif active.serving and active.promoted_s is not None and active.stop is None and not self._replaying(active.promoted_s, now_s):
            self._release(active, now_s)

    def _prove(self, rollout: RollOut, now_s: float) -> None:
        active = self.active
        if active is None or active.revision != rollout.target.revision or active.promoted_s is None:
            self._fail("the engine with the new settings was lost as soon as it served", now_s)
            return
        beat = active.vitals.beat
        if active.committed:
            self._enter(Stage.PROVEN)
        elif beat is None or beat.inflight + beat.queued == 0:
            due_s = active.promoted_s + PROVE_S
            if now_s >= due_s:
                self._enter(Stage.PROVEN)
            else:
                self._at(due_s)

    def _return_to_origin(self, rollout: RollOut, now_s: float) -> None:
        active = self.active
        for engine in self._newcomers():
            if engine.id != self.succession.active:
                ladder.begin(engine, now_s)
        self._push_ends(now_s)
        # One that is stuck in the kernel may stay for ever, and serves nobody.
        on_trial = [e for e in self.engines.values() if e.revision == rollout.target.revision and e.state is not EngineState.QUARANTINED]
        if self.desired is not Desired.RUN or self.down_reason:
            if not any(e.live and e.id != self.succession.active for e in on_trial):
                self._end_roll_out(Stage.FAILED)
        elif active is not None and active in on_trial:
            self._serve_from_origin(active, rollout, now_s)
        elif not on_trial and (not rollout.returns or (active is not None and active.promoted_s is not None)):
            self._end_roll_out(Stage.FAILED)

    def _end_roll_out(self, stage: Stage) -> None:
        """What has other settings than those in force now is replaced, and memory that only such engines used is freed."""
        self._enter(stage)
        self._tidy_due = True
        for engine in self.engines.values():
            engine.stale = engine.stale or engine.revision != self.settings.revision

    def _serve_from_origin(self, active: EngineRecord, rollout: RollOut, now_s: float) -> None:
        """The new one serves and shall not: bring back one with the old settings, if need be beside it."""
        if active.promoted_s is None or not active.serving or active.stop is not None or self._replaying(active.promoted_s, now_s):
            return
        if any(e.parked and e.revision == rollout.origin.revision for e in self.engines.values()) or rollout.way is Way.GAP:
            self._release(active, now_s)
        elif not any(e.loading for e in self.engines.values()):
            if now_s < self._shadow.not_before_s:
                self._at(self._shadow.not_before_s)
            else:
                self._spawn(now_s, refill=True, settings=rollout.origin)

    def _shed(self, now_s: float) -> None:
        """End the shadows that are too many since fewer are wanted."""
        shadows = [e for e in self.engines.values() if e.live and e.id != self.succession.active]
        wanted = self.settings.shadows + (self.active is None)
        for engine in sorted(shadows, key=lambda e: (e.stale, not e.parked, e.seq), reverse=True)[: max(0, len(shadows) - wanted)]:
            self._do(m.Announce("engine.retired", f"{engine.id} is retired: {self.settings.shadows} shadows are wanted", engine=engine.id))
            ladder.begin(engine, now_s)
            self._push_ends(now_s)

    def _tidy(self) -> None:
        """The old engines are gone, and nobody holds the memory that only they used: have it freed."""
        active = self.active
        if not self._tidy_due or active is None or active.promoted_s is None:
            return
        keep = self.succession.set_in_use
        # By what they say: what one holds that was adopted on its way in or out is not known otherwise.
        held = {e.vitals.beat.kv_set if e.vitals.beat is not None else "" for e in self.engines.values()}
        if not keep or held != {keep} or any(e.revision != self.settings.revision or e.dying for e in self.engines.values()):
            return
        self._tidy_due = False
        self.succession.forget_others()
        self._do(m.TidyMemory(keep))

    # --- what others ask --------------------------------------------------------------------------------------------------------

    def settings_of(self, engine: EngineRecord) -> WorkerSettings:
        """Return the settings that an engine was started with, as far as they are still known."""
        known = self.rollout.of(engine.revision) if self.rollout is not None else None
        return self.settings if known is None or engine.revision == self.settings.revision else known

    def _newcomers(self) -> list[EngineRecord]:
        """Return the live engines with the settings of the open roll-out."""
        rollout = self.rollout
        if rollout is None or not rollout.open:
            return []
        return [e for e in self.engines.values() if e.live and e.revision == rollout.target.revision]

    def _extra(self, engine: EngineRecord) -> bool:
        """Say whether this one comes beside those that belong here: it takes no shadow's place."""
        rollout = self.rollout
        return rollout is not None and rollout.open and engine.revision == rollout.target.revision != self.settings.revision

    def _holds_refills(self) -> bool:
        """Say whether the set of engines is to stay as it is: until the outcome is known, old shadows are not replaced."""
        return self.rollout is not None and (self.rollout.stage.committed or self.rollout.stage is Stage.TAKING_BACK)

    def _waits_for_room(self) -> bool:
        """Say whether a start must wait for the end of engines with other settings: there is no room for both."""
        rollout = self.rollout
        if rollout is None or not rollout.open or rollout.way is Way.SURGE:
            return False
        return any(e.revision != self.settings.revision and e.state is not EngineState.QUARANTINED for e in self.engines.values())

    def _blame(self, engine: EngineRecord, cause: str, now_s: float) -> bool:
        """Count the loss of ``engine`` against the roll-out, if it was the one on trial. Returns whether it was."""
        rollout = self.rollout
        if rollout is None or not rollout.open or engine.revision != rollout.target.revision:
            return False
        if rollout.stage in (Stage.PROVEN, Stage.TAKING_BACK):
            return rollout.stage is Stage.TAKING_BACK
        beside = rollout.stage in (Stage.WAITING, Stage.STARTING, Stage.READY)
        if beside and (engine.excused or (engine.how is How.NURSERY and engine.vitals.beat is None)):
            if not engine.excused:
                self._distrust_fork(engine)
            return True  # a drill, or a fork that failed: the next one is tried
        rollout.blamed.append(engine.id)
        hint = f" ({engine.hint})" if engine.hint else ""
        self._fail(f"{engine.id}: {engine.message + hint if engine.message else cause}", now_s)
        return True

    def _blame_more(self, engine: EngineRecord, output: str) -> None:
        """The last words of an engine that was blamed."""
        rollout = self.rollout
        if rollout is not None and engine.id in rollout.blamed and output and not engine.message and output not in rollout.reason:
            rollout.reason = f"{rollout.reason} ({engine.exit or 'status unknown'}); its last output:\n{output}"

    def _enter(self, stage: Stage) -> None:
        rollout = self.rollout
        assert rollout is not None
        if rollout.stage is not stage:
            was, rollout.stage = rollout.stage, stage
            self._announce_stage(was.value)

    def _announce_stage(self, was: str) -> None:
        rollout = self.rollout
        assert rollout is not None
        stage = rollout.stage
        text = f"{self.settings.name}: new settings: {stage.value.replace('_', ' ')}"
        if rollout.reason:
            text += f": {rollout.reason}"
        data = {"stage": stage.value, "was": was, "revision": rollout.target.revision}
        level = "warning" if stage in (Stage.TAKING_BACK, Stage.FAILED) else "info"
        self._do(m.Announce("rollout.state", text, level, data=data))

    # --- what the rest of the policy does ---------------------------------------------------------------------------------------

    @abstractmethod
    def _spawn(self, now_s: float, *, refill: bool, settings: WorkerSettings | None = None) -> None: ...

    @abstractmethod
    def _push_ends(self, now_s: float) -> None: ...

    @abstractmethod
    def _replaying(self, promoted_s: float, now_s: float) -> bool: ...

    @abstractmethod
    def _forgive_failures(self) -> None: ...

    def _nursery_of(self, settings: WorkerSettings) -> NurseryState:
        """Return the state of the nursery that forks engines with ``settings``."""
        rollout = self.rollout
        if rollout is None or settings.revision == self.settings.revision:
            return self.nursery
        return rollout.nursery if settings.revision == rollout.target.revision else rollout.origin_nursery
