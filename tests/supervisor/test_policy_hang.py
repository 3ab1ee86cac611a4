"""Hangs, by an injected clock: what is seen, how soon, and above all what is not taken for one."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
from policy_world import World

from shadowsup.supervisor.policy import messages as m
from shadowsup.supervisor.policy.model import NurseryState, WorkerSettings, WorkerState
from shadowsup.wire.engine import Canaried, Canary, EngineState, Phase
from shadowsup.wire.faults import Fault

BEAT_S = 0.2
GPU = "GPU-1"


class Node(World):
    """A worker at default settings whose engines beat every 200 ms by themselves."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.silent: set[str] = set()
        self.stuck: dict[str, float] = {}
        """Engine → since when its step does not end."""
        self.gap_s = 0.02
        self.phase = Phase.DECODE
        self.tokens = 4
        self.noise = random.Random(7)
        self.stalled_since_s = 0.0
        self.util: float | None = None
        self.fronts: dict[str, tuple[float, int]] = {}
        """Engine with a server in front → when its loop stood still (``inf``: it turns), and its requests."""

    def live(self, seconds: float) -> None:
        """Let time pass."""
        end_s = self.now_s + seconds
        while self.now_s < end_s:
            for engine in list(self.bodies):
                if engine not in self.silent and engine in self.bodies and not self.bodies[engine].frozen:
                    self._beat(engine)
            if self.util is not None:
                self.policy.loads.note(GPU, self.util, self.now_s)
            step_s = min(BEAT_S, end_s - self.now_s)
            if step_s < 1e-6:
                return
            self.advance(step_s)

    def _beat(self, engine: str) -> None:
        body = self.bodies[engine]
        front: dict[str, Any] = {}
        if engine in self.fronts:
            stands_s, open_ = self.fronts[engine]
            front = {"front_s": min(stands_s, self.now_s - 0.05 * self.noise.random()), "front_open": open_}
        if body.state is EngineState.PARKED:
            self.beat(engine, phase=Phase.PARKED, **front)
        elif body.state is not EngineState.ACTIVE:
            self.beat(engine, **front)
        elif body.inflight == 0:
            self.beat(engine, phase=Phase.IDLE, **front)
        elif engine in self.stuck:
            self.beat(engine, phase=self.phase, since_s=self.stuck[engine], step_tokens=self.tokens, **front)
        else:
            gap_s = self.gap_s * self.noise.uniform(0.7, 1.4)
            body.step += 1
            self.beat(
                engine,
                phase=self.phase,
                since_s=self.now_s - 0.5 * gap_s,
                gap_s=gap_s,
                gap_phase=self.phase,
                gap_tokens=self.tokens,
                step_tokens=self.tokens,
                stalled_since_s=self.stalled_since_s,
                **front,
            )

    def until_dead(self, engine: str, bound_s: float = 60.0) -> float:
        """Return the seconds until ``engine`` is condemned."""
        began_s = self.now_s
        while engine in self.policy.engines and not self.policy.engines[engine].dying:
            assert self.now_s < began_s + bound_s, "nobody noticed"
            self.live(0.02)
        return self.now_s - began_s


def node(*, gpus: tuple[str, ...] = (), busy: bool = True, shadows: int = 1) -> Node:
    w = Node(WorkerSettings(name="chat", shadows=shadows, gpus=gpus), nursery=NurseryState.READY)
    w.serve()
    if busy:
        w.bodies["chat.1"].inflight = 4
    w.live(5.0)
    assert w.announced("engine.verdict") == []
    return w


# --- what is seen, and how soon ---------------------------------------------------------------------------------------------------


def test_a_stopped_engine_is_seen_within_a_second_while_it_decodes() -> None:
    for early_s in (0.0, 0.05, 0.1, 0.19):
        w = node()
        w.live(early_s)
        w.silent.add("chat.1")
        w.bodies["chat.1"].stopped = True
        assert 0.55 <= w.until_dead("chat.1") <= 1.05
        assert w.promotions[-1][0] == "chat.2"
        assert "no heartbeat" in w.recoveries[-1].cause and "stopped" in w.recoveries[-1].cause
        evidence = w.recoveries[-1].evidence
        assert (evidence["phase"], evidence["process"], evidence["exit"]) == ("decode", "the process is stopped", "signal 9")


