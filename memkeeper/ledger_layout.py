"""Where everything lies in a ledger: one header page, then two banks of columns over blocks.

Header page (little-endian): magic u64 (stored last, so a ledger that has it is complete), version u32, blocks u32, block_tokens u32,
fingerprint 16 B, salt 16 B, and at byte 64 the *word*: one aligned u64 that says who owns the ledger. It is the only thing that is
ever compared and swapped, and a store of 8 aligned bytes is seen whole or not at all::

    63          32 31   30                    0
    [   epoch     |bank|        owner         ]

``bank`` says which of the two banks is the owner's. A successor writes the other one and names it by the swap, so it does not matter
whether epochs are consecutive (a promotion that failed before the swap leaves a gap).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shadowsup.memkeeper.errors import KeeperError, LedgerLost
from shadowsup.memkeeper.ledger_word import MAX_OWNER, WORD_AT, unpack_word

MAGIC = int.from_bytes(b"SSUPLDG1", "little")
VERSION = 1
PAGE = 4096
RESERVE = 1
"""Bit 0 of ``flags``: set aside for a successor that serves before its predecessor is fenced; never written since the bit was set."""

_FACTS = struct.Struct("<III4x16s16s")
"""version, blocks, block_tokens, fingerprint, salt; from byte 8."""
_FACTS_AT = 8
_ALIGN = 64
"""Bytes: every column starts on a cache line of its own."""
_FLOCK = struct.Struct("hhqqi4x")
"""``struct flock`` of 64-bit Linux: l_type, l_whence, l_start, l_len, l_pid."""

U8 = NDArray[np.uint8]
U32 = NDArray[np.uint32]
U64 = NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class Header:
    """``epoch`` 0: nobody has owned this ledger yet. ``fingerprint`` and ``salt``: 16 bytes each."""

    epoch: int
    owner: int
    bank: int
    blocks: int
    block_tokens: int
    fingerprint: bytes
    salt: bytes

    def matches(self, fingerprint: bytes) -> bool:
        """Whether the blocks were computed under ``fingerprint`` (16 bytes). False is a miss: nothing in the ledger may be trusted."""
        return self.fingerprint == fingerprint


@dataclass(frozen=True, slots=True)
class Columns:
    """One bank. All arrays have one row a block and are views of the shared memory."""

    valid: U32
    """The epoch that published the entry, or copied it at its start; 0 = invalid. Trusted iff equal to the header's epoch."""
    generation: U32
    """Grows with each publish and invalidate of the block."""
    hashes: U64
    """(blocks, 2): the 128-bit content hash."""
    tokens: U32
    last_use: U64
    flags: U8


