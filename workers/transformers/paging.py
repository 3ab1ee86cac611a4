"""Which tiles of queries the attention kernels work on, and which pages each sequence has: the metadata of one step on a device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from shadowsup.workers.transformers.batch import Piece, upload

DECODE_ROWS = 16
"""Rows of a tile in which each sequence has one new token: the least that the matrix units take."""

MAX_PARTS = 32
_TILES_WANTED = 264
"""Two for each multiprocessor of an H100 or H200: with fewer, the keys of each tile are cut into parts."""


@dataclass(frozen=True, slots=True)
class Paging:
    """S sequences, P tiles; all tensors on the device, of any integer type.

    Attributes:
        tables: (S, W) block ids. ``starts``: (S,) first new position. ``firsts``: (S,) its row in the packed step. ``counts``: (S,) new
            tokens, 0 for a sequence that only fills a graph up.
        tile_sequence, tile_begin: (P,) the sequence of a tile, and its first token, counted from the sequence's first new one.
        rows: of a tile: tokens times the query heads that share a KV head.
        parts: into how many the keys of a tile are cut.
        padded: whether there are rows in the packed step that belong to no sequence; attention gives zeros for them.
    """

    tables: torch.Tensor
    starts: torch.Tensor
    firsts: torch.Tensor
    counts: torch.Tensor
    tile_sequence: torch.Tensor
    tile_begin: torch.Tensor
    rows: int
    parts: int
    padded: bool = False


def rows_of_tile(longest: int, group: int, dtype: torch.dtype) -> int:
    """Return how many rows a tile has when ``longest`` is the most new tokens of a sequence and ``group`` the heads that share a KV head.

    Few sizes, for each is compiled on its own; float32 goes without matrix units and wants small ones.
    """
    least = max(DECODE_ROWS, 1 << (group - 1).bit_length())
    if longest == 1:
        return least
    return max(least, 32 if dtype.itemsize > 2 else 64 if longest * group <= 64 else 128)


def parts_of(tiles: int, kv_heads: int) -> int:
    """Return into how many parts the keys of each of ``tiles`` are cut: a power of two, for what is compiled is few as well."""
    parts = 1
    while parts < MAX_PARTS and tiles * kv_heads * parts < _TILES_WANTED:
        parts *= 2
    return parts


def paging_of(pieces: Sequence[Piece], block_tokens: int, *, heads: int, kv_heads: int, dtype: torch.dtype, device: torch.device) -> Paging:
    """Return the metadata of a step whose pieces are packed in this order; one transfer to the device."""
    group = heads // kv_heads
    counts = np.array([len(piece.tokens) for piece in pieces], np.int32)
    starts = np.array([piece.start for piece in pieces], np.int32)
    rows = rows_of_tile(int(counts.max()), group, dtype)
    tokens = rows // group
    tiles = -(-counts // tokens)
    sequence = np.repeat(np.arange(len(pieces), dtype=np.int32), tiles)
    begin = np.concatenate([np.arange(number, dtype=np.int32) * tokens for number in tiles])
    width = max(-(-piece.context // block_tokens) for piece in pieces)
    tables = np.zeros((len(pieces), width), np.int32)
    for row, piece in zip(tables, pieces, strict=True):
        used = -(-piece.context // block_tokens)
        row[:used] = piece.blocks[:used]
    firsts = np.concatenate([[0], np.cumsum(counts[:-1])]).astype(np.int32)
    parts = _together([starts, firsts, counts, sequence, begin, tables.reshape(-1)], device)
    return Paging(
        tables=parts[5].view(tables.shape),
        starts=parts[0],
        firsts=parts[1],
        counts=parts[2],
        tile_sequence=parts[3],
        tile_begin=parts[4],
        rows=rows,
        parts=parts_of(len(sequence), kv_heads),
    )


def _together(arrays: Sequence[npt.NDArray[np.int32]], device: torch.device) -> list[torch.Tensor]:
    """Bring arrays to the device in one transfer. Each begins at a multiple of 16 bytes: for others Triton would compile anew."""
    padded = [np.zeros(-(-array.size // 4) * 4, np.int32) for array in arrays]
    for place, array in zip(padded, arrays, strict=True):
        place[: array.size] = array
    pieces = torch.split(upload(np.concatenate(padded), device), [place.size for place in padded])
    return [piece[: array.size] for piece, array in zip(pieces, arrays, strict=True)]
