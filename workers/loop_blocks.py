"""The blocks of a loop of one's own: memory that outlives the process, and the ledger that says what is in it."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from shadowsup.memkeeper import hashing
from shadowsup.memkeeper.ledger import Follower, LedgerReader, LedgerWriter, initialise, ledger_size
from shadowsup.wire.engine import KvCounts
from shadowsup.workers.api import KvGeometry
from shadowsup.workers.arena import KvArena
from shadowsup.workers.errors import WorkerError
from shadowsup.workers.kv_pool import Filled, IndexMirror, KvPool

_NAMED = b"ssup-block-name"


class Blocks:
    """KV blocks, or state of any other kind, in ``blocks`` pieces of ``block_bytes`` bytes. Made by `shadowsup.workers.loop.Loop.kv`.

    Until `Loop.park` returns, the memory is scratch: write to it to warm up, nothing stays and blocks are not distinct. After that it is
    the worker's own, with what a predecessor left in it, at the same addresses. Which of it may be written and what it holds is the
    business of `pool`: allocate, write, publish, release. Whatever is published is found by the next engine, whatever is not is lost.

    Attributes:
        blocks, block_bytes, block_tokens: the geometry.
        reserve: blocks that `pool` sets aside for a successor.
    """

    def __init__(self, geometry: KvGeometry, arena: KvArena | None, device: str) -> None:
        self.blocks = geometry.blocks
        self.block_bytes = geometry.block_bytes
        self.block_tokens = geometry.block_tokens
        self.reserve = geometry.reserve
        self._size = geometry.size
        self._arena = arena
        self._device = device
        self._private: Any = None
        self._mirror = IndexMirror(geometry.blocks)
        self._follower: tuple[LedgerReader, Follower] | None = None
        self._pool: KvPool | None = None
        self._ledger: LedgerWriter | None = None

    # --- the memory ------------------------------------------------------------------------------------------------------------

    @property
    def array(self) -> npt.NDArray[np.uint8]:
        """All of it as bytes, (blocks, block_bytes); host memory only.

        Raises:
            WorkerError: it is on a GPU.
        """
        if self._device != "cpu":
            raise WorkerError(f"blocks on {self._device} are no array", "use Blocks.tensor", fatal=True)
        if self._arena is not None:
            return self._arena.view()[: self._size].reshape(self.blocks, self.block_bytes)
        if self._private is None:
            self._private = np.zeros(self._size, np.uint8)
        private: npt.NDArray[np.uint8] = self._private
        return private.reshape(self.blocks, self.block_bytes)

    def tensor(self, dtype: Any, *shape: int) -> Any:
        """All of it as a torch tensor of ``dtype`` and shape (blocks, *shape), no copy; make it once, it stays good.

        Raises:
            WorkerError: a block of that shape has not `block_bytes` bytes.
        """
        import torch

        from shadowsup.workers.torch_memory import as_bytes

        wanted = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        if wanted != self.block_bytes:
            raise WorkerError(f"{dtype} of shape {shape} has {wanted} bytes, a block has {self.block_bytes}", fatal=True)
        if self._arena is not None:
            raw = as_bytes(self._arena.address, self._size, torch.device(self._device))
        elif self._device == "cpu":
            raw = torch.from_numpy(self.array.reshape(-1))
        else:
            if self._private is None:
                self._private = torch.zeros(self._size, dtype=torch.uint8, device=self._device)
            raw = self._private
        return raw.view(dtype).view(self.blocks, *shape)

    def settle(self) -> None:
        """Wait for what the GPU still has to write; on the CPU there is nothing to wait for. Before anything is published."""
        if self._device != "cpu":
            import torch

            torch.cuda.synchronize(self._device)

    # --- what is in it ---------------------------------------------------------------------------------------------------------

    @property
    def pool(self) -> KvPool:
        """Who may write where, and what is found where (`KvPool`); sequences are keyed by `shadowsup.memkeeper.hashing.chain_all`.

        Raises:
            WorkerError: not promoted yet.
        """
        if self._pool is None:
            raise WorkerError("the blocks belong to another engine until this one is promoted", "call park() first", fatal=True)
        return self._pool

    @property
    def ledger(self) -> LedgerWriter:
        """The ledger itself, this engine's: ``entries``, ``check``, ``header``. What `pool` does it also writes here.

        Raises:
            WorkerError: not promoted yet.
        """
        assert self.pool is not None
        assert self._ledger is not None
        return self._ledger

    @property
    def salt(self) -> bytes:
        """Of the hashes in this ledger. Raises WorkerError: not promoted yet."""
        return self.ledger.header().salt

    # --- state with a name -----------------------------------------------------------------------------------------------------

    def save(self, name: str, data: Any) -> bool:
        """Put ``data`` into a block of its own and publish it as ``name``, all or nothing.

        A name stands for its content: under a name that is there already nothing is written. The blocks that were saved or used longest
        ago make room.

        Args:
            data: a tensor, an array or bytes; at most `block_bytes` bytes, of which the rest is left as it is.

        Returns:
            False when no block may be written just now (a predecessor's are not fenced yet); after a few more beats there will be one.

        Raises:
            WorkerError: too large, or not promoted yet.
            LedgerLost: another engine owns the ledger.
        """
        pool, digest = self.pool, self._digest(name)
        if pool.match([digest]):
            return True
        taken = pool.allocate(1)
        if taken is None:
            return False
        self._write(taken[0], data)
        self.settle()
        pool.publish([Filled(taken[0], digest)])
        pool.release(taken)
        return True

    def find(self, name: str) -> int | None:
        """Return the block that was saved as ``name``, or None. Raises WorkerError: not promoted yet."""
        found = self.pool.match([self._digest(name)])
        return found[0] if found else None

    def newest(self) -> int | None:
        """Return the block that was saved or used last, by whichever engine, or None. Raises WorkerError: not promoted yet."""
        entries = self.ledger.entries()
        return int(entries.ids[int(np.argmax(entries.last_use))]) if len(entries.ids) else None

    def _digest(self, name: str) -> bytes:
        return hashlib.blake2b(name.encode(), digest_size=hashing.SIZE, key=self.salt, person=_NAMED).digest()

    def _write(self, block: int, data: Any) -> None:
        if self._device != "cpu":
            import torch

            raw = self.tensor(torch.uint8, self.block_bytes)[block]
            tensor = data if isinstance(data, torch.Tensor) else torch.from_numpy(_bytes_of(data).copy())
            source = tensor.detach().contiguous().view(-1).view(torch.uint8)
        else:
            raw, source = self.array[block], _bytes_of(data)
        if len(source) > len(raw):
            raise WorkerError(f"{len(source)} bytes do not fit a block of {len(raw)}", "make block_bytes larger", fatal=True)
        raw[: len(source)] = source

    # --- what a life drives (`shadowsup.workers.api.Served`) ---------------------------------------------------------------------

    def follow(self, ledger: LedgerReader) -> None:
        """Parked: keep up with what the owner publishes."""
        if self._follower is None or self._follower[0] is not ledger:
            self._follower = (ledger, Follower(ledger))
        self._mirror.follow(self._follower[1])

    def promote(self, ledger: LedgerWriter, *, fenced: bool) -> tuple[int, int]:
        """The memory is this engine's. Returns (blocks kept, blocks dropped)."""
        self._ledger = ledger
        self._pool = KvPool(
            ledger,
            blocks=self.blocks,
            block_tokens=self.block_tokens,
            reserve=self.reserve,
            fenced=fenced,
            index=self._mirror.index,
        )
        return self._pool.kept, self._pool.dropped

    def counts(self) -> KvCounts | None:
        return self._pool.counts() if self._pool is not None else None


def private_ledger(geometry: KvGeometry) -> LedgerWriter:
    """Return a ledger that nobody else has, owned in epoch 1."""
    fd = os.memfd_create("shadowsup-private-ledger", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, ledger_size(geometry.blocks))
        initialise(fd, blocks=geometry.blocks, block_tokens=geometry.block_tokens, fingerprint=bytes(16), salt=os.urandom(16))
        return LedgerWriter.take(fd, owner=1, epoch=1)
    finally:
        os.close(fd)


def slots(blocks: Sequence[int], block_tokens: int, tokens: int) -> npt.NDArray[np.int64]:
    """Return where the first ``tokens`` tokens of a sequence lie, (tokens,): block × ``block_tokens`` + offset."""
    at = np.arange(tokens, dtype=np.int64)
    return np.asarray(blocks, dtype=np.int64)[at // block_tokens] * block_tokens + at % block_tokens


def _bytes_of(data: Any) -> npt.NDArray[np.uint8]:
    if isinstance(data, bytes | bytearray | memoryview):
        return np.frombuffer(data, np.uint8)
    array = np.ascontiguousarray(data.detach().cpu().numpy() if hasattr(data, "detach") else data)
    return array.reshape(-1).view(np.uint8)
