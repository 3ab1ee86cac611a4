"""One worker's policy, driven without I/O."""

from __future__ import annotations

import pytest
from policy_world import World

from shadowsup.supervisor.policy import messages as m
from shadowsup.supervisor.policy.detector import HangLimits
from shadowsup.supervisor.policy.model import How, NurseryState, WorkerSettings, WorkerState
from shadowsup.wire.engine import Drain, EngineState, Fence, Fenced, Hurry, Phase, Promote, Release, Stop


def world(*, shadows: int = 1, nursery: NurseryState = NurseryState.READY, obeys: bool = True, **settings: object) -> World:
    settings.setdefault("hang", HangLimits(floor_s=30.0))  # what is not about hangs need not beat all the time
    return World(WorkerSettings(name="chat", shadows=shadows, **settings), nursery=nursery, obeys=obeys)  # type: ignore[arg-type]


# --- start ------------------------------------------------------------------------------------------------------------------------


def test_the_first_engine_is_promoted_by_order_and_then_the_shadow_is_spawned() -> None:
    w = world()
    w.run()
    assert [s.engine for s in w.spawns] == ["chat.1"]
    assert w.policy.state is WorkerState.STARTING
    w.park("chat.1")
    assert w.promotions == [("chat.1", Promote(epoch=1, keep_kv=True, fenced=True))]
    assert len(w.spawns) == 1, "no shadow before the active serves"
    w.promoted("chat.1")
    assert w.policy.state is WorkerState.DEGRADED
    assert w.spawns[-1] == m.Spawn("chat.2", 2, How.NURSERY, refill=True)
    w.park("chat.2")
    assert w.policy.state is WorkerState.HEALTHY
    assert len(w.promotions) == 1


def test_shadows_are_started_one_after_another() -> None:
    w = world(shadows=3)
    w.run()
    w.park("chat.1")
    w.promoted("chat.1")
    for number in (2, 3, 4):
        assert [s.seq for s in w.spawns] == list(range(1, number + 1))
        w.park(f"chat.{number}")
    assert w.policy.state is WorkerState.HEALTHY
    assert len(w.spawns) == 4


def test_a_first_start_waits_for_the_nursery_that_is_coming_up() -> None:
    w = world(nursery=NurseryState.STARTING)
    w.run()
    assert w.spawns == []
    w.tell(m.NurseryChanged(NurseryState.READY))
    assert [s.how for s in w.spawns] == [How.NURSERY]


def test_without_a_nursery_engines_are_spawned_cold() -> None:
    w = world(nursery=NurseryState.NONE)
    w.run()
    assert [s.how for s in w.spawns] == [How.COLD]


def test_a_fork_that_never_beats_is_replaced_by_a_cold_spawn() -> None:
    w = world()
    w.run()
    w.advance(10.0)
    assert [s.how for s in w.spawns] == [How.NURSERY, How.COLD]


def test_a_shadow_tries_the_nursery_once_more_and_then_nobody_does() -> None:
    w = world()
    w.run()
    w.fail("chat.1", "The operating system has blocked the request.")
    w.die("chat.1", 1)
    w.advance(2.0)
    w.park("chat.2")
    w.promoted("chat.2")
    w.advance(2.0)
    assert [s.how for s in w.spawns] == [How.NURSERY, How.COLD, How.NURSERY]
    (told,) = w.announced("nursery.distrusted")
    assert told.level == "warning" and "chat.1" in told.message
    w.fail("chat.3", "The operating system has blocked the request.")
    w.die("chat.3", 1)
    w.advance(60.0)
    assert w.spawns[-1].how is How.COLD
    assert "chat.3" in w.announced("nursery.distrusted")[1].message
    w.tell(m.NurseryChanged(NurseryState.STARTING))
    w.tell(m.NurseryChanged(NurseryState.READY))
    w.park("chat.4")
    w.die("chat.2")
    w.promoted("chat.4")
    w.advance(2.0)
    assert w.spawns[-1].how is How.NURSERY, "another nursery may have what the one before had not"


def test_without_shadows_the_nursery_is_tried_once_more_and_after_a_restart_again() -> None:
    w = world(shadows=0)
    w.run()
    for expected in ([How.NURSERY], [How.NURSERY] * 2, [How.NURSERY] * 2 + [How.COLD]):
        assert [s.how for s in w.spawns] == expected
        w.die(w.spawns[-1].engine, 1)
        w.advance(4.0)
    assert len(w.announced("nursery.distrusted")) == 2
    w.tell(m.RestartWorker())
    w.die(w.spawns[-1].engine, 1)
    w.advance(4.0)
    assert w.spawns[-1].how is How.NURSERY


