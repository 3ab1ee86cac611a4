"""vLLM's own block pool, journalled: what the ledger says at any moment is true of the blocks, whoever reads it then."""

from __future__ import annotations

import os
import random
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import vllm_world

from shadowsup.memkeeper.hashing import from_array
from shadowsup.memkeeper.ledger import LedgerReader, LedgerWriter, initialise, ledger_size

pytestmark = pytest.mark.vllm
if not vllm_world.importable():
    pytest.skip("vLLM is not in this environment (make vllm)", allow_module_level=True)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of what vLLM imports
    from vllm.v1.core.block_pool import BlockPool

    from shadowsup.workers.vllm.block_pool import KeptBlockPool

BLOCKS, BLOCK, RESERVE = 17, 32, 3
GROUP = bytes(4)


@pytest.fixture
def ledger() -> Iterator[int]:
    fd = os.memfd_create("shadowsup-test", os.MFD_CLOEXEC)
    os.ftruncate(fd, ledger_size(BLOCKS))
    initialise(fd, blocks=BLOCKS, block_tokens=BLOCK, fingerprint=bytes(16), salt=bytes(16))
    yield fd
    os.close(fd)


def parked(kind: type[KeptBlockPool] = KeptBlockPool) -> KeptBlockPool:
    return kind.adopt(BlockPool(BLOCKS, True, BLOCK), block_tokens=BLOCK, reserve=RESERVE)


def promoted(ledger: int, epoch: int = 1, *, fenced: bool = True, kind: type[KeptBlockPool] = KeptBlockPool) -> KeptBlockPool:
    pool = parked(kind)
    pool.take(LedgerWriter.take(ledger, owner=epoch, epoch=epoch), fenced=fenced)
    return pool


def key(number: int) -> bytes:
    return number.to_bytes(16, "big") + GROUP


def schedule(pool: KeptBlockPool, *numbers: int) -> tuple[list[Any], list[tuple[int, bytes]]]:
    """Give out a block for each number and enter it in the index, as vLLM does when it schedules the step that writes them."""
    blocks = pool.get_new_blocks(len(numbers))
    for block, number in zip(blocks, numbers, strict=True):
        pool._insert_block_hash(key(number), block, num_tokens=BLOCK)
    return blocks, pool.take_fresh()


def cached(pool: KeptBlockPool, number: int) -> Any:
    return pool.cached_block_hash_to_block.get_one_block(key(number))


def said(ledger: int) -> dict[int, bytes]:
    """What a successor would believe now."""
    reader = LedgerReader(ledger)
    try:
        found = reader.snapshot()
        ids = np.flatnonzero(found.valid)
        return dict(zip(ids.tolist(), from_array(found.hashes[ids]), strict=True))
    finally:
        reader.close()


def nothing_unwritten_is_said(pool: KeptBlockPool, ledger: int) -> None:
    """The check: between the schedule and the output of a step the ledger has none of its blocks."""
    schedule(pool, 1, 2)
    assert said(ledger) == {}


def test_a_block_is_entered_in_the_ledger_when_its_step_has_finished(ledger: int) -> None:
    pool = promoted(ledger)
    nothing_unwritten_is_said(pool, ledger)
    blocks, written = schedule(pool, 3)
    pool.publish(written)
    assert said(ledger) == {blocks[0].block_id: key(3)[:16]}


def test_a_pool_that_publishes_what_it_schedules_would_be_found_out(ledger: int) -> None:
    class Hasty(KeptBlockPool):
        def _insert_block_hash(self, block_hash_with_group_id: bytes, block: Any, num_tokens: int | None) -> None:
            super()._insert_block_hash(block_hash_with_group_id, block, num_tokens)
            self.publish(self.take_fresh())

    with pytest.raises(AssertionError):
        nothing_unwritten_is_said(promoted(ledger, kind=Hasty), ledger)


def test_a_block_that_was_given_away_meanwhile_is_not_entered(ledger: int) -> None:
    pool = promoted(ledger)
    blocks, written = schedule(pool, 1)
    pool.free_blocks(blocks)
    everything = pool.get_new_blocks(pool.get_num_free_blocks())
    assert blocks[0] in everything
    pool.publish(written)
    assert said(ledger) == {}


