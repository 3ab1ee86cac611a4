"""Prompts that are hashed before they are replayed."""

from __future__ import annotations

import random

from shadowsup.memkeeper.hashing import chain_all
from shadowsup.workers.foreseen import BLOCKS_AT_ONCE, ForeseenPrompts

SALT = b"salt"
BLOCK = 4


class Clock:
    """Goes on by ``step`` at each look."""

    def __init__(self, step: float) -> None:
        self.now = 0.0
        self.step = step

    def __call__(self) -> float:
        self.now += self.step
        return self.now


def nowhere(digest: bytes) -> int | None:
    return None


def hashes_of(foreseen: ForeseenPrompts, rid: str, salt: bytes = SALT) -> list[bytes]:
    known = foreseen.take(rid, salt)
    assert known is not None
    return known.hashes


def prompt(blocks: float, seed: int = 0) -> tuple[int, ...]:
    made = random.Random(seed)
    return tuple(made.randrange(50_000) for _ in range(int(blocks * BLOCK)))


def test_the_hashes_are_those_that_the_request_would_compute() -> None:
    foreseen = ForeseenPrompts(BLOCK)
    long, short = prompt(2.5 * BLOCKS_AT_ONCE, 1), prompt(1.75, 2)
    foreseen.add("long", long)
    foreseen.add("short", short)
    while foreseen.prepare(SALT, nowhere):
        pass
    assert hashes_of(foreseen, "long") == chain_all(SALT, long, BLOCK)
    assert hashes_of(foreseen, "short") == chain_all(SALT, short, BLOCK)
    assert len(foreseen) == 0
    assert foreseen.take("long", SALT) is None


def test_a_look_is_short_and_what_is_known_by_then_counts() -> None:
    foreseen = ForeseenPrompts(BLOCK, Clock(step=0.004))
    ids = prompt(4 * BLOCKS_AT_ONCE)
    foreseen.add("a", ids)
    assert foreseen.prepare(SALT, nowhere)
    taken = hashes_of(foreseen, "a")
    assert taken == chain_all(SALT, ids, BLOCK)[:BLOCKS_AT_ONCE]


def test_another_ledger_makes_what_was_known_void() -> None:
    foreseen = ForeseenPrompts(BLOCK)
    ids = prompt(3)
    foreseen.add("a", ids)
    foreseen.add("b", ids)
    assert not foreseen.prepare(SALT, nowhere)
    assert hashes_of(foreseen, "a", b"another") == []
    assert not foreseen.prepare(b"another", nowhere)
    assert hashes_of(foreseen, "b", b"another") == chain_all(b"another", ids, BLOCK)


def test_what_will_not_come_is_forgotten_hashed_or_not() -> None:
    foreseen = ForeseenPrompts(BLOCK)
    foreseen.add("a", prompt(2))
    foreseen.forget("a")
    foreseen.forget("never known")
    assert not foreseen.prepare(SALT, nowhere)
    assert len(foreseen) == 0


def test_blocks_are_looked_up_as_far_as_their_engine_has_computed_them() -> None:
    foreseen = ForeseenPrompts(BLOCK)
    ids = prompt(5)
    hashes = chain_all(SALT, ids, BLOCK)
    there: dict[bytes, int] = {hashes[0]: 7, hashes[1]: 3}
    foreseen.add("a", ids)
    foreseen.prepare(SALT, there.get)
    there |= {hashes[0]: 8, hashes[2]: 1}  # what was found once is not looked up again
    foreseen.prepare(SALT, there.get)
    known = foreseen.take("a", SALT)
    assert known is not None and known.blocks == [7, 3, 1]
