"""New settings for a worker: beside what serves first, then a hand-over, and back when they do not work."""

from __future__ import annotations

from dataclasses import replace

import pytest
from policy_world import World

from shadowsup.supervisor.policy import messages as m
from shadowsup.supervisor.policy.detector import HangLimits
from shadowsup.supervisor.policy.model import NurseryState, WorkerSettings, WorkerState
from shadowsup.supervisor.policy.rollout import Stage
from shadowsup.wire.engine import EngineState, Phase, Promote, Release, Stop

OLD = WorkerSettings(name="chat", shadows=1, revision="old", stop_timeout_s=4.0, hang=HangLimits(floor_s=30.0))
NEW = replace(OLD, revision="new")


def healthy(shadows: int = 1, *, alike: bool = True) -> World:
    layouts = {"old": "one", "new": "one" if alike else "other"}
    world = World(replace(OLD, shadows=shadows), layouts=layouts)
    world.serve()
    world.beat("chat.1", step=1)
    return world


def stage(world: World) -> Stage:
    assert world.policy.rollout is not None
    return world.policy.rollout.stage


def revisions(world: World) -> dict[str, str]:
    return {e.id: e.revision for e in world.policy.engines.values()}


def hand_over(world: World, newcomer: str) -> Promote:
    """From ready to proving."""
    world.now_s += 0.5
    world.tell(m.CommitRollOut())
    name, order = world.promotions[-1]
    assert name == newcomer
    world.promoted(newcomer)
    return order


def test_nothing_that_serves_is_touched_before_a_new_engine_is_parked_beside_it() -> None:
    world = healthy()
    world.tell(m.RollOut(NEW, NurseryState.READY))
    assert stage(world) is Stage.STARTING
    assert world.spawns[-1] == m.Spawn("chat.3", 3, world.spawns[-1].how, refill=True, revision="new", beside=True)
    assert world.policy.state is WorkerState.HEALTHY
    world.park("chat.3")
    assert stage(world) is Stage.READY
    world.advance(10.0)
    assert revisions(world) == {"chat.1": "old", "chat.2": "old", "chat.3": "new"}
    assert not world.sent(Stop) and not world.sent(Release)


def test_the_new_engine_takes_the_blocks_along_when_they_are_laid_out_alike() -> None:
    world = healthy()
    world.tell(m.RollOut(NEW, NurseryState.READY))
    world.park("chat.3")
    order = hand_over(world, "chat.3")
    assert order.keep_kv and len(world.sent(Release)) == 1
    assert world.recoveries[-1].cause == "planned hand-over" and world.recoveries[-1].kind == "shadow"
    assert stage(world) is Stage.PROVING
    world.first_token("chat.3")
    assert stage(world) is Stage.PROVEN
    assert "chat.2" in world.bodies, "the old shadow waits: it may be needed again"
    world.tell(m.FinishRollOut())
    assert stage(world) is Stage.DONE
    world.park(world.spawns[-1].engine)
    assert revisions(world) == {"chat.3": "new", "chat.4": "new"}
    assert world.policy.state is WorkerState.HEALTHY
    assert not world.policy._tidy_due


def test_a_set_of_its_own_is_taken_as_it_is_and_the_old_one_freed_when_nobody_is_left_to_go_back_to_it() -> None:
    world = healthy(alike=False)
    world.tell(m.RollOut(NEW, NurseryState.READY))
    world.park("chat.3")
    order = hand_over(world, "chat.3")
    assert order.keep_kv and order.fenced, "nobody has written it: the promotion asks the keeper for nothing"
    world.first_token("chat.3")
    assert world.tidied == []
    world.tell(m.FinishRollOut())
    world.park(world.spawns[-1].engine)
    assert world.tidied == ["set-2"]


def test_one_that_crashes_on_start_leaves_everything_as_it_was_and_says_why() -> None:
    world = healthy()
    world.tell(m.RollOut(NEW, NurseryState.READY))
    world.beat("chat.3", phase=Phase.LOADING)
    world.obeys = False  # the news of its end comes with its last words
    world.freeze("chat.3")
    world.gone("chat.3", 1, ("Traceback", "ImportError: no module named nonsense"))
    assert stage(world) is Stage.FAILED
    rollout = world.policy.rollout
    assert rollout is not None and "ImportError" in rollout.reason and "status 1" in rollout.reason
    assert revisions(world) == {"chat.1": "old", "chat.2": "old"}
    assert world.policy.state is WorkerState.HEALTHY and world.policy.settings.revision == "old"
    world.advance(5.0)
    assert len(world.spawns) == 3, "nothing was started anew"