def test_an_engine_that_has_work_now_is_not_waited_for_as_long_as_an_idle_one() -> None:
    w = node(busy=False)
    w.fronts = {"chat.1": (math.inf, 0)}
    w.live(3.0)
    w._beat("chat.1")
    w.policy.handle(m.Tick(), w.now_s)
    assert w.policy.deadline_s > w.now_s + 1.5
    w.bodies["chat.1"].inflight = 4
    w._beat("chat.1")
    assert w.policy.deadline_s <= w.now_s + 0.8


def test_a_step_that_does_not_end_is_seen_within_a_second_though_the_heart_beats() -> None:
    for asleep in (0.0, 1.0):
        w = node()
        w.stuck["chat.1"] = w.now_s
        w.bodies["chat.1"].ran = asleep  # it sleeps, or it spins
        assert 0.75 <= w.until_dead("chat.1") <= 1.25
        assert "no step finished" in w.recoveries[-1].cause
        assert w.recoveries[-1].detect_ms == pytest.approx(1000, abs=260), "since the last step, not since the last beat"


def fronted(*, inflight: int, waiting: int) -> Node:
    """A node whose engines have a server in front. ``waiting``: requests that only the server knows."""
    w = node(busy=False)
    w.bodies["chat.1"].inflight = inflight
    w.fronts = {"chat.1": (math.inf, inflight + waiting), "chat.2": (math.inf, 0)}
    w.live(5.0)
    assert w.announced("engine.verdict") == []
    return w


@pytest.mark.parametrize(
    ("inflight", "waiting", "engine", "soonest_s", "latest_s"),
    [(4, 0, "chat.1", 0.7, 1.2), (0, 2, "chat.1", 0.7, 1.2), (0, 0, "chat.1", 2.0, 2.8), (4, 0, "chat.2", 3.5, 4.4)],
    ids=["serving", "taking in", "idle", "parked"],
)
def test_a_server_in_front_that_stands_still_is_seen_though_the_engine_beats(
    inflight: int, waiting: int, engine: str, soonest_s: float, latest_s: float
) -> None:
    for stopped in (True, False):
        w = fronted(inflight=inflight, waiting=waiting)
        w.fronts[engine] = (w.now_s, w.fronts[engine][1])
        w.bodies[engine].front_stopped = stopped
        assert soonest_s <= w.until_dead(engine) <= latest_s
        [verdict] = w.announced("engine.verdict")
        assert "its API server has not turned its event loop" in verdict.message
        fault = Fault.STOPPED if stopped else Fault.HANG
        assert verdict.data is not None and verdict.data["fault"] == fault.value


def test_a_server_in_front_that_computes_may_take_as_long_as_the_ceiling() -> None:
    """One prompt's template, one long tokenization: its loop stands still, and it is well."""
    w = fronted(inflight=4, waiting=1)
    w.fronts["chat.1"] = (w.now_s, 5)
    w.bodies["chat.1"].front_ran = 1.0
    w.live(25.0)
    assert w.announced("engine.verdict") == []
    w.fronts["chat.1"] = (math.inf, 5)
    w.live(2.0)
    w.fronts["chat.1"] = (w.now_s, 5)
    assert 29.0 <= w.until_dead("chat.1") <= 31.0, "and no longer"


def test_a_server_in_front_that_gets_no_processor_is_let_be() -> None:
    w = fronted(inflight=4, waiting=1)
    w.fronts["chat.1"] = (w.now_s, 5)
    w.bodies["chat.1"].front_waits = 1.0
    w.live(15.0)
    assert w.announced("engine.verdict") == []


def test_an_engine_that_is_silent_is_told_as_such_whatever_its_server_does() -> None:
    w = fronted(inflight=4, waiting=1)
    w.silent.add("chat.1")
    w.fronts["chat.1"] = (w.now_s, 5)
    assert 0.55 <= w.until_dead("chat.1") <= 1.05
    assert "no heartbeat" in w.recoveries[-1].cause


