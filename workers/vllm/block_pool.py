"""Seam: vLLM's `BlockPool` (0.26, 0.32), whose index is journalled in the ledger. The pool that the scheduler has made becomes one of
these.

vLLM enters a block into its index when it *schedules* the step that will write it. The ledger may hear of it only when that step has
finished: `take_fresh` says what was entered since the last call, and the scheduler hands it to `publish` when the step's output is there.
An entry is invalidated, and a reserve flag cleared, before the block is handed out.

Where a block is (block 0 is vLLM's null block, in none of these places):

* **in use**, **cached** (in the free queue, with a hash), **free** (in the free queue, without one): as in vLLM;
* **reserve**: set aside in the ledger, in no queue, for a successor that serves before its predecessor is fenced;
* before the fence the reserve is at the front of the queue and `_budget` says how much of the front may be handed out: what lies behind
  it may still be written by a dying engine, or is cached and must not be evicted.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import KVCacheBlock

from shadowsup.memkeeper.hashing import from_array, to_array
from shadowsup.memkeeper.ledger import RESERVE, Follower, LedgerReader, LedgerWriter
from shadowsup.wire.engine import KvCounts
from shadowsup.workers.vllm.hashing import SIZE

_GROUP = bytes(4)
"""vLLM appends the number of the KV cache group to a hash; there is one group."""

Fresh = tuple[int, bytes]
"""A block and the key it was entered under."""


class KeptBlockPool(BlockPool):
    """Made by `adopt`. Until `take` nothing may be allocated."""

    block_tokens: int
    _journal: LedgerWriter | None
    _follower: tuple[LedgerReader, Follower] | None
    _published: npt.NDArray[np.bool_]
    _used: npt.NDArray[np.bool_]
    """Handed out by this engine."""
    _pending: dict[int, bytes]
    """Entered in the index, and its step not finished."""
    _fresh: list[Fresh]
    _reserve: set[int]
    _reserve_target: int
    _budget: int | None
    _doomed: list[int] | None
    _tick: int
    _restoring: bool

    @classmethod
    def adopt(cls, pool: Any, *, block_tokens: int, reserve: int) -> KeptBlockPool:
        """Make ``pool``, which nobody has used yet, one of these; ``reserve``: blocks to keep set aside."""
        pool.__class__ = cls
        pool.block_tokens = block_tokens
        pool._journal = None
        pool._follower = None
        pool._published = np.zeros(pool.num_gpu_blocks, np.bool_)
        pool._used = np.zeros(pool.num_gpu_blocks, np.bool_)
        pool._pending, pool._fresh = {}, []
        pool._reserve, pool._reserve_target = set(), reserve
        pool._budget, pool._doomed = None, None
        pool._tick = 1
        pool._restoring = False
        found: KeptBlockPool = pool
        return found

    # --- parked ------------------------------------------------------------------------------------------------------------------

    def follow(self, ledger: LedgerReader) -> None:
        """Bring the index up to date with the ledger."""
        if self._follower is None or self._follower[0] is not ledger:
            self._follower = (ledger, Follower(ledger))
            changed, follower = np.arange(self.num_gpu_blocks), self._follower[1]
            follower.update()
        else:
            follower = self._follower[1]
            changed = follower.update()
        if len(changed):
            usable = follower.valid[changed] & (follower.tokens[changed] == self.block_tokens)
            self._enter(changed, usable, follower.hashes[changed])

    def _enter(self, ids: npt.NDArray[np.intp], valid: npt.NDArray[np.bool_], hashes: npt.NDArray[np.uint64]) -> None:
        """Make the index say of blocks ``ids`` what ``valid`` and ``hashes`` (a row an id) say; costs what differs."""
        self._restoring = True
        try:
            for block_id, known, digest in zip(ids.tolist(), valid.tolist(), from_array(hashes), strict=True):
                block = self.blocks[block_id]
                key = digest + _GROUP if known and not block.is_null else None
                if block.block_hash != key:
                    if block.block_hash is not None:
                        self._remove_cached_block_hashes(block)
                    if key is not None:
                        self._insert_block_hash(key, block, num_tokens=self.block_tokens)
        finally:
            self._restoring = False

    # --- promotion and fence -----------------------------------------------------------------------------------------------------

    def take(self, journal: LedgerWriter, *, fenced: bool) -> tuple[int, int]:
        """The blocks are ours: restore the index and order the free queue. Returns (blocks kept, blocks dropped)."""
        entries = journal.entries()
        usable = (entries.tokens == self.block_tokens) & ((entries.flags & RESERVE) == 0) & (entries.ids != 0)
        valid = np.zeros(self.num_gpu_blocks, np.bool_)
        hashes = np.zeros((self.num_gpu_blocks, 2), np.uint64)
        valid[entries.ids[usable]] = True
        hashes[entries.ids] = entries.hashes
        known = np.fromiter((block.block_hash is not None for block in self.blocks), np.bool_, self.num_gpu_blocks)
        # What the follower has seen needs no second look; the rest, and everything if there was no follower, is entered now.
        follower = self._follower[1] if self._follower is not None else None
        seen = known & valid & (follower.hashes == hashes).all(axis=1) if follower is not None else np.zeros_like(valid)
        todo = np.flatnonzero((valid | known) & ~seen)
        self._enter(todo, valid[todo], hashes[todo])
        dropped = entries.ids[~usable]
        if len(dropped):
            journal.invalidate(dropped)
        self._journal = journal
        self._published = valid
        self._tick = int(entries.last_use.max(initial=np.uint64(0))) + 1
        reserve = journal.reserve()
        self._reserve = set(reserve[reserve != 0].tolist())
        free = ~valid
        free[0] = False
        free[list(self._reserve)] = False
        by_age = entries.ids[usable][np.argsort(entries.last_use[usable], kind="stable")]
        self._relink([*sorted(self._reserve), *np.flatnonzero(free).tolist(), *by_age.tolist()])
        self._budget = len(self._reserve)
        self._follower = None
        if fenced:
            self.fence()
        return int(np.count_nonzero(valid)), len(dropped)

    def fence(self) -> int:
        """No former engine writes any more: every block may be used, the reserve is set aside. Returns its size."""
        journal, queue = self._journal, self.free_block_queue
        assert journal is not None
        if self._budget is not None:
            self._budget = None
            for block_id in self._reserve:  # what was not used of it stays set aside
                queue.remove(self.blocks[block_id])
        surplus = sorted(self._reserve)[self._reserve_target :]
        if surplus:  # an owner with a larger reserve set them aside
            journal.clear_reserve(surplus)
            self._reserve.difference_update(surplus)
            queue.append_n([self.blocks[block_id] for block_id in surplus])
        chosen = self._set_aside(self._reserve_target - len(self._reserve))
        if chosen:
            self._doomed = []
            for block in chosen:
                queue.remove(block)
                self._maybe_evict_cached_block(block)
            self._bury(journal)
            ids = [block.block_id for block in chosen]
            journal.set_reserve(ids)
            self._reserve.update(ids)
        return len(self._reserve)

    def _set_aside(self, count: int) -> list[Any]:
        """Choose ``count`` blocks for the reserve, the least useful first. Not one that this engine has handed out: a step in flight
        may still write to a block whose request has just ended, and the next engine would be given it as untouched."""
        found: list[Any] = []
        block = self.free_block_queue.fake_free_list_head.next_free_block
        while len(found) < count and block is not None and block.block_id >= 0:
            if not self._used[block.block_id]:
                found.append(block)
            block = block.next_free_block
        return found

    def _relink(self, order: Sequence[int]) -> None:
        """Make the free queue hold these blocks, the first to be handed out first."""
        queue, blocks = self.free_block_queue, self.blocks
        last = queue.fake_free_list_head
        for block_id in order:
            block = blocks[block_id]
            last.next_free_block, block.prev_free_block = block, last
            last = block
        tail = queue.fake_free_list_tail
        last.next_free_block, tail.prev_free_block = tail, last
        queue.num_free_blocks = len(order)

    # --- the commit rule ---------------------------------------------------------------------------------------------------------

    def take_fresh(self) -> list[Fresh]:
        """Return what was entered in the index since the last call."""
        fresh, self._fresh = self._fresh, []
        return fresh

    def publish(self, written: Sequence[Fresh]) -> None:
        """The steps that write these blocks have finished. What was evicted meanwhile is left out.

        Raises:
            LedgerLost: another engine owns the ledger.
        """
        pending = self._pending
        rows = [(block, key) for block, key in written if pending.get(block) == key]
        if not rows or self._journal is None:
            return
        ids = np.asarray([block for block, _ in rows], dtype=np.intp)
        self._journal.publish(ids, to_array([key[:SIZE] for _, key in rows]), self.block_tokens, self._ticks(len(ids)))
        self._published[ids] = True
        for block, _ in rows:
            del pending[block]

    def _ticks(self, count: int) -> npt.NDArray[np.uint64]:
        ticks = np.arange(self._tick, self._tick + count, dtype=np.uint64)
        self._tick += count
        return ticks

    def _bury(self, journal: LedgerWriter) -> None:
        doomed, self._doomed = self._doomed, None
        if doomed:
            journal.invalidate(doomed)

    # --- what vLLM calls -----------------------------------------------------------------------------------------------------------
    # In a failover all blocks of all requests pass `get_cached_block` and `touch` within one step, where a microsecond for each is 15 ms
    # (32 conversations of 8,000 tokens). These do what vLLM's do, in less time.

    def get_cached_block(self, block_hash: bytes, kv_cache_group_ids: list[int]) -> list[Any] | None:
        found = self.cached_block_hash_to_block._cache.get(block_hash + _GROUP)
        if found.__class__ is KVCacheBlock and len(kv_cache_group_ids) == 1:
            return [found]
        cached: list[Any] | None = super().get_cached_block(block_hash, kv_cache_group_ids)
        return cached

    def touch(self, blocks: Sequence[Any]) -> None:
        if self.metrics_collector is not None:
            super().touch(blocks)
            return
        left = 0
        for block in blocks:
            if block.ref_cnt == 0 and not block.is_null:
                before, after = block.prev_free_block, block.next_free_block
                if before is None or after is None:  # of the reserve, say: that must not be
                    self.free_block_queue.num_free_blocks -= left
                    self.free_block_queue.remove(block)  # vLLM's error
                before.next_free_block, after.prev_free_block = after, before
                block.prev_free_block = block.next_free_block = None
                left += 1
            block.ref_cnt += 1
        self.free_block_queue.num_free_blocks -= left

    def _insert_block_hash(self, block_hash_with_group_id: bytes, block: Any, num_tokens: int | None) -> None:
        super()._insert_block_hash(block_hash_with_group_id, block, num_tokens)
        if not self._restoring and block.block_hash == block_hash_with_group_id and not self._published[block.block_id]:
            self._pending[block.block_id] = block_hash_with_group_id
            self._fresh.append((block.block_id, block_hash_with_group_id))

    def _remove_cached_block_hashes(self, block: Any) -> Any:
        block_id = block.block_id
        if not self._restoring:
            self._pending.pop(block_id, None)
            if self._published[block_id]:
                self._published[block_id] = False
                if self._doomed is not None:
                    self._doomed.append(block_id)
                elif self._journal is not None:
                    self._journal.invalidate([block_id])
        return super()._remove_cached_block_hashes(block)

    def get_num_free_blocks(self) -> int:
        free: int = super().get_num_free_blocks()
        return free if self._budget is None else min(self._budget, free)

    def to_hand_out(self, count: int, hits: Sequence[Sequence[Any]]) -> int:
        """Return what a request takes of `get_num_free_blocks`.

        vLLM counts hits that nobody uses yet, because they leave the free queue. Before the fence that number is of blocks to write to,
        and a hit is only read: a failover would wait for the fence if it counted.

        Args:
            count: vLLM's.
            hits: by KV cache group.
        """
        if self._budget is None or count > super().get_num_free_blocks():
            return count
        return count - sum(block.ref_cnt == 0 and not block.is_null for group in hits for block in group)

    def get_usage(self) -> float:
        blocks = self.num_gpu_blocks - 1 - (len(self._reserve) if self._budget is None else 0)
        return 1.0 - super().get_num_free_blocks() / blocks if blocks > 0 else 0.0

    def get_new_blocks(self, num_blocks: int) -> list[Any]:
        journal = self._journal
        if journal is None:
            raise AssertionError("blocks are asked for while this engine is parked")
        self._doomed = []
        taken: list[Any] = super().get_new_blocks(num_blocks)
        self._bury(journal)
        ids = [block.block_id for block in taken]
        self._used[ids] = True
        if self._budget is not None:
            self._budget -= num_blocks
            set_aside = self._reserve.intersection(ids)
            if set_aside:
                journal.clear_reserve(sorted(set_aside))
                self._reserve -= set_aside
        return taken

    def free_blocks(self, ordered_blocks: Iterable[Any]) -> None:
        blocks = list(ordered_blocks)
        super().free_blocks(blocks)
        idle = [block for block in blocks if block.ref_cnt == 0 and not block.is_null]
        cached = [block.block_id for block in idle if block.block_hash is not None and self._published[block.block_id]]
        if cached and self._journal is not None:
            self._journal.touch(cached, self._ticks(len(cached)))
        if self._budget is not None:  # written under this very epoch: safe to write again, and at the front of the queue
            self._budget += sum(block.block_hash is None for block in idle)

    def reset_prefix_cache(self) -> bool:
        journal = self._journal
        if journal is None:
            return bool(super().reset_prefix_cache())
        if self._budget is not None:
            return False
        # vLLM counts what is in no queue as in use.
        aside = [self.blocks[block_id] for block_id in sorted(self._reserve)]
        self.free_block_queue.append_n(aside)
        try:
            done = bool(super().reset_prefix_cache())
        finally:
            for block in aside:
                self.free_block_queue.remove(block)
        if done:
            journal.invalidate(np.flatnonzero(self._published))
            self._published[:] = False
            self._pending.clear()
            self._fresh.clear()
        return done

    # --- figures ---------------------------------------------------------------------------------------------------------------------

    def counts(self) -> KvCounts:
        free = int(super().get_num_free_blocks())
        # Cached blocks are in vLLM's queue too; those that somebody uses are not worth a walk over all blocks.
        valid = int(np.count_nonzero(self._published))
        return KvCounts(
            blocks=self.num_gpu_blocks,
            valid=valid,
            free=max(0, free - valid),
            quarantined=0 if self._budget is None else max(0, free - self._budget),
            reserve=len(self._reserve),
        )