def test_a_fork_that_parks_makes_good_for_one_that_did_not() -> None:
    w = world()
    w.run()
    w.die("chat.1", 1)
    w.advance(2.0)
    w.park("chat.2")
    w.promoted("chat.2")
    w.advance(2.0)
    w.park("chat.3")
    w.die("chat.2")
    w.promoted("chat.3")
    w.die("chat.3")
    w.advance(2.0)
    assert not w.spawns[-1].refill and w.spawns[-1].how is How.NURSERY, "somebody waits for it"


def test_a_refused_fork_is_followed_by_a_cold_spawn_at_once_and_not_counted() -> None:
    w = world()
    w.run()
    w.bodies.clear()
    w.tell(m.SpawnFailed("chat.1", How.NURSERY, "7 threads"))
    assert [s.how for s in w.spawns] == [How.NURSERY, How.COLD]
    assert w.policy.state is WorkerState.STARTING


def test_a_start_that_takes_too_long_is_killed() -> None:
    w = world(startup_s=60.0)
    w.run()
    for _ in range(59):
        w.beat("chat.1", EngineState.LOADING)
        w.advance(1.0)
    assert "chat.1" in w.bodies
    w.beat("chat.1", EngineState.LOADING)
    w.advance(1.0)
    assert "chat.1" not in w.bodies
    assert "start-up took longer than 60 s" in w.announced("engine.verdict")[0].message


# --- failover ---------------------------------------------------------------------------------------------------------------------


def test_the_parked_shadow_is_promoted_in_the_same_breath_as_the_eof() -> None:
    w = world()
    w.serve()
    w.bodies["chat.1"].frozen = True
    actions = w.tell(m.Died("chat.1", frozen=True))
    kinds = [type(a).__name__ for a in actions if not isinstance(a, m.Announce | m.Record)]
    assert kinds == ["KillTree", "Send", "PublishRoutes"]
    assert w.promotions[-1] == ("chat.2", Promote(epoch=2, keep_kv=True, fenced=False))


def test_nothing_is_promoted_before_the_old_tree_is_frozen() -> None:
    w = world(obeys=False)
    w.serve()
    w.tell(m.Died("chat.1"))
    assert len(w.promotions) == 1
    assert w.policy.epoch == 2, "the gateway holds from the verdict on"
    assert any(isinstance(a, m.KillTree) for a in w.actions)
    w.bodies["chat.1"].frozen = True
    w.tell(m.Frozen("chat.1"))
    assert w.promotions[-1][1] == Promote(epoch=2, keep_kv=True, fenced=False)


@pytest.mark.parametrize(("stuck", "bound_s"), [(True, 0.1), (False, 1.0)])
def test_a_tree_that_does_not_freeze_costs_the_kv_and_not_the_service(stuck: bool, bound_s: float) -> None:
    w = world(obeys=False)
    w.serve()
    w.tell(m.Died("chat.1"))
    if stuck:
        w.tell(m.Stuck("chat.1"))
    w.advance(bound_s - 0.01)
    assert len(w.promotions) == 1
    w.advance(0.02)
    assert w.promotions[-1] == ("chat.2", Promote(epoch=2, keep_kv=False, fenced=True))
    assert w.announced("worker.kv_dropped")


def test_a_tree_that_only_waits_for_a_processor_keeps_the_kv() -> None:
    """On a busy machine what was killed may not run for more than 0.1 s, not even to end."""
    w = world(obeys=False)
    w.serve()
    w.tell(m.Died("chat.1"))
    w.advance(0.5)
    assert len(w.promotions) == 1
    w.bodies["chat.1"].frozen = True
    w.tell(m.Frozen("chat.1"))
    assert w.promotions[-1] == ("chat.2", Promote(epoch=2, keep_kv=True, fenced=False))


def test_what_turns_out_to_be_stuck_is_waited_for_no_longer() -> None:
    w = world(obeys=False)
    w.serve()
    w.tell(m.Died("chat.1"))
    w.advance(0.15)
    assert len(w.promotions) == 1
    w.tell(m.Stuck("chat.1"))
    assert w.promotions[-1] == ("chat.2", Promote(epoch=2, keep_kv=False, fenced=True))


def test_shadows_that_hold_the_given_up_kv_never_keep_it() -> None:
    w = world(shadows=2, obeys=False)
    w.serve()
    w.tell(m.Died("chat.1"))
    w.tell(m.Stuck("chat.1"))
    w.advance(0.2)
    assert w.promotions[-1][1].keep_kv is False
    w.promoted("chat.2")
    w.freeze("chat.2")
    assert w.promotions[-1] == ("chat.3", Promote(epoch=3, keep_kv=False, fenced=True)), "chat.3 parked over the abandoned set"


