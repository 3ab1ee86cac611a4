"""An engine over a real ledger and real block memory that can be stopped between any two of its stores, and what must hold then."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from typing import Any

import numpy as np

from shadowsup.memkeeper.ledger import Follower, LedgerReader, LedgerWriter, initialise, ledger_size

BLOCKS = 6
FINGERPRINT, SALT = b"f" * 16, b"s" * 16


def new_ledger(blocks: int = BLOCKS) -> int:
    """Return the fd of an empty ledger."""
    fd = os.memfd_create("test-ledger", os.MFD_CLOEXEC)
    os.ftruncate(fd, ledger_size(blocks))
    initialise(fd, blocks=blocks, block_tokens=16, fingerprint=FINGERPRINT, salt=SALT)
    return fd


class Stopped(Exception):
    """The process was killed here."""


class Stores:
    """Every store of the engine under test, element by element in any order, until ``budget`` stores are done.

    Then `then` is called: it raises `Stopped` (killed), or returns (paused and resumed).
    """

    def __init__(self, budget: int, then: Callable[[], None], seed: int) -> None:
        self.budget = budget
        self.then = then
        self.random = random.Random(seed)

    def __call__(self, column: np.ndarray[Any, Any], index: Any, values: Any) -> None:
        rows = np.atleast_1d(np.arange(len(column))[index])
        # Copied: a killed process has the values in its registers, not in the memory that changes meanwhile.
        spread = np.array(np.broadcast_to(values, (len(rows), *column.shape[1:])))
        order = list(range(len(rows)))
        self.random.shuffle(order)
        for at in order:
            if self.budget == 0:
                self.budget = -1
                self.then()
            self.budget -= 1
            column[rows[at]] = spread[at]


class Model:
    """What a successor may and must find. ``None`` in `may`: no entry."""

    def __init__(self) -> None:
        self.may: list[set[tuple[int, int] | None]] = [{None} for _ in range(BLOCKS)]
        """Per block, (content, last use) of entries that may be trusted."""
        self.reserve: list[set[bool]] = [{False} for _ in range(BLOCKS)]
        self.written_since_reserved = [True] * BLOCKS


class Worker:
    """A worker's memory: a ledger and the content of its blocks; and the engines that own it one after another."""

    def __init__(self, writer_class: type[LedgerWriter] = LedgerWriter, *, careless: str = "") -> None:
        self.fd = new_ledger()
        self.content = np.zeros(BLOCKS, np.uint64)
        self.model = Model()
        self.writer_class = writer_class
        self.careless = careless
        self.reader = LedgerReader(self.fd)
        self.follower = Follower(self.reader)
        self.epoch = 0
        self.writers: list[LedgerWriter] = []

    def close(self) -> None:
        for writer in self.writers:
            writer.close()
        self.reader.close()
        os.close(self.fd)

    def take(self, store: Callable[[Any, Any, Any], None], gap: int = 1) -> LedgerWriter:
        self.epoch += gap
        writer = self.writer_class.take(self.fd, owner=self.epoch, epoch=self.epoch, store=store, wait_s=0.0)
        self.writers.append(writer)
        return writer

    # --- what an engine does; the model first allows both outcomes of each block, then only the one -----------------------------

    def fill(self, writer: LedgerWriter, stores: Stores, ids: list[int], value: int, use: int) -> None:
        """Take blocks, write their content, publish them."""
        model = self.model
        early = self.careless == "publish before the content is written"
        if self.careless != "reserve flag cleared after the write":
            self.clear_reserve(writer, ids)
        if self.careless != "overwrite without invalidating":
            self.invalidate(writer, ids)
        if early:
            self.publish(writer, ids, value, use)
        for block in ids:
            model.written_since_reserved[block] = True
        stores(self.content, np.array(ids, np.intp), np.uint64(value))
        if self.careless == "reserve flag cleared after the write":
            self.clear_reserve(writer, ids)
        if not early:
            self.publish(writer, ids, value, use)

    def publish(self, writer: LedgerWriter, ids: list[int], value: int, use: int) -> None:
        for block in ids:
            self.model.may[block] |= {(value, use), None}
        writer.publish(ids, np.full((len(ids), 2), value), value % 17, use)
        for block in ids:
            self.model.may[block] = {(value, use)}

    def invalidate(self, writer: LedgerWriter, ids: list[int]) -> None:
        for block in ids:
            self.model.may[block].add(None)
        writer.invalidate(ids)
        for block in ids:
            self.model.may[block] = {None}

    def touch(self, writer: LedgerWriter, ids: list[int], use: int) -> None:
        before = {block: self.model.may[block] for block in ids}
        after = {block: {entry and (entry[0], use) for entry in before[block]} for block in ids}
        for block in ids:
            self.model.may[block] = before[block] | after[block]
        writer.touch(ids, use)
        for block in ids:
            self.model.may[block] = after[block]

    def set_reserve(self, writer: LedgerWriter, ids: list[int]) -> None:
        self.invalidate(writer, ids)
        for block in ids:
            self.model.written_since_reserved[block] = False
            self.model.reserve[block].add(True)
        writer.set_reserve(ids)
        for block in ids:
            self.model.reserve[block] = {True}

    def clear_reserve(self, writer: LedgerWriter, ids: list[int]) -> None:
        for block in ids:
            self.model.reserve[block].add(False)
        writer.clear_reserve(ids)
        for block in ids:
            self.model.reserve[block] = {False}

    # --- what must hold after a take-over --------------------------------------------------------------------------------------

    def found(self, writer: LedgerWriter) -> dict[int, tuple[int, int]]:
        entries = writer.entries()
        assert (entries.hashes[:, 0] == entries.hashes[:, 1]).all(), "a hash is half of one entry and half of another"
        assert (entries.tokens == entries.hashes[:, 0] % np.uint64(17)).all(), "tokens of another entry"
        return {
            int(block): (int(words[0]), int(use)) for block, words, use in zip(entries.ids, entries.hashes, entries.last_use, strict=True)
        }

    def verify(self, writer: LedgerWriter) -> None:
        """``writer`` has just taken the ledger: it sees what was published and not invalidated, and right reserve flags."""
        found, reserve = self.found(writer), set(writer.reserve().tolist())
        for block in range(BLOCKS):
            entry = found.get(block)
            assert entry in self.model.may[block], f"block {block}: {entry} is trusted, allowed {self.model.may[block]}"
            if entry is not None:
                assert self.content[block] == entry[0], f"block {block} holds {self.content[block]}, its entry says {entry[0]}"
                assert block not in reserve
            assert (block in reserve) in self.model.reserve[block], f"block {block}: wrong reserve flag"
            if block in reserve:
                assert not self.model.written_since_reserved[block], f"block {block} is in reserve and may be being written"
            self.model.may[block], self.model.reserve[block] = {entry}, {block in reserve}
        self.verify_readers(found)

    def verify_readers(self, found: dict[int, tuple[int, int]]) -> None:
        snapshot = self.reader.snapshot()
        self.follower.update()
        for view in (snapshot, self.follower):
            assert view.epoch == self.epoch
            ids = np.flatnonzero(view.valid)
            got = {int(block): (int(view.hashes[block, 0]), int(view.last_use[block])) for block in ids}
            assert got == found
            assert (view.tokens[ids] == view.hashes[ids, 1] % np.uint64(17)).all()