def test_an_entry_is_withdrawn_before_its_block_is_handed_out(ledger: int) -> None:
    pool = promoted(ledger)
    blocks, written = schedule(pool, 1, 2)
    pool.publish(written)
    pool.free_blocks(reversed(blocks))
    assert len(said(ledger)) == 2
    taken = {block.block_id for block in pool.get_new_blocks(pool.get_num_free_blocks())}
    assert {block.block_id for block in blocks} <= taken
    assert said(ledger) == {}


def test_a_successor_finds_what_was_written_and_evicts_the_oldest_first(ledger: int) -> None:
    pool = promoted(ledger)
    for number in range(1, 7):
        blocks, written = schedule(pool, number)
        pool.publish(written)
        pool.free_blocks(blocks)
    pool.touch([cached(pool, 2)])
    pool.free_blocks([cached(pool, 2)])
    schedule(pool, 9)  # its step never finishes
    successor = parked()
    reader = LedgerReader(ledger)
    successor.follow(reader)
    assert successor.take(LedgerWriter.take(ledger, owner=2, epoch=2), fenced=True) == (6, 0)
    reader.close()
    assert cached(successor, 9) is None
    kept = {number: cached(successor, number).block_id for number in range(1, 7)}
    assert kept == {number: cached(pool, number).block_id for number in range(1, 7)}
    # 16 blocks but the null one; 3 in reserve, 7 free: the next two are the oldest, and 2 has been used since.
    given = [block.block_id for block in successor.get_new_blocks(successor.get_num_free_blocks() - 4)]
    assert given[-2:] == [kept[1], kept[3]]


def test_before_the_fence_only_the_reserve_is_written_and_nothing_is_evicted(ledger: int) -> None:
    pool = promoted(ledger)
    blocks, written = schedule(pool, 1, 2, 3)
    pool.publish(written)
    pool.free_blocks(reversed(blocks))
    aside = set(pool._reserve)
    assert len(aside) == RESERVE
    successor = promoted(ledger, 2, fenced=False)
    assert successor.get_num_free_blocks() == RESERVE
    assert successor.reset_prefix_cache() is False
    taken = successor.get_new_blocks(RESERVE)
    assert {block.block_id for block in taken} == aside
    assert successor.get_num_free_blocks() == 0
    with pytest.raises(ValueError, match="free blocks"):
        successor.get_new_blocks(1)
    hit = cached(successor, 2)
    # A hit is read only: of what may be handed out it takes nothing, unless the queue has not even that many.
    assert successor.to_hand_out(1, [[hit]]) == 0 and successor.to_hand_out(BLOCKS, [[hit]]) == BLOCKS
    successor.touch([hit])
    assert successor.to_hand_out(2, [[hit]]) == 2
    successor.free_blocks([hit, taken[0]])
    assert successor.get_num_free_blocks() == 1
    assert successor.get_new_blocks(1) == [taken[0]]
    assert len(said(ledger)) == 3
    # A second successor must not take what the first may have written for untouched.
    assert LedgerWriter.take(ledger, owner=3, epoch=3).reserve().tolist() == []


def test_after_the_fence_every_block_is_used_and_a_reserve_is_set_aside(ledger: int) -> None:
    pool = promoted(ledger)
    blocks, written = schedule(pool, 1, 2, 3)
    pool.publish(written)
    pool.free_blocks(blocks)
    successor = promoted(ledger, 2, fenced=False)
    hit = cached(successor, 2)
    assert successor.to_hand_out(1, [[hit]]) == 0
    mine = successor.get_new_blocks(2)
    assert successor.fence() == RESERVE
    assert successor.get_num_free_blocks() == BLOCKS - 1 - RESERVE - len(mine)
    assert not {block.block_id for block in mine} & successor._reserve
    assert successor.get_usage() == pytest.approx(len(mine) / (BLOCKS - 1 - RESERVE))


def test_a_reset_empties_the_ledger(ledger: int) -> None:
    pool = promoted(ledger)
    blocks, written = schedule(pool, 1, 2)
    pool.publish(written)
    assert pool.reset_prefix_cache() is False  # they are in use
    pool.free_blocks(blocks)
    assert pool.reset_prefix_cache() is True
    assert said(ledger) == {}
    assert cached(pool, 1) is None
    assert pool.get_num_free_blocks() == BLOCKS - 1 - RESERVE