def test_the_threshold_follows_the_steps_that_were_seen() -> None:
    w = node()
    for slower in (0.1, 0.2, 0.3, 0.5, 0.7, 0.9):
        w.gap_s = slower
        w.live(4.0)
    assert w.announced("engine.verdict") == []
    w.stuck["chat.1"] = w.now_s
    assert 1.8 <= w.until_dead("chat.1") <= 4.5


def test_the_successor_is_judged_by_what_its_predecessor_showed() -> None:
    w = node()
    w.silent.add("chat.1")
    w.until_dead("chat.1")
    w.promoted("chat.2")
    w.bodies["chat.2"].inflight = 4
    w.stuck["chat.2"] = w.now_s
    assert w.until_dead("chat.2") <= 1.25, "its very first step"


def test_p34_a_stopped_shadow_is_seen_and_refilled() -> None:
    w = node()
    w.silent.add("chat.2")
    w.bodies["chat.2"].stopped = True
    assert w.until_dead("chat.2") <= 5.0
    w.live(0.1)
    assert w.spawns[-1].engine == "chat.3" and w.spawns[-1].refill
    assert w.policy.active is not None and w.policy.active.id == "chat.1"
    w.park("chat.3")
    assert w.policy.state is WorkerState.HEALTHY


def test_p34_a_shadow_that_is_silent_is_not_chosen_where_another_one_beats() -> None:
    w = node(shadows=2)
    w.silent.add("chat.2")
    w.live(1.5)
    assert "chat.2" in w.bodies, "not judged yet"
    w.die("chat.1")
    assert w.promotions[-1][0] == "chat.3"


def test_a_successor_that_is_stopped_during_its_promotion_is_passed_over_soon() -> None:
    w = node(shadows=2)
    w.silent |= {"chat.2"}
    w.bodies["chat.2"].stopped = True
    w.silent |= {"chat.3"}
    w.live(0.5)
    w.die("chat.1")
    first = w.promotions[-1][0]
    w.silent -= {"chat.3"}
    assert w.until_dead(first) <= 1.1
    assert w.promotions[-1][0] != first


def test_a_request_that_hangs_the_engine_while_it_is_taken_in_is_seen() -> None:
    w = node(busy=False)
    w.bodies["chat.1"].inflight = 0
    w.live(1.0)
    since_s = w.now_s
    while "chat.1" in w.bodies:
        w.policy.beat(_queued(w, since_s), w.now_s)
        w.advance(BEAT_S)
        w.beat("chat.2", phase=Phase.PARKED)
        assert w.now_s < since_s + 40.0
    assert "no step finished" in w.recoveries[-1].cause


def _queued(w: Node, since_s: float):  # type: ignore[no-untyped-def]
    from shadowsup.wire.engine import Beat

    return Beat(
        engine="chat.1",
        pid=1,
        sent_s=w.now_s,
        state=EngineState.ACTIVE,
        phase=Phase.PREFILL,
        epoch=1,
        step=0,
        inflight=0,
        queued=1,
        last_step_s=0.0,
        tokens_total=0,
        since_s=since_s,
        step_tokens=100,
    )


# --- what is no hang --------------------------------------------------------------------------------------------------------------


def test_p20_an_engine_that_holds_the_gil_for_half_a_minute_while_it_loads_is_let_be() -> None:
    w = Node(WorkerSettings(name="chat"), nursery=NurseryState.READY)
    w.run()
    w.beat("chat.1", EngineState.LOADING)
    w.silent.add("chat.1")
    w.bodies["chat.1"].ran = 1.0
    w.live(31.0)
    w.silent.clear()
    w.live(1.0)
    w.beat("chat.1", EngineState.WARMING, phase=Phase.WARMING)
    w.silent.add("chat.1")
    w.live(31.0)
    assert w.announced("engine.verdict") == []


def test_p20_what_hangs_while_it_loads_is_seen_in_the_end() -> None:
    w = Node(WorkerSettings(name="chat"), nursery=NurseryState.READY)
    w.run()
    w.beat("chat.1", EngineState.LOADING)
    w.silent.add("chat.1")
    assert 55.0 <= w.until_dead("chat.1", 70.0) <= 65.0


