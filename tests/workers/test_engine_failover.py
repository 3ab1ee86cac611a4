"""One engine dies between two steps, another goes on over the same memory: what clients get, and controls that show the test can fail."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch
from engine_world import BLOCK, Host, Hosts, keeper_process, prompt_of, resume, submit, tiny_spec

from shadowsup.workers.scheduler import Chunk
from shadowsup.workers.transformers.adapter import TransformersEngine
from shadowsup.workers.transformers.attention import KvCache
from shadowsup.workers.transformers.batch import Piece
from shadowsup.workers.transformers.executor import Executor

keeper = pytest.fixture(scope="module")(keeper_process)

REQUESTS = [
    submit("greedy", prompt_of(37), max_tokens=50),
    submit("seeded", prompt_of(20, 1), max_tokens=45, temperature=1.0, seed=5),
    submit("filtered", prompt_of(55, 2), max_tokens=50, temperature=0.9, top_p=0.9, seed=6, frequency_penalty=0.4),
    submit("stopping", prompt_of(18, 3), max_tokens=50, temperature=1.0, seed=7, stop=(" 30", "zz"), min_tokens=12),
    submit("long", prompt_of(150, 4), max_tokens=30, temperature=1.0, seed=8),
]


@pytest.fixture
def hosts(keeper: str, request: pytest.FixtureRequest) -> Iterator[Hosts]:
    made = Hosts(keeper, request.node.name)
    yield made
    made.close()


@pytest.fixture(scope="module")
def undisturbed(keeper: str) -> dict[str, tuple[list[int], str, str | None]]:
    host = Host(keeper, tiny_spec(99), worker="undisturbed")
    try:
        host.promote()
        return {stream.submit.rid: (stream.ids, stream.text, stream.finish_reason) for stream in host.run(*REQUESTS)}
    finally:
        host.close()


def outcome(host: Host) -> dict[str, tuple[list[int], str, str | None]]:
    return {rid: (stream.ids, stream.text, stream.finish_reason) for rid, stream in host.streams.items()}


@pytest.mark.parametrize("steps", [0, 1, 3, 7, 20, 33, 60])
@pytest.mark.parametrize("fence_after", [0, 4])
def test_every_stream_continues_as_if_nothing_had_happened(
    hosts: Hosts, undisturbed: dict[str, tuple[list[int], str, str | None]], steps: int, fence_after: int
) -> None:
    first, shadow = hosts.start(tiny_spec(1, blocks=96)), hosts.start(tiny_spec(2, blocks=96))
    first.promote(1)
    first.submit(*REQUESTS)
    first.step(steps)
    shadow.follow()
    totals = {rid: len(stream.prompt_ids) + len(stream.ids) for rid, stream in first.streams.items()}
    started = {rid for rid, stream in first.streams.items() if stream.ids and not stream.done}
    died = first.die()
    kept, dropped = shadow.promote(2, fenced=False)
    assert dropped == 0 and kept >= sum((totals[rid] - 1) // BLOCK for rid in started)
    resume(shadow, died, 2)
    shadow.step(fence_after)
    shadow.engine.fence()
    shadow.finish()
    assert outcome(shadow) == undisturbed
    for rid in started:
        assert shadow.streams[rid].cached[-1] == (totals[rid] - 1) // BLOCK * BLOCK, "every full block is found"


def test_three_deaths_in_a_row_without_a_fence_between_them(
    hosts: Hosts, undisturbed: dict[str, tuple[list[int], str, str | None]]
) -> None:
    host = hosts.start(tiny_spec(1, blocks=96))
    host.promote(1)
    host.submit(*REQUESTS)
    host.step(9)
    for epoch in (2, 3, 4):
        died = host.die()
        host = hosts.start(tiny_spec(epoch, blocks=96))
        host.promote(epoch, fenced=False)
        resume(host, died, epoch)
        host.step(5)
    host.engine.fence()
    host.finish()
    assert outcome(host) == undisturbed


def test_scrambled_bytes_under_a_kept_index_change_the_output(
    hosts: Hosts, undisturbed: dict[str, tuple[list[int], str, str | None]]
) -> None:
    """P37: Negative control: the continuation really comes from the kept bytes."""
    first, shadow = hosts.start(tiny_spec(1, blocks=96)), hosts.start(tiny_spec(2, blocks=96))
    first.promote(1)
    first.submit(REQUESTS[0])
    first.step(20)
    assert first.arena is not None
    view = first.arena.view().view(np.float32)
    view[:] = np.roll(view, 4096)
    died = first.die()
    shadow.promote(2)
    resume(shadow, died, 2)
    assert shadow.finish()["greedy"].ids != undisturbed["greedy"][0]


class PublishesTooEarly(TransformersEngine):
    """Publishes what a step is going to fill before the step has run, and dies before it does: the mistake the journal's rule forbids."""

    def _compute(self, plan: Sequence[Chunk]) -> list[int]:
        scheduler = self._active()
        if any(chunk.start + chunk.count >= 5 * BLOCK for chunk in plan):
            scheduler.commit([Chunk(chunk.request, chunk.start, chunk.count, samples=False) for chunk in plan], [])
            raise KeyboardInterrupt("died here")
        return super()._compute(plan)


