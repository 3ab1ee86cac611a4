"""Content hashes of KV blocks: chained, so that a hash names a block and everything before it; salted for each worker, so that nobody
who chooses prompts can aim at a collision; 128 bits, so that none happens by chance.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

SIZE = 16
"""Bytes of a hash."""

_ROOT = b"ssup-block-root"
_NEXT = b"ssup-block-next"


def chain(salt: bytes, parent: bytes | None, token_ids: Sequence[int] | NDArray[np.integer]) -> bytes:
    """Return the hash of the block that holds ``token_ids`` after the block ``parent`` (None: the first block of a sequence).

    Keyed blake2b-128 (RFC 7693). ``salt``: 1 to 64 bytes. Tokens are hashed as u32, little-endian.
    """
    return _chain(salt, parent, np.asarray(token_ids, dtype="<u4").tobytes())


def _chain(salt: bytes, parent: bytes | None, tokens: bytes) -> bytes:
    if parent is None:
        return hashlib.blake2b(tokens, digest_size=SIZE, key=salt, person=_ROOT).digest()
    return hashlib.blake2b(parent + tokens, digest_size=SIZE, key=salt, person=_NEXT).digest()


def chain_all(salt: bytes, token_ids: Sequence[int] | NDArray[np.integer], block_tokens: int, parent: bytes | None = None) -> list[bytes]:
    """Return the hashes of all *full* blocks of ``token_ids``, the first of them after ``parent``."""
    tokens, size = np.asarray(token_ids, dtype="<u4").tobytes(), 4 * block_tokens
    hashes: list[bytes] = []
    for start in range(0, len(tokens) - size + 1, size):
        parent = _chain(salt, parent, tokens[start : start + size])
        hashes.append(parent)
    return hashes


def to_words(digest: bytes) -> tuple[int, int]:
    """Return a hash as the ledger's two u64."""
    return int.from_bytes(digest[:8], "little"), int.from_bytes(digest[8:SIZE], "little")


def from_words(first: int, second: int) -> bytes:
    """Inverse of `to_words`."""
    return int(first).to_bytes(8, "little") + int(second).to_bytes(8, "little")


def to_array(digests: Sequence[bytes]) -> NDArray[np.uint64]:
    """Return (n, 2) u64 for the ledger."""
    return np.frombuffer(b"".join(digests), dtype="<u8").reshape(-1, 2)


def from_array(hashes: NDArray[np.uint64]) -> list[bytes]:
    """Inverse of `to_array`."""
    raw = np.ascontiguousarray(hashes, dtype="<u8").tobytes()
    return [raw[at : at + SIZE] for at in range(0, len(raw), SIZE)]
