"""The ledger's owner is stopped between any two of its stores, element by element, in random sequences of all it does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from ledger_tools import BLOCKS, Model, Stopped, Stores, Worker

from shadowsup.memkeeper.errors import LedgerLost
from shadowsup.memkeeper.ledger import LedgerWriter
from shadowsup.memkeeper.ledger_layout import LedgerMap
from shadowsup.memkeeper.ledger_word import pack_word

ids = st.lists(st.integers(0, BLOCKS - 1), min_size=1, max_size=4, unique=True)
operation = st.tuples(st.sampled_from(["fill", "fill", "fill", "publish again", "invalidate", "touch", "reserve", "take", "follow"]), ids)
operations = st.lists(operation, min_size=1, max_size=8)
life = st.tuples(operations, st.integers(0, 250), st.integers(0, 2**16))
"""What an engine does, after how many stores it is stopped, and in which order the elements of a store are stored."""

Operation = tuple[str, list[int]]

thorough = settings(max_examples=400, deadline=None, suppress_health_check=list(HealthCheck))


class Counter:
    """Every published content and every use is a number of its own."""

    def __init__(self) -> None:
        self.number = 0

    def next(self) -> int:
        self.number += 1
        return self.number


@contextmanager
def closing(worker: Worker) -> Iterator[Worker]:
    try:
        yield worker
    finally:
        worker.close()


def perform(worker: Worker, writer: LedgerWriter, stores: Stores, todo: list[Operation], count: Counter) -> None:
    for what, blocks in todo:
        if what == "fill":
            worker.fill(writer, stores, blocks, count.next(), count.next())
        elif what == "publish again":  # what is valid once more, under another time of use
            for block, (value, _) in worker.found(writer).items():
                worker.publish(writer, [block], value, count.next())
        elif what == "invalidate":
            worker.invalidate(writer, blocks)
        elif what == "touch":
            worker.touch(writer, blocks, count.next())
        elif what == "reserve":
            worker.set_reserve(writer, blocks)
        elif what == "take":  # a planned hand-over
            writer = worker.take(stores)
        else:
            worker.follower.update()


def killed() -> None:
    raise Stopped


def kill_again_and_again(writer_class: type[LedgerWriter] = LedgerWriter, careless: str = "", examples: int = 400) -> Callable[[], None]:
    """Return the property: after each of several kills the successor finds what it should."""

    @settings(thorough, max_examples=examples, phases=[Phase.generate] if examples != 400 else tuple(Phase), derandomize=examples != 400)
    @given(lives=st.lists(life, min_size=1, max_size=3), gap=st.integers(1, 3))
    def holds(lives: list[tuple[list[Operation], int, int]], gap: int) -> None:
        count = Counter()
        with closing(Worker(writer_class, careless=careless)) as worker:
            for todo, budget, seed in lives:
                stores = Stores(budget, killed, seed)
                try:
                    perform(worker, worker.take(stores, gap), stores, todo, count)
                except Stopped:
                    pass
                worker.verify(worker.take(plain_store))

    return holds


def plain_store(column: Any, index: Any, values: Any) -> None:
    column[index] = values


def test_a_successor_trusts_exactly_what_was_published_and_not_invalidated() -> None:
    kill_again_and_again()()


class ValidFirst(LedgerWriter):
    """Wrong on purpose: what is stored last in the real one is stored first."""

    def publish(self, ids: Any, hashes: Any, tokens: Any, last_use: Any) -> None:
        columns, index = self._columns, np.asarray(ids, np.intp)
        self._put(columns.valid, index, self.epoch)
        self._put(columns.hashes, index, np.asarray(hashes, np.uint64))
        self._put(columns.tokens, index, tokens)
        self._put(columns.last_use, index, last_use)
        self._put(columns.generation, index, columns.generation[index] + 1)


@pytest.mark.parametrize(
    ("writer_class", "careless"),
    [
        (ValidFirst, ""),
        (LedgerWriter, "publish before the content is written"),
        (LedgerWriter, "overwrite without invalidating"),
        (LedgerWriter, "reserve flag cleared after the write"),
    ],
)
def test_the_property_catches_a_writer_that_breaks_a_rule(writer_class: type[LedgerWriter], careless: str) -> None:
    with pytest.raises(AssertionError):
        kill_again_and_again(writer_class, careless, examples=2000)()


def pause_and_resume(writer_class: type[LedgerWriter] = LedgerWriter, examples: int = 400) -> Callable[[], None]:
    """Return the property: the owner is paused inside a call, its successor takes the ledger and works, then the owner goes on storing."""

    @settings(thorough, max_examples=examples, phases=[Phase.generate] if examples != 400 else tuple(Phase), derandomize=examples != 400)
    @given(before=operations, paused=life, after=operations)
    def holds(before: list[Operation], paused: tuple[list[Operation], int, int], after: list[Operation]) -> None:
        count, unlimited = Counter(), Stores(-1, killed, 0)
        todo, budget, seed = paused
        successors: list[LedgerWriter] = []
        with closing(Worker(writer_class)) as worker:
            model, content = worker.model, worker.content

            def succeed() -> None:
                successor = worker.take(plain_store)
                successors.append(successor)
                worker.verify(successor)
                perform(worker, successor, unlimited, without_take(after), count)
                # What the former owner thinks from here on is not what is true; and a frozen engine writes no block.
                worker.model, worker.content = Model(), content.copy()

            perform(worker, worker.take(plain_store), unlimited, without_take(before), count)
            stores = Stores(-1, succeed, seed)
            former = worker.take(stores)
            stores.budget = budget
            try:
                perform(worker, former, unlimited, without_take(todo), count)
            except LedgerLost:
                assert successors
            worker.model, worker.content = model, content
            for successor in successors:
                successor.check()
                worker.verify_readers(worker.found(successor))
            worker.verify(worker.take(plain_store))

    return holds


def without_take(todo: list[Operation]) -> list[Operation]:
    """Who is just taking the ledger holds its lock, so nobody can succeed it there (`test_ledger_owner`)."""
    return [one for one in todo if one[0] != "take"]


def test_a_former_owner_that_resumes_is_never_trusted_and_harms_nothing() -> None:
    pause_and_resume()()


class OneBank(LedgerWriter):
    """Wrong on purpose: the successor stamps the entries where they are."""

    @classmethod
    def take(
        cls, fd: int, *, owner: int, epoch: int, expect_epoch: int | None = None, wait_s: float = 1.0, store: Any = None
    ) -> LedgerWriter:
        memory = LedgerMap(fd, writable=True)
        columns, word = memory.columns(0), pack_word(epoch, 0, owner)
        columns.valid[:] = np.where((columns.valid != 0) & (columns.valid == memory.header().epoch), epoch, 0)
        memory.word_cell[0] = word
        return cls(memory, word, store)


def test_the_property_catches_a_successor_that_shares_its_predecessors_bank() -> None:
    with pytest.raises(AssertionError):
        pause_and_resume(OneBank, examples=5000)()


def test_a_kill_between_two_failovers_leaves_reserve_flags_right() -> None:
    """Freeze, promote, the successor dies before the fence: the second one gets no block that the first one wrote."""
    with closing(Worker()) as worker:
        first = worker.take(plain_store)
        worker.set_reserve(first, [0, 1, 2, 3])
        second = worker.take(plain_store)
        worker.clear_reserve(second, [1, 3])
        third = worker.take(plain_store)
        assert third.reserve().tolist() == [0, 2]