def test_shadows_that_hold_the_given_up_kv_are_replaced() -> None:
    w = world(shadows=2, obeys=False)
    w.serve()
    w.tell(m.Died("chat.1"))
    w.tell(m.Stuck("chat.1"))
    w.advance(0.2)
    w.promoted("chat.2")
    w.first_token("chat.2")
    w.park(w.spawns[-1].engine)
    assert [a.engine for a in w.sent(Stop)] == ["chat.3"]
    w.obeys = True
    w.bodies["chat.3"].frozen = True
    w.gone("chat.3", 0)
    w.park(w.spawns[-1].engine)
    w.freeze("chat.2")
    assert w.promotions[-1][1].keep_kv is True


def test_the_fence_comes_when_the_last_process_of_the_old_tree_is_gone() -> None:
    w = world(obeys=False)
    w.serve()
    w.freeze("chat.1")
    w.promoted("chat.2")
    assert w.sent(Fence) == []
    w.gone("chat.1")
    assert w.sent(Fence) == [m.Send("chat.2", Fence(epoch=2))]
    w.advance(5.0)
    assert len(w.sent(Fence)) == 1


def test_a_fence_that_is_told_again_and_again_is_announced_once() -> None:
    w = world()
    w.serve()
    w.obeys = False
    w.freeze("chat.1")
    w.promoted("chat.2")
    w.gone("chat.1")
    fenced = m.Reported(Fenced(engine="chat.2", epoch=2, reserve=4))
    w.beat("chat.2", fenced=True)  # may be ahead of the report
    w.tell(fenced)
    w.beat("chat.2", fenced=False)  # and one of before may come after it
    w.tell(fenced)
    w.tell(m.Reported(Fenced(engine="chat.2", epoch=1, reserve=4)))
    assert len(w.announced("engine.fenced")) == 1


def test_no_fence_is_sent_when_the_promotion_was_already_fenced() -> None:
    w = world()
    w.serve()
    w.gone("chat.1", 0)
    assert w.promotions[-1][1].fenced is True
    w.promoted("chat.2")
    assert w.sent(Fence) == []


def test_a_refill_waits_for_the_first_token() -> None:
    w = world()
    w.serve()
    w.die("chat.1")
    w.promoted("chat.2")
    w.advance(0.5)
    assert len(w.spawns) == 2
    w.first_token("chat.2")
    assert w.spawns[-1] == m.Spawn("chat.3", 3, How.NURSERY, refill=True)


def test_a_refill_without_traffic_starts_after_a_second() -> None:
    w = world()
    w.serve()
    w.die("chat.1")
    w.promoted("chat.2")
    w.advance(0.9)
    assert len(w.spawns) == 2
    w.advance(0.2)
    assert len(w.spawns) == 3


def test_a_recovery_has_its_timeline() -> None:
    w = world(obeys=False)
    w.serve()
    w.beat("chat.1")
    w.advance(0.1)
    w.freeze("chat.1")
    w.now_s += 0.004
    w.promoted("chat.2")
    w.now_s += 0.006
    w.first_token("chat.2")
    w.now_s += 0.090
    w.gone("chat.1", -9)
    w.now_s += 1.0
    w.park("chat.3")
    (recovery,) = w.done
    assert (recovery.kind, recovery.from_engine, recovery.to_engine, recovery.epoch) == ("shadow", "chat.1", "chat.2", 2)
    assert recovery.exit == "signal 9"
    assert recovery.detect_ms == pytest.approx(100)
    assert recovery.freeze_ms == 0
    assert recovery.promote_ms == pytest.approx(4)
    assert recovery.first_token_ms == pytest.approx(10)
    assert recovery.fence_ms == pytest.approx(100)
    assert recovery.refill_ms == pytest.approx(1100)
    assert (recovery.blocks_kept, recovery.blocks_dropped, recovery.requests_resumed) == (7, 1, 3)


@pytest.mark.parametrize("heard", ["before", "after"])
def test_a_shadow_that_is_waited_for_before_it_has_come_up_is_told_so_once(heard: str) -> None:
    w = world()
    w.serve(shadows=0)
    if heard == "before":
        w.beat("chat.2", EngineState.LOADING)
        assert w.sent(Hurry) == []
    w.die("chat.1")
    w.beat("chat.2", EngineState.LOADING)
    w.beat("chat.2", EngineState.WARMING)
    assert w.sent(Hurry) == [m.Send("chat.2", Hurry())]
    w.park("chat.2")
    assert w.promotions[-1][0] == "chat.2"


def test_what_takes_over_the_beats_of_an_engine_that_is_waited_for_is_told_too() -> None:
    """vLLM's API server beats until it has forked EngineCore."""
    w = world()
    w.serve(shadows=0)
    w.beat("chat.2", EngineState.LOADING, pid=200)
    w.die("chat.1")
    w.beat("chat.2", EngineState.LOADING, pid=201)
    w.beat("chat.2", EngineState.WARMING, pid=201)
    w.beat("chat.2", EngineState.WARMING, pid=201)
    assert w.sent(Hurry) == [m.Send("chat.2", Hurry())] * 2


