"""Whatever the order of events: one owner an epoch, never promoted before the freeze, never spawned twice."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from policy_world import World

from shadowsup.supervisor.policy import messages as m
from shadowsup.supervisor.policy.detector import HangLimits
from shadowsup.supervisor.policy.model import Desired, NurseryState, WorkerSettings, WorkerState
from shadowsup.supervisor.policy.rollout import Stage
from shadowsup.wire.engine import EngineState, Phase


class AnyOrder(RuleBasedStateMachine):
    """`World` asserts the invariants at every action and after every event; the rules only find ways to break them."""

    def __init__(self) -> None:
        super().__init__()
        limits = HangLimits(ceiling_s=5.0)
        self.base = WorkerSettings(name="chat", shadows=2, hang=limits, stop_timeout_s=4.0, startup_s=60.0, max_failures=1000, revision="a")
        self.world = World(self.base, obeys=False, layouts={"a": "one", "b": "one", "c": "other"})
        self.world.run()

    @initialize(healthy=st.booleans())
    def begin(self, healthy: bool) -> None:
        while healthy and self.world.policy.state is not WorkerState.HEALTHY:
            self.let_all_go_well()
            self.world.advance(1.0)

    def pick(self, number: int) -> str | None:
        names = sorted(self.world.bodies)
        return names[number % len(names)] if names else None

    @rule(number=st.integers(0, 5), state=st.sampled_from([EngineState.LOADING, EngineState.WARMING, EngineState.PARKED]))
    def start_up(self, number: int, state: EngineState) -> None:
        engine = self.pick(number)
        if engine is not None and self.world.bodies[engine].epoch == 0 and not self.world.bodies[engine].frozen:
            self.world.beat(engine, state, phase=Phase.LOADING)

    @rule(number=st.integers(0, 5))
    def obey_the_promotion(self, number: int) -> None:
        engine = self.pick(number)
        if engine is not None and self.world.bodies[engine].state is EngineState.PROMOTING and not self.world.bodies[engine].frozen:
            self.world.promoted(engine)

    @rule(number=st.integers(0, 5), epoch=st.integers(1, 4))
    def report_a_promotion_nobody_ordered(self, number: int, epoch: int) -> None:
        engine = self.pick(number)
        if engine is not None and self.world.bodies[engine].epoch == 0:
            self.world.tell(m.Reported(_promoted(engine, epoch)))

    @rule(number=st.integers(0, 5))
    def send_a_first_token(self, number: int) -> None:
        engine = self.pick(number)
        if engine is not None and self.world.bodies[engine].state is EngineState.ACTIVE:
            self.world.first_token(engine)

    @rule(number=st.integers(0, 5))
    def notice_a_death_by_pidfd(self, number: int) -> None:
        engine = self.pick(number)
        if engine is not None:
            self.world.tell(m.Died(engine, -9))

    @rule(number=st.integers(0, 5))
    def find_it_stuck_in_the_kernel(self, number: int) -> None:
        engine = self.pick(number)
        record = self.world.policy.engines.get(engine) if engine is not None else None
        if record is not None and record.dying and not self.world.bodies[record.id].frozen:
            self.world.tell(m.Stuck(record.id))

    @rule(number=st.integers(0, 5))
    def freeze(self, number: int) -> None:
        engine = self.pick(number)
        if engine is not None:
            self.world.freeze(engine)

    @rule(number=st.integers(0, 5), status=st.sampled_from([0, 1, 2, -9, -11]))
    def end(self, number: int, status: int) -> None:
        engine = self.pick(number)
        if engine is not None:
            self.world.bodies[engine].frozen = True
            self.world.gone(engine, status, ("last words",))

    @rule(number=st.integers(0, 5), stage=st.sampled_from(["load", "promote", "step"]))
    def report_a_failure(self, number: int, stage: str) -> None:
        engine = self.pick(number)
        if engine is not None:
            self.world.fail(engine, stage=stage)

    @rule()
    def let_all_go_well(self) -> None:
        """Who was told to end ends, who loads parks, who was promoted serves: the deeper states are behind many such steps."""
        for name in sorted(self.world.bodies):
            body, record = self.world.bodies.get(name), self.world.policy.engines.get(name)
            if body is None or record is None or body.frozen:
                continue
            if not record.live:
                body.frozen = True
                self.world.gone(name, 0)
            elif body.state is EngineState.PROMOTING:
                self.world.promoted(name)
                if name in self.world.bodies:
                    self.world.first_token(name)
            elif body.epoch == 0:
                self.world.park(name)
            else:
                self.world.beat(name)

    @rule(seconds=st.sampled_from([0.01, 0.05, 0.1, 0.5, 1.0, 6.0, 30.0]))
    def pass_time(self, seconds: float) -> None:
        self.world.advance(seconds)

    @rule(state=st.sampled_from(list(NurseryState)))
    def change_the_nursery(self, state: NurseryState) -> None:
        self.world.tell(m.NurseryChanged(state))

    @rule(order=st.sampled_from([m.RunWorker(), m.RestartWorker(), m.FailOver(), m.DrainWorker(), m.StopWorker()]))
    def order(self, order: m.WorkerEvent) -> None:
        if self.world.policy.refusal(order) is None:
            self.world.tell(order)

    @rule(revision=st.sampled_from("abc"), shadows=st.integers(0, 2), gap=st.booleans(), nursery=st.sampled_from(list(NurseryState)))
    def roll_out(self, revision: str, shadows: int, gap: bool, nursery: NurseryState) -> None:
        policy = self.world.policy
        open_stage = policy.rollout.stage if policy.rollout is not None and policy.rollout.open else None
        if revision == policy.settings.revision or open_stage not in (None, Stage.WAITING, Stage.STARTING, Stage.READY):
            return
        self.world.tell(m.RollOut(replace(self.base, revision=revision, shadows=shadows), nursery, gap))

    @rule(order=st.sampled_from([m.CommitRollOut(), m.CommitRollOut(), m.FinishRollOut(), m.TakeBack("the operator changed his mind")]))
    def go_on_with_the_roll_out(self, order: m.RollOutOrder) -> None:
        rollout = self.world.policy.rollout
        if rollout is not None and (rollout.stage is Stage.READY or not isinstance(order, m.CommitRollOut)):
            self.world.tell(order)

    @rule(steps=st.integers(1, 9))
    def roll_on(self, steps: int) -> None:
        """As far as so many steps go when nothing goes wrong and the node commits and finishes at once."""
        for _ in range(steps):
            rollout = self.world.policy.rollout
            if rollout is not None and rollout.stage is Stage.READY:
                self.world.tell(m.CommitRollOut())
            self.world.tell(m.FinishRollOut())
            self.let_all_go_well()
            self.world.advance(1.0)

    @rule(shadows=st.integers(0, 3))
    def change_what_needs_no_engine(self, shadows: int) -> None:
        policy = self.world.policy
        if policy.rollout is None or not policy.rollout.open:
            self.world.tell(m.Reconfigure(replace(policy.settings, shadows=shadows)))

    @rule(with_keeper=st.booleans())
    def lose_the_supervisor(self, with_keeper: bool) -> None:
        if self.world.policy.desired is not Desired.STOP or self.world.bodies:
            self.world.lose_the_supervisor(with_keeper=with_keeper)

    @precondition(lambda self: self.world.policy.state is WorkerState.STOPPED)
    @rule()
    def run_again(self) -> None:
        self.world.run()

    @invariant()
    def epochs_only_grow_and_have_one_owner(self) -> None:
        epochs = [order.epoch for _, order in self.world.promotions]
        assert epochs == sorted(set(epochs))
        assert self.world.policy.epoch >= (epochs[-1] if epochs else 0)

    @invariant()
    def whoever_is_wanted_is_on_its_way(self) -> None:
        """Nobody serves: then something is starting, ending, waiting for its time, or the worker is down and says why."""
        policy = self.world.policy
        if policy.desired is Desired.RUN and policy.active is None and policy.nursery is not NurseryState.STARTING:
            busy = bool(policy.engines) or policy.deadline_s < float("inf") or policy.state is WorkerState.DOWN
            assert busy, policy.state

    def teardown(self) -> None:
        """However it stands: a roll-out can be taken back, and an order to stop ends it within the bounds."""
        self.world.obeys = True
        self.world.tell(m.TakeBack("the test is over"))
        for _ in range(60):
            self.let_all_go_well()
            self.world.advance(0.5)  # the shortest silence that is judged is longer: nobody is killed for beats that a test did not send
        rollout = self.world.policy.rollout
        assert rollout is None or not rollout.open, rollout
        self.world.tell(m.StopWorker())
        self.world.advance(20.0)
        assert self.world.policy.state is WorkerState.STOPPED
        assert self.world.bodies == {}


def _promoted(engine: str, epoch: int) -> object:
    from shadowsup.wire.engine import Promoted

    return Promoted(engine=engine, epoch=epoch, header_s=0, map_s=0, index_s=0, blocks_kept=0, blocks_dropped=0)


AnyOrder.TestCase.settings = settings(max_examples=80, stateful_step_count=50, deadline=None)
TestAnyOrder = AnyOrder.TestCase
