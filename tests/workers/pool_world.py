"""A KV pool over a real ledger in a memfd, and successors of it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from shadowsup.memkeeper import hashing
from shadowsup.memkeeper.ledger import LedgerReader, LedgerWriter, initialise, ledger_size
from shadowsup.workers.kv_pool import Filled, KvPool, PrefixIndex

SALT = b"0123456789abcdef"
BLOCK_TOKENS = 4


def digests(count: int, family: int = 0) -> list[bytes]:
    """Chained hashes of a made-up sequence of ``count`` blocks."""
    return hashing.chain_all(SALT, [family * 1000 + at for at in range(count * BLOCK_TOKENS)], BLOCK_TOKENS)


class Ledger:
    """The memory that stays when its owner dies."""

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        self.epoch = 0
        self.fd = os.memfd_create("ledger", os.MFD_CLOEXEC)
        os.ftruncate(self.fd, ledger_size(blocks))
        initialise(self.fd, blocks=blocks, block_tokens=BLOCK_TOKENS, fingerprint=bytes(16), salt=SALT)
        self._open: list[LedgerWriter | LedgerReader] = []

    def pool(self, *, reserve: int = 2, fenced: bool = True, index: PrefixIndex | None = None) -> KvPool:
        """Let a new owner take the ledger; returns its pool."""
        return KvPool(self.take(), blocks=self.blocks, block_tokens=BLOCK_TOKENS, reserve=reserve, fenced=fenced, index=index)

    def take(self, **options: Callable[..., Any]) -> LedgerWriter:
        self.epoch += 1
        writer = LedgerWriter.take(self.fd, owner=self.epoch, epoch=self.epoch, **options)  # type: ignore[arg-type]
        self._open.append(writer)
        return writer

    def reader(self) -> LedgerReader:
        reader = LedgerReader(self.fd)
        self._open.append(reader)
        return reader

    def reserved(self) -> set[int]:
        return {int(block) for block in (self.reader().snapshot().flags & 1).nonzero()[0]}

    def valid(self) -> set[int]:
        return {int(block) for block in self.reader().snapshot().valid.nonzero()[0]}

    def close(self) -> None:
        for one in self._open:
            one.close()
        os.close(self.fd)


@contextmanager
def ledger(blocks: int) -> Iterator[Ledger]:
    made = Ledger(blocks)
    try:
        yield made
    finally:
        made.close()


def fill(pool: KvPool, count: int, family: int = 0) -> list[int]:
    """Allocate and publish a sequence; returns its blocks, still held."""
    blocks = pool.allocate(count)
    assert blocks is not None
    pool.publish([Filled(block, digest) for block, digest in zip(blocks, digests(count, family), strict=True)])
    return blocks