def test_nobody_hurries_while_another_shadow_is_parked() -> None:
    w = world(shadows=2)
    w.serve(shadows=1)
    loading = w.spawns[-1].engine
    w.beat(loading, EngineState.LOADING)
    w.die("chat.1")
    assert w.promotions[-1][0] == "chat.2"
    w.beat(loading, EngineState.WARMING)
    assert w.sent(Hurry) == []


def test_without_a_parked_shadow_the_loading_one_is_awaited() -> None:
    w = world()
    w.serve(shadows=0)
    assert [s.seq for s in w.spawns] == [1, 2]
    w.die("chat.1")
    assert [s.seq for s in w.spawns] == [1, 2], "chat.2 is on its way: nothing is faster"
    assert w.policy.state is WorkerState.RECOVERING
    w.park("chat.2")
    assert w.promotions[-1][0] == "chat.2"
    assert w.recoveries[-1].kind == "respawn"


@pytest.mark.parametrize(
    ("nursery", "kind", "how"), [(NurseryState.READY, "respawn", How.NURSERY), (NurseryState.STARTING, "cold", How.COLD)]
)
def test_without_any_shadow_an_engine_is_started_at_once(nursery: NurseryState, kind: str, how: How) -> None:
    w = world(shadows=0)
    w.serve()
    w.tell(m.NurseryChanged(nursery))
    w.beat("chat.1", step=5)
    w.die("chat.1")
    assert w.spawns[-1].how is how
    assert w.spawns[-1].refill is False
    assert [s.hurry for s in w.spawns] == [False, True], "clients wait for this one only"
    w.park("chat.2")
    assert w.recoveries[-1].kind == kind


def test_p34_a_shadow_that_dies_unseen_is_noticed_and_refilled() -> None:
    w = world()
    w.serve()
    w.advance(2.0)
    w.die("chat.2")
    assert w.policy.state is WorkerState.DEGRADED
    assert w.spawns[-1].seq == 3
    w.advance(1.0)
    w.die("chat.1")
    w.park("chat.3")
    assert w.promotions[-1][0] == "chat.3"


def test_p34_a_shadow_that_falls_silent_is_replaced() -> None:
    w = world(hang=HangLimits(ceiling_s=5.0))
    w.serve()
    for _ in range(6):
        w.advance(1.0)
        w.beat("chat.1")
    assert "chat.2" not in w.bodies
    assert w.spawns[-1].seq == 3


def test_p35_two_shadows_one_successor() -> None:
    w = world(shadows=2)
    w.serve()
    w.die("chat.1")
    assert [name for name, _ in w.promotions] == ["chat.1", "chat.2"]
    w.advance(1.0)
    assert len(w.promotions) == 2


def test_p35_a_failed_promotion_moves_on_to_the_next_rung_with_a_new_epoch() -> None:
    w = world(shadows=2)
    w.serve()
    w.die("chat.1")
    w.fail("chat.2", "the map failed", stage="promote")
    assert w.promotions[-1] == ("chat.3", Promote(epoch=3, keep_kv=True, fenced=False))
    w.promoted("chat.3")
    w.first_token("chat.3")
    assert len(w.recoveries) == 1, "it is one failover"
    assert w.recoveries[0].to_engine == "chat.3"
    assert w.recoveries[0].epoch == 3


def test_p35_a_promotion_that_never_ends_moves_on() -> None:
    w = world(shadows=2)
    w.serve()
    w.die("chat.1")
    w.advance(5.0)
    w.beat("chat.2")
    w.advance(5.1)
    assert w.promotions[-1][0] == "chat.3"


def test_an_engine_that_serves_without_an_order_is_killed() -> None:
    w = world(shadows=2)
    w.serve()
    w.promoted("chat.3", epoch=1)
    assert "chat.3" not in w.bodies
    assert w.policy.active is not None and w.policy.active.id == "chat.1"


def test_p39_an_exit_with_status_0_is_a_death_like_any_other() -> None:
    w = world(obeys=False)
    w.serve()
    w.freeze("chat.1")
    w.gone("chat.1", 0)
    assert w.promotions[-1][0] == "chat.2"
    assert w.recoveries[-1].exit == "status 0"


def test_the_shadow_that_dies_with_the_active_is_not_promoted() -> None:
    w = world()
    w.serve()
    w.die("chat.2")
    w.die("chat.1")
    w.park("chat.3")
    assert w.promotions[-1][0] == "chat.3"


# --- hang -------------------------------------------------------------------------------------------------------------------------


def busy(w: World, engine: str, step: int) -> None:
    w.bodies[engine].inflight = 4
    w.beat(engine, phase=Phase.DECODE, step=step)