def test_p20_a_busy_engine_on_a_machine_that_gives_it_no_processor_is_not_killed() -> None:
    w = node()
    w.silent.add("chat.1")
    w.bodies["chat.1"].waits, w.bodies["chat.1"].ran = 0.9, 0.05
    w.live(10.0)
    assert w.announced("engine.verdict") == []
    w.silent.clear()
    w.live(2.0)
    w.silent.add("chat.1")
    w.live(25.0)
    assert w.announced("engine.verdict") == []
    assert w.until_dead("chat.1") <= 7.0, "the ceiling holds for everybody"


def test_a_gil_held_while_decoding_is_given_a_few_seconds() -> None:
    w = node()
    w.silent.add("chat.1")
    w.bodies["chat.1"].ran = 1.0
    w.live(2.5)
    assert w.announced("engine.verdict") == []
    assert w.until_dead("chat.1") <= 1.5


def test_a_long_prefill_is_given_the_time_that_its_tokens_take() -> None:
    w = node()
    w.phase, w.tokens, w.gap_s = Phase.PREFILL, 512, 0.4
    w.live(4.0)
    w.tokens = 8192
    w.stuck["chat.1"] = w.now_s
    w.live(6.0)
    assert w.announced("engine.verdict") == [], "16 times the tokens take 16 times as long"
    assert w.until_dead("chat.1") <= 24.0


def test_the_first_short_prefill_is_judged_by_the_steps_that_are_known() -> None:
    w = node()
    w.phase, w.tokens = Phase.PREFILL, 20
    w.stuck["chat.1"] = w.now_s
    assert 1.5 <= w.until_dead("chat.1") <= 4.0


def test_the_first_prefill_of_all_is_given_the_ceiling() -> None:
    w = node()
    w.phase, w.tokens = Phase.PREFILL, 8192
    w.stuck["chat.1"] = w.now_s
    w.live(29.0)
    assert w.announced("engine.verdict") == []
    assert w.until_dead("chat.1") <= 2.0


def test_a_loop_of_the_users_own_is_bounded_by_the_ceiling_alone() -> None:
    w = node()
    w.tokens = -1
    w.live(4.0)
    w.stuck["chat.1"] = w.now_s
    w.live(29.0)
    assert w.announced("engine.verdict") == []
    assert w.until_dead("chat.1") <= 2.0


def test_an_active_engine_that_says_that_it_compiles_is_given_a_minute() -> None:
    w = node()
    w.stuck["chat.1"] = w.now_s
    w.phase = Phase.WARMING
    w.live(50.0)
    assert w.announced("engine.verdict") == []
    assert w.until_dead("chat.1") <= 15.0


def test_one_pause_of_the_whole_machine_is_nobodys_hang() -> None:
    for pause_s in (0.3, 0.7, 0.9, 1.2, 3.0, 3600.0):
        w = node()
        asked = w.policy.deadline_s
        w.now_s += pause_s
        w.tell(m.Tick(late_s=max(0.0, w.now_s - asked)))
        w.advance(0.05)  # before anybody could say a word
        w.live(3.0)
        assert w.announced("engine.verdict") == [], pause_s


def test_a_pause_of_the_supervisor_ends_no_promotion_whatever_it_hears_first() -> None:
    w = node(shadows=2)
    w.freeze("chat.1")
    successor = w.promotions[-1][0]
    (other,) = w.bodies.keys() - {successor, "chat.1"}
    w.now_s += 11.0  # it was stopped; what the successor has said meanwhile is not read yet
    w.freeze(other)
    w.promoted(successor)
    assert w.policy.active is not None and w.policy.active.id == successor
    assert w.policy.epoch == 2


def test_a_supervisor_that_is_late_for_every_tick_still_finds_a_hang() -> None:
    w = node()
    w.silent.add("chat.1")
    began_s = w.now_s
    while "chat.1" in w.bodies:
        w.now_s = max(w.now_s, w.policy.deadline_s) + 0.3
        w.tell(m.Tick(late_s=0.3))
        w.beat("chat.2", phase=Phase.PARKED)
        assert w.now_s < began_s + 10.0


