"""Random lives of a pool and its successors; after each move every block is in exactly one place and no rule is broken."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from pool_world import Ledger, digests

from shadowsup.memkeeper.ledger import Follower
from shadowsup.workers.kv_pool import Filled, IndexMirror, KvPool

_BLOCKS = 24


class PoolLife(RuleBasedStateMachine):
    """Sequences of made-up families hold blocks; owners die at any moment between moves."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = Ledger(_BLOCKS)
        self.pool: KvPool
        self.held: list[tuple[list[int], int]] = []
        self.written_before_fence: set[int] = set()
        self.clean: set[int] = set()
        self.mirror = IndexMirror(_BLOCKS)
        self.follower: Follower

    @initialize(reserve=st.integers(0, 6))
    def first_owner(self, reserve: int) -> None:
        self.reserve = reserve
        self.pool = self.kept.pool(reserve=reserve)
        self.follower = Follower(self.kept.reader())

    @rule(count=st.integers(1, 8), family=st.integers(0, 5))
    def begin(self, count: int, family: int) -> None:
        """A sequence takes what is cached of it and allocates the rest."""
        hit = self.pool.match(digests(count, family))
        self.pool.acquire(hit)
        held_before = {block for blocks, _ in self.held for block in blocks} | set(hit)
        cached = self.kept.valid()
        blocks = self.pool.allocate(count - len(hit))
        if blocks is None:
            self.pool.release(hit)
            return
        assert not held_before & set(blocks), "a block in use was handed out"
        assert not self.kept.reserved() & set(blocks), "a reserve block was handed out before its flag was cleared"
        assert not self.kept.valid() & set(blocks), "a trusted block was handed out"
        if not self.pool.fenced:
            assert set(blocks) <= self.clean, "before the fence only reserve blocks are handed out"
            assert self.kept.valid() == cached, "before the fence nothing is evicted"
        self.held.append((hit + blocks, family))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def publish(self, data: st.DataObject) -> None:
        blocks, family = data.draw(st.sampled_from(self.held))
        hashes = digests(len(blocks), family)
        self.pool.publish([Filled(b, h) for b, h in zip(blocks, hashes, strict=True) if not self.pool.is_indexed(b)])

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        at = data.draw(st.integers(0, len(self.held) - 1))
        self.pool.release(self.held.pop(at)[0])

    @rule()
    def follow(self) -> None:
        self.mirror.follow(self.follower)

    @rule(fenced=st.booleans(), followed=st.booleans())
    def die_and_succeed(self, fenced: bool, followed: bool) -> None:
        trusted = self.kept.valid()
        self.held.clear()
        self.clean = self.kept.reserved()
        self.pool = self.kept.pool(reserve=self.reserve, fenced=fenced, index=self.mirror.index if followed else None)
        self.mirror, self.follower = IndexMirror(_BLOCKS), Follower(self.kept.reader())
        assert {block for block in range(_BLOCKS) if self.pool.is_indexed(block)} >= trusted - self.kept.reserved() if not fenced else True

    @rule()
    def fence(self) -> None:
        self.pool.fence()
        assert self.pool.counts().quarantined == 0

    @invariant()
    def every_block_is_in_one_place(self) -> None:
        if hasattr(self, "pool"):
            self.pool.check()
            indexed = {block for block in range(_BLOCKS) if self.pool.is_indexed(block)}
            assert indexed == self.kept.valid(), "the ledger and the index disagree"
            assert self.pool.available <= _BLOCKS

    def teardown(self) -> None:
        self.kept.close()


TestPoolLife = PoolLife.TestCase
TestPoolLife.settings = settings(max_examples=60, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck))
