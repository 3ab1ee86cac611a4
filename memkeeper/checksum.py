"""Content checksums of weights: fast enough to take while publishing (several GB/s on one core), sensitive to every bit and its place.

They find memory that was overwritten or mixed up, not an adversary. Each u64 word is xored with a value of its place, multiplied by an odd
one (both steps lose nothing) and folded onto its own lower half, so that a change of the upper bits reaches all of the sum; the sums of the
chunks, in order, and the length go through blake2b.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

_WORDS = 8192
"""u64 words a chunk: 64 KiB, so that all passes over it stay in the first- or second-level cache."""
_PAGE = 4096


def _places(seed: int) -> NDArray[np.uint64]:
    """splitmix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, 2014) of 1 … chunk length."""
    state = np.arange(1, _WORDS + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(seed)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))


_XOR = _places(0)
_ODD = _places(1 << 32) | np.uint64(1)
_HALF = np.uint64(32)


def _bytes_of(buffer: Any) -> NDArray[np.uint8]:
    view = memoryview(buffer)
    if not view.c_contiguous:
        raise ValueError("a checksum is of contiguous bytes")
    return np.frombuffer(view.cast("B") if view.nbytes else b"", dtype=np.uint8)


def checksum(buffer: Any) -> str:
    """Return 32 hex digits for all bytes of ``buffer`` (anything with the buffer protocol, contiguous)."""
    data = _bytes_of(buffer)
    whole = len(data) // 8 * 8
    words = data[:whole].view(np.uint64)
    sums = np.empty(-(-len(words) // _WORDS), dtype=np.uint64)
    mixed, folded = np.empty(_WORDS, np.uint64), np.empty(_WORDS, np.uint64)
    for number, start in enumerate(range(0, len(words), _WORDS)):
        chunk = words[start : start + _WORDS]
        size = len(chunk)
        np.bitwise_xor(chunk, _XOR[:size], out=mixed[:size])
        np.multiply(mixed[:size], _ODD[:size], out=mixed[:size])
        np.right_shift(mixed[:size], _HALF, out=folded[:size])
        np.bitwise_xor(mixed[:size], folded[:size], out=mixed[:size])
        sums[number] = np.add.reduce(mixed[:size])
    state = hashlib.blake2b(len(data).to_bytes(8, "little"), digest_size=16)
    state.update(sums.astype("<u8").tobytes())
    state.update(data[whole:].tobytes())
    return state.hexdigest()


def sample_checksum(buffer: Any, *, pages: int = 256) -> str:
    """Return 32 hex digits for ``pages`` pages spread evenly over ``buffer``, the first and the last among them, and its length."""
    data = _bytes_of(buffer)
    count = -(-len(data) // _PAGE)
    state = hashlib.blake2b(len(data).to_bytes(8, "little"), digest_size=16)
    chosen = range(count) if count <= pages else sorted({round(number * (count - 1) / (pages - 1)) for number in range(pages)})
    for page in chosen:
        state.update(data[page * _PAGE : (page + 1) * _PAGE].tobytes())
    return state.hexdigest()