def test_one_that_takes_longer_than_its_start_up_may_is_given_up() -> None:
    world = healthy()
    world.tell(m.RollOut(replace(NEW, startup_s=5.0), NurseryState.NONE))
    for _ in range(8):
        world.now_s += 1.0
        for name in list(world.bodies):
            world.beat(name)
        world.tell(m.Tick())
    assert stage(world) is Stage.FAILED
    assert world.policy.rollout is not None and "start-up took longer than 5 s" in world.policy.rollout.reason


def test_one_that_fails_at_its_first_step_hands_back_to_the_old_shadow_with_the_old_blocks() -> None:
    world = healthy(alike=False)
    world.tell(m.RollOut(NEW, NurseryState.READY))
    world.park("chat.3")
    hand_over(world, "chat.3")
    world.die("chat.3", -11)
    name, order = world.promotions[-1]
    assert (name, order.keep_kv, order.fenced) == ("chat.2", True, True), "its set was left in good order"
    world.promoted("chat.2")
    assert stage(world) is Stage.FAILED and world.policy.settings.revision == "old"
    world.first_token("chat.2")
    world.park(world.spawns[-1].engine)
    assert set(revisions(world).values()) == {"old"}
    assert world.tidied == ["set-1"]


def test_a_proven_one_goes_back_when_it_is_told_that_another_workers_failed() -> None:
    world = healthy()
    world.tell(m.RollOut(NEW, NurseryState.READY))
    world.park("chat.3")
    hand_over(world, "chat.3")
    world.first_token("chat.3")
    world.tell(m.TakeBack("code failed"))
    assert world.promotions[-1][0] == "chat.2"
    world.promoted("chat.2")
    assert stage(world) is Stage.FAILED
    assert world.recoveries[-1].cause == "planned hand-over"


def test_without_a_shadow_to_go_back_to_an_old_one_is_started_beside_the_new_one() -> None:
    world = healthy(shadows=0)
    world.tell(m.RollOut(replace(NEW, shadows=0), NurseryState.READY))
    world.park("chat.2")
    hand_over(world, "chat.2")
    world.first_token("chat.2")
    world.tell(m.TakeBack("code failed"))
    assert world.spawns[-1].revision == "old" and "chat.2" in world.bodies
    world.park("chat.3")
    assert world.promotions[-1][0] == "chat.3" and world.promotions[-1][1].keep_kv
    world.promoted("chat.3")
    assert stage(world) is Stage.FAILED


def test_without_room_for_one_more_the_old_ones_go_first() -> None:
    world = healthy()
    world.tell(m.RollOut(NEW, NurseryState.READY, gap=True))
    assert stage(world) is Stage.READY and len(world.spawns) == 2
    world.tell(m.CommitRollOut())
    assert revisions(world) == {"chat.3": "new"}
    world.park("chat.3")
    assert world.promotions[-1] == ("chat.3", Promote(epoch=2, keep_kv=True, fenced=True))
    world.promoted("chat.3")
    world.advance(2.0)
    assert stage(world) is Stage.PROVEN


def test_without_room_a_new_one_that_does_not_come_up_is_followed_by_an_old_one() -> None:
    world = healthy()
    world.tell(m.RollOut(NEW, NurseryState.READY, gap=True))
    world.tell(m.CommitRollOut())
    world.beat("chat.3", phase=Phase.LOADING)
    world.fail("chat.3", "CUDA out of memory")
    assert stage(world) is Stage.TAKING_BACK
    assert world.spawns[-1].revision == "old"
    world.park("chat.4")
    world.promoted("chat.4")
    assert stage(world) is Stage.FAILED
    assert world.policy.rollout is not None and "CUDA out of memory" in world.policy.rollout.reason


def test_a_recovery_under_way_is_waited_for() -> None:
    world = healthy()
    world.die("chat.1")
    world.tell(m.RollOut(NEW, NurseryState.READY))
    assert stage(world) is Stage.WAITING
    world.promoted("chat.2")
    world.first_token("chat.2")
    assert stage(world) is Stage.WAITING and world.spawns[-1].revision == "old", "first the shadow of the recovery"
    world.park("chat.3")
    assert stage(world) is Stage.STARTING and world.spawns[-1].revision == "new"


def test_settings_that_may_mend_a_shadow_that_does_not_come_up_do_not_wait_for_it() -> None:
    world = healthy()
    world.die("chat.2")
    world.beat("chat.3", phase=Phase.LOADING)
    world.fail("chat.3", "no such option")
    assert world.policy.state is WorkerState.DEGRADED
    world.tell(m.RollOut(NEW, NurseryState.READY))
    assert stage(world) is Stage.STARTING


def test_a_worker_that_is_down_starts_with_the_new_settings_and_is_down_again_when_they_fail() -> None:
    world = World(OLD)
    world.run()
    world.fail("chat.1", "no such model", fatal=True)
    assert world.policy.state is WorkerState.DOWN
    world.tell(m.RollOut(NEW, NurseryState.READY))
    assert stage(world) is Stage.READY
    world.tell(m.CommitRollOut())
    assert world.spawns[-1].revision == "new"
    world.fail("chat.2", "no such model either", fatal=True)
    assert stage(world) is Stage.FAILED and world.policy.state is WorkerState.DOWN
    assert world.policy.reason == "no such model"