def _column_offsets(blocks: int) -> tuple[dict[str, int], int]:
    offsets, at = {}, 0
    for name, row_bytes in (("valid", 4), ("generation", 4), ("hashes", 16), ("tokens", 4), ("last_use", 8), ("flags", 1)):
        offsets[name] = at
        at += -(-blocks * row_bytes // _ALIGN) * _ALIGN
    return offsets, -(-at // PAGE) * PAGE


def ledger_size(blocks: int) -> int:
    """Return the bytes of a ledger over ``blocks`` blocks (about 74 a block)."""
    return PAGE + 2 * _column_offsets(blocks)[1]


def check_successor(owner: int, epoch: int) -> None:
    """Raises KeeperError when owner or epoch cannot be written into the header."""
    if not 0 < owner <= MAX_OWNER or not 0 < epoch < 2**32:
        raise KeeperError(f"owner {owner} or epoch {epoch} is out of range", "both start at 1")


class LedgerMap:
    """A ledger mapped into this process. Does not own ``fd``; `close` unmaps.

    Raises:
        KeeperError: ``fd`` is not an initialised ledger of this version, or shorter than its header says.
    """

    def __init__(self, fd: int, *, writable: bool) -> None:
        size = os.fstat(fd).st_size
        if size < PAGE:
            raise KeeperError(f"not a ledger: {size} bytes")
        self._map = mmap.mmap(fd, size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0))
        try:
            (magic,) = struct.unpack_from("<Q", self._map, 0)
            if magic != MAGIC:
                raise KeeperError("not an initialised ledger", "whoever creates it initialises it before it is handed out")
            version, self.blocks, self.block_tokens, self.fingerprint, self.salt = _FACTS.unpack_from(self._map, _FACTS_AT)
            if version != VERSION or size < ledger_size(self.blocks):
                raise KeeperError(f"ledger of version {version} with {self.blocks} blocks in {size} bytes is not one of version {VERSION}")
        except BaseException:
            self._map.close()
            raise
        self.word_cell: U64 = np.frombuffer(self._map, dtype=np.uint64, count=1, offset=WORD_AT)
        self._banks = (self._columns(0), self._columns(1))

    def _columns(self, bank: int) -> Columns:
        offsets, bank_bytes = _column_offsets(self.blocks)
        base = PAGE + bank * bank_bytes

        def view(name: str, dtype: type[Any], width: int = 1) -> NDArray[Any]:
            return np.frombuffer(self._map, dtype=dtype, count=self.blocks * width, offset=base + offsets[name])

        return Columns(
            valid=view("valid", np.uint32),
            generation=view("generation", np.uint32),
            hashes=view("hashes", np.uint64, 2).reshape(self.blocks, 2),
            tokens=view("tokens", np.uint32),
            last_use=view("last_use", np.uint64),
            flags=view("flags", np.uint8),
        )

    def word(self) -> int:
        return int(self.word_cell[0])

    def columns(self, bank: int) -> Columns:
        return self._banks[bank]

    def header(self) -> Header:
        epoch, bank, owner = unpack_word(self.word())
        return Header(epoch, owner, bank, self.blocks, self.block_tokens, self.fingerprint, self.salt)

    def close(self) -> None:
        """Unmap, or leave that to the last array that `columns` handed out and that is still in use. Idempotent."""
        if hasattr(self, "word_cell"):
            del self.word_cell, self._banks
            with contextlib.suppress(BufferError):
                self._map.close()


@contextlib.contextmanager
def exclusive(fd: int, wait_s: float) -> Iterator[None]:
    """Hold the ledger's lock.

    The lock belongs to an open file description, and an fd that came by SCM_RIGHTS shares its description with every process that has
    it: locking that one would exclude nobody. So the memfd is opened again. The kernel drops the lock when its holder dies.

    Raises:
        LedgerLost: another process held the lock for ``wait_s`` seconds.
    """
    own = os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
    try:
        deadline = time.monotonic() + wait_s
        while True:
            try:
                fcntl.fcntl(own, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0))
                break
            except OSError as error:
                if error.errno not in (errno.EAGAIN, errno.EACCES):
                    raise
            if time.monotonic() >= deadline:
                raise LedgerLost(f"another engine has been taking the ledger for {wait_s:g} s")
            # F_OFD_SETLKW has no time limit; a taker holds the lock for about a millisecond.
            time.sleep(0.0005)
        try:
            yield
        finally:
            # Explicitly: a child forked meanwhile shares the description and would go on holding the lock after our close.
            fcntl.fcntl(own, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_UNLCK, os.SEEK_SET, 0, 0, 0))
    finally:
        os.close(own)


def initialise(fd: int, *, blocks: int, block_tokens: int, fingerprint: bytes, salt: bytes) -> None:
    """Make the zeroed memory of ``fd`` an empty ledger; on one that is initialised with the same facts, do nothing.

    Raises:
        KeeperError: too small for ``blocks``, or initialised with other facts.
    """
    if blocks <= 0 or block_tokens <= 0 or len(fingerprint) != 16 or len(salt) != 16:
        raise KeeperError("a ledger needs blocks, block_tokens, and a fingerprint and a salt of 16 bytes each")
    size = os.fstat(fd).st_size
    if size < ledger_size(blocks):
        raise KeeperError(f"{size} bytes cannot hold a ledger of {blocks} blocks", f"it needs {ledger_size(blocks)} bytes")
    facts = _FACTS.pack(VERSION, blocks, block_tokens, fingerprint, salt)
    with exclusive(fd, wait_s=5.0), mmap.mmap(fd, PAGE, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ | mmap.PROT_WRITE) as page:
        (magic,) = struct.unpack_from("<Q", page, 0)
        if magic == MAGIC:
            if page[_FACTS_AT : _FACTS_AT + _FACTS.size] != facts:
                raise KeeperError("the ledger is initialised with another geometry, fingerprint or salt")
            return
        page[_FACTS_AT : _FACTS_AT + _FACTS.size] = facts
        struct.pack_into("<Q", page, 0, MAGIC)
