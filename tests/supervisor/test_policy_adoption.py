"""How a worker stands, from what its engines say to a supervisor that did not start them: a table of facts and of what follows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from shadowsup.supervisor.policy import messages as m
from shadowsup.supervisor.policy.command import CommandPolicy
from shadowsup.supervisor.policy.detector import HangLimits
from shadowsup.supervisor.policy.invariants import validate
from shadowsup.supervisor.policy.model import Desired, Ending, How, NurseryState, WorkerSettings, WorkerState
from shadowsup.supervisor.policy.worker import WorkerPolicy
from shadowsup.wire.engine import Beat, Canary, EngineState, Fence, Fenced, Phase, Promote

NOW_S = 5000.0
PHASE = {
    EngineState.LOADING: Phase.LOADING,
    EngineState.WARMING: Phase.WARMING,
    EngineState.PARKED: Phase.PARKED,
    EngineState.PROMOTING: Phase.PARKED,
}


def beat(seq: int, state: EngineState, **changes: Any) -> Beat:
    facts: dict[str, Any] = {
        "engine": f"chat.{seq}",
        "pid": 100 + seq,
        "sent_s": NOW_S,
        "state": state,
        "phase": PHASE.get(state, Phase.IDLE),
        "epoch": 0,
        "step": 0,
        "inflight": 0,
        "queued": 0,
        "last_step_s": 0.0,
        "tokens_total": 0,
        "kv_set": "" if state in (EngineState.LOADING, EngineState.WARMING) else "set-1",
    }
    return Beat(**(facts | changes))


def engine(
    seq: int, state: EngineState | None = None, *, alive: bool = True, ending: Ending | None = None, **changes: Any
) -> m.FoundEngine:
    """Return an engine that says it is in ``state``; None: it says nothing."""
    said = beat(seq, state, **changes) if state is not None else None
    return m.FoundEngine(
        id=f"chat.{seq}", seq=seq, how=How.COLD, pid=100 + seq, spawned_s=NOW_S - 60, alive=alive, ending=ending, beat=said
    )


def active(seq: int, epoch: int, **changes: Any) -> m.FoundEngine:
    return engine(seq, EngineState.ACTIVE, epoch=epoch, ordered=epoch, step=9, **changes)


def parked(seq: int, **changes: Any) -> m.FoundEngine:
    return engine(seq, EngineState.PARKED, **changes)


def adopted(*engines: m.FoundEngine, shadows: int = 1, **facts: Any) -> tuple[WorkerPolicy, list[m.WorkerAction]]:
    policy = WorkerPolicy(WorkerSettings(name="chat", shadows=shadows, hang=HangLimits(ceiling_s=5.0)), nursery=NurseryState.READY)
    actions = policy.handle(m.Adopt(engines=engines, **({"kv_set": "set-1"} | facts)), NOW_S)
    validate(policy)
    return policy, actions


def summary(actions: list[m.WorkerAction]) -> list[str]:
    """Return what was ordered, without what is only told."""
    found = []
    for action in actions:
        match action:
            case m.Send(engine=name, order=Promote() as order):
                found.append(f"promote {name} to {order.epoch}{'' if order.keep_kv else ' fresh'}{'' if order.fenced else ' unfenced'}")
            case m.Send(engine=name, order=order):
                found.append(f"{type(order).__name__.lower()} {name}")
            case m.KillTree(engine=name):
                found.append(f"kill {name}")
            case m.Spawn(engine=name):
                found.append(f"spawn {name}")
    return found


TABLE: dict[str, tuple[tuple[m.FoundEngine, ...], dict[str, Any], WorkerState, list[str]]] = {
    "all is well": ((active(1, 1), parked(2)), {"epoch": 1, "owner": 1}, WorkerState.HEALTHY, []),
    "a shadow is missing": ((active(1, 1),), {"epoch": 1, "owner": 1, "seq": 2}, WorkerState.DEGRADED, ["spawn chat.3"]),
    "a shadow is on its way": (
        (active(1, 1), engine(2, EngineState.LOADING)),
        {"epoch": 1, "owner": 1},
        WorkerState.DEGRADED,
        [],
    ),
    "a shadow has died": (
        (active(1, 1), engine(2, alive=False)),
        {"epoch": 1, "owner": 1},
        WorkerState.DEGRADED,
        ["kill chat.2", "spawn chat.3"],
    ),
    "the active has died": (
        (engine(1, alive=False), parked(2)),
        {"epoch": 1, "owner": 1},
        WorkerState.RECOVERING,
        ["kill chat.1", "promote chat.2 to 2 unfenced"],
    ),
    "the active has died and is forgotten": (
        (parked(2),),
        {"epoch": 1, "owner": 1},
        WorkerState.STARTING,
        ["promote chat.2 to 2"],
    ),
    "everybody has died": (
        (engine(1, alive=False), engine(2, alive=False)),
        {"epoch": 1, "owner": 1},
        WorkerState.RECOVERING,
        ["kill chat.1", "kill chat.2", "spawn chat.3"],
    ),
    "the order to promote was read": (
        (engine(1, alive=False), parked(2, ordered=2)),
        {"epoch": 1, "owner": 1},
        WorkerState.RECOVERING,
        ["kill chat.1"],
    ),
    "the successor is just taking over": (
        (engine(1, alive=False), engine(2, EngineState.PROMOTING, ordered=2)),
        {"epoch": 2, "owner": 2},
        WorkerState.RECOVERING,
        ["kill chat.1"],
    ),
    "the successor waits for its fence": (
        (active(2, 2, fenced=False), parked(3)),
        {"epoch": 2, "owner": 2},
        WorkerState.HEALTHY,
        ["fence chat.2"],
    ),
    "the successor waits for the end of its predecessor": (
        (engine(1, alive=False), active(2, 2, fenced=False), parked(3)),
        {"epoch": 2, "owner": 2},
        WorkerState.HEALTHY,
        ["kill chat.1"],
    ),
    "the predecessor still lives": (
        (active(1, 1), active(2, 2, fenced=False), parked(3)),
        {"epoch": 2, "owner": 2},
        WorkerState.HEALTHY,
        ["kill chat.1"],
    ),
    "the active says nothing": ((engine(1), parked(2)), {"epoch": 1, "owner": 1}, WorkerState.HEALTHY, ["fence chat.1"]),
    "its end had begun": (
        (engine(1, ending=Ending.KILL), parked(2)),
        {"epoch": 1, "owner": 1},
        WorkerState.RECOVERING,
        ["kill chat.1"],  # a successor is named when it is frozen, or in a second
    ),
    "nothing of it runs": ((), {"epoch": 0, "owner": 0, "kv_set": ""}, WorkerState.STARTING, ["spawn chat.1"]),
    "the ledger is known to be further": ((parked(4),), {"epoch": 7, "owner": 3}, WorkerState.STARTING, ["promote chat.4 to 8"]),
    "the first engine is loading": (
        (engine(1, EngineState.LOADING),),
        {"epoch": 0, "owner": 0, "kv_set": ""},
        WorkerState.STARTING,
        [],
    ),
    "the active leaves by an order": (
        (engine(1, EngineState.STOPPING, epoch=1, ordered=1, step=4), parked(2)),
        {"epoch": 1, "owner": 1},
        WorkerState.HEALTHY,
        [],
    ),
    "it was stopped": (
        (active(1, 1), parked(2)),
        {"epoch": 1, "owner": 1, "desired": Desired.STOP},
        WorkerState.STOPPING,
        ["stop chat.1", "stop chat.2"],
    ),
    "it was drained": (
        (engine(1, EngineState.DRAINING, epoch=1, ordered=1, inflight=2), parked(2)),
        {"epoch": 1, "owner": 1},
        WorkerState.DRAINING,
        [],
    ),
    "the keeper has lost the set in use": (
        (active(1, 1), parked(2)),
        {"epoch": 1, "owner": 1, "kv_set": ""},
        WorkerState.HEALTHY,
        [],
    ),
    "a shadow holds an older set": (
        (active(2, 2), parked(1, kv_set="set-0")),
        {"epoch": 2, "owner": 2},
        WorkerState.DEGRADED,
        ["stop chat.1", "spawn chat.3"],
    ),
}


@pytest.mark.parametrize("case", TABLE)
def test_what_is_found_decides_what_follows(case: str) -> None:
    engines, facts, state, orders = TABLE[case]
    policy, actions = adopted(*engines, **facts)
    assert policy.state is state
    assert summary(actions) == orders
    assert policy.last_seq >= max([facts.get("seq", 0), *(each.seq for each in engines)])


def test_after_an_adoption_a_death_is_a_failover_as_ever() -> None:
    policy, _ = adopted(active(1, 3), parked(2), epoch=3, owner=1)
    actions = policy.handle(m.Died("chat.1", -9, frozen=True), NOW_S + 1)
    validate(policy)
    assert summary(actions) == ["kill chat.1", "promote chat.2 to 4 unfenced"]
    assert policy.timeline is not None
    assert policy.timeline.recovery.kind == "shadow"


def test_an_active_that_says_nothing_is_judged_by_its_silence() -> None:
    policy, _ = adopted(engine(1), parked(2), epoch=1, owner=1)
    actions: list[m.WorkerAction] = []
    for second in range(1, 8):
        policy.beat(beat(2, EngineState.PARKED), NOW_S + second)
        actions += policy.handle(m.Tick(), NOW_S + second)
    assert "kill chat.1" in summary(actions)


def test_a_successor_that_was_ordered_is_believed_when_it_serves() -> None:
    policy, _ = adopted(engine(1, alive=False), parked(2, ordered=2), epoch=1, owner=1)
    policy.handle(m.Gone("chat.1"), NOW_S + 0.1)
    actions = policy.beat(beat(2, EngineState.ACTIVE, epoch=2, ordered=2, fenced=False), NOW_S + 0.2)
    validate(policy)
    assert summary(actions) == ["fence chat.2"]
    assert policy.epoch == 2
    assert summary(policy.handle(m.Tick(), NOW_S + 1.3)) == ["fence chat.2", "spawn chat.3"], "no token was to be sent: refill"
    assert policy.timeline is not None
    recovery = policy.timeline.recovery
    assert (recovery.kind, recovery.from_engine, recovery.to_engine, recovery.epoch) == ("shadow", "chat.1", "chat.2", 2)
    assert "supervisor died" in recovery.cause


def test_a_fence_is_ordered_again_until_it_is_answered() -> None:
    policy, actions = adopted(active(2, 2, fenced=False), parked(3), epoch=2, owner=2)
    assert summary(actions) == ["fence chat.2"]
    assert summary(policy.handle(m.Tick(), NOW_S + 0.5)) == []
    assert summary(policy.handle(m.Tick(), NOW_S + 1.1)) == ["fence chat.2"]
    policy.handle(m.Reported(Fenced(engine="chat.2", epoch=2, reserve=4)), NOW_S + 1.2)
    assert summary(policy.handle(m.Tick(), NOW_S + 2.5)) == []


def test_a_beat_that_shows_the_fence_lost_brings_it_again() -> None:
    policy, _ = adopted(active(2, 2, fenced=False), parked(3), epoch=2, owner=2)
    policy.beat(beat(2, EngineState.ACTIVE, epoch=2, step=10, fenced=False), NOW_S + 1.0)
    [order] = [a.order for a in policy.handle(m.Tick(), NOW_S + 1.1) if isinstance(a, m.Send)]
    assert order == Fence(epoch=2)
    policy.beat(beat(2, EngineState.ACTIVE, epoch=2, step=11, fenced=True), NOW_S + 1.2)
    assert summary(policy.handle(m.Tick(), NOW_S + 2.5)) == []


@pytest.mark.parametrize(
    ("engines", "upstream", "state", "orders"),
    [
        ((engine(4),), "http://127.0.0.1:1", WorkerState.HEALTHY, []),
        ((engine(4),), "", WorkerState.RECOVERING, []),
        ((engine(4, alive=False),), "", WorkerState.RECOVERING, ["kill chat.4"]),
        ((), "", WorkerState.RECOVERING, ["spawn chat.6"]),
    ],
)
def test_a_command_goes_on_where_it_stood(engines: tuple[m.FoundEngine, ...], upstream: str, state: WorkerState, orders: list[str]) -> None:
    policy = CommandPolicy(WorkerSettings(name="chat", shadows=0))
    actions = policy.handle(m.Adopt(engines=engines, seq=5, epoch=3, upstream=upstream), NOW_S)
    assert (policy.state, summary(actions), policy.epoch) == (state, orders, 3)


@pytest.mark.parametrize("old_lives", [False, True])
def test_a_worker_that_has_moved_to_a_spare_stays_there_whatever_is_left_of_the_engine_before(old_lives: bool) -> None:
    policy = WorkerPolicy(WorkerSettings(name="chat", gpus=("GPU-a",), spares=("GPU-b",)), nursery=NurseryState.READY)
    before = engine(1, EngineState.ACTIVE, alive=old_lives, ending=Ending.KILL, epoch=1, ordered=1)
    here = replace(active(2, 2), gpus=("GPU-b",))
    actions = policy.handle(m.Adopt(engines=(before, here), kv_set="set-1", epoch=2, owner=2), NOW_S)
    validate(policy)
    assert policy.gpus == ("GPU-b",) and policy.spares_taken == {"GPU-b": "chat"}
    assert [a.gpus for a in actions if isinstance(a, m.Spawn)] == [("GPU-b",)]


def test_p20_a_fork_that_loads_and_is_silent_when_it_is_adopted_is_given_time_to_speak() -> None:
    silent = replace(engine(2), how=How.NURSERY)
    policy, _ = adopted(active(1, 1), silent)
    assert not policy.engines["chat.2"].dying, "what loads holds the GIL for as long as it likes"
    policy.handle(m.Tick(), NOW_S + 11.0)
    assert policy.engines["chat.2"].dying


def test_a_newcomer_that_a_keeper_without_the_set_gave_another_is_kept_and_takes_over_with_fresh_blocks() -> None:
    """Supervisor, keeper and shadow had died at once: replacing the newcomer would bring no better one, again and again."""
    policy, actions = adopted(active(1, 1), kv_set="", epoch=1, owner=1, seq=2)
    assert summary(actions) == ["spawn chat.3"]
    policy.beat(beat(1, EngineState.ACTIVE, epoch=1, step=10), NOW_S + 0.1)
    policy.handle(m.Spawned("chat.3", 103), NOW_S + 0.1)
    actions = policy.beat(beat(3, EngineState.PARKED, kv_set="set-9"), NOW_S + 1.0)
    assert (summary(actions), policy.state) == ([], WorkerState.HEALTHY)
    assert summary(policy.handle(m.Tick(), NOW_S + 5.0)) == []
    actions = policy.handle(m.Died("chat.1", -9, frozen=True), NOW_S + 5.1)
    assert summary(actions) == ["kill chat.1", "promote chat.3 to 2 fresh"]
    validate(policy)
    # From here on the keeper has what is in use: the next one is as good as any.
    policy.handle(m.Gone("chat.1"), NOW_S + 5.2)
    policy.beat(beat(3, EngineState.ACTIVE, epoch=2, ordered=2, step=1, kv_set="set-10"), NOW_S + 5.3)
    policy.beat(beat(3, EngineState.ACTIVE, epoch=2, ordered=2, step=2, kv_set="set-10", sent_s=NOW_S + 6.3), NOW_S + 6.3)
    assert summary(policy.handle(m.Tick(), NOW_S + 6.4)) == ["spawn chat.4"]
    policy.handle(m.Spawned("chat.4", 104), NOW_S + 6.5)
    policy.beat(beat(4, EngineState.PARKED, kv_set="set-10"), NOW_S + 6.6)
    actions = policy.handle(m.Died("chat.3", -9, frozen=True), NOW_S + 6.7)
    assert summary(actions) == ["kill chat.3", "promote chat.4 to 3 unfenced"]


def test_a_shadow_that_has_followed_to_the_set_in_use_is_no_longer_stale() -> None:
    policy, actions = adopted(active(2, 2), parked(1, kv_set="set-0"), epoch=2, owner=2, kv_set="")
    assert summary(actions) == []
    policy.beat(beat(2, EngineState.ACTIVE, epoch=2, step=10), NOW_S + 0.1)
    policy.beat(beat(1, EngineState.PARKED, kv_set="set-1"), NOW_S + 0.2)
    actions = policy.handle(m.Died("chat.2", -9, frozen=True), NOW_S + 1.0)
    assert summary(actions) == ["kill chat.2", "promote chat.1 to 3 unfenced"]


def test_a_canary_is_never_one_that_the_supervisor_before_may_have_sent() -> None:
    """Its engine may still have that one, and would end over a second of the same number."""
    numbers: list[int] = []
    now_s = NOW_S
    for _ in range(3):  # supervisors, each of which dies when it has asked
        policy, actions = adopted(active(1, 1), parked(2), epoch=1, owner=1)
        sent: list[Canary] = []
        while not sent:
            now_s += 0.2
            assert now_s < NOW_S + 30, "no canary is sent"
            said = {"epoch": 1, "ordered": 1, "step": 9, "inflight": 1, "phase": Phase.DECODE, "since_s": NOW_S, "stalled_since_s": NOW_S}
            for each in (beat(1, EngineState.ACTIVE, sent_s=now_s, **said), beat(2, EngineState.PARKED, sent_s=now_s)):
                actions += policy.beat(each, now_s)
            actions += policy.handle(m.Tick(), now_s)
            sent = [a.order for a in actions if isinstance(a, m.Send) and isinstance(a.order, Canary)]
        numbers += [order.number for order in sent]
    assert len(numbers) == 3 and len(set(numbers)) == 3