def test_an_active_that_beats_and_finishes_no_step_is_hung() -> None:
    w = world(hang=HangLimits(ceiling_s=3.0))
    w.serve()
    while "chat.1" in w.bodies:
        busy(w, "chat.1", 5)
        w.beat("chat.2")
        w.advance(0.2)
    assert w.now_s < 1005.0
    assert w.promotions[-1][0] == "chat.2"
    assert "no step finished" in w.recoveries[-1].cause


def test_a_busy_engine_that_makes_steps_is_never_hung_and_an_idle_one_neither() -> None:
    w = world(hang=HangLimits(ceiling_s=3.0))
    w.serve()
    for step in range(100):
        busy(w, "chat.1", step)
        w.beat("chat.2")
        w.advance(0.2)
    w.bodies["chat.1"].inflight = 0
    for _ in range(100):
        w.beat("chat.1", phase=Phase.IDLE)
        w.beat("chat.2")
        w.advance(0.2)
    assert len(w.promotions) == 1


def test_an_active_that_falls_silent_is_hung() -> None:
    w = world(hang=HangLimits(ceiling_s=3.0))
    w.serve()
    for _ in range(16):
        if "chat.1" not in w.bodies:
            break
        w.advance(0.25)
        w.beat("chat.2", phase=Phase.PARKED)
    assert w.promotions[-1][0] == "chat.2"
    assert "no heartbeat" in w.recoveries[-1].cause


def test_a_supervisor_that_slept_itself_passes_no_verdict_on_silence() -> None:
    w = world(hang=HangLimits(ceiling_s=3.0))
    w.serve()
    w.now_s += 3600.0
    w.tell(m.Tick(late_s=3597.0))
    assert w.policy.state is WorkerState.HEALTHY
    w.beat("chat.1")
    w.beat("chat.2")
    w.advance(2.0)
    assert w.policy.state is WorkerState.HEALTHY
    w.advance(2.0)
    assert len(w.promotions) > 1 or w.policy.state is not WorkerState.HEALTHY


# --- restart accounting -----------------------------------------------------------------------------------------------------------


def test_p11_engines_that_die_at_once_back_off_and_end_in_down_with_their_last_output() -> None:
    w = world(backoff_s=(0.0, 1.0, 2.0), max_failures=4, window_s=600.0, obeys=False)
    w.run()
    waits = []
    while w.policy.state is not WorkerState.DOWN:
        engine = w.spawns[-1].engine
        before_s = w.now_s
        w.freeze(engine)
        w.gone(engine, 1, ("Traceback …", "ImportError: no module named torch"))
        if w.policy.state is WorkerState.BACKOFF:
            w.advance(w.policy.deadline_s - w.now_s)
        waits.append(round(w.now_s - before_s, 3))
    assert waits == [0.0, 1.0, 2.0, 2.0, 0.0]
    assert len(w.spawns) == 5
    assert "ImportError: no module named torch" in w.policy.reason
    assert "gave up after 4 restarts" in w.policy.reason
    w.advance(3600.0)
    assert len(w.spawns) == 5, "down stays down"
    w.run()
    assert len(w.spawns) == 6


def test_a_fatal_failure_is_down_at_once() -> None:
    w = world()
    w.run()
    w.fail("chat.1", "there is no model /nowhere", fatal=True)
    assert w.policy.state is WorkerState.DOWN
    assert "there is no model /nowhere" in w.policy.reason
    assert len(w.spawns) == 1


def test_a_shadow_that_fails_for_good_leaves_the_service_alone() -> None:
    w = world()
    w.serve(shadows=0)
    w.fail("chat.2", "out of memory", fatal=True)
    assert w.policy.state is WorkerState.DEGRADED
    assert "out of memory" in w.policy.reason
    assert len(w.spawns) == 2


def test_shadows_that_cannot_start_back_off_and_never_take_the_worker_down() -> None:
    w = world(max_failures=3)
    w.serve(shadows=0)
    for _ in range(8):
        engine = w.spawns[-1].engine
        w.die(engine, 1)
        for _ in range(70):
            w.beat("chat.1")
            w.advance(1.0)
            if w.spawns[-1].engine != engine:
                break
    assert w.policy.state is WorkerState.DEGRADED
    assert len(w.spawns) == 10


def test_engines_that_worked_are_restarted_at_once_however_often_they_die() -> None:
    w = world(shadows=0, max_failures=2)
    w.serve()
    for _ in range(20):
        engine = w.spawns[-1].engine
        w.beat(engine, step=3)
        w.die(engine)
        assert w.policy.state is WorkerState.RECOVERING
        w.park(w.spawns[-1].engine)
        w.promoted(w.spawns[-1].engine)
    assert len(w.spawns) == 21


def test_a_drill_is_not_counted() -> None:
    w = world(shadows=0, max_failures=1)
    w.serve()
    for _ in range(5):
        w.tell(m.Drill(w.spawns[-1].engine, 9))
        w.park(w.spawns[-1].engine)
        w.promoted(w.spawns[-1].engine)
    assert w.policy.state is WorkerState.HEALTHY


