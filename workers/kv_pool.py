"""Which KV block holds what: prefix index, reference counts, eviction, the reserve and the quarantine before the fence. No torch here.

A block is in exactly one of these places:

* **in use**: some request refers to it (``refs > 0``); it may be indexed as well;
* **cached**: indexed and referred to by nobody; the least recently used are evicted, just as many as are needed;
* **free**: its content is worth nothing and no former engine can still be writing to it;
* **reserve**: set aside in the ledger, for a successor that serves before its predecessor is fenced;
* **quarantined**: not valid when an engine was promoted before the fence, so its predecessor's kernels may still be writing to it.

Before the fence only reserve blocks are handed out and nothing is evicted. The journal (the ledger) always hears of a change in the order
that a crash at any instant leaves true: a reserve flag is cleared, an entry is invalidated *before* the block is handed out; an entry is
published only by `publish`, which the caller calls when the step that filled the blocks has finished.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from shadowsup.memkeeper.hashing import from_array, to_array
from shadowsup.memkeeper.ledger import RESERVE, Entries, Follower
from shadowsup.wire.engine import KvCounts

_EVICTION_WINDOW = 256
"""Blocks sorted by age at once: one partial sort over all blocks serves this many evictions."""


class Journal(Protocol):
    """What the pool needs of `shadowsup.memkeeper.ledger.LedgerWriter`."""

    def publish(self, ids: npt.ArrayLike, hashes: npt.ArrayLike, tokens: npt.ArrayLike, last_use: npt.ArrayLike) -> None: ...
    def invalidate(self, ids: npt.ArrayLike) -> None: ...
    def touch(self, ids: npt.ArrayLike, last_use: npt.ArrayLike) -> None: ...
    def set_reserve(self, ids: npt.ArrayLike) -> None: ...
    def clear_reserve(self, ids: npt.ArrayLike) -> None: ...
    def reserve(self) -> npt.NDArray[np.intp]: ...
    def entries(self) -> Entries: ...


class PrefixIndex:
    """Hash ↔ block, one block a hash. ``words``: the hashes as stored in the ledger, (blocks, 2) u64, meaningful where ``held``."""

    def __init__(self, blocks: int) -> None:
        self.held: npt.NDArray[np.bool_] = np.zeros(blocks, np.bool_)
        self.words: npt.NDArray[np.uint64] = np.zeros((blocks, 2), np.uint64)
        self._block_of: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}

    def __len__(self) -> int:
        return len(self._hash_of)

    def find(self, digest: bytes) -> int | None:
        return self._block_of.get(digest)

    def hash_of(self, block: int) -> bytes | None:
        return self._hash_of.get(block)

    def add(self, block: int, digest: bytes, words: npt.NDArray[np.uint64]) -> bool:
        """Index ``block``; False (and nothing changed) when another block already holds this content."""
        if self._block_of.setdefault(digest, block) != block:
            return False
        self._hash_of[block] = digest
        self.words[block] = words
        self.held[block] = True
        return True

    def remove(self, block: int) -> None:
        """Forget ``block``; one that is not indexed is ignored."""
        digest = self._hash_of.pop(block, None)
        if digest is not None:
            del self._block_of[digest]
            self.held[block] = False

    def sync(self, ids: npt.NDArray[np.intp], valid: npt.NDArray[np.bool_], words: npt.NDArray[np.uint64]) -> None:
        """Make the entries of ``ids`` what ``valid`` and ``words`` (a row an id) say; costs what differs.

        Of several blocks with the same content one is indexed.
        """
        differs = self.held[ids] != valid
        differs |= valid & (self.words[ids] != words).any(axis=1)
        rows = np.flatnonzero(differs)
        for block in ids[rows].tolist():
            self.remove(block)
        rows = rows[valid[rows]]
        for block, digest, row in zip(ids[rows].tolist(), from_array(words[rows]), words[rows], strict=True):
            self.add(block, digest, row)


class IndexMirror:
    """A parked engine's copy of the owner's prefix index, so that a promotion costs what changed since the last look."""

    def __init__(self, blocks: int) -> None:
        self.index = PrefixIndex(blocks)
        self._follower: Follower | None = None

    def follow(self, follower: Follower) -> int:
        """Catch up with the ledger; returns how many blocks had changed."""
        ids = follower.update()
        if follower is not self._follower:  # another ledger: nothing that was known of the old one counts
            self._follower = follower
            ids = np.arange(len(follower.valid))
        if len(ids):
            self.index.sync(ids, follower.valid[ids], follower.hashes[ids])
        return len(ids)


@dataclass(frozen=True, slots=True)
class Filled:
    """A block that a finished step completed, and the chained hash of what it holds."""

    block: int
    digest: bytes


class KvPool:
    """The blocks of one worker, under one owner. Made at promotion.

    Args:
        journal: the ledger, ours.
        reserve: blocks to keep set aside once the fence has passed.
        fenced: False while a predecessor's kernels may still write.
        index: a mirror's index to start from (adopted, not copied); it only saves time.
    """

    def __init__(
        self, journal: Journal, *, blocks: int, block_tokens: int, reserve: int, fenced: bool, index: PrefixIndex | None = None
    ) -> None:
        self.blocks = blocks
        self.block_tokens = block_tokens
        self.fenced = False
        self.kept = 0
        self.dropped = 0
        self._journal = journal
        self._reserve_target = reserve
        self._index = index if index is not None else PrefixIndex(blocks)
        self._refs: npt.NDArray[np.int32] = np.zeros(blocks, np.int32)
        self._last_use: npt.NDArray[np.uint64] = np.zeros(blocks, np.uint64)
        self._tick = 1
        self._free: deque[int] = deque()
        self._oldest: deque[tuple[int, int]] = deque()
        self._restore()
        self._reserve: deque[int] = deque(int(block) for block in journal.reserve())
        if fenced:
            self.fence()

    # --- looking ---------------------------------------------------------------------------------------------------------------

    @property
    def capacity(self) -> int:
        """Blocks that requests can ever have at once."""
        return self.blocks - self._reserve_target

    @property
    def available(self) -> int:
        """Blocks that `allocate` could hand out now."""
        if not self.fenced:
            return len(self._free) + len(self._reserve)
        return len(self._free) + self.evictable

    @property
    def evictable(self) -> int:
        """Cached blocks that nobody uses."""
        return int(np.count_nonzero(self._index.held & (self._refs == 0)))

    def match(self, hashes: Sequence[bytes], guess: Sequence[int] = ()) -> list[int]:
        """Return the blocks that hold the longest known prefix of ``hashes`` (chained hashes of successive full blocks).

        Args:
            guess: blocks that probably hold the first of them. Checking is a tenth of looking up, and nothing is taken on trust.
        """
        found: list[int] = []
        if guess and len(guess) <= len(hashes):
            ids = np.asarray(guess, dtype=np.intp)
            words = to_array(hashes[: len(guess)])
            if self._index.held[ids].all() and (self._index.words[ids] == words).all():
                found = list(guess)
        for digest in hashes[len(found) :]:
            block = self._index.find(digest)
            if block is None:
                break
            found.append(block)
        return found

    def refs(self, block: int) -> int:
        return int(self._refs[block])

    def is_indexed(self, block: int) -> bool:
        return bool(self._index.held[block])

    def hash_of(self, block: int) -> bytes | None:
        return self._index.hash_of(block)

    def counts(self) -> KvCounts:
        quarantined = 0 if self.fenced else int(np.count_nonzero(self._quarantine()))
        return KvCounts(
            blocks=self.blocks, valid=len(self._index), free=len(self._free), quarantined=quarantined, reserve=len(self._reserve)
        )

    # --- requests take and give blocks ------------------------------------------------------------------------------------------

    def acquire(self, blocks: Sequence[int]) -> None:
        """Add a reference to cached (or already used) blocks found by `match`."""
        if blocks:
            ids = np.asarray(blocks, dtype=np.intp)
            self._refs[ids] += 1
            self._stamp(ids)

    def allocate(self, count: int) -> list[int] | None:
        """Hand out ``count`` blocks to write to, each with one reference; None (and nothing changed) when there are not as many.

        Raises:
            LedgerLost: another engine owns the ledger: nothing may be written any more.
        """
        if count <= 0:
            return []
        missing = count - len(self._free)
        if missing > 0 and not self._refill(missing):
            return None
        taken = [self._free.popleft() for _ in range(count)]
        self._refs[taken] = 1
        return taken

    def release(self, blocks: Sequence[int]) -> None:
        """Take a reference off each of a sequence's blocks (in the sequence's order). Indexed ones stay cached, the last the oldest, so
        that a long prefix is eaten from its end."""
        if not blocks:
            return
        ids = np.asarray(blocks[::-1], dtype=np.intp)
        if (self._refs[ids] <= 0).any():
            raise AssertionError(f"release of blocks that nobody holds: {blocks}")
        self._refs[ids] -= 1
        idle = ids[self._refs[ids] == 0]
        cached = self._index.held[idle]
        self._stamp(idle[cached])
        # Written under this very epoch, so they are safe to write again even before the fence.
        self._free.extend(idle[~cached].tolist())
        self._top_up()

    def publish(self, filled: Sequence[Filled]) -> None:
        """Index blocks and enter them in the journal. Call it when the step that filled them has finished, never before.

        A block whose content another block already holds stays private to its request.

        Raises:
            LedgerLost: another engine owns the ledger.
        """
        if not filled:
            return
        words = to_array([one.digest for one in filled])
        fresh = [row for row, one in enumerate(filled) if self._index.add(one.block, one.digest, words[row])]
        if fresh:
            ids = np.asarray([filled[row].block for row in fresh], dtype=np.intp)
            used = self._ticks(len(ids))
            self._last_use[ids] = used
            self._journal.publish(ids, words[fresh], self.block_tokens, used)

    # --- the fence --------------------------------------------------------------------------------------------------------------

    def fence(self) -> int:
        """No former engine writes any more: quarantined blocks become free and the reserve is filled up. Returns its size."""
        if not self.fenced:
            self._free.extend(np.flatnonzero(self._quarantine()).tolist())
            self.fenced = True
        self._top_up(evict=True)
        return len(self._reserve)

    def check(self) -> None:
        """Verify that every block is in exactly one place (for tests).

        Raises:
            AssertionError: it is not.
        """
        used = set(np.flatnonzero(self._refs > 0).tolist())
        indexed = set(np.flatnonzero(self._index.held).tolist())
        cached = indexed - used
        places = [used, cached, set(self._free), set(self._reserve)]
        quarantined = set() if self.fenced else set(np.flatnonzero(self._quarantine()).tolist())
        places.append(quarantined)
        assert (self._refs >= 0).all(), "negative reference count"
        assert len(set(self._free)) == len(self._free), "a block is free twice"
        assert sum(map(len, places)) == self.blocks == len(set[int]().union(*places)), f"blocks lost or in two places: {places}"
        assert not indexed & set(self._reserve), "a reserve block is indexed"

    # --- inside -----------------------------------------------------------------------------------------------------------------

    def _restore(self) -> None:
        entries = self._journal.entries()
        # A partial or set-aside entry is never published by this code; whatever it is, it is not worth an argument.
        usable = (entries.tokens == self.block_tokens) & ((entries.flags & RESERVE) == 0)
        valid = np.zeros(self.blocks, np.bool_)
        words = np.zeros((self.blocks, 2), np.uint64)
        valid[entries.ids[usable]] = True
        words[entries.ids] = entries.hashes
        self._index.sync(np.arange(self.blocks), valid, words)
        # Unusable ones, and those whose content another block holds too.
        dropped = entries.ids[~self._index.held[entries.ids]]
        if len(dropped):
            self._journal.invalidate(dropped)
        self._last_use[entries.ids] = entries.last_use
        self._tick = int(entries.last_use.max(initial=np.uint64(0))) + 1
        self.kept, self.dropped = len(self._index), len(dropped)

    def _quarantine(self) -> npt.NDArray[np.bool_]:
        """Blocks that are in no other place."""
        rest: npt.NDArray[np.bool_] = ~self._index.held & (self._refs == 0)
        rest[list(self._reserve)] = False
        rest[list(self._free)] = False
        return rest

    def _ticks(self, count: int) -> npt.NDArray[np.uint64]:
        ticks = np.arange(self._tick, self._tick + count, dtype=np.uint64)
        self._tick += count
        return ticks

    def _stamp(self, ids: npt.NDArray[np.intp]) -> None:
        """Blocks used now, the first the longest ago."""
        if len(ids):
            used = self._ticks(len(ids))
            self._last_use[ids] = used
            self._journal.touch(ids, used)

    def _refill(self, missing: int) -> bool:
        """Make ``missing`` more blocks free, or change nothing."""
        if not self.fenced:
            if missing > len(self._reserve):
                return False
            blocks = [self._reserve.popleft() for _ in range(missing)]
            self._journal.clear_reserve(blocks)
            self._free.extend(blocks)
            return True
        if missing > self.evictable:
            return False
        self._evict(missing)
        return True

    def _evict(self, count: int) -> None:
        victims: list[int] = []
        while len(victims) < count:
            if not self._oldest:
                self._sort_oldest(exclude=victims)
            block, stamp = self._oldest.popleft()
            # What was used since the sort has a younger stamp, and every block that is not in the window is younger than all in it.
            if self._refs[block] == 0 and self._index.held[block] and self._last_use[block] == stamp:
                victims.append(block)
        self._journal.invalidate(victims)
        for block in victims:
            self._index.remove(block)
        self._free.extend(victims)

    def _sort_oldest(self, exclude: Iterable[int]) -> None:
        idle = self._index.held & (self._refs == 0)
        idle[list(exclude)] = False
        ids = np.flatnonzero(idle)
        stamps = self._last_use[ids]
        if len(ids) > _EVICTION_WINDOW:
            first = np.argpartition(stamps, _EVICTION_WINDOW)[:_EVICTION_WINDOW]
            ids, stamps = ids[first], stamps[first]
        order = np.argsort(stamps, kind="stable")
        self._oldest.extend(zip(ids[order].tolist(), stamps[order].tolist(), strict=True))

    def _top_up(self, *, evict: bool = False) -> None:
        if not self.fenced:
            return
        missing = self._reserve_target - len(self._reserve)
        if missing < 0:  # an owner with a larger reserve set them aside
            surplus = [self._reserve.popleft() for _ in range(-missing)]
            self._journal.clear_reserve(surplus)
            self._free.extend(surplus)
        if missing <= 0:
            return
        if evict and missing > len(self._free):
            self._evict(min(missing - len(self._free), self.evictable))
        blocks = [self._free.popleft() for _ in range(min(missing, len(self._free)))]
        if blocks:
            self._journal.set_reserve(blocks)
            self._reserve.extend(blocks)
