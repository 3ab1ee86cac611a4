"""The GPU kernel of `shadowsup.workers.checksum_cuda`. Importing this module needs Triton.

A program keeps one tile of keys in registers and runs down a piece chunk by chunk, so that keys are read once a piece and data once:
the kernel is bound by memory bandwidth. The order of chunks is carried by Horner's rule in every lane, and lanes are summed at the end.
"""

from __future__ import annotations

import importlib
from typing import Any

from shadowsup.workers import checksum

# Not import statements: Triton is on no machine without a GPU, and type checkers would call it missing here and untyped there.
triton: Any = importlib.import_module("triton")
tl: Any = importlib.import_module("triton.language")

_TILE = tl.constexpr(2048)
_CHUNK_WORDS = tl.constexpr(checksum.WORDS)
_PIECE_WORDS = tl.constexpr(checksum.PIECE // 8)
_CHUNKS = tl.constexpr(checksum.PIECE // 8 // checksum.WORDS)

TILES = checksum.WORDS // 2048


@triton.jit
def _tile_sums(words, keys, multipliers, sums):  # type: ignore[no-untyped-def]
    piece = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * _TILE + tl.arange(0, _TILE)
    low_keys = tl.load(keys + column).to(tl.uint64, bitcast=True)
    high_keys = tl.load(keys + _CHUNK_WORDS + column).to(tl.uint64, bitcast=True)
    multiplier = tl.load(multipliers).to(tl.uint64, bitcast=True)
    total = tl.zeros([_TILE], tl.uint64)
    start = words + piece * _PIECE_WORDS + column
    for chunk in tl.range(0, _CHUNKS, num_stages=3):
        word = tl.load(start + chunk * _CHUNK_WORDS).to(tl.uint64, bitcast=True)
        low = word.to(tl.uint32).to(tl.uint64)
        high = (word >> 32).to(tl.uint32).to(tl.uint64)
        total = total * multiplier + low * low_keys + high * high_keys
    tl.store(sums + piece * tl.num_programs(1) + tl.program_id(1), tl.sum(total, 0).to(tl.int64, bitcast=True))


def tile_sums(words: Any, keys: Any, multiplier: Any, sums: Any) -> None:
    """Fill ``sums``, (pieces, `TILES`) i64, from ``words``, (pieces × PIECE / 8,) i64, all on one device. ``keys``: (2, WORDS) i64,
    ``multiplier``: (1,) i64. The row sums are the checksums without the term of the length."""
    _tile_sums[(sums.shape[0], TILES)](words, keys, multiplier, sums, num_warps=8)
