"""Requests that end engines: who is tried, who is failed, and that nobody else loses a token. The pure core, with imaginary engines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import hypothesis.strategies as st
from hypothesis import given, settings

from shadowsup.supervisor.gateway.errors import ApiError
from shadowsup.supervisor.gateway.params import Generation, chat
from shadowsup.supervisor.gateway.stream import Stream
from shadowsup.supervisor.gateway.suspects import UNKNOWN_S
from shadowsup.supervisor.gateway.worker import Worker, validate
from shadowsup.wire.engine import Death, EngineState, Route, WorkerRoute
from shadowsup.wire.link import Accepted, Cancel, Hello, Rejected, Submit, ToEngine, Token

GENERATION: Generation = chat({"model": "m", "messages": [{"role": "user", "content": "x"}]})
LENGTH = 8


@dataclass
class Reader:
    text: str = ""
    reason: str | None = None
    error: ApiError | None = None

    def put(self, text: str) -> None:
        self.text += text

    def finish(self, reason: str) -> None:
        self.reason = reason

    def fail(self, error: ApiError) -> None:
        self.error = error


@dataclass
class World:
    """One engine at a time. A request answers with its own letters, ``LENGTH`` of them; a poisoned one ends the engine at a position."""

    poison: dict[str, int] = field(default_factory=dict)
    """Request → the token that no engine survives computing."""
    external: set[int] = field(default_factory=set)
    """Epochs whose engine is killed from outside, at its third step."""
    tells_late: set[int] = field(default_factory=set)
    """Epochs of whose end the cause is told only with that of the next."""
    epoch: int = 1
    now: float = 100.0

    def __post_init__(self) -> None:
        self.readers: dict[str, Reader] = {}
        self.streams: dict[str, Stream] = {}
        self.running: dict[str, tuple[str, int]] = {}
        """Wire id → (request, tokens so far), in the engine."""
        self.deaths: list[Death] = []
        self.together: list[set[str]] = []
        """What was in the engine at each of its deaths."""
        self.steps = 0
        self.truth: dict[int, bool] = {}
        """Epoch → whether its engine's end was of its own making."""
        self.worker = Worker(self._route(), self._send)
        self._greet()

    def _route(self, *, admits: bool = True) -> WorkerRoute:
        return WorkerRoute(
            worker="w",
            served_name="m",
            kind="link",
            state="healthy",
            epoch=self.epoch,
            engines=(Route(engine=f"e{self.epoch}", socket="s"),),
            give_up_after_s=60.0,
            deaths=tuple(self.deaths),
            admits=admits,
        )

    def _send(self, engine: str, messages: Sequence[ToEngine]) -> bool:
        assert engine == f"e{self.epoch}"
        for message in messages:
            if isinstance(message, Cancel):
                self.running.pop(message.rid, None)
            elif isinstance(message, Submit):
                rid = message.rid.partition("~")[0]
                done = len(message.replay.output_ids) if message.replay is not None else 0
                self.running[message.rid] = (rid, done)
        return True

    def _greet(self) -> None:
        engine = f"e{self.epoch}"
        hello = Hello(worker="w", engine=engine, state=EngineState.ACTIVE, epoch=self.epoch, model="m", max_context=99)
        self.worker.events(engine, [hello], self.now)
        validate(self.worker)

    def ask(self, *names: str) -> None:
        for name in names:
            self.readers[name] = Reader()
            self.streams[name] = Stream(name, GENERATION, self.readers[name], self.now)
            self.worker.add(self.streams[name], self.now)
            validate(self.worker)

    def step(self) -> None:
        """Everything in the engine gets a token; or the engine ends."""
        self.now += 0.01
        self.steps += 1
        fatal = [rid for rid, done in self.running.values() if self.poison.get(rid) == done]
        if fatal or (self.epoch in self.external and self.steps == 3):
            self._die(own=bool(fatal))
            return
        engine = f"e{self.epoch}"
        for wire, (rid, done) in list(self.running.items()):
            if wire not in self.running:
                continue  # taken back meanwhile
            self.running[wire] = (rid, done + 1)
            end = done + 1 == LENGTH
            if end:
                del self.running[wire]
            accepted = Accepted(rid=wire, epoch=self.epoch, prompt_ids=(1,), cached_tokens=0)
            token = Token(rid=wire, epoch=self.epoch, ids=(done,), text=str(done), chars=done + 1, finish_reason="stop" if end else None)
            self.worker.events(engine, [accepted, token], self.now)
            validate(self.worker)

    def _die(self, *, own: bool) -> None:
        self.together.append({rid for rid, _ in self.running.values()})
        self.running.clear()
        engine, died = f"e{self.epoch}", self.epoch
        self.epoch += 1
        self.steps = 0
        self.deaths.append(Death(epoch=died, engine=engine, fault="unknown", own=None))
        self.worker.link_lost(engine, self.now)
        self.worker.rerouted(self._route(), self.now)
        self._greet()  # milliseconds after; what it died of is known later
        self.truth[died] = own
        if died not in self.tells_late:
            self.now += 0.1
            self.deaths = [self._told(death.epoch) for death in self.deaths]
            self.worker.rerouted(self._route(), self.now)
        validate(self.worker)

    def _told(self, epoch: int) -> Death:
        own = self.truth[epoch]
        return Death(epoch=epoch, engine=f"e{epoch}", fault="segfault" if own else "killed", own=own)

    def finish(self, most: int = 2000) -> None:
        for _ in range(most):
            if all(reader.reason or reader.error for reader in self.readers.values()):
                return
            self.step()
            if not self.running:
                self.now += UNKNOWN_S
                self.worker.expire(self.now)
        raise AssertionError(f"not finished: {[name for name, r in self.readers.items() if not (r.reason or r.error)]}")

    def check(self) -> None:
        """Everybody but the poisoned has a whole answer."""
        for name, reader in self.readers.items():
            if name in self.poison:
                assert reader.error is not None, name
            else:
                assert (reader.text, reader.reason, reader.error) == ("01234567", "stop", None), name