def wrong_blocks(host: Host, tokens: tuple[int, ...]) -> int:
    """How many trusted blocks of ``tokens`` do not hold what computing them again gives; the recomputation check."""
    engine = host.engine
    assert engine._loaded is not None and engine._executor is not None
    scheduler = engine._active()
    shape, count = engine._loaded.shape, len(tokens) // BLOCK
    found = scheduler.pool.match(host_hashes(host, tokens))
    fresh = KvCache(torch.zeros((count + 1) * shape.block_bytes, dtype=torch.uint8), shape, count + 1)
    Executor(engine._loaded.model, fresh, torch.device("cpu")).forward([Piece(tokens, 0, range(count + 1), False)])
    wrong = 0
    for at, block in enumerate(found):
        for layer in range(shape.layers):
            for kept, computed in zip(engine._executor.cache.pages[layer], fresh.pages[layer], strict=True):
                if not torch.allclose(kept[block], computed[at], rtol=1e-3, atol=1e-4):
                    wrong += 1
                    break
            else:
                continue
            break
    return wrong


def host_hashes(host: Host, tokens: tuple[int, ...]) -> list[bytes]:
    from shadowsup.memkeeper.hashing import chain_all

    assert host.ledger is not None
    return chain_all(host.ledger.header().salt, tokens, BLOCK)


@pytest.mark.parametrize(("factory", "wrong"), [(TransformersEngine, False), (PublishesTooEarly, True)])
def test_recomputing_trusted_blocks_tells_an_honest_journal_from_a_hasty_one(
    hosts: Hosts, factory: type[TransformersEngine], wrong: bool
) -> None:
    tokens = prompt_of(100)
    first = hosts.start(tiny_spec(1), factory)
    first.promote(1)
    first.submit(submit("a", tokens, max_tokens=2))
    try:
        first.finish()
    except KeyboardInterrupt:
        assert wrong
    first.die()
    shadow = hosts.start(tiny_spec(2))
    shadow.promote(2)
    assert len(shadow.engine._active().pool.match(host_hashes(shadow, tokens))) == 6
    assert (wrong_blocks(shadow, tokens) > 0) is wrong


def test_blocks_of_another_layout_are_a_miss(hosts: Hosts) -> None:
    import msgspec

    first = hosts.start(tiny_spec(1))
    first.promote(1)
    first.run(submit("a", prompt_of(60)))
    first.die()
    changed = msgspec.structs.replace(tiny_spec(2), dtype="bfloat16")
    other = hosts.start(changed)
    assert other.promote(2) == (0, 0)
    assert other.run(submit("a", prompt_of(60), epoch=2))[0].cached == [0]


def test_blocks_of_other_weights_are_a_miss(hosts: Hosts) -> None:
    from engine_world import TINY

    first = hosts.start(tiny_spec(1))
    first.promote(1)
    first.run(submit("a", prompt_of(60)))
    first.die()
    other = hosts.start(tiny_spec(2, config={**TINY, "initializer_range": 0.3}))
    assert other.promote(2) == (0, 0)


def test_a_shadow_that_warmed_up_has_not_touched_the_blocks(
    hosts: Hosts, undisturbed: dict[str, tuple[list[int], str, str | None]]
) -> None:
    first = hosts.start(tiny_spec(1, blocks=96))
    first.promote(1)
    first.submit(*REQUESTS)
    first.step(10)
    hosts.start(tiny_spec(2, blocks=96))
    hosts.start(tiny_spec(3, blocks=96))
    first.finish()
    assert outcome(first) == undisturbed


def test_an_engine_that_lost_the_ledger_says_so_at_its_next_step(hosts: Hosts) -> None:
    from shadowsup.memkeeper.errors import LedgerLost

    first, shadow = hosts.start(tiny_spec(1)), hosts.start(tiny_spec(2))
    first.promote(1)
    first.submit(submit("a", prompt_of(40)))
    shadow.promote(2)
    with pytest.raises(LedgerLost):
        first.step(20)
