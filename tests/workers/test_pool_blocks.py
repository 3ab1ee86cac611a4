"""What the block pool promises, one behaviour a test, over a real ledger."""

from __future__ import annotations

import numpy as np
import pytest
from pool_world import BLOCK_TOKENS, digests, fill, ledger

from shadowsup.memkeeper.errors import LedgerLost
from shadowsup.memkeeper.ledger import Follower, LedgerWriter
from shadowsup.workers.kv_pool import Filled, IndexMirror, KvPool


def test_a_released_prefix_is_found_again() -> None:
    with ledger(16) as kept:
        pool = kept.pool()
        blocks = fill(pool, 3)
        pool.release(blocks)
        assert pool.match(digests(5)) == blocks
        pool.acquire(blocks[:2])
        assert [pool.refs(block) for block in blocks] == [1, 1, 0]
        pool.check()


def test_nothing_is_trusted_before_it_is_published() -> None:
    with ledger(8) as kept:
        pool = kept.pool()
        blocks = pool.allocate(2)
        assert blocks is not None
        assert kept.valid() == set() and pool.match(digests(2)) == []
        pool.publish([Filled(blocks[0], digests(1)[0])])
        assert kept.valid() == {blocks[0]}


def test_just_enough_is_evicted_and_the_oldest_first() -> None:
    with ledger(10) as kept:
        pool = kept.pool(reserve=2)
        first, second = fill(pool, 4, family=1), fill(pool, 4, family=2)
        pool.release(first)
        pool.release(second)
        taken = pool.allocate(3)
        # The oldest sequence is eaten from its end, so what is left of it still is a prefix.
        assert taken == [first[3], first[2], first[1]]
        assert pool.match(digests(4, 1)) == first[:1] and pool.match(digests(4, 2)) == second
        assert kept.valid() == {first[0], *second}
        pool.check()


def test_using_a_prefix_again_saves_it_from_eviction() -> None:
    with ledger(10) as kept:
        pool = kept.pool(reserve=2)
        first, second = fill(pool, 4, family=1), fill(pool, 4, family=2)
        pool.release(first)
        pool.release(second)
        pool.acquire(first)
        pool.release(first)
        pool.allocate(2)
        assert pool.match(digests(4, 1)) == first and pool.match(digests(4, 2)) == second[:2]


def test_blocks_in_use_are_never_evicted() -> None:
    with ledger(10) as kept:
        pool = kept.pool(reserve=2)
        held = fill(pool, 6)
        assert pool.allocate(3) is None
        assert pool.allocate(2) is not None
        assert pool.match(digests(6)) == held


def test_a_request_for_too_many_blocks_changes_nothing() -> None:
    with ledger(10) as kept:
        pool = kept.pool(reserve=2)
        pool.release(fill(pool, 4))
        before = pool.counts()
        assert pool.allocate(9) is None
        assert pool.counts() == before and pool.match(digests(4)) != []


def test_an_entry_is_invalid_in_the_ledger_before_its_block_is_handed_out() -> None:
    with ledger(6) as kept:
        pool = kept.pool(reserve=2)
        pool.release(fill(pool, 4))
        blocks = pool.allocate(2)
        assert blocks is not None and not kept.valid() & set(blocks)


def test_equal_content_computed_twice_is_indexed_once() -> None:
    with ledger(8) as kept:
        pool = kept.pool()
        one, two = fill(pool, 2), fill(pool, 2)
        assert pool.match(digests(2)) == one and kept.valid() == set(one)
        pool.release(two)
        pool.release(one)
        pool.check()
        assert pool.match(digests(2)) == one


def test_releasing_what_nobody_holds_is_an_error() -> None:
    with ledger(8) as kept:
        pool = kept.pool()
        blocks = pool.allocate(1)
        assert blocks is not None
        pool.release(blocks)
        with pytest.raises(AssertionError):
            pool.release(blocks)


def test_a_successor_finds_what_was_published_in_the_order_of_its_use() -> None:
    with ledger(12) as kept:
        pool = kept.pool(reserve=2)
        first, second = fill(pool, 4, family=1), fill(pool, 4, family=2)
        pool.release(second)
        pool.release(first)
        successor = kept.pool(reserve=2)
        assert (successor.kept, successor.dropped) == (8, 0)
        assert successor.match(digests(4, 1)) == first
        successor.allocate(4)  # two were free
        assert successor.match(digests(4, 2)) == second[:2] and successor.match(digests(4, 1)) == first
        successor.check()