def test_the_one_request_that_ends_engines_is_failed_by_name_and_the_rest_go_on_exactly() -> None:
    for position in (0, 3):
        world = World(poison={"bad": position})
        world.ask("a", "bad", "b")
        world.finish()
        world.check()
        error = world.readers["bad"].error
        assert error is not None and error.status == 500 and error.code == "request_ends_engines"
        assert (
            "bad" in error.message
            and "e1 (segfault), e2 (segfault)" in error.message
            and "e3 (segfault) while it ran alone" in error.message
        )
        assert "x-should-retry" in error.headers() and error.retry_after_s is None
        assert world.together[-1] == {"bad"} and len(world.together) == 3
        assert world.worker.counts.poisoned == 1
        assert world.worker.counts.isolated >= 1


def test_kills_from_outside_never_make_anybody_a_suspect() -> None:
    world = World(external={1, 2, 3, 4, 5})
    world.ask("a", "b")
    world.finish()
    world.check()
    assert world.worker.counts.isolated == 0


def test_nobody_waits_for_the_cause_of_a_death_unless_another_one_was_of_the_engines_own_making() -> None:
    world = World(external={1, 2})
    world.ask("a")
    for _ in range(3):
        world.step()
    assert world.running, "given on at once, before any cause was known"


def test_one_death_of_the_engines_own_making_is_nobodys_fault() -> None:
    world = World(poison={"bad": 3}, external={2})
    world.ask("a", "bad")
    for _ in range(4):
        world.step()
    assert len(world.together) == 1
    assert world.worker.counts.isolated == 0


def test_a_kill_from_outside_during_the_trial_convicts_nobody() -> None:
    world = World(poison={"bad": 5}, external={3})
    world.ask("a", "bad")
    world.finish()
    world.check()
    assert world.readers["a"].error is None


def test_who_passes_the_point_of_the_deaths_alone_goes_on_with_the_others() -> None:
    world = World(poison={"bad": 1})
    world.ask("long", "bad")
    world.finish()
    world.check()
    assert world.worker.counts.isolated >= 2, "both were in flight at both deaths"


