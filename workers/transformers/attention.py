"""Paged attention as a transformers attention function: K and V go to the arena, queries attend through block tables.

transformers calls it by the name it is registered under, for each layer, with the packed row of the whole step; which step that is it
finds in a module variable (`attending`), so no model has to forward anything. No mask function is registered under the name:
transformers then makes no mask at all, and this module masks by sequence, position and sliding window itself.

`GatherAttention` gathers the pages of a layer and calls torch's SDPA: right on a CPU, and a fallback on a GPU, where
`shadowsup.workers.transformers.attention_cuda` has the other one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from shadowsup.workers.errors import WorkerError
from shadowsup.workers.transformers.batch import DecodeGroup, PrefillPiece, StepBatch

NAME = "shadowsup_paged"
LAYOUT = "lkb-thd-1"
"""Id of the arena's layout: layer, K or V, block; then token, head, dimension. A change here makes kept KV a miss."""

_REFUSED = ("s_aux", "sinks", "position_bias", "alibi", "head_mask")
"""Arguments that change what attention computes and are not implemented here."""


@dataclass(frozen=True, slots=True)
class KvShape:
    """What one token's K and V are, and how blocks lie in the arena."""

    layers: int
    block_tokens: int
    heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def block_bytes(self) -> int:
        """Bytes of one block: all layers, K and V."""
        return self.layers * 2 * self.block_tokens * self.heads * self.head_dim * self.dtype.itemsize


class KvCache:
    """The arena as tensors. ``arena``: (bytes,) uint8; (layers, 2, blocks, block_tokens, heads, head_dim) lies at its beginning."""

    def __init__(self, arena: torch.Tensor, shape: KvShape, blocks: int) -> None:
        self.shape = shape
        size = blocks * shape.block_bytes
        tensor = arena[:size].view(shape.dtype).view(shape.layers, 2, blocks, shape.block_tokens, shape.heads, shape.head_dim)
        # Two views of each: rows are blocks, which is what is gathered, and tokens, which is what is written.
        self.pages = [(layer[0].view(blocks, -1), layer[1].view(blocks, -1)) for layer in tensor]
        self.tokens = [(layer[0].view(-1, shape.heads, shape.head_dim), layer[1].view(-1, shape.heads, shape.head_dim)) for layer in tensor]


class StepAttention(Protocol):
    """Attention of one step. Tensors of one layer: ``query`` (heads, T, dim); ``key``, ``value`` (kv heads, T, dim) of the new tokens."""

    def store(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Write the new tokens' K and V to the cache."""

    def attend(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, how: How) -> torch.Tensor:
        """Return (T, heads, dim). `store` comes first."""


@dataclass(frozen=True, slots=True)
class How:
    """``scale`` of the scores; ``window``: positions a query sees, itself included; ``softcap``: scores go through cap·tanh(score/cap)."""

    scale: float
    window: int | None = None
    softcap: float | None = None


@dataclass(slots=True)
class Step:
    """The step that is running: ``tokens`` new ones in all. ``seen``: layers that attended."""

    tokens: int
    shape: KvShape
    attention: StepAttention
    seen: int = 0


_current: Step | None = None


@contextmanager
def attending(step: Step) -> Iterator[None]:
    """Everything that calls the attention function inside is part of ``step``. One at a time, on one thread."""
    global _current
    _current = step
    try:
        yield
    finally:
        _current = None


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    **others: object,
) -> tuple[torch.Tensor, None]:
    """The function transformers calls. ``query`` (1, heads, T, dim), ``key`` and ``value`` (1, kv heads, T, dim).

    Returns:
        ((1, T, heads, dim), None).

    Raises:
        WorkerError: (fatal) the model asks for an attention that is not this one.
    """
    step = _current
    if step is None:
        raise WorkerError("paged attention was called outside a step", fatal=True)
    shape = step.shape
    if attention_mask is not None or is_causal is False:
        raise _unsupported(module, "its attention has a mask of its own")
    if any(others.get(name) is not None for name in _REFUSED):
        raise _unsupported(module, "attention with " + ", ".join(name for name in _REFUSED if others.get(name) is not None))
    expected = (1, shape.heads, step.tokens, shape.head_dim)
    if key.shape != expected or value.shape != expected:
        raise _unsupported(module, f"K {tuple(key.shape)} and V {tuple(value.shape)} are not {expected} in each layer")
    layer = module.layer_idx
    step.attention.store(layer, key[0], value[0])
    step.seen += 1
    how = How(scaling if scaling is not None else shape.head_dim**-0.5, sliding_window, softcap)
    return step.attention.attend(layer, query[0], key[0], value[0], how)[None], None