def test_before_the_fence_only_reserve_blocks_are_handed_out() -> None:
    with ledger(16) as kept:
        pool = kept.pool(reserve=3)
        pool.release(fill(pool, 4))
        pool.allocate(5)  # being written when the owner dies
        reserved = kept.reserved()
        successor = kept.pool(reserve=3, fenced=False)
        assert successor.counts().quarantined == 16 - 4 - 3
        assert successor.available == 3 and successor.allocate(4) is None
        taken = successor.allocate(3)
        assert taken is not None and set(taken) == reserved
        assert successor.match(digests(4)) != [] and len(kept.valid()) == 4, "nothing is evicted"
        successor.check()


def test_a_reserve_flag_is_cleared_before_the_block_is_handed_out() -> None:
    with ledger(16) as kept:
        kept.pool(reserve=3)
        successor = kept.pool(reserve=3, fenced=False)
        taken = successor.allocate(1)
        assert taken is not None and not kept.reserved() & set(taken)
        # Should this one die as well, its successor does not take the block for untouched.
        third = kept.pool(reserve=3, fenced=False)
        assert third.available == 2 and third.counts().quarantined == 14
        third.check()


def test_the_fence_frees_the_quarantine_and_fills_the_reserve() -> None:
    with ledger(16) as kept:
        pool = kept.pool(reserve=3)
        pool.release(fill(pool, 4))
        successor = kept.pool(reserve=3, fenced=False)
        blocks = successor.allocate(2)
        assert blocks is not None
        assert successor.fence() == 3
        assert successor.counts().quarantined == 0 and successor.counts().free == 16 - 4 - 2 - 3
        assert len(kept.reserved()) == 3 and not kept.reserved() & set(blocks)
        successor.check()
        assert successor.fence() == 3, "a second fence changes nothing"


def test_the_fence_evicts_for_the_reserve_but_not_what_is_in_use() -> None:
    with ledger(8) as kept:
        pool = kept.pool(reserve=2)
        pool.release(fill(pool, 6))
        successor = kept.pool(reserve=2, fenced=False)
        held = successor.match(digests(6))[:3]
        successor.acquire(held)
        assert successor.allocate(2) is not None
        assert successor.fence() == 2
        assert successor.match(digests(6))[:3] == held and len(kept.valid()) == 4
        successor.check()


def test_a_reserve_that_could_not_be_filled_is_filled_when_blocks_come_back() -> None:
    with ledger(6) as kept:
        pool = kept.pool(reserve=2)
        blocks = pool.allocate(4)
        assert blocks is not None
        successor = kept.pool(reserve=4, fenced=False)
        held = successor.allocate(2)
        assert held is not None
        assert successor.fence() == 4
        successor.release(held)
        assert successor.counts().reserve == 4 and successor.counts().free == 2
        successor.check()


def test_a_smaller_reserve_gives_the_rest_back_at_the_fence() -> None:
    with ledger(12) as kept:
        kept.pool(reserve=6)
        successor = kept.pool(reserve=2, fenced=False)
        assert successor.counts().reserve == 6, "before the fence all of them help"
        successor.fence()
        assert successor.counts().reserve == len(kept.reserved()) == 2 and successor.counts().free == 10
        successor.check()


def test_blocks_released_before_the_fence_may_be_written_again() -> None:
    with ledger(12) as kept:
        kept.pool(reserve=2)
        successor = kept.pool(reserve=2, fenced=False)
        blocks = successor.allocate(2)
        assert blocks is not None and successor.allocate(1) is None
        successor.release(blocks)
        again = successor.allocate(2)
        assert again is not None and set(again) == set(blocks)


def test_entries_that_cannot_be_used_are_withdrawn() -> None:
    with ledger(12) as kept:
        writer = kept.take()
        words = np.arange(8, dtype=np.uint64).reshape(4, 2)
        words[1] = words[0]  # two blocks that claim the same content
        writer.publish([1, 2, 3, 4], words, [BLOCK_TOKENS, BLOCK_TOKENS, BLOCK_TOKENS - 1, BLOCK_TOKENS], 5)
        pool = kept.pool()
        assert (pool.kept, pool.dropped) == (2, 2)
        assert len(kept.valid()) == 2 and 3 not in kept.valid() and 4 in kept.valid()
        pool.check()


