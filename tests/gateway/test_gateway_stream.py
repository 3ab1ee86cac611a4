"""The pure core: one worker's streams under any order of deaths, and what each rule says, without a socket."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import hypothesis.strategies as st
from hypothesis import given, settings
from prompt_shelf import PromptShelf

from shadowsup.supervisor.gateway.errors import ApiError
from shadowsup.supervisor.gateway.params import Generation, chat
from shadowsup.supervisor.gateway.stream import Stream, StreamState
from shadowsup.supervisor.gateway.worker import Worker, validate
from shadowsup.wire.engine import EngineState, Route, WorkerRoute
from shadowsup.wire.link import Accepted, Cancel, Hello, Rejected, Submit, ToEngine, Token

PROMPT = (1, 2, 3)
GENERATION: Generation = chat({"model": "m", "messages": [{"role": "user", "content": "x"}]})


@dataclass
class Reader:
    """A client: what it was given, and how it ended."""

    text: str = ""
    reason: str | None = None
    error: ApiError | None = None

    def put(self, text: str) -> None:
        assert self.reason is None and self.error is None
        self.text += text

    def finish(self, reason: str) -> None:
        assert self.reason is None and self.error is None
        self.reason = reason

    def fail(self, error: ApiError) -> None:
        assert self.reason is None and self.error is None
        self.error = error


@dataclass
class Bench:
    """A worker, the frames it sent, and a clock."""

    patience_s: float = 60.0
    now: float = 100.0
    frames: list[tuple[str, list[ToEngine]]] = field(default_factory=list)
    pauses: list[float] = field(default_factory=list)
    shelves: dict[str, PromptShelf] = field(default_factory=dict)
    deaf: set[str] = field(default_factory=set)
    """Engines that do not read what they are sent."""

    def __post_init__(self) -> None:
        self.worker = Worker(self.route(1, "e1", "e2"), self.send, self.pauses.append)

    def send(self, engine: str, messages: Sequence[ToEngine]) -> bool:
        if engine in self.deaf:
            return False
        if frame := self.shelves.setdefault(engine, PromptShelf()).take(messages):
            self.frames.append((engine, frame))
        return True

    def staged(self, engine: str) -> set[str]:
        """The requests whose prompts an engine knows beforehand."""
        return set(self.shelves[engine].prompts) if engine in self.shelves else set()

    def route(self, epoch: int, *engines: str, state: str = "healthy", reason: str = "") -> WorkerRoute:
        return WorkerRoute(
            worker="w",
            served_name="m",
            kind="link",
            state=state,
            epoch=epoch,
            engines=tuple(Route(engine=engine, socket="/x") for engine in engines),
            give_up_after_s=self.patience_s,
            reason=reason,
        )

    def hello(self, engine: str, epoch: int, state: EngineState = EngineState.ACTIVE) -> None:
        hello = Hello(worker="w", engine=engine, state=state, epoch=epoch, model="m", max_context=9)
        self.worker.events(engine, [hello], self.now)
        validate(self.worker)

    def add(self, rid: str = "r") -> tuple[Stream, Reader]:
        reader = Reader()
        stream = Stream(rid, GENERATION, reader, self.now)
        self.worker.add(stream, self.now)
        validate(self.worker)
        return stream, reader

    def event(self, engine: str, *events: Accepted | Token | Rejected) -> None:
        self.worker.events(engine, events, self.now)
        validate(self.worker)

    def lose(self, engine: str) -> None:
        self.shelves.pop(engine, None)
        self.worker.link_lost(engine, self.now)
        validate(self.worker)

    def expire(self) -> None:
        self.worker.expire(self.now)
        validate(self.worker)

    def sent(self) -> tuple[str, list[ToEngine]]:
        (frame,) = self.frames
        self.frames.clear()
        return frame


def accepted(rid: str = "r", epoch: int = 1) -> Accepted:
    return Accepted(rid=rid, epoch=epoch, prompt_ids=PROMPT, cached_tokens=9)


def token(text: str, end: int, *ids: int, rid: str = "r", epoch: int = 1, finish: str | None = None) -> Token:
    return Token(rid=rid, epoch=epoch, ids=ids, text=text, chars=end, finish_reason=finish)


def test_events_of_an_older_epoch_another_engine_or_an_unknown_request_are_nobodys() -> None:
    bench = Bench()
    bench.hello("e1", 1)
    stream, reader = bench.add()
    bench.event("e1", accepted(), token("a", 1, 1))
    bench.hello("e2", 2)  # while the first one is alive
    bench.event("e1", token("X", 2, 9), token("X", 2, 9, epoch=2))
    bench.event("e2", accepted(epoch=2), token("X", 2, 9, epoch=1), token("X", 2, 9, rid="other", epoch=2), token("b", 2, 2, epoch=2))
    assert reader.text == "ab" and stream.output_ids == [1, 2]
    assert bench.worker.counts.stale_events == 4


def test_an_engine_of_an_old_epoch_that_says_it_is_active_serves_nobody() -> None:
    bench = Bench()
    bench.hello("e2", 2)
    bench.hello("e1", 1)
    bench.add()
    assert bench.sent()[0] == "e2"
    bench.lose("e2")
    assert bench.worker.serving is None and bench.worker.held == 1


def test_routes_from_before_the_promotion_change_nothing() -> None:
    bench = Bench()
    bench.hello("e2", 2)
    bench.worker.rerouted(bench.route(1, "e1", "e2"), bench.now)
    assert bench.worker.serving == "e2" and bench.worker.epoch == 2


def test_a_worker_that_was_stopped_and_started_counts_its_epochs_anew() -> None:
    bench = Bench()
    bench.hello("e2", 7)
    bench.lose("e2")
    bench.worker.rerouted(bench.route(0, state="stopped"), bench.now)
    bench.worker.rerouted(bench.route(1, "e3"), bench.now)
    bench.hello("e3", 1)
    assert bench.worker.serving == "e3"
    bench.add()
    engine, (message,) = bench.sent()
    assert engine == "e3" and isinstance(message, Submit) and message.epoch == 1


def test_held_requests_go_out_in_the_order_of_their_arrival() -> None:
    bench = Bench()
    bench.hello("e1", 1)
    for rid in "abc":
        bench.add(rid)
    bench.lose("e1")
    bench.add("d")
    bench.frames.clear()
    bench.hello("e2", 2)
    engine, frame = bench.sent()
    assert engine == "e2" and [message.rid for message in frame] == ["a", "b", "c", "d"]


def test_cached_tokens_are_those_of_the_first_engine_and_no_more_than_the_prompt() -> None:
    bench = Bench()
    bench.hello("e1", 1)
    stream, _ = bench.add()
    bench.event("e1", accepted())
    assert stream.cached_tokens == 3
    bench.hello("e2", 2)
    bench.event("e2", Accepted(rid="r", epoch=2, prompt_ids=PROMPT, cached_tokens=0))
    assert stream.cached_tokens == 3


def test_a_token_without_an_acceptance_is_not_delivered() -> None:
    bench = Bench()
    bench.hello("e1", 1)
    stream, reader = bench.add()
    bench.event("e1", token("a", 1, 1))
    assert reader.text == "" and stream.state is StreamState.HELD and bench.worker.counts.missteps == 1


def test_patience_counts_the_time_without_an_engine_only_and_tokens_renew_it() -> None:
    bench = Bench(patience_s=10.0)
    bench.hello("e1", 1)
    _, reader = bench.add()
    bench.event("e1", accepted())
    bench.now += 100  # a long prefill is no wait for an engine
    bench.lose("e1")
    assert bench.worker.deadline_s() == bench.now + 10
    bench.now += 6
    bench.hello("e2", 2)
    bench.lose("e2")  # without a token
    assert bench.worker.deadline_s() == bench.now + 4
    bench.hello("e3", 3)
    bench.event("e3", accepted(epoch=3), token("a", 1, 1, epoch=3))
    assert bench.pauses == [6.0]
    bench.lose("e3")
    assert bench.worker.deadline_s() == bench.now + 10
    bench.now += 10
    bench.expire()
    assert reader.error is not None and reader.error.status == 503 and bench.worker.deadline_s() is None
    assert bench.worker.counts.gave_up == 1


def test_a_refused_request_is_asked_for_again_ever_more_slowly() -> None:
    bench = Bench()
    bench.hello("e1", 1)
    bench.add()
    pauses = []
    for _ in range(7):
        _, messages = bench.sent()
        request = messages[-1]
        assert isinstance(request, Submit)
        bench.event("e1", Rejected(rid=request.rid, epoch=1, status=503, message="full", retryable=True))
        deadline = bench.worker.deadline_s()
        assert deadline is not None
        pauses.append(round(deadline - bench.now, 3))
        bench.now = deadline
        bench.expire()
    assert pauses == [0.05, 0.1, 0.2, 0.4, 0.8, 1.0, 1.0]


def test_a_request_refused_to_the_end_fails_with_what_the_engine_said() -> None:
    bench = Bench(patience_s=0.01)
    bench.hello("e1", 1)
    _, reader = bench.add()
    bench.event("e1", Rejected(rid="r", epoch=1, status=503, message="the queue is full", retryable=True))
    bench.now += 0.01
    bench.expire()
    assert reader.error is not None and "the queue is full" in reader.error.message


def test_each_submission_in_one_epoch_has_an_id_of_its_own_and_the_next_epoch_gets_the_last() -> None:
    bench = Bench()
    bench.hello("e1", 1)
    bench.add()
    bench.lose("e1")
    bench.hello("e1", 1)
    bench.lose("e1")
    bench.hello("e1", 1)
    bench.lose("e1")
    bench.hello("e2", 2)
    rids = [[message.rid for message in frame] for _, frame in bench.frames]
    assert rids == [["r"], ["r", "r~1"], ["r~1", "r~2"], ["r~2"]]
    assert [type(frame[0]) for _, frame in bench.frames] == [Submit, Cancel, Cancel, Submit]


def test_a_client_that_leaves_is_forgotten_whatever_its_stream_was_doing() -> None:
    for steps in range(4):
        bench = Bench()
        if steps:
            bench.hello("e1", 1)
        stream, _ = bench.add()
        if steps > 1:
            bench.event("e1", accepted())
        if steps > 2:
            bench.lose("e1")
        bench.frames.clear()
        bench.worker.cancel(stream)
        validate(bench.worker)
        assert bench.worker.inflight == 0
        assert bench.frames == ([("e1", [Cancel(rid="r")])] if steps in (1, 2) else [])
        bench.hello("e2", 2)
        assert len(bench.frames) == (steps in (1, 2))


def test_a_worker_without_hope_fails_what_it_holds_but_not_what_an_engine_still_serves() -> None:
    bench = Bench()
    bench.hello("e1", 1)
    _, served = bench.add()
    bench.worker.rerouted(bench.route(1, "e1", state="stopped", reason="by order"), bench.now)
    validate(bench.worker)
    assert served.error is None
    bench.lose("e1")
    assert served.error is not None and "by order" in served.error.message
    _, late = bench.add("late")
    assert late.error is not None


WORDS = ["The ", "qu", "", "ick ", "brown 🦊 ", "", "", "jum", "ps over ", "the lazy ", "dög", "."]
TEXT = "".join(WORDS)


class ModelEngine:
    """What an engine does: it writes the same text from wherever it is asked to go on; some words stay back a step."""

    def __init__(self, bench: Bench, name: str, epoch: int) -> None:
        self.bench, self.name, self.epoch = bench, name, epoch
        self.tasks: dict[str, tuple[int, int]] = {}
        self.seen: set[str] = set()

    def take(self, messages: list[ToEngine]) -> None:
        for message in messages:
            if isinstance(message, Cancel):
                self.tasks.pop(message.rid, None)
                continue
            assert message.epoch == self.epoch and message.rid not in self.seen
            self.seen.add(message.rid)
            done, chars = 0, 0
            if message.replay is not None:
                done, chars = len(message.replay.output_ids), message.replay.delivered_chars
                assert message.replay.prompt_ids == PROMPT
                assert message.replay.output_ids == tuple(range(done))
                assert len("".join(WORDS[:done])) >= chars
            self.tasks[message.rid] = (done, chars)
            self.bench.event(self.name, accepted(message.rid, self.epoch))

    def step(self, hold_back: bool) -> None:
        events = []
        for rid, (done, chars) in list(self.tasks.items()):
            ids = (done,) if done < len(WORDS) else ()
            done += len(ids)
            last = done == len(WORDS) and not (hold_back and ids)
            written = "".join(WORDS[: done - 1 if hold_back and not last else done])
            text = written[chars:]
            events.append(token(text, chars + len(text), *ids, rid=rid, epoch=self.epoch, finish="stop" if last else None))
            self.tasks[rid] = (done, chars + len(text))
            if last:
                del self.tasks[rid]
        self.bench.event(self.name, *events)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from(["step", "step", "held back", "die", "fork", "add", "break", "stale"]), max_size=60))
def test_whatever_dies_when_every_client_reads_the_whole_text_once(script: list[str]) -> None:
    bench = Bench()
    epoch = 1
    engine = ModelEngine(bench, "e1", epoch)
    readers: list[Reader] = []
    former = engine

    def deliver() -> None:
        frames, bench.frames[:] = list(bench.frames), []
        for name, messages in frames:
            if name == engine.name:
                engine.take(messages)

    bench.hello(engine.name, epoch)
    for action in [*script, "add"]:
        if action in ("step", "held back"):
            engine.step(action == "held back")
        elif action == "die":  # and a successor is promoted
            former, epoch = engine, epoch + 1
            bench.lose(engine.name)
            engine = ModelEngine(bench, f"e{epoch}", epoch)
            bench.hello(engine.name, epoch)
        elif action == "fork":  # a successor is promoted while the former engine still talks
            former, epoch = engine, epoch + 1
            engine = ModelEngine(bench, f"e{epoch}", epoch)
            bench.hello(engine.name, epoch)
        elif action == "break":  # the link, not the engine
            bench.lose(engine.name)
            bench.hello(engine.name, epoch)
        elif action == "stale" and former is not engine:
            former.step(False)
        elif action == "add":
            readers.append(bench.add(f"r{len(readers)}")[1])
        deliver()
    for _ in range(2 * len(WORDS)):
        engine.step(False)
    assert [(reader.text, reader.reason) for reader in readers] == [(TEXT, "stop")] * len(readers)
    assert bench.worker.inflight == 0 and bench.worker.counts.repeated_chars == 0 and bench.worker.counts.missteps == 0


def test_a_parked_engine_knows_the_prompts_before_it_is_given_the_streams() -> None:
    bench = Bench()
    bench.hello("e1", 1)
    bench.add("old")
    bench.event("e1", accepted("old"))
    bench.hello("e2", 0, EngineState.PARKED)
    assert bench.staged("e2") == {"old"}
    bench.add("new")
    bench.event("e1", accepted("new"))
    assert bench.staged("e2") == {"old", "new"}
    bench.frames.clear()
    bench.lose("e1")
    bench.hello("e2", 2)
    _, frame = bench.sent()
    assert [message.replay.prompt_ids for message in frame if isinstance(message, Submit) and message.replay is not None] == [PROMPT] * 2
    assert bench.staged("e2") == set()


def test_a_stream_that_ends_is_staged_nowhere_any_more() -> None:
    bench = Bench()
    bench.hello("e1", 1)
    bench.hello("e2", 0, EngineState.PARKED)
    finished, left = bench.add("finished")[0], bench.add("left")[0]
    bench.event("e1", accepted("finished"), accepted("left"))
    assert bench.staged("e2") == {"finished", "left"}
    bench.event("e1", token("a", 1, 1, rid="finished", finish="stop"))
    assert bench.staged("e2") == {"left"}
    bench.worker.cancel(left)
    assert bench.staged("e2") == set()
    assert finished.state is StreamState.DONE


def test_an_engine_that_lost_its_link_or_did_not_read_is_told_the_whole_prompt() -> None:
    bench = Bench()
    bench.hello("e1", 1)
    bench.hello("e2", 0, EngineState.PARKED)
    bench.add("a")
    bench.event("e1", accepted("a"))
    bench.lose("e2")
    bench.deaf.add("e2")
    bench.hello("e2", 0, EngineState.PARKED)
    bench.deaf.clear()
    bench.frames.clear()
    bench.lose("e1")
    bench.hello("e2", 2)
    ((_, [submit]),) = bench.frames  # which the shelf would not have found on itself
    assert isinstance(submit, Submit) and submit.replay is not None and submit.replay.prompt_ids == PROMPT