def test_an_engine_that_stayed_well_starts_the_count_anew() -> None:
    w = world(shadows=0, max_failures=2, healthy_after_s=60.0)
    w.serve()
    for _ in range(6):
        w.die(w.spawns[-1].engine)
        w.park(w.spawns[-1].engine)
        w.promoted(w.spawns[-1].engine)
        for _ in range(61):
            w.beat(w.spawns[-1].engine)
            w.advance(1.0)
    assert w.policy.state is WorkerState.HEALTHY


# --- the operator -----------------------------------------------------------------------------------------------------------------


def test_p13_a_stop_during_backoff_sticks() -> None:
    w = world(backoff_s=(5.0,))
    w.run()
    w.die("chat.1", 1)
    assert w.policy.state is WorkerState.BACKOFF
    w.tell(m.StopWorker())
    assert w.policy.state is WorkerState.STOPPED
    w.advance(3600.0)
    assert len(w.spawns) == 1
    assert w.freed == 1


def test_a_stop_while_an_engine_loads_and_before_it_has_a_pid_leaves_nothing() -> None:
    w = world(obeys=False)
    policy = w.policy
    policy.handle(m.RunWorker(), 0.0)
    policy.handle(m.StopWorker(), 0.1)
    actions = policy.handle(m.Spawned("chat.1", 42), 0.2)
    assert m.Signal("chat.1", 15) in actions
    policy.handle(m.Gone("chat.1", -15), 0.3)
    assert policy.state is WorkerState.STOPPED


def test_stop_goes_from_order_to_signal_to_kill_and_says_so() -> None:
    """P22."""
    w = world(shadows=0, stop_timeout_s=8.0, obeys=False)
    w.serve()
    w.tell(m.StopWorker())
    assert w.sent(Stop) == [m.Send("chat.1", Stop())]
    assert w.policy.state is WorkerState.STOPPING
    w.advance(3.9)
    assert not [a for a in w.actions if isinstance(a, m.Signal)]
    w.advance(0.2)
    assert m.Signal("chat.1", 15) in w.actions
    assert w.announced("engine.stop_signal")
    w.advance(3.8)
    assert not [a for a in w.actions if isinstance(a, m.KillTree)]
    w.advance(0.2)
    assert m.KillTree("chat.1") in w.actions
    assert w.announced("engine.killed")
    w.gone("chat.1")
    assert w.policy.state is WorkerState.STOPPED
    assert w.policy.settled
    assert w.recoveries == []


def test_p06_an_engine_that_cannot_be_killed_is_quarantined_and_nothing_waits_for_it() -> None:
    w = world(shadows=0, stop_timeout_s=2.0, obeys=False)
    w.serve()
    w.tell(m.StopWorker())
    w.advance(13.0)
    assert w.policy.engines["chat.1"].state is EngineState.QUARANTINED
    assert len(w.announced("engine.quarantined")) == 1
    assert w.policy.state is WorkerState.STOPPED
    assert w.policy.settled


def test_p06_a_successor_serves_while_the_old_tree_cannot_be_killed() -> None:
    w = world(obeys=False)
    w.serve()
    w.tell(m.Died("chat.1"))
    w.tell(m.Stuck("chat.1"))
    w.advance(0.2)
    w.promoted("chat.2")
    w.first_token("chat.2")
    w.park("chat.3")
    for _ in range(12):
        w.advance(1.0)
        w.beat("chat.2")
        w.beat("chat.3")
    assert w.policy.engines["chat.1"].state is EngineState.QUARANTINED
    assert w.policy.state is WorkerState.HEALTHY


def test_p06_an_active_whose_fence_never_comes_is_succeeded_on_fresh_memory() -> None:
    w = world(obeys=False)
    w.serve()
    w.freeze("chat.1")
    assert w.promotions[-1] == ("chat.2", Promote(epoch=2, keep_kv=True, fenced=False))
    w.promoted("chat.2")
    w.first_token("chat.2")
    w.park("chat.3")
    for _ in range(12):
        w.advance(1.0)
        for engine in ("chat.2", "chat.3"):
            w.beat(engine)
    assert w.policy.engines["chat.1"].state is EngineState.QUARANTINED
    assert "cannot be ended" in w.policy.engines["chat.2"].cause
    w.freeze("chat.2")
    assert w.promotions[-1] == ("chat.3", Promote(epoch=3, keep_kv=False, fenced=True))
    assert w.policy.state is WorkerState.RECOVERING


