"""The ledger: what the KV blocks of a worker hold, in shared memory, so that a successor finds it after its owner died at any instant.

One writer (the owner named in the header), any number of readers. The rules, each held by a test that stops the writer between any two
stores:

* An entry is published payload first, ``valid`` last, and only after the step that wrote the block has finished (the caller's part).
* An entry is invalidated before anything may overwrite the block (the caller's part: call `LedgerWriter.invalidate` first).
* A reader trusts an entry iff its ``valid`` equals the header's epoch, in the header's bank. What was half-written was never valid.
* A reserve flag is cleared before the block may be written, so a second successor never takes a block for untouched that is not.
* A successor copies what it trusts into the other bank, stamps it with its epoch, then swaps the header word, all under a lock. A former
  owner that still stores (it was paused) writes into a bank that nobody trusts. The one before it must be dead by then: that is what
  freezing before every promotion guarantees.

Order of stores: a killed process stops between two of its instructions, so what its successor sees is a prefix of its stores on any
architecture. A follower of a *live* owner also relies on stores being seen in order (x86-64); elsewhere it can at worst cache a wrong
entry until the epoch changes, when it compares every payload (`Follower.update`), so no promotion builds on one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from shadowsup.memkeeper.errors import KeeperError, LedgerLost
from shadowsup.memkeeper.ledger_layout import (
    PAGE,
    RESERVE,
    U8,
    U32,
    U64,
    Columns,
    Header,
    LedgerMap,
    check_successor,
    exclusive,
    initialise,
    ledger_size,
)
from shadowsup.memkeeper.ledger_word import pack_word, unpack_word

__all__ = [
    "PAGE",
    "RESERVE",
    "Counts",
    "Entries",
    "Follower",
    "Header",
    "LedgerReader",
    "LedgerWriter",
    "Snapshot",
    "initialise",
    "ledger_size",
]

Bool = NDArray[np.bool_]
Ids = NDArray[np.intp]
Store = Callable[[NDArray[Any], Any, Any], None]
"""(array over shared memory, index, values): every store of a writer goes through one of these."""


def _store(column: NDArray[Any], index: Any, values: Any) -> None:
    column[index] = values


class Counts(NamedTuple):
    """Blocks."""

    blocks: int
    valid: int
    reserve: int


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Copies; one row a block. ``valid``: whether the entry is trusted."""

    epoch: int
    owner: int
    valid: Bool
    generation: U32
    hashes: U64
    tokens: U32
    last_use: U64
    flags: U8


@dataclass(frozen=True, slots=True)
class Entries:
    """Trusted entries: block ``ids`` (n), ``hashes`` (n, 2), ``tokens`` (n), ``last_use`` (n), ``flags`` (n); copies."""

    ids: Ids
    hashes: U64
    tokens: U32
    last_use: U64
    flags: U8


def _trusted(valid: U32, epoch: int) -> Bool:
    if epoch == 0:  # nobody has published yet, and 0 means invalid
        return np.zeros(valid.shape, np.bool_)
    return np.equal(valid, np.uint32(epoch))


class LedgerReader:
    """A read-only view of the ledger in ``fd``, which stays the caller's.

    Raises:
        KeeperError: not an initialised ledger.
    """

    def __init__(self, fd: int) -> None:
        self._memory = LedgerMap(fd, writable=False)

    def header(self) -> Header:
        return self._memory.header()

    def word(self) -> int:
        """Return the header word: equal words mean the same owner, epoch and bank."""
        return self._memory.word()

    def columns(self) -> tuple[int, Columns]:
        """Return (epoch, live read-only views of the bank it names). Read `word` before and after what you read from them."""
        epoch, bank, _ = unpack_word(self._memory.word())
        return epoch, self._memory.columns(bank)

    def snapshot(self) -> Snapshot:
        """Return a consistent copy; an entry that changes meanwhile comes out as not valid."""
        while True:
            word = self._memory.word()
            epoch, bank, owner = unpack_word(word)
            columns = self._memory.columns(bank)
            generation, valid = columns.generation.copy(), columns.valid.copy()
            hashes, tokens = columns.hashes.copy(), columns.tokens.copy()
            last_use, flags = columns.last_use.copy(), columns.flags.copy()
            settled = (columns.generation == generation) & (columns.valid == valid)
            if self._memory.word() == word:
                return Snapshot(epoch, owner, _trusted(valid, epoch) & settled, generation, hashes, tokens, last_use, flags)

    def counts(self) -> Counts:
        epoch, columns = self.columns()
        valid = int(np.count_nonzero(_trusted(columns.valid, epoch)))
        return Counts(self._memory.blocks, valid, int(np.count_nonzero(columns.flags & RESERVE)))

    def close(self) -> None:
        """Unmap. Idempotent."""
        self._memory.close()