def test_utilisation_widens_the_threshold() -> None:
    w = node(gpus=(GPU,))
    w.util = 1.0
    w.live(1.0)
    w.stuck["chat.1"] = w.now_s
    w.live(1.2)
    assert w.announced("engine.verdict") == []
    assert w.until_dead("chat.1") <= 1.0


def test_an_idle_engine_is_never_hung() -> None:
    w = node(busy=False)
    w.live(120.0)
    assert w.announced("engine.verdict") == []
    assert w.examined == []


def test_beats_move_the_deadline_without_work() -> None:
    w = node()
    actions = len(w.actions)
    for _ in range(100):
        if w.policy.deadline_s <= w.now_s:
            assert w.policy.postponed(w.now_s)
        w._beat("chat.1")
        w._beat("chat.2")
        w.now_s += BEAT_S
    assert len(w.actions) == actions


# --- the canary -------------------------------------------------------------------------------------------------------------------


def sick(w: Node) -> None:
    """Its device has nothing to do, and a prefill of unknown length does not end."""
    w.phase, w.tokens = Phase.PREFILL, 8192
    w.util = 0.0
    w.stuck["chat.1"] = w.now_s


def number_of(sent: m.Send) -> int:
    assert isinstance(sent.order, Canary)
    return sent.order.number


def test_an_idle_device_under_load_brings_one_canary_and_only_one() -> None:
    w = node(gpus=(GPU,))
    sick(w)
    w.live(1.5)
    assert len(w.sent(Canary)) == 1
    w.live(10.0)
    assert len(w.sent(Canary)) == 1, "the bound of the step under way holds for it, too"


def test_a_canary_that_is_not_answered_condemns() -> None:
    w = node(gpus=(GPU,))
    w.util = 0.0
    w.live(1.0)
    assert w.sent(Canary) == [], "steps end: nothing is wrong"
    w.stalled_since_s = w.now_s
    w.live(1.5)
    assert len(w.sent(Canary)) == 1
    assert w.until_dead("chat.1") <= 1.0
    assert "a canary of one token was not answered" in w.recoveries[-1].cause


def test_an_answered_canary_clears_the_suspicion_and_the_next_one_comes_later() -> None:
    w = node(gpus=(GPU,))
    w.stalled_since_s = w.now_s
    for number in (1, 2):
        w.live(1.5 if number == 1 else 3.4)
        assert len(w.sent(Canary)) == number
        w.tell(m.Reported(Canaried(engine="chat.1", number=number_of(w.sent(Canary)[-1]))))
        w.live(2.0)
        assert len(w.sent(Canary)) == number
    assert w.announced("engine.verdict") == []
    assert len(w.announced("engine.cleared")) == 2


@pytest.mark.parametrize("stalled", [False, True])
def test_a_long_prefill_that_begins_when_the_canary_is_sent_is_given_its_time(stalled: bool) -> None:
    w = node(gpus=(GPU,))
    if stalled:
        w.stalled_since_s = w.now_s
    else:  # a step of a few tokens that does not end, on a device that does nothing
        w.util = 0.0
        w.stuck["chat.1"] = w.now_s
    while not w.sent(Canary):
        w.live(0.02)
    body = w.bodies["chat.1"]
    said = {"phase": Phase.PREFILL, "since_s": w.now_s, "step_tokens": 8192, "stalled_since_s": w.stalled_since_s}
    for _ in range(15):
        w.beat("chat.1", step=body.step + 1, **said)
        w.advance(0.2)
    assert w.announced("engine.verdict") == []


def test_a_canary_that_got_lost_condemns_nobody_whose_steps_end() -> None:
    w = node(gpus=(GPU,))
    w.stalled_since_s = w.now_s
    while not w.sent(Canary):
        w.live(0.02)
    w.stalled_since_s = 0.0
    w.live(10.0)
    assert w.announced("engine.verdict") == []
    assert len(w.announced("engine.cleared")) == 1
    w.stalled_since_s = w.now_s
    w.live(1.2)
    assert len(w.sent(Canary)) == 2, "the next trouble has a canary of its own"
    assert w.announced("engine.verdict") == []


