"""What follows from how a worker stands: the level-triggered half of the policy.

`Upkeep._reconcile` compares what is with what is wanted and says what to do about it. It is run after every event, so the order in which
events arrive decides nothing, and a lost occasion is found again at the next event or deadline.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable

from shadowsup.supervisor.policy import ladder
from shadowsup.supervisor.policy import messages as m
from shadowsup.supervisor.policy.model import (
    FIRST_BEAT_S,
    FORKS_TRIED,
    ORDER_AGAIN_S,
    PROMOTE_BOUND_S,
    REFILL_DELAY_S,
    Desired,
    EngineRecord,
    How,
    NurseryState,
    WorkerSettings,
    WorkerState,
)
from shadowsup.supervisor.policy.rolling import Rolling
from shadowsup.supervisor.policy.standing import NEVER_S
from shadowsup.wire import engine as w
from shadowsup.wire.engine import EngineState, Role
from shadowsup.wire.faults import Fault


class Upkeep(Rolling, ABC):
    """What must be done about the state of a worker."""

    # --- what follows -----------------------------------------------------------------------------------------------------------

    def _reconcile(self, now_s: float) -> None:
        self.deadline_s = self._wake_s = NEVER_S
        self._watch(now_s)
        if self.desired is Desired.STOP or self.down_reason:
            self._end_all(now_s)
        self._push_ends(now_s)  # the first blow falls before anything is promoted
        self._promote(now_s)
        self._start_service(now_s)
        self._drain_active(now_s)
        self._fence(now_s)
        self._wind_down(now_s)
        self._refill(now_s)
        self._close_when_done(now_s)
        if self._roll_out(now_s):
            self._start_service(now_s)
            self._refill(now_s)
        self._free_when_stopped()
        self._tell(now_s)

    def _watch(self, now_s: float) -> None:
        """Shadows and loading engines are watched like actives (P34)."""
        for engine in list(self.engines.values()):
            if engine.dying:
                continue
            verdict, due_s = self._judge(engine, now_s)
            if verdict is not None and now_s < self._judge_from_s:
                verdict, due_s = None, self._judge_from_s
            if verdict is not None:
                fault, cause = verdict
                self._condemn(engine, cause, now_s, fault)
                continue
            self._at(due_s)
            self._look_for_hangs(engine, now_s)

    def _judge(self, engine: EngineRecord, now_s: float) -> tuple[tuple[Fault, str] | None, float]:
        """Return the verdict, or None and when to look again."""
        due_s = NEVER_S
        settings = self.settings_of(engine)
        if engine.stop is not None:
            return None, due_s  # the ladder has its own bounds
        if engine.vitals.beat is None and engine.how is How.NURSERY and engine.pid is not None:
            silent_s = max(engine.spawned_s, engine.adopted_s)
            if now_s >= silent_s + FIRST_BEAT_S:
                self._distrust_fork(engine)
                return (Fault.START, f"no sign of life {FIRST_BEAT_S:g} s after the {'adoption' if engine.adopted_s else 'fork'}"), now_s
            due_s = silent_s + FIRST_BEAT_S
        if engine.parked_s is None and engine.epoch == 0:
            if now_s >= engine.spawned_s + settings.startup_s:
                return (Fault.START, f"start-up took longer than {settings.startup_s:g} s (it was {engine.state.value})"), now_s
            due_s = min(due_s, engine.spawned_s + settings.startup_s)
        if engine.promote_sent_s is not None and engine.promoted_s is None:
            if now_s >= engine.promote_sent_s + PROMOTE_BOUND_S:
                return (Fault.PROMOTION, f"promotion did not finish within {PROMOTE_BOUND_S:g} s"), now_s
            due_s = min(due_s, engine.promote_sent_s + PROMOTE_BOUND_S)
        if engine.id == self.succession.active and not engine.fence_sent:
            unfenced_s = self._unfenced_until_s(engine)
            if now_s >= unfenced_s:
                engine.excused = True
                return (Fault.UNFENCED, "the engine before it cannot be ended: the blocks that one may write are never free again"), now_s
            due_s = min(due_s, unfenced_s)
        return None, due_s

    def _unfenced_until_s(self, active: EngineRecord) -> float:
        """Return when the active has waited for its fence for long enough; ``inf``: the fence will come.

        Without it, it has its reserve blocks only, and streams that need more stand still. Fresh memory is better, where there may be any;
        where there may not, the end of that tree is hoped for as long as clients are told to wait.
        """
        stuck = [e for e in self.succession.former_owners(self.engines.values()) if e.state is EngineState.QUARANTINED]
        if active.promoted_s is None or not stuck:
            return NEVER_S
        patience_s = self.give_up_after_s if self._stranded() else 0.0
        return max(e.verdict_s or 0.0 for e in stuck) + patience_s

    def _push_ends(self, now_s: float) -> None:
        for engine in list(self.engines.values()):
            settings = self.settings_of(engine)
            actions, again_s = ladder.push(engine, settings, now_s)
            self._actions += actions
            self._at(again_s)
            if engine.state is EngineState.QUARANTINED:
                self.quarantined |= set(self.gpus_of(engine))  # the node tells everyone, us too, but a little later
            if engine.dying and engine.id == self.succession.active:
                self._lost_active(engine, now_s)  # the ladder ran out on a hand-over

    def _promote(self, now_s: float) -> None:
        if self.desired is Desired.STOP or self.down_reason or self._blocked():
            return
        decision = self.succession.decide(list(self.engines.values()), now_s, self.settings.revision)
        if decision is None:
            return
        if isinstance(decision, float):
            self._at(decision)
            return
        engine = self.engines[decision.engine]
        engine.epoch, engine.keep_kv, engine.promote_sent_s = decision.epoch, decision.keep_kv, now_s
        engine.fence_sent = decision.fenced
        engine.role = Role.ACTIVE
        engine.fenced = decision.fenced
        self._memory_used = True
        self._do(m.Send(engine.id, w.Promote(epoch=decision.epoch, keep_kv=decision.keep_kv, fenced=decision.fenced)))
        self._set_state(engine, EngineState.PROMOTING)
        self._at(now_s + PROMOTE_BOUND_S)
        if not decision.keep_kv:
            text = f"the KV of {self.settings.name} is given up: {decision.why}"
            self._do(m.Announce("worker.kv_dropped", text, "warning", engine.id, decision.epoch))
        if self.timeline is not None and not self.timeline.done:
            self.timeline.ordered(engine, decision.epoch, self.gpus_of(engine))
            if decision.fenced:
                self.timeline.fence(now_s)
            self._do(m.Record(self.timeline.recovery))

    def _start_service(self, now_s: float) -> None:
        """Nobody serves and nobody is about to: start an engine, as fast as this machine allows."""
        if self.desired is Desired.STOP or self.down_reason or self.active is not None:
            return
        if self.desired is Desired.DRAIN and self.timeline is None:
            return  # nobody was lost while there was something to finish
        stuck_there = self._blocked() and not self._stranded()  # what loads on a quarantined device need not be waited for
        if any(e.parked and not self._blocked() for e in self.engines.values()):
            return
        if not stuck_there and (coming := [e for e in self.engines.values() if e.loading]):
            self._hurry(coming)
            return
        if self._waits_for_room():
            return
        if self._blocked():
            if not self._move(self.quarantined, now_s):
                stuck = sorted(self.quarantined & set(self.gpus))
                why = self.quarantined_why.get(stuck[0], "a process that cannot be killed holds it")
                no_spare = ", and no spare is left" if self.settings.spares else ""
                self._down_by_quarantine = True
                self._go_down(f"GPU {', '.join(stuck)} is quarantined: {why}{no_spare}", now_s)
                return
            self._push_ends(now_s)
        if self._service.exhausted(now_s):
            limit = f"gave up after {self.settings.max_failures} restarts within {self.settings.window_s:g} s"
            self._go_down(f"{limit}; last: {self.last_failure}", now_s)
            return
        if now_s < self._service.not_before_s:
            self._at(self._service.not_before_s)
            return
        if self.nursery is NurseryState.STARTING and self.epoch == 0 and self._service.in_a_row == 0:
            return  # its imports are the longest part of a cold start too: wait for it
        self._spawn(now_s, refill=False)

    def _hurry(self, coming: Iterable[EngineRecord]) -> None:
        """What was started as a shadow, at low priority, is waited for now."""
        for engine in coming:
            beat = engine.vitals.beat
            if engine.refill and beat is not None and engine.hurried_pid != beat.pid:
                engine.hurried_pid = beat.pid
                self._do(m.Send(engine.id, w.Hurry()))

    def _end_all(self, now_s: float) -> None:
        for engine in self.engines.values():
            if engine.live:
                ladder.begin(engine, now_s)

    def _go_down(self, reason: str, now_s: float) -> None:
        self.down_reason = reason
        self._end_all(now_s)
        self._push_ends(now_s)

    def _refill(self, now_s: float) -> None:
        """Keep N shadows parked, one start at a time, when the streams run again."""
        active = self.active
        if self.desired is not Desired.RUN or self.down_reason or active is None or not active.serving or active.promoted_s is None:
            return
        if active.stop is not None:
            return
        if self._replaying(active.promoted_s, now_s) or self._holds_refills():
            return
        if any(e.loading for e in self.engines.values()):
            return
        if self._missing() > 0:
            if self.nursery is NurseryState.STARTING or self.shadow_reason or self._blocked():
                return
            if now_s < self._shadow.not_before_s:
                self._at(self._shadow.not_before_s)
                return
            self._spawn(now_s, refill=True)
        else:
            self._replace_stale(active, now_s)

    def _missing(self) -> int:
        """Shadows to start. An engine that is on its way out has no place any more, a stale one still has."""
        there = [e for e in self.engines.values() if e.live and e.id != self.succession.active and not self._extra(e)]
        return self.settings.shadows - len(there)

    def _replace_stale(self, active: EngineRecord, now_s: float) -> None:
        if self.rollout is not None and self.rollout.open:
            return
        shadows = [e for e in self.engines.values() if e.parked]
        # Where the keeper does not have the set in use, a newcomer would be no better.
        stale = [e for e in shadows if e.stale or (not self.succession.usable(e) and self.succession.gives_current)]
        if stale:
            self._do(m.Announce("engine.replaced", f"{stale[0].id} is replaced by a new shadow", engine=stale[0].id))
            ladder.begin(stale[0], now_s)
            self._push_ends(now_s)
            self._refill(now_s)
        elif active.stale:
            self._release(active, now_s)

    def _release(self, active: EngineRecord, now_s: float) -> None:
        self._do(m.Announce("worker.hand_over", f"{active.id} hands over", engine=active.id, epoch=active.epoch))
        ladder.begin(active, now_s, release=True)
        self._push_ends(now_s)

    def _spawn(self, now_s: float, *, refill: bool, settings: WorkerSettings | None = None) -> None:
        settings = settings or self.settings
        tried = FORKS_TRIED if refill or not settings.shadows else 0
        forks = self._nursery_of(settings) is NurseryState.READY and self._forks_failed[settings.revision] <= tried
        how = How.NURSERY if forks else How.COLD
        seq = self._next_seq
        self._next_seq += 1
        engine = EngineRecord(
            id=f"{self.settings.name}.{seq}",
            seq=seq,
            how=how,
            spawned_s=now_s,
            refill=refill,
            kv_set=self.succession.kv_set_of_newcomer(),
            revision=settings.revision,
            gpus=self.placed(settings),
        )
        self.engines[engine.id] = engine
        self._memory_used = True
        self._at(now_s + settings.startup_s)
        beside = any(e.revision != settings.revision for e in self.engines.values())
        where, hurry = engine.gpus if self.moved else None, not refill and self.timeline is not None
        self._do(m.Spawn(engine.id, seq, how, refill, settings.revision, beside, where, self._verify, hurry))
        self._do(m.Announce("engine.state", f"{engine.id} is spawning ({how.value})", engine=engine.id, data={"state": "spawning"}))

    def _drain_active(self, now_s: float) -> None:
        active = self.active
        if self.desired is not Desired.DRAIN or active is None or not active.serving or active.drain_sent or active.stop is not None:
            return
        if active.promoted_s is not None and self._replaying(active.promoted_s, now_s):
            return  # one that drains takes nothing, and what its predecessor left is to be finished
        active.drain_sent = True
        self._do(m.Send(active.id, w.Drain()))

    def _replaying(self, promoted_s: float, now_s: float) -> bool:
        """Say whether a successor is still to be given what its predecessor had: until its first token, a second at most."""
        if self.timeline is None or self.timeline.served:
            return False
        served_s = promoted_s + REFILL_DELAY_S
        if now_s < served_s:
            self._at(served_s)
            return True
        self.timeline.served = True
        return False

    def _fence(self, now_s: float) -> None:
        """Every process of every former owner is gone: the successor may use all blocks again."""
        active = self.active
        if active is None or active.promoted_s is None or self.succession.former_owners(self.engines.values()):
            return
        if active.fence_sent and (active.fenced or not self._again(active, now_s)):
            return
        if not active.fence_sent and self.timeline is not None:
            self.timeline.fence(now_s)
            self._do(m.Record(self.timeline.recovery))
        active.fence_sent = True
        self._do(m.Send(active.id, w.Fence(epoch=active.epoch)))
        active.order_again_s = now_s + ORDER_AGAIN_S
        self._at(active.order_again_s)

    def _again(self, engine: EngineRecord, now_s: float) -> bool:
        """Say whether the last order to ``engine`` is due once more: the supervisor's end of the connection may have been its last."""
        if now_s >= engine.order_again_s:
            return True
        self._at(engine.order_again_s)
        return False

    def _close_when_done(self, now_s: float) -> None:
        active = self.active
        if active is not None and active.promoted_s is not None and active.serving:
            if now_s >= active.promoted_s + self.settings.healthy_after_s:
                self._service.reset()
            elif self._service.in_a_row:
                self._at(active.promoted_s + self.settings.healthy_after_s)
        proven = [e.parked_s for e in self.engines.values() if e.parked and e.parked_s is not None]
        if self._shadow.in_a_row and proven:
            due_s = min(proven) + self.settings.healthy_after_s
            if now_s >= due_s:
                self._shadow.reset()
            else:
                self._at(due_s)
        if self.timeline is not None and self.timeline.done:
            self._close_timeline()

    def _close_timeline(self) -> None:
        if self.timeline is not None:
            if self.timeline.recovery.fault == Fault.UNKNOWN.value and self.timeline.old in self.engines:
                self._causeless[self.timeline.old] = self.timeline  # the end of its process tells more
            else:
                self._do(m.Record(self.timeline.recovery, done=True))
            self.timeline = None

    def _free_when_stopped(self) -> None:
        if self.settled and self._memory_used:
            self._memory_used = False
            self._close_timeline()
            for timeline in self._causeless.values():
                self._do(m.Record(timeline.recovery, done=True))
            self._causeless.clear()
            self.succession.abandon_memory()
            self._do(m.FreeMemory())

    # --- telling ----------------------------------------------------------------------------------------------------------------

    def _set_state(self, engine: EngineRecord, state: EngineState) -> None:
        if engine.state is not state:
            engine.state = state
            text = f"{engine.id} is {state.value}"
            self._do(m.Announce("engine.state", text, engine=engine.id, epoch=engine.epoch or None, data={"state": state.value}))

    def _worker_state(self, now_s: float) -> WorkerState:
        active = self.active
        if self.desired is Desired.STOP:
            return WorkerState.STOPPED if self.settled else WorkerState.STOPPING
        if self.down_reason:
            return WorkerState.DOWN
        if active is not None and active.promoted_s is not None:
            if self.desired is Desired.DRAIN:
                return WorkerState.DRAINING
            parked = sum(1 for e in self.engines.values() if e.parked)
            return WorkerState.HEALTHY if parked >= self.settings.shadows else WorkerState.DEGRADED
        if active is None and now_s < self._service.not_before_s and not any(e.live for e in self.engines.values()):
            return WorkerState.BACKOFF
        return WorkerState.STARTING if self.timeline is None else WorkerState.RECOVERING

    def _tell(self, now_s: float) -> None:
        state = self._worker_state(now_s)
        if state is not self.state:
            was, self.state = self.state, state
            if state is WorkerState.HEALTHY:
                self.last_failure = ""
            level = "error" if state is WorkerState.DOWN else "info" if state in _CALM else "warning"
            text = f"{self.settings.name} is {state.value}" + (f": {self.reason}" if self.reason else "")
            self._do(m.Announce("worker.state", text, level, epoch=self.epoch, data={"state": state.value, "was": was.value}))
        key = (
            self.state,
            self.epoch,
            self.reason,
            self.give_up_after_s,
            tuple(e.id for e in self.routable()),
            self.deaths(now_s),
            self.paused_s is None,
        )
        if key != self._routes_key:
            self._routes_key = key
            self._do(m.PublishRoutes())

    # --- the half that takes events ---------------------------------------------------------------------------------------------

    @abstractmethod
    def _lost_active(self, engine: EngineRecord, now_s: float) -> None:
        """The active engine was condemned."""


_CALM = (WorkerState.STARTING, WorkerState.HEALTHY, WorkerState.STOPPING, WorkerState.STOPPED, WorkerState.DRAINING)