class Follower:
    """A copy of the ledger that a parked engine keeps up to date at the cost of what changed.

    Attributes:
        epoch: of the last update.
        valid, hashes, tokens, last_use, flags: like `Snapshot`; the follower's own arrays, read-only by convention.
    """

    def __init__(self, reader: LedgerReader) -> None:
        blocks = reader.header().blocks
        self._reader = reader
        self.epoch = 0
        self.valid: Bool = np.zeros(blocks, np.bool_)
        self.hashes: U64 = np.zeros((blocks, 2), np.uint64)
        self.tokens: U32 = np.zeros(blocks, np.uint32)
        self.last_use: U64 = np.zeros(blocks, np.uint64)
        self.flags: U8 = np.zeros(blocks, np.uint8)
        self._generation: U32 = np.zeros(blocks, np.uint32)

    def update(self) -> Ids:
        """Catch up. Returns the ids of blocks whose entry may have changed since the last update, ascending.

        An entry that the owner is just changing is not valid in the copy and comes again in the next update.
        """
        while True:
            word = self._reader.word()
            epoch, columns = self._reader.columns()
            generation = columns.generation.copy()
            trusted = _trusted(columns.valid, epoch)
            differs = (generation != self._generation) | (trusted != self.valid)
            if epoch != self.epoch:
                # A former owner may have stored into its bank after the copy: generations of two banks do not compare.
                differs |= (columns.hashes != self.hashes).any(axis=1) | (columns.tokens != self.tokens)
            ids = np.flatnonzero(differs)
            hashes, tokens = columns.hashes[ids], columns.tokens[ids]
            last_use, flags = columns.last_use.copy(), columns.flags.copy()
            settled = (columns.generation[ids] == generation[ids]) & (_trusted(columns.valid[ids], epoch) == trusted[ids])
            if self._reader.word() == word:
                break
        self.epoch = epoch
        self._generation[ids] = generation[ids]
        self.valid[ids] = trusted[ids] & settled
        self.hashes[ids], self.tokens[ids] = hashes, tokens
        self.last_use, self.flags = last_use, flags
        return ids