def test_a_parked_copy_makes_restoring_cost_only_what_changed() -> None:
    with ledger(32) as kept:
        pool = kept.pool(reserve=2)
        follower, mirror = Follower(kept.reader()), IndexMirror(32)
        mirror.follow(follower)
        first = fill(pool, 4, family=1)
        pool.release(first)
        assert mirror.follow(follower) == 4
        assert mirror.follow(follower) == 0
        pool.allocate(28)  # takes two of the four away again
        second = fill_after(pool, family=2)
        assert mirror.follow(follower) > 0
        successor = kept.pool(reserve=2, index=mirror.index)
        assert successor.match(digests(4, 1)) == first[:2] and successor.match(digests(1, 2)) == second
        assert successor.kept == len(kept.valid())
        successor.check()


def fill_after(pool: KvPool, family: int) -> list[int]:
    """Publish one block out of those that are in use already."""
    block = next(block for block in range(pool.blocks) if pool.refs(block) and not pool.is_indexed(block))
    pool.publish([Filled(block, digests(1, family)[0])])
    return [block]


def test_a_stale_copy_is_put_right_at_promotion() -> None:
    with ledger(16) as kept:
        pool = kept.pool(reserve=2)
        mirror = IndexMirror(16)
        pool.release(fill(pool, 4, family=1))
        mirror.follow(Follower(kept.reader()))
        blocks = pool.allocate(14)
        assert blocks is not None
        pool.publish([Filled(blocks[-1], digests(1, 2)[0])])
        successor = kept.pool(reserve=2, index=mirror.index)
        assert successor.match(digests(4, 1)) == [] and successor.match(digests(1, 2)) == [blocks[-1]]
        assert successor.kept == 1
        successor.check()


def test_a_copy_of_another_ledger_is_forgotten() -> None:
    with ledger(16) as old, ledger(16) as new:
        mirror = IndexMirror(16)
        pool = old.pool()
        fill(pool, 4)
        mirror.follow(Follower(old.reader()))
        mirror.follow(Follower(new.reader()))
        assert len(mirror.index) == 0


def test_who_lost_the_ledger_gets_no_block() -> None:
    with ledger(8) as kept:
        pool = kept.pool(reserve=1)
        pool.release(fill(pool, 7))
        kept.pool(reserve=1)
        with pytest.raises(LedgerLost):
            pool.allocate(1)


def test_a_crash_between_any_two_stores_leaves_only_true_entries() -> None:
    """The owner stops at store number n of a life with publishing, eviction and reserve; whatever is valid then holds what it says."""

    class Crash(Exception):
        pass

    crashed = True
    at = 0
    while crashed:
        crashed = False
        with ledger(8) as kept:
            left = at

            def store(column: np.ndarray, index: object, values: object) -> None:  # type: ignore[type-arg]
                nonlocal left
                if left == 0:
                    raise Crash
                left -= 1
                column[index] = values  # type: ignore[index]

            content: dict[int, bytes] = {}
            try:
                pool = _pool_with(kept.take(store=store), 8)
                for family in range(4):
                    blocks = pool.allocate(3)
                    assert blocks is not None
                    for block in blocks:  # from here on the old content is gone
                        content[block] = b""
                    for block, digest in zip(blocks, digests(3, family), strict=True):
                        content[block] = digest
                    pool.publish([Filled(block, content[block]) for block in blocks])
                    pool.release(blocks)
            except Crash:
                crashed = True
            kept.epoch = max(kept.epoch, kept.reader().header().epoch)
            successor = kept.pool(reserve=1, fenced=False)
            for block in range(8):
                if successor.is_indexed(block):
                    assert successor.hash_of(block) == content[block]
            assert not kept.reserved() & set(content)
            successor.check()
        at += 1
    assert at > 20


def _pool_with(writer: LedgerWriter, blocks: int) -> KvPool:
    return KvPool(writer, blocks=blocks, block_tokens=BLOCK_TOKENS, reserve=1, fenced=True)


def test_a_guess_where_blocks_are_is_checked_and_saves_only_time() -> None:
    with ledger(16) as kept:
        pool = kept.pool()
        mine, other = fill(pool, 4, 1), fill(pool, 4, 2)
        hashes = digests(4, 1)
        assert pool.match(hashes, mine) == mine
        assert pool.match(hashes, mine[:2]) == mine
        assert pool.match(hashes, [*mine[:3], other[3]]) == mine
        assert pool.match(digests(4, 2), mine) == other
        assert pool.match(digests(6, 1), mine) == mine
        assert pool.match(hashes[:2], mine) == mine[:2]
        free = next(block for block in range(16) if block not in (*mine, *other))
        assert pool.match(hashes, [free]) == mine
