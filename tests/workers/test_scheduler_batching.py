"""Who gets computed when: driven step by step over a real ledger, with a made-up model (the next token is a function of the tokens)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pool_world import BLOCK_TOKENS, SALT, Ledger, ledger

from shadowsup.wire.engine import Phase
from shadowsup.wire.link import Accepted, Sampling, Token
from shadowsup.workers.detokenize import Detokenizer
from shadowsup.workers.requests import Request
from shadowsup.workers.scheduler import Chunk, Event, Limits, Scheduler
from shadowsup.workers.transformers.tokenizer import ByteCodec

CODEC = ByteCodec(256)


def next_token(tokens: Sequence[int]) -> int:
    return (sum(tokens) * 31 + len(tokens)) % 90 + 33


class Bench:
    """A scheduler and what its model has written: the tokens that each block's slots were computed for."""

    def __init__(self, kept: Ledger, *, reserve: int = 0, fenced: bool = True, batch: int = 4, tokens: int = 16) -> None:
        self.pool = kept.pool(reserve=reserve, fenced=fenced)
        self.scheduler = Scheduler(self.pool, Limits(batch, tokens), SALT)
        self.events: list[Event] = []
        self.content: dict[tuple[int, int], tuple[int, ...]] = {}

    def request(
        self, rid: str, prompt: Sequence[int] | int, *, output: Sequence[int] = (), max_total: int = 64, **sampling: Any
    ) -> Request:
        ids = tuple(range(40, 40 + prompt)) if isinstance(prompt, int) else tuple(prompt)
        options = Sampling(**{"seed": 1, "temperature": 0.0, "max_tokens": 8, **sampling})
        delivered = len(CODEC.decode(list(output)))
        text = Detokenizer(CODEC, stops=options.stop, min_tokens=options.min_tokens, delivered=delivered)
        return Request(
            rid=rid, epoch=1, prompt=ids, output=list(output), sampling=options, text=text, max_total=max_total, eos=frozenset({33})
        )

    def add(self, rid: str, prompt: Sequence[int] | int, **options: Any) -> Request:
        request = self.request(rid, prompt, **options)
        self.scheduler.add(request)
        return request

    def step(self) -> list[Chunk]:
        plan = self.scheduler.plan()
        sampled = []
        for chunk in plan:
            tokens = chunk.request.tokens
            for position in range(chunk.start, chunk.start + chunk.count):
                slot = chunk.request.blocks[position // BLOCK_TOKENS], position % BLOCK_TOKENS
                self.content[slot] = tuple(tokens[: position + 1])
            for position in range(chunk.start + chunk.count):  # attention reads all of it
                slot = chunk.request.blocks[position // BLOCK_TOKENS], position % BLOCK_TOKENS
                assert self.content.get(slot) == tuple(tokens[: position + 1]), "another sequence's KV would be read"
            if chunk.samples:
                sampled.append(next_token(tokens))
        self.scheduler.commit(plan, sampled)
        self.pool.check()
        self.events += self.scheduler.take_events()
        return plan

    def finish(self) -> None:
        for _ in range(3000):
            if not (self.scheduler.inflight or self.scheduler.queued):
                return
            self.step()
        raise AssertionError("requests wait for ever")

    def ids(self, rid: str) -> list[int]:
        return [token for event in self.events if isinstance(event, Token) and event.rid == rid for token in event.ids]

    def reason(self, rid: str) -> str | None:
        return next(
            (event.finish_reason for event in self.events if isinstance(event, Token) and event.rid == rid and event.finish_reason), None
        )

    def cached(self, rid: str) -> list[int]:
        return [event.cached_tokens for event in self.events if isinstance(event, Accepted) and event.rid == rid]


def undisturbed(prompt: Sequence[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
        if tokens[-1] == 33:
            break
    return tokens[len(prompt) :]


@pytest.fixture
def kept() -> Iterator[Ledger]:
    with ledger(32) as made:
        yield made


def test_a_long_prompt_is_computed_in_pieces_beside_a_running_stream(kept: Ledger) -> None:
    bench = Bench(kept, tokens=8)
    bench.add("short", 3)
    bench.step()
    bench.add("long", range(100, 130))
    counts = [[(chunk.request.rid, chunk.count) for chunk in bench.step()] for _ in range(5)]
    assert counts[:4] == [[("short", 1), ("long", 7)]] * 4
    assert counts[4] == [("short", 1), ("long", 2)]
    assert bench.scheduler.phase is Phase.DECODE


def test_requests_start_in_the_order_they_came(kept: Ledger) -> None:
    bench = Bench(kept, batch=2)
    for rid in "abcd":
        bench.add(rid, 4)
    bench.step()
    assert (bench.scheduler.inflight, bench.scheduler.queued) == (2, 2)
    bench.finish()
    order = [event.rid for event in bench.events if isinstance(event, Accepted)]
    assert order == list("abcd")


def test_acceptance_comes_before_the_first_token_and_once(kept: Ledger) -> None:
    bench = Bench(kept)
    bench.add("a", 10)
    bench.finish()
    mine = [type(event).__name__ for event in bench.events]
    assert mine == ["Accepted"] + ["Token"] * 8
    accepted = bench.events[0]
    assert isinstance(accepted, Accepted) and accepted.prompt_ids == tuple(range(40, 50))


def test_a_prompt_seen_before_is_found_up_to_its_last_token(kept: Ledger) -> None:
    bench = Bench(kept)
    for rid, length in (("a", 16), ("b", 16), ("c", 17), ("d", 15)):
        bench.add(rid, length)
        bench.finish()
    assert bench.cached("a") == [0]
    assert bench.cached("b") == [12], "the last token must be computed, for its logits"
    assert bench.cached("c") == [16] and bench.cached("d") == [12]
    assert bench.ids("a") == bench.ids("b")


def test_a_dry_pool_preempts_the_newest_and_loses_nothing(kept: Ledger) -> None:
    with ledger(12) as small:
        bench = Bench(small, batch=4, tokens=64)
        prompts = {rid: [ord(rid)] * 6 for rid in "abcd"}
        for rid, prompt in prompts.items():
            bench.add(rid, prompt, max_tokens=24, max_total=48)
        preempted: set[str] = set()
        started: set[str] = set()
        while bench.scheduler.inflight or bench.scheduler.queued:
            bench.step()
            running = {request.rid for request in bench.scheduler._running}
            preempted |= {request.rid for request in bench.scheduler._waiting} & started
            started |= running
        assert preempted and "a" not in preempted, "the oldest is never the one to give way"
        for rid, prompt in prompts.items():
            assert bench.ids(rid) == undisturbed(prompt, 24)
            assert len(bench.cached(rid)) == 1
        small_pool = bench.pool
        assert small_pool.counts().free + small_pool.evictable == 12


def test_before_the_fence_a_dry_pool_makes_requests_wait(kept: Ledger) -> None:
    bench = Bench(kept, reserve=2, tokens=32)
    bench.add("a", 30, max_tokens=30)
    bench.step()
    successor = Bench(kept, reserve=2, fenced=False)
    successor.content = bench.content
    prompt = tuple(range(40, 70))
    successor.add("a", prompt, output=undisturbed(prompt, 1), max_tokens=30)
    successor.add("long", range(200, 240))
    plan = successor.step()
    assert [chunk.request.rid for chunk in plan] == ["a"], "what does not fit waits"
    for _ in range(10):
        successor.step()
    assert successor.step() == [] and successor.scheduler.inflight == 1, "the reserve is used up; nobody is preempted, nothing fails"
    successor.pool.fence()
    successor.finish()
    assert successor.ids("a") == undisturbed(prompt, 30)[1:] and successor.ids("long") == undisturbed(range(200, 240), 8)


def test_before_the_fence_a_request_that_fits_goes_past_one_that_does_not(kept: Ledger) -> None:
    Bench(kept, reserve=2)
    bench = Bench(kept, reserve=2, fenced=False)
    bench.add("long", range(200, 240))
    bench.add("short", 3, max_tokens=2)
    bench.step()
    bench.step()
    assert bench.reason("short") == "length" and bench.scheduler.queued == 1


def test_a_replayed_request_hits_all_its_full_blocks(kept: Ledger) -> None:
    bench = Bench(kept, reserve=4, tokens=64)
    prompt = tuple(range(40, 63))
    bench.add("a", prompt, max_tokens=20)
    for _ in range(9):
        bench.step()
    done = bench.ids("a")
    successor = Bench(kept, reserve=4, fenced=False, tokens=64)
    successor.content = bench.content
    successor.add("a", prompt, output=done, max_tokens=20)
    successor.pool.fence()
    successor.finish()
    total = len(prompt) + len(done)
    assert successor.cached("a") == [(total - 1) // BLOCK_TOKENS * BLOCK_TOKENS]
    assert done + successor.ids("a") == undisturbed(prompt, 20)


@pytest.mark.parametrize(
    ("output", "sampling", "reason"),
    [
        ([50] * 8, {}, "length"),
        ([50, 33], {}, "stop"),
        (CODEC.encode("xEND"), {"stop": ("END",)}, "stop"),
    ],
)
def test_a_replay_that_is_complete_ends_at_once(kept: Ledger, output: list[int], sampling: dict[str, Any], reason: str) -> None:
    bench = Bench(kept)
    bench.add("a", 5, output=output, **sampling)
    assert bench.scheduler.queued == 1, "its last event still has to be taken"
    assert bench.step() == []
    assert [type(event).__name__ for event in bench.events] == ["Accepted", "Token"]
    assert bench.reason("a") == reason and bench.ids("a") == []
    assert bench.scheduler.queued == 0 and "a" not in bench.scheduler


def test_end_of_sequence_has_no_text_but_is_a_token(kept: Ledger) -> None:
    bench = Bench(kept)
    prompt = next(ids for ids in ([40, at] for at in range(41, 200)) if next_token(ids) == 33)
    bench.add("a", prompt)
    bench.finish()
    last = bench.events[-1]
    assert isinstance(last, Token) and (last.ids, last.text, last.finish_reason) == ((33,), "", "stop")
    bench.add("b", prompt, ignore_eos=True)
    bench.finish()
    assert bench.reason("b") == "length" and len(bench.ids("b")) == 8


def test_the_context_limit_ends_a_request_without_max_tokens(kept: Ledger) -> None:
    bench = Bench(kept)
    bench.add("a", 10, max_tokens=None, max_total=30, ignore_eos=True)
    bench.finish()
    assert bench.reason("a") == "length" and len(bench.ids("a")) == 20


def test_a_cancelled_request_leaves_its_blocks_whatever_it_was_doing(kept: Ledger) -> None:
    bench = Bench(kept, batch=1, tokens=8)
    bench.add("running", 20)
    bench.add("waiting", 4)
    bench.step()
    bench.scheduler.cancel("running")
    bench.scheduler.cancel("waiting")
    bench.scheduler.cancel("unknown")
    assert (bench.scheduler.inflight, bench.scheduler.queued) == (0, 0)
    assert bench.pool.counts().free + bench.pool.evictable == 32
    assert bench.step() == []


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    lengths=st.lists(st.tuples(st.integers(1, 30), st.integers(1, 12), st.integers(0, 2)), min_size=1, max_size=8),
    blocks=st.integers(12, 40),
    batch=st.integers(1, 5),
    tokens=st.integers(5, 40),
    steps=st.integers(0, 30),
    late_fence=st.integers(0, 8),
)
def test_whatever_the_load_and_whenever_it_dies_each_request_gets_its_own_tokens(
    lengths: list[tuple[int, int, int]], blocks: int, batch: int, tokens: int, steps: int, late_fence: int
) -> None:
    with ledger(blocks) as kept:
        limit = (blocks - 2) * BLOCK_TOKENS
        wanted = {f"r{at}": ([50 + family] * length, count) for at, (length, count, family) in enumerate(lengths)}
        first = Bench(kept, reserve=2, batch=batch, tokens=max(tokens, batch))
        for rid, (prompt, count) in wanted.items():
            first.add(rid, prompt, max_tokens=count, max_total=limit)
        for _ in range(steps):
            first.step()
        second = Bench(kept, reserve=2, fenced=False, batch=batch, tokens=max(tokens, batch))
        second.content = first.content
        for rid, (prompt, count) in wanted.items():
            if first.reason(rid) is None:
                second.add(rid, prompt, output=first.ids(rid), max_tokens=count, max_total=limit)
        for _ in range(late_fence):
            second.step()
        second.pool.fence()
        second.finish()
        for rid, (prompt, count) in wanted.items():
            assert first.ids(rid) + second.ids(rid) == undisturbed(prompt, count)
        held = [block for block in range(blocks) if second.pool.refs(block)]
        assert not held, "every block was given back"