@pytest.mark.parametrize("seed", range(20))
def test_whatever_happens_the_ledger_says_what_is_cached(ledger: int, seed: int) -> None:
    rng = random.Random(seed)
    pool, epoch = promoted(ledger), 1
    running: list[Any] = []
    steps: list[list[tuple[int, bytes]]] = []
    written: dict[int, bytes] = {}
    for number in range(1, 400):
        match rng.randrange(6):
            case 0 | 1 if pool.get_num_free_blocks() and len(steps) < 2:
                blocks, fresh = schedule(pool, number)
                running += blocks
                steps.append(fresh)
                written.pop(blocks[0].block_id, None)
            case 2 if steps:
                fresh = steps.pop(0)
                pool.publish(fresh)
                written |= dict(fresh)
            case 3 if running:
                pool.free_blocks([running.pop(rng.randrange(len(running)))])
            case 4 if written and (hit := cached(pool, int.from_bytes(rng.choice(list(written.values()))[:16], "big"))):
                pool.touch([hit])
                running.append(hit)
            case 5 if rng.random() < 0.1:  # it dies, and a successor comes
                epoch += 1
                pool = promoted(ledger, epoch, fenced=False)
                running, steps = [], []
            case _ if rng.random() < 0.2:
                pool.fence()
        for block_id, digest in said(ledger).items():
            assert pool.blocks[block_id].block_hash == digest + GROUP
            assert written[block_id] == digest + GROUP, "a block is said to hold what was never written to it"
            assert block_id not in pool._reserve


def test_hits_are_found_and_taken_as_vllm_does_it(ledger: int) -> None:
    """Same blocks, same queue, same counts, also where a hash has several blocks."""
    rng = random.Random(0)
    ours, theirs = promoted(ledger), BlockPool(BLOCKS, True, BLOCK)
    theirs_free = [block.block_id for block in ours.free_block_queue.get_all_free_blocks()]
    theirs.free_block_queue.get_all_free_blocks()
    for block in list(theirs.free_block_queue.get_all_free_blocks()):
        if block.block_id not in theirs_free:
            theirs.free_block_queue.remove(block)  # the reserve
    held: list[tuple[list[Any], list[Any]]] = []

    def queue(pool: Any) -> list[int]:
        return [block.block_id for block in pool.free_block_queue.get_all_free_blocks()]

    for turn in range(600):
        assert ours.free_block_queue.num_free_blocks == theirs.free_block_queue.num_free_blocks
        what = rng.random()
        if what < 0.3 and queue(ours):
            number = rng.randrange(8)  # few: the same hash is entered for several blocks
            pair = []
            for pool in (ours, theirs):
                [block] = pool.get_new_blocks(1)
                if block.block_hash is None:
                    pool._insert_block_hash(key(number), block, num_tokens=BLOCK)
                pair.append([block])
            held.append((pair[0], pair[1]))
        elif what < 0.6 and held:
            for pool, blocks in zip((ours, theirs), held.pop(rng.randrange(len(held))), strict=True):
                pool.free_blocks(blocks)
        else:
            hits = [pool.get_cached_block(key(rng_number)[:16], [0]) for rng_number in [rng.randrange(8)] for pool in (ours, theirs)]
            assert [hit and [block.block_id for block in hit] for hit in hits[:1]] == [
                hit and [block.block_id for block in hit] for hit in hits[1:]
            ], turn
            if hits[0] and hits[1]:
                for pool, hit in zip((ours, theirs), hits, strict=True):
                    pool.touch(hit)
                held.append((hits[0], hits[1]))
        assert [block.ref_cnt for block in ours.blocks] == [block.ref_cnt for block in theirs.blocks]
    assert held


def test_a_hit_that_is_in_no_queue_is_told_by_name_and_the_count_stays_right(ledger: int) -> None:
    """It would be one that is set aside."""
    pool = promoted(ledger)
    (block,), written = schedule(pool, 1)
    pool.publish(written)
    pool.free_blocks([block])
    aside = pool.blocks[min(pool._reserve)]
    with pytest.raises(RuntimeError, match=f"block_id={aside.block_id}|{aside.block_id}"):
        pool.touch([block, aside])
    assert pool.free_block_queue.num_free_blocks == len(pool.free_block_queue.get_all_free_blocks())
