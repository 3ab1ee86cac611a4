"""One step's tokens as tensors: what is computed, where its K and V go, and what each sequence attends to.

Sequences are packed: T tokens of all of them in one row, those that decode (one token) first, ordered by length so that neighbours can
share a padded gather without much padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

_ALWAYS_TOGETHER = 16
"""Blocks. Sequences up to this length share a gather whatever their lengths: a further kernel call costs more than the padding."""


@dataclass(frozen=True, slots=True)
class Piece:
    """New tokens of one sequence. ``start``: its first new position. ``samples``: the logits of the last token are wanted.

    ``blocks``: the sequence's blocks, from its beginning. From step to step the same list may grow at its end; what is in it stays.
    """

    tokens: Sequence[int]
    start: int
    blocks: Sequence[int]
    samples: bool

    @property
    def context(self) -> int:
        """Tokens up to and including the new ones."""
        return self.start + len(self.tokens)


class DecodeGroup:
    """Rows ``first`` … ``last`` of the step, one query each. ``table``: (rows, blocks) flattened, padded with the row's first block."""

    def __init__(self, first: int, pieces: Sequence[Piece], block_tokens: int, device: torch.device, dtype: torch.dtype) -> None:
        self.first, self.last = first, first + len(pieces)
        self.width = max(-(-piece.context // block_tokens) for piece in pieces)
        self.length = self.width * block_tokens
        table = np.empty((len(pieces), self.width), np.int64)
        for row, piece in zip(table, pieces, strict=True):
            used = min(len(piece.blocks), self.width)
            row[:used] = piece.blocks[:used]
            row[used:] = piece.blocks[0]
        self.table = torch.from_numpy(table.reshape(-1)).to(device)
        self._contexts = np.array([piece.context for piece in pieces])
        self._device, self._dtype = device, dtype
        self._masks: dict[int | None, torch.Tensor] = {}

    def mask(self, window: int | None) -> torch.Tensor:
        """Return (rows, 1, 1, length): 0 where a row attends, -inf elsewhere. ``window``: how many of the last positions it sees."""
        mask = self._masks.get(window)
        if mask is None:
            at = np.arange(self.length)
            hidden = at >= self._contexts[:, None]
            if window is not None:
                hidden |= at < self._contexts[:, None] - window
            mask = self._masks[window] = _additive(hidden, self._device, self._dtype)[:, None, None, :]
        return mask


class PrefillPiece:
    """Rows ``first`` … ``last`` of the step are one sequence's positions ``start`` … ``context``."""

    def __init__(self, first: int, piece: Piece, block_tokens: int, device: torch.device, dtype: torch.dtype) -> None:
        self.first, self.last = first, first + len(piece.tokens)
        self.start, self.context = piece.start, piece.context
        self.table = torch.tensor(piece.blocks[: -(-piece.context // block_tokens)], dtype=torch.int64, device=device)
        self._device, self._dtype = device, dtype
        self._masks: dict[int | None, torch.Tensor] = {}

    def mask(self, window: int | None) -> torch.Tensor:
        """Return (tokens, context): 0 where a query attends, -inf elsewhere."""
        mask = self._masks.get(window)
        if mask is None:
            query = np.arange(self.start, self.context)[:, None]
            key = np.arange(self.context)
            hidden = key > query
            if window is not None:
                hidden |= key <= query - window
            mask = self._masks[window] = _additive(hidden, self._device, self._dtype)
        return mask


def _additive(hidden: npt.NDArray[np.bool_], device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    mask = torch.zeros(hidden.shape, dtype=dtype)
    return mask.masked_fill_(torch.from_numpy(hidden), -torch.inf).to(device)


class StepBatch:
    """The tensors of one step.

    Attributes:
        pieces: in the order in which their tokens are packed.
        input_ids, position_ids: (1, T) int64.
        slots: (T,) int64, block × block_tokens + offset: where the K and V of each token go.
        sample_rows: (S,) int64, rows whose logits are wanted, in the order of the pieces that sample.
    """

    def __init__(self, pieces: Sequence[Piece], block_tokens: int, *, device: torch.device, dtype: torch.dtype) -> None:
        order = sorted(range(len(pieces)), key=lambda at: _order(pieces[at]))
        ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        last_row: dict[int, int] = {}
        for at in order:
            piece = pieces[at]
            ids += piece.tokens
            for position in range(piece.start, piece.context):
                positions.append(position)
                slots.append(piece.blocks[position // block_tokens] * block_tokens + position % block_tokens)
            last_row[at] = len(ids) - 1
        self.pieces = [pieces[at] for at in order]
        self.tokens = len(ids)
        self._block_tokens, self._device, self._dtype = block_tokens, device, dtype
        rows = [last_row[at] for at, piece in enumerate(pieces) if piece.samples]
        # One transfer for all.
        packed = upload(np.array([*ids, *positions, *slots, *rows], np.int64), device)
        self.input_ids, self.position_ids, self.slots, self.sample_rows = packed.split([self.tokens] * 3 + [len(rows)])
        self.input_ids, self.position_ids = self.input_ids[None], self.position_ids[None]

    def groups(self) -> tuple[list[DecodeGroup], list[PrefillPiece]]:
        """Return the sequences as a gather wants them: those with one new token in groups of similar length, the others one by one."""
        decodes: list[DecodeGroup] = []
        prefills: list[PrefillPiece] = []
        singles = [piece for piece in self.pieces if len(piece.tokens) == 1]
        row = 0
        while row < len(singles):
            end = row + 1
            blocks = -(-singles[row].context // self._block_tokens)
            while end < len(singles) and (blocks <= _ALWAYS_TOGETHER or 2 * singles[end].context >= singles[row].context):
                end += 1
            decodes.append(DecodeGroup(row, singles[row:end], self._block_tokens, self._device, self._dtype))
            row = end
        for piece in self.pieces[len(singles) :]:
            prefills.append(PrefillPiece(row, piece, self._block_tokens, self._device, self._dtype))
            row += len(piece.tokens)
        return decodes, prefills


def upload(array: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """Return ``array`` on ``device``; to a GPU from pinned memory, so that nobody waits for what runs there."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def _order(piece: Piece) -> tuple[bool, int]:
    return len(piece.tokens) > 1, -piece.context
