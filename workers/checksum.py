"""Checksums of weights: fast enough to take at every publish, sensitive to every bit and to order. Not a defence against an adversary.

Multilinear hashing over 32-bit words: ``sum(word[i] * key[i]) mod 2^64`` with random 64-bit keys (Lemire and Kaser, "Strongly universal
string hashing is fast", 2014: two different inputs agree in the top 32 bits with probability 2^-32). Memory is summed in pieces, so that
a sample can be verified; 5 to 7 GB/s on one core.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

NAME = "multilinear-64"
"""Noted with the checksums, so that another algorithm may follow."""

PIECE = 4 * 1024 * 1024
"""Bytes that one checksum covers."""

WORDS = 16384
"""u64 words of a chunk: 128 KiB of data, and as much of each key, stays in the L2 cache."""

CHUNKS = PIECE // 8 // WORDS
"""Chunks of a piece."""

KEYS = np.random.Generator(np.random.PCG64(0x73686164)).integers(0, 2**64, size=(3, WORDS), dtype=np.uint64)
_LOW = np.uint64(0xFFFFFFFF)
_HIGH_BITS = np.uint64(32)
MULTIPLIER = 0x9E3779B97F4A7C15
"""Odd; carries the order of chunks."""


def piece_count(size: int) -> int:
    """Return how many checksums ``size`` bytes have."""
    return -(-size // PIECE)


def checksum(data: npt.NDArray[np.uint8]) -> int:
    """Return the 64-bit checksum of contiguous bytes, at most `PIECE` of them. Zeros behind the end do not count; the length does."""
    total = data.size
    whole = total - total % 8
    words = data[:whole].view(np.uint64)
    product = np.empty(WORDS, dtype=np.uint64)
    result = total
    for start in range(0, words.size, WORDS):
        chunk = words[start : start + WORDS]
        out = product[: chunk.size]
        np.bitwise_and(chunk, _LOW, out=out)
        np.multiply(out, KEYS[0, : chunk.size], out=out)
        low = int(out.sum())
        np.right_shift(chunk, _HIGH_BITS, out=out)
        np.multiply(out, KEYS[1, : chunk.size], out=out)
        result = (result * MULTIPLIER + low + int(out.sum())) % 2**64
    if whole != total:
        tail = int.from_bytes(data[whole:].tobytes(), "little")
        result = (result * MULTIPLIER + tail * int(KEYS[2, 0])) % 2**64
    return result


def checksums(data: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint64]:
    """Return the checksum of every piece of ``data``: shape ``(piece_count(data.size),)``."""
    return np.array([checksum(data[at : at + PIECE]) for at in range(0, data.size, PIECE)], dtype=np.uint64)


def sample(count: int, wanted: int) -> list[int]:
    """Return the indices of ``wanted`` pieces out of ``count``: spread evenly, first and last among them."""
    if count <= wanted:
        return list(range(count))
    return sorted({round(index * (count - 1) / (wanted - 1)) for index in range(wanted)})