def test_p06_where_there_is_no_other_gpu_the_fence_is_hoped_for_while_clients_wait() -> None:
    def stuck() -> World:
        w = world(shadows=0, gpus=("GPU-1",), obeys=False, give_up_after_s=60.0)
        w.serve()
        w.freeze("chat.1")
        w.park("chat.2")
        w.promoted("chat.2")
        for _ in range(50):
            w.advance(1.0)
            w.beat("chat.2")
        return w

    w = stuck()
    assert w.sent(Fence) == []
    w.gone("chat.1")
    assert w.sent(Fence) == [m.Send("chat.2", Fence(epoch=2))]
    w.advance(1.0)
    assert w.policy.state is WorkerState.HEALTHY
    w = stuck()
    for _ in range(12):
        w.advance(1.0)
        if not w.policy.engines["chat.2"].dying:
            w.beat("chat.2")
    assert w.policy.state is WorkerState.DOWN
    assert "GPU-1 is quarantined" in w.policy.reason


def test_p06_nothing_is_started_or_promoted_onto_a_quarantined_gpu() -> None:
    w = world(shadows=0, gpus=("GPU-1",), obeys=False)
    w.serve()
    w.tell(m.Died("chat.1"))
    w.advance(11.0)
    assert m.Quarantine("chat.1", ("GPU-1",), "chat.1, a process that cannot be killed, holds it") in w.actions
    other = world(shadows=1, gpus=("GPU-1",))
    other.serve()
    other.tell(m.GpusQuarantined(frozenset({"GPU-1"})))
    assert other.policy.state is WorkerState.HEALTHY, "what serves there goes on"
    promotions, spawns = len(other.promotions), len(other.spawns)
    other.die("chat.1")
    assert (len(other.promotions), len(other.spawns)) == (promotions, spawns)
    assert other.policy.state is WorkerState.DOWN
    assert "GPU-1 is quarantined" in other.policy.reason
    held = (("GPU-1", "chat.1 holds it"),)
    refused = other.policy.refusal(m.RestartWorker(held))
    assert refused is not None and "GPU GPU-1: chat.1 holds it" in refused[0] and "rebooted" in refused[1]
    other.tell(m.RestartWorker(held))
    assert len(other.spawns) == spawns, "no word of an operator ends the process of another worker"
    assert "chat.1 holds it" in other.policy.reason
    other.tell(m.RestartWorker())
    assert len(other.spawns) == spawns + 1, "the operator says that it is well again"


def test_a_planned_failover_lets_the_active_finish_its_step_first() -> None:
    w = world(obeys=False)
    w.serve()
    w.tell(m.FailOver())
    assert w.sent(Release) == [m.Send("chat.1", Release())]
    assert len(w.promotions) == 1
    assert "chat.1" in {e.id for e in w.policy.routable()}, "its last tokens count"
    assert w.policy.epoch == 1
    w.die("chat.1", 0)
    assert w.promotions[-1] == ("chat.2", Promote(epoch=2, keep_kv=True, fenced=False))
    assert w.recoveries[-1].cause == "planned hand-over"


def test_a_planned_failover_without_a_parked_shadow_is_refused() -> None:
    w = world()
    w.serve(shadows=0)
    refusal = w.policy.refusal(m.FailOver())
    assert refusal is not None and "no parked shadow" in refusal[0]
    w.tell(m.FailOver())
    assert "chat.1" in w.bodies


def test_an_active_that_does_not_let_go_is_killed_and_succeeded() -> None:
    w = world(obeys=False, stop_timeout_s=4.0)
    w.serve()
    w.tell(m.FailOver())
    for _ in range(5):
        w.advance(0.9)
        w.beat("chat.2")
    assert m.KillTree("chat.1") in w.actions
    w.freeze("chat.1")
    assert w.promotions[-1][0] == "chat.2"


def test_restart_replaces_the_shadow_first_then_hands_over_then_refills() -> None:
    w = world()
    w.serve()
    w.tell(m.RestartWorker())
    assert sorted(w.bodies) == ["chat.1", "chat.3"]
    w.park("chat.3")
    assert w.promotions[-1][0] == "chat.3"
    w.promoted("chat.3")
    w.first_token("chat.3")
    w.park("chat.4")
    assert sorted(w.bodies) == ["chat.3", "chat.4"]
    assert w.policy.state is WorkerState.HEALTHY
    w.advance(5.0)
    assert len(w.spawns) == 4


def test_restart_brings_a_worker_back_that_is_down() -> None:
    w = world()
    w.run()
    w.fail("chat.1", "no such model", fatal=True)
    w.tell(m.RestartWorker())
    assert w.policy.state is WorkerState.STARTING
    assert w.spawns[-1].engine == "chat.2"


