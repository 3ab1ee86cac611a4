"""Content checksums of weights: fast enough to take while publishing (several GB/s on one core), sensitive to every bit and its place.

They find memory that was overwritten or mixed up, not an adversary. Each u64 word is folded (its upper half xored onto its lower), xored
with a value of its place, multiplied by an odd one of its place, and folded again: steps that lose nothing. Without the first fold two
words that differ in their top bit could change places unseen: 2^63 times an odd number is 2^63, whatever the number. The sums of the
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
        mix, fold = mixed[:size], folded[:size]
        np.right_shift(chunk, _HALF, out=fold)
        np.bitwise_xor(chunk, fold, out=mix)
        np.bitwise_xor(mix, _XOR[:size], out=mix)
        np.multiply(mix, _ODD[:size], out=mix)
        np.right_shift(mix, _HALF, out=fold)
        np.bitwise_xor(mix, fold, out=mix)
        sums[number] = np.add.reduce(mix)
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