class LedgerWriter:
    """The owner's side. Made by `take`; not thread-safe (one step loop).

    Attributes:
        epoch, owner: what the header says while this writer owns the ledger.
    """

    def __init__(self, memory: LedgerMap, word: int, store: Store) -> None:
        self._memory = memory
        self._word = word
        self._put = store
        self.epoch, bank, self.owner = unpack_word(word)
        self._columns = memory.columns(bank)

    @classmethod
    def take(
        cls, fd: int, *, owner: int, epoch: int, expect_epoch: int | None = None, wait_s: float = 1.0, store: Store = _store
    ) -> LedgerWriter:
        """Become the owner: keep what the last owner published, as epoch ``epoch``.

        Args:
            expect_epoch: fail unless this is the header's epoch.
            wait_s: how long to wait for another engine that is just taking it.
            store: how to store into shared memory; tests inject one that stops.

        Raises:
            LedgerLost: the header is at ``epoch`` or beyond, or not at ``expect_epoch``.
            KeeperError: not an initialised ledger.
        """
        check_successor(owner, epoch)
        memory = LedgerMap(fd, writable=True)
        try:
            with exclusive(fd, wait_s):
                epoch_now, bank_now, owner_now = unpack_word(memory.word())
                if epoch_now >= epoch:
                    raise LedgerLost(f"owner {owner_now} holds the ledger in epoch {epoch_now}, owner {owner} came with {epoch}")
                if expect_epoch is not None and epoch_now != expect_epoch:
                    raise LedgerLost(f"the ledger is in epoch {epoch_now}, owner {owner} expected {expect_epoch}")
                bank = 1 - bank_now
                _succeed(memory.columns(bank_now), epoch_now, memory.columns(bank), epoch, store)
                word = pack_word(epoch, bank, owner)
                store(memory.word_cell, 0, word)
            return cls(memory, word, store)
        except BaseException:
            memory.close()
            raise

    def header(self) -> Header:
        return self._memory.header()

    def check(self) -> None:
        """Raises LedgerLost when another engine owns the ledger now. Every method that stores calls this first."""
        word = self._memory.word()
        if word != self._word:
            epoch, _, owner = unpack_word(word)
            raise LedgerLost(f"owner {owner} took the ledger in epoch {epoch} from owner {self.owner} of epoch {self.epoch}")

    def publish(self, ids: ArrayLike, hashes: ArrayLike, tokens: ArrayLike, last_use: ArrayLike) -> None:
        """Enter full blocks whose content has been written.

        Args:
            ids: (n) block ids, each once.
            hashes: (n, 2) u64.
            tokens: (n) or one number: tokens held.
            last_use: (n) or one number, any clock that grows (for eviction).

        Raises:
            LedgerLost: another engine owns the ledger; nothing was stored.
            KeeperError: an id is out of range, still in reserve, or the shapes do not fit; nothing was stored.
        """
        index = self._index(ids)
        rows = np.asarray(hashes, dtype=np.uint64)
        if rows.shape != (len(index), 2):
            raise KeeperError(f"{len(index)} blocks need hashes of shape ({len(index)}, 2), not {rows.shape}")
        held, used = np.asarray(tokens, dtype=np.uint32), np.asarray(last_use, dtype=np.uint64)
        columns, put = self._columns, self._put
        if (columns.flags[index] & RESERVE).any():
            raise KeeperError("a reserve block is published", "clear its reserve flag before the block is written")
        self.check()
        again = index[columns.valid[index] != 0]
        if len(again):
            put(columns.valid, again, 0)
        put(columns.generation, index, columns.generation[index] + 1)
        put(columns.hashes, index, rows)
        put(columns.tokens, index, held)
        put(columns.last_use, index, used)
        put(columns.valid, index, self.epoch)

    def invalidate(self, ids: ArrayLike) -> None:
        """Withdraw entries; after the return the blocks may be overwritten.

        Raises:
            LedgerLost: another engine owns the ledger: nothing may be overwritten.
        """
        index = self._index(ids)
        self.check()
        columns, put = self._columns, self._put
        put(columns.valid, index, 0)
        put(columns.generation, index, columns.generation[index] + 1)
        self.check()

    def touch(self, ids: ArrayLike, last_use: ArrayLike) -> None:
        """Note a use of blocks: ``last_use`` (n) or one number."""
        index = self._index(ids)
        used = np.asarray(last_use, dtype=np.uint64)
        self.check()
        self._put(self._columns.last_use, index, used)

    def set_reserve(self, ids: ArrayLike) -> None:
        """Set blocks aside: not valid, and from here on written by nobody before `clear_reserve`.

        Raises:
            KeeperError: a block is valid; nothing was stored.
        """
        index = self._index(ids)
        self.check()
        columns = self._columns
        if columns.valid[index].any():
            raise KeeperError("a valid block cannot be set aside", "invalidate it first")
        self._put(columns.flags, index, columns.flags[index] | RESERVE)

    def clear_reserve(self, ids: ArrayLike) -> None:
        """Take blocks out of the reserve. Only after the return may they be written."""
        index = self._index(ids)
        self.check()
        columns = self._columns
        self._put(columns.flags, index, columns.flags[index] & ~np.uint8(RESERVE))
        self.check()

    def reserve(self) -> Ids:
        """Return the ids of the blocks set aside, ascending."""
        return np.flatnonzero(self._columns.flags & RESERVE)

    def entries(self) -> Entries:
        """Return what is trusted now, by ascending block id."""
        columns = self._columns
        ids = np.flatnonzero(columns.valid == self.epoch)
        return Entries(ids, columns.hashes[ids], columns.tokens[ids], columns.last_use[ids], columns.flags[ids])

    def close(self) -> None:
        """Unmap. The header goes on naming this owner until a successor takes it. Idempotent."""
        self._columns = _NO_COLUMNS
        self._memory.close()

    def _index(self, ids: ArrayLike | Sequence[int]) -> Ids:
        index = np.asarray(ids, dtype=np.intp).reshape(-1)
        # A negative id would wrap around and name another block.
        if len(index) and (index.min() < 0 or index.max() >= len(self._columns.valid)):
            raise KeeperError(f"block id outside 0 … {len(self._columns.valid) - 1}")
        return index


_NO_COLUMNS = Columns(*(np.zeros(shape, dtype) for shape, dtype in [(0, "u4"), (0, "u4"), ((0, 2), "u8"), (0, "u4"), (0, "u8"), (0, "u1")]))


def _succeed(old: Columns, epoch_old: int, new: Columns, epoch: int, store: Store) -> None:
    """Copy what is trusted in ``old`` into ``new``, stamped with ``epoch``. ``new`` is trusted by nobody before the header names it."""
    generation, valid = old.generation.copy(), old.valid.copy()
    everything = slice(None)
    # First: a taker that died here may have left stamps of the same epoch.
    store(new.valid, everything, 0)
    store(new.generation, everything, generation)
    store(new.hashes, everything, old.hashes)
    store(new.tokens, everything, old.tokens)
    store(new.last_use, everything, old.last_use)
    store(new.flags, everything, old.flags)
    # Should the former owner be storing still, what it changed during the copy is not taken over.
    settled = (old.generation == generation) & (old.valid == valid)
    store(new.valid, everything, np.where(_trusted(valid, epoch_old) & settled, np.uint32(epoch), np.uint32(0)))