def test_new_requests_wait_for_the_end_of_a_trial() -> None:
    world = World(poison={"bad": 2})
    world.ask("a", "bad")
    while world.worker.counts.isolated == 0:
        world.step()
    world.ask("late")
    assert {rid for rid, _ in world.running.values()} == {next(rid for rid, _ in world.running.values())}
    assert "late" not in {rid for rid, _ in world.running.values()}
    world.finish()
    world.check()


def test_a_client_that_leaves_during_its_trial_frees_the_engine() -> None:
    world = World(poison={"bad": 2})
    world.ask("bad", "a")
    while world.worker.counts.isolated == 0:
        world.step()
    tried = next(rid for rid, _ in world.running.values())
    world.worker.cancel(world.streams[tried])
    validate(world.worker)
    del world.readers[tried]
    world.poison.pop(tried, None)
    world.finish()


def test_a_suspect_that_leaves_before_its_trial_frees_those_that_wait_for_it() -> None:
    w = World(poison={"a": 2}, tells_late={2})
    w.ask("a")
    while w.epoch == 1:
        w.step()
    w.ask("b")
    while w.epoch == 2:
        w.step()
    assert w.running == {}, "of the second death it is not known yet whose fault it was"
    w.worker.cancel(w.streams.pop("a"))
    del w.readers["a"]
    assert {rid for rid, _ in w.running.values()} == {"b"}, "nothing else may happen for a long time"
    w.finish()
    assert w.readers["b"].reason == "stop"


def test_a_cause_that_is_never_told_holds_nobody_for_long() -> None:
    world = World(poison={"bad": 2}, tells_late={2})
    world.ask("a", "bad")
    while len(world.together) < 2:
        world.step()
    assert not world.running, "one death was of the engine's own making: what was the other?"
    world.now += UNKNOWN_S + 0.01
    deadline = world.worker.deadline_s()
    assert deadline is not None and deadline <= world.now
    world.worker.expire(world.now)
    assert world.running


def test_who_was_refused_for_now_is_not_asked_again_before_a_trial_is_over() -> None:
    world = World(poison={"bad": 2})
    world.ask("a", "bad")
    while world.epoch == 1:
        world.step()
    wire = next(wire for wire, (rid, _) in world.running.items() if rid == "a")
    del world.running[wire]
    refused = Rejected(rid=wire, epoch=world.epoch, status=503, message="not now", retryable=True)
    world.worker.events(f"e{world.epoch}", [refused], world.now)
    assert world.worker.deadline_s() == world.streams["a"].retry_at_s
    while world.worker.counts.isolated == 0:
        world.step()
    for _ in range(100):
        world.now += 1.0
        world.worker.expire(world.now)
        deadline = world.worker.deadline_s()
        assert deadline is None or deadline > world.now, "this would be called again at once, for as long as the trial goes on"
    assert {rid for rid, _ in world.running.values()} == {"bad"}
    world.finish()
    world.check()


def test_requests_wait_while_admission_is_paused_and_those_that_run_go_on() -> None:
    world = World()
    world.ask("old")
    world.step()
    world.worker.rerouted(world._route(admits=False), world.now)
    world.ask("new")
    world.step()
    assert {rid for rid, _ in world.running.values()} == {"old"}
    world.worker.rerouted(world._route(), world.now)
    assert {rid for rid, _ in world.running.values()} == {"old", "new"}
    world.finish()
    world.check()


@settings(max_examples=150, deadline=None)
@given(
    good=st.integers(0, 4),
    poison=st.dictionaries(st.sampled_from(["p", "q", "r"]), st.integers(0, LENGTH - 1), max_size=3),
    external=st.sets(st.integers(1, 12), max_size=4),
    late=st.sets(st.integers(1, 12), max_size=3),
    order=st.randoms(use_true_random=False),
)
def test_whatever_ends_whenever_only_poison_fails(
    good: int, poison: dict[str, int], external: set[int], late: set[int], order: object
) -> None:
    world = World(poison=dict(poison), external=external, tells_late=late)
    names = [f"g{number}" for number in range(good)] + list(poison)
    order.shuffle(names)  # type: ignore[attr-defined]
    world.ask(*names)
    world.finish()
    world.check()