def test_drain_finishes_the_requests_and_then_stops() -> None:
    w = world()
    w.serve()
    w.bodies["chat.1"].inflight = 2
    w.beat("chat.1", phase=Phase.DECODE, step=1)
    w.tell(m.DrainWorker())
    assert w.sent(Drain) == [m.Send("chat.1", Drain())]
    assert w.policy.state is WorkerState.DRAINING
    w.beat("chat.1", EngineState.DRAINING, phase=Phase.DECODE, step=2)
    assert "chat.1" in w.bodies
    w.bodies["chat.1"].inflight = 0
    w.beat("chat.1", phase=Phase.IDLE)
    assert w.bodies == {}
    assert w.policy.state is WorkerState.STOPPED


def test_an_active_that_dies_while_it_drains_is_succeeded_and_the_successor_drains() -> None:
    w = world()
    w.serve()
    w.bodies["chat.1"].inflight = 2
    w.tell(m.DrainWorker())
    w.beat("chat.1", EngineState.DRAINING, phase=Phase.DECODE, step=2)
    w.die("chat.1")
    w.promoted("chat.2")
    assert [s.engine for s in w.sent(Drain)] == ["chat.1"], "an engine that drains would refuse what is to be finished"
    w.first_token("chat.2")
    assert [s.engine for s in w.sent(Drain)] == ["chat.1", "chat.2"]
    assert len(w.spawns) == 2, "no refill while draining"


def test_a_successor_that_has_nothing_to_finish_drains_after_a_second() -> None:
    w = world()
    w.serve()
    w.tell(m.DrainWorker())
    w.die("chat.1")
    w.promoted("chat.2")
    w.advance(1.0)
    assert [s.engine for s in w.sent(Drain)] == ["chat.1", "chat.2"]
    w.beat("chat.2", EngineState.DRAINING, phase=Phase.IDLE)
    assert w.policy.state is WorkerState.STOPPED


def test_without_a_shadow_an_engine_is_started_to_finish_what_a_drain_was_about() -> None:
    w = world(shadows=0)
    w.serve()
    w.bodies["chat.1"].inflight = 2
    w.tell(m.DrainWorker())
    w.beat("chat.1", EngineState.DRAINING, phase=Phase.DECODE, step=2)
    w.die("chat.1")
    assert w.spawns[-1].engine == "chat.2"
    w.park("chat.2")
    w.promoted("chat.2")
    w.first_token("chat.2")
    w.beat("chat.2", EngineState.DRAINING, phase=Phase.IDLE)
    assert w.policy.state is WorkerState.STOPPED
    assert len(w.spawns) == 2


def test_a_stopped_worker_runs_again_with_a_new_epoch_and_new_engine_ids() -> None:
    w = world()
    w.serve()
    w.tell(m.StopWorker())
    assert w.bodies == {}
    assert w.freed == 1
    w.run()
    w.park("chat.3")
    assert w.promotions[-1] == ("chat.3", Promote(epoch=2, keep_kv=True, fenced=True))


def test_the_routes_are_published_with_the_new_epoch_at_the_verdict() -> None:
    w = world(obeys=False)
    w.serve()
    actions = w.tell(m.Died("chat.1"))
    assert any(isinstance(a, m.PublishRoutes) for a in actions)
    assert [e.id for e in w.policy.routable()] == ["chat.2"]
    assert w.policy.epoch == 2


def test_beats_without_news_cost_nothing() -> None:
    w = world()
    w.serve()
    before = len(w.actions)
    for _ in range(100):
        w.beat("chat.1")
        w.beat("chat.2")
    assert len(w.actions) == before


def test_give_up_follows_the_measured_start() -> None:
    w = world()
    w.run()
    assert w.policy.give_up_after_s == 60.0
    for _ in range(9):
        w.advance(5.0)
        w.beat("chat.1", EngineState.LOADING)
    w.park("chat.1")
    assert w.policy.give_up_after_s == pytest.approx(90.0)


def test_starts_that_failed_count_for_the_next_supervisor_too() -> None:
    w = world(shadows=0, nursery=NurseryState.NONE, backoff_s=(0.0, 5.0), max_failures=3)
    w.run()
    for _ in range(2):
        w.die(w.spawns[-1].engine, 1)
    assert w.policy.state is WorkerState.BACKOFF and w.policy.backoff is not None
    due_s, spawns = w.policy.backoff.when_s, len(w.spawns)
    w.lose_the_supervisor()
    assert w.policy.backoff is not None and (w.policy.backoff.when_s, w.policy.backoff.failures) == (due_s, 2)
    assert len(w.spawns) == spawns and w.policy.state is WorkerState.BACKOFF and w.policy.reason
    for _ in range(2):
        w.advance(5.1)
        w.die(w.spawns[-1].engine, 1)
    assert w.policy.state is WorkerState.DOWN
    reason = w.policy.reason
    w.lose_the_supervisor()
    assert (w.policy.state, w.policy.reason) == (WorkerState.DOWN, reason)
    w.tell(m.RestartWorker())
    assert w.policy.state is not WorkerState.DOWN, "an operator's word is another matter"