def test_a_successor_that_waits_for_its_fence_is_not_asked_for_tokens() -> None:
    w = node(gpus=(GPU,))
    w.obeys = False
    w.freeze("chat.1")
    w.promoted("chat.2")
    w.bodies["chat.2"].inflight = 4
    w.util, w.stalled_since_s = 0.0, w.now_s
    w.live(5.0)
    assert w.sent(Canary) == []


def test_p30_a_sensor_that_says_nothing_any_more_is_not_believed() -> None:
    w = node(gpus=(GPU,))
    w.util = 0.0
    w.live(0.1)
    w.util = None
    sick_since_s = w.now_s
    w.phase, w.tokens = Phase.PREFILL, 8192
    w.stuck["chat.1"] = sick_since_s
    w.live(0.4)
    w.policy.loads.note(GPU, None, w.now_s)
    w.live(10.0)
    assert w.sent(Canary) == []
    assert w.announced("engine.verdict") == []


# --- what follows -----------------------------------------------------------------------------------------------------------------


def test_a_hang_is_of_the_engines_own_making_and_a_stop_is_not() -> None:
    for stopped, fault in ((False, Fault.HANG), (True, Fault.STOPPED)):
        w = node()
        w.obeys = False
        w.silent.add("chat.1")
        w.bodies["chat.1"].stopped = stopped
        w.until_dead("chat.1")
        assert w.policy.engines["chat.1"].fault is fault


# --- what may be silent, and is stopped -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spoke", [False, True])
def test_an_engine_that_is_stopped_while_it_starts_is_seen_by_that_and_not_by_its_silence(spoke: bool) -> None:
    n = Node(nursery=NurseryState.NONE)
    n.run()
    if spoke:
        n.beat("chat.1", EngineState.LOADING)
    n.bodies["chat.1"].stopped = True
    n.advance(1.5)
    (verdict,) = n.announced("engine.verdict")
    assert "the process is stopped" in verdict.message and verdict.data["fault"] == Fault.STOPPED.value
    assert n.spawns[-1].engine == "chat.2"


@pytest.mark.parametrize("ran", [0.0, 1.0])
def test_an_engine_that_says_nothing_while_it_starts_is_let_be_as_long_as_it_is_not_stopped(ran: float) -> None:
    n = Node(nursery=NurseryState.NONE)
    n.run()
    n.bodies["chat.1"].ran = ran
    n.advance(30.0)
    n.beat("chat.1", EngineState.LOADING)
    n.advance(50.0)
    assert n.announced("engine.verdict") == []
    assert 20 < n.examined.count("chat.1") < 100, "looked at, and not too often"


def test_an_engine_that_is_stopped_for_a_moment_while_it_starts_goes_on() -> None:
    n = Node(nursery=NurseryState.NONE)
    n.run()
    for _ in range(10):
        n.bodies["chat.1"].stopped = True
        while not n.examined:
            n.advance(0.05)
        n.bodies["chat.1"].stopped = False
        n.advance(1.0)
        n.examined.clear()
    assert n.announced("engine.verdict") == []


def test_an_engine_that_beats_while_it_loads_is_not_looked_at() -> None:
    n = Node(nursery=NurseryState.NONE)
    n.run()
    for _ in range(40):
        n.beat("chat.1", EngineState.LOADING)
        n.advance(0.2)
    assert n.examined == []


def test_many_workers_that_are_well_are_looked_at_together_and_none_too_late() -> None:
    nodes = []
    for number in range(32):
        n = Node()
        n.serve()
        n.live(2.0 + number * 0.0171)  # each beats in a time of its own
        nodes.append(n)
    looks, woken = 0, set()
    for n in nodes:
        end_s = 1010.0
        while n.now_s < end_s:
            n.now_s += BEAT_S
            for engine in n.bodies:
                n._beat(engine)
            while (due_s := n.policy.deadline_s) <= n.now_s:
                assert n.policy.postponed(n.now_s)
                plain_s = min(n.policy._hang_due_s(e, n.now_s) for e in n.policy.engines.values())
                assert plain_s - 0.1 < n.policy.deadline_s <= plain_s, "a little early, never late"
                assert n.policy.deadline_s > due_s
                looks += 1
                woken.add(round(n.policy.deadline_s, 4))
    assert looks > 60 and len(woken) <= looks // 3, (looks, len(woken))