def _unsupported(module: torch.nn.Module, why: str) -> WorkerError:
    return WorkerError(f"{type(module).__name__} cannot run on paged KV: {why}", "use another model", fatal=True)


class GatherAttention:
    """Gathers a sequence's pages into a contiguous K and V, then SDPA."""

    def __init__(self, batch: StepBatch, cache: KvCache) -> None:
        self._batch, self._cache = batch, cache
        self._decodes, self._prefills = batch.groups()

    def store(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        keys, values = self._cache.tokens[layer]
        keys.index_copy_(0, self._batch.slots, key.transpose(0, 1))
        values.index_copy_(0, self._batch.slots, value.transpose(0, 1))

    def attend(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, how: How) -> torch.Tensor:
        pages = self._cache.pages[layer]
        if len(self._decodes) == 1 and not self._prefills:
            return self._decode(self._decodes[0], pages, query, how)
        out = query.new_empty((query.shape[1], query.shape[0], query.shape[2]))
        for group in self._decodes:
            out[group.first : group.last] = self._decode(group, pages, query[:, group.first : group.last], how)
        for piece in self._prefills:
            rows = slice(piece.first, piece.last)
            out[rows] = self._prefill(piece, pages, query[:, rows], key[:, rows], value[:, rows], how)
        return out

    def _decode(self, group: DecodeGroup, pages: tuple[torch.Tensor, torch.Tensor], query: torch.Tensor, how: How) -> torch.Tensor:
        shape = self._cache.shape
        size = (group.last - group.first, group.length, shape.heads, shape.head_dim)
        key = pages[0].index_select(0, group.table).view(size).transpose(1, 2)
        value = pages[1].index_select(0, group.table).view(size).transpose(1, 2)
        return _attend(query.transpose(0, 1).unsqueeze(2), key, value, how, mask=group.mask(how.window))[:, :, 0]

    def _prefill(
        self,
        piece: PrefillPiece,
        pages: tuple[torch.Tensor, torch.Tensor],
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        how: How,
    ) -> torch.Tensor:
        shape = self._cache.shape
        whole = piece.start == 0 and (how.window is None or how.window >= piece.context)
        if piece.start > 0:
            size = (-1, shape.heads, shape.head_dim)
            key = pages[0].index_select(0, piece.table).view(size)[: piece.context].transpose(0, 1)
            value = pages[1].index_select(0, piece.table).view(size)[: piece.context].transpose(0, 1)
        mask = None if whole and how.softcap is None else piece.mask(how.window)
        return _attend(query[None], key[None], value[None], how, mask=mask)[0].transpose(0, 1)


def _attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, how: How, *, mask: torch.Tensor | None) -> torch.Tensor:
    """Return (batch, heads, queries, dim). No mask means causal from the first position on."""
    groups = query.shape[1] // key.shape[1]
    if how.softcap is None:
        return scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=mask is None, scale=how.scale, enable_gqa=groups > 1
        )
    assert mask is not None
    batch, heads, queries, dim = query.shape
    grouped = query.reshape(batch, key.shape[1], groups, queries, dim)
    scores = torch.matmul(grouped, key[:, :, None].transpose(-1, -2)) * how.scale
    scores = torch.tanh(scores / how.softcap) * how.softcap
    scores += mask if mask.dim() == 2 else mask[:, :, None]
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    return torch.matmul(weights, value[:, :, None]).reshape(batch, heads, queries, dim)


AttentionInterface.register(NAME, paged_attention)