def test_a_stopped_worker_takes_the_settings_at_once() -> None:
    world = healthy()
    world.tell(m.StopWorker())
    world.tell(m.RollOut(NEW, NurseryState.READY))
    world.tell(m.CommitRollOut())
    assert stage(world) is Stage.PROVEN
    world.tell(m.FinishRollOut())
    world.run()
    assert world.spawns[-1].revision == "new"


def test_an_active_that_dies_meanwhile_is_succeeded_by_a_shadow_with_the_settings_in_force() -> None:
    world = healthy()
    world.tell(m.RollOut(NEW, NurseryState.READY))
    world.park("chat.3")
    world.die("chat.1")
    assert world.promotions[-1][0] == "chat.2"
    world.promoted("chat.2")
    assert stage(world) is Stage.READY


def test_where_no_other_is_left_the_new_one_serves_before_it_was_told_to() -> None:
    world = healthy(shadows=0)
    world.tell(m.RollOut(replace(NEW, shadows=0), NurseryState.READY))
    world.park("chat.2")
    world.die("chat.1")
    assert world.promotions[-1][0] == "chat.2"
    world.promoted("chat.2")
    assert stage(world) is Stage.READY
    world.tell(m.CommitRollOut())
    world.first_token("chat.2")
    assert stage(world) is Stage.PROVEN


def test_a_drill_on_the_newcomer_is_no_verdict_on_its_settings() -> None:
    world = healthy()
    world.tell(m.RollOut(NEW, NurseryState.READY))
    world.tell(m.Drill("chat.3", 9))
    assert stage(world) is Stage.STARTING
    assert world.spawns[-1].engine == "chat.4" and world.spawns[-1].revision == "new"


def test_other_settings_in_the_middle_of_it_start_anew_and_the_same_go_on() -> None:
    world = healthy()
    world.tell(m.RollOut(NEW, NurseryState.READY))
    world.tell(m.RollOut(replace(NEW, stop_timeout_s=9.0), NurseryState.READY))
    assert len(world.spawns) == 3
    world.tell(m.RollOut(replace(OLD, revision="newer"), NurseryState.READY))
    assert world.spawns[-1].revision == "newer"
    assert set(revisions(world).values()) == {"old", "newer"}


def test_fewer_shadows_are_retired_and_more_are_started_without_a_new_active() -> None:
    world = healthy(shadows=2)
    world.tell(m.Reconfigure(replace(world.policy.settings, shadows=0)))
    assert list(world.bodies) == ["chat.1"] and world.policy.state is WorkerState.HEALTHY
    world.tell(m.Reconfigure(replace(world.policy.settings, shadows=1)))
    assert len(world.bodies) == 2 and len(world.promotions) == 1


def test_a_restart_is_refused_while_settings_are_rolled_out() -> None:
    world = healthy()
    world.tell(m.RollOut(NEW, NurseryState.READY))
    refusal = world.policy.refusal(m.RestartWorker())
    assert refusal is not None and "new settings" in refusal[0]


@pytest.mark.parametrize("order", [m.StopWorker(), m.DrainWorker()])
def test_a_worker_that_is_told_to_end_meanwhile_ends(order: m.WorkerEvent) -> None:
    world = healthy()
    world.tell(m.RollOut(NEW, NurseryState.READY))
    world.tell(order)
    assert stage(world) in (Stage.FAILED, Stage.TAKING_BACK)
    assert "chat.3" not in world.bodies


def test_an_old_engine_without_a_name_for_its_blocks_leaves_none_to_the_new_one() -> None:
    """Adopted from a version that does not tell: rather fresh blocks than those of who knows whom."""
    world = healthy()
    world.policy.succession._names.clear()
    world.tell(m.RollOut(NEW, NurseryState.READY))
    world.policy.succession._names.clear()
    world.park("chat.3")
    assert not hand_over(world, "chat.3").keep_kv


def test_p06_a_new_engine_that_cannot_be_ended_does_not_keep_its_roll_out_open_for_ever() -> None:
    world = healthy()
    world.obeys = False
    world.tell(m.RollOut(NEW, NurseryState.READY))
    world.beat("chat.3", phase=Phase.LOADING)
    world.fail("chat.3")
    assert stage(world) is Stage.TAKING_BACK
    for _ in range(12):
        world.advance(1.0)
        world.beat("chat.1")
        world.beat("chat.2")
    assert world.policy.engines["chat.3"].state is EngineState.QUARANTINED
    assert stage(world) is Stage.FAILED
    world.die("chat.2")
    world.advance(5.0)
    assert world.spawns[-1].revision == "old", "shadows are refilled again"
