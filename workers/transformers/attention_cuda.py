"""Paged attention on a GPU: which implementation runs here, and the one by Triton kernels, the same for prefill and decode."""

from __future__ import annotations

import enum
import importlib
import logging
from typing import Any

import torch

from shadowsup.workers.transformers.attention import How, KvCache, KvShape
from shadowsup.workers.transformers.paging import Paging, rows_of_tile

log = logging.getLogger("shadowsup.engine")


class Kind(enum.Enum):
    """How attention over pages is computed."""

    KERNELS = "triton"
    GATHER = "gather + sdpa"


def choose(shape: KvShape, heads: int, device: torch.device) -> Kind:
    """Return what runs on ``device``; one small call decides, for a Triton that is there need not work (it wants a C compiler).

    A CPU gathers. So does a GPU without Triton: without graphs, and with several times the memory traffic.
    """
    if device.type != "cuda":
        return Kind.GATHER
    try:
        _try(shape, heads, device)
    except Exception as error:
        log.warning("paged attention kernels cannot be used here (%s): pages are gathered, which is several times slower", error)
        return Kind.GATHER
    return Kind.KERNELS


def _try(shape: KvShape, heads: int, device: torch.device) -> None:
    """Compile and run the kernels once. Raises whatever Triton raises."""
    memory = torch.zeros(shape.block_bytes, dtype=torch.uint8, device=device)
    integers = torch.zeros(4, dtype=torch.int32, device=device)
    one = torch.ones(4, dtype=torch.int32, device=device)
    group = heads // shape.heads
    rows = rows_of_tile(1, group, shape.dtype)
    paging = Paging(integers[None], integers, integers, one, integers[:1], integers[:1], rows=rows, parts=1)
    attention = KernelAttention(KvCache(memory, shape, 1), integers[:1], paging)
    new = torch.zeros((shape.heads, 1, shape.head_dim), dtype=shape.dtype, device=device)
    attention.store(0, new, new)
    attention.attend(0, new.repeat_interleave(group, 0), new, new, How(1.0))
    torch.cuda.synchronize(device)


class KernelAttention:
    """See `shadowsup.workers.transformers.attention.StepAttention`. ``slots``: (T,); below 0: nothing is written for this token."""

    def __init__(self, cache: KvCache, slots: torch.Tensor, paging: Paging) -> None:
        self._cache, self._slots, self._paging = cache, slots, paging
        self._kernels: Any = importlib.import_module("shadowsup.workers.transformers.paged_kernels")

    def store(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        keys, values = self._cache.tokens[layer]
        self._kernels.store(_rows(key), _rows(value), keys, values, self._slots)

    def attend(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, how: How) -> torch.Tensor:
        keys, values = self._cache.tokens[layer]
        query, parts = _rows(query), self._paging.parts
        empty = torch.zeros if self._paging.padded else torch.empty
        out = (empty if parts == 1 else torch.empty)(query.shape, dtype=query.dtype, device=query.device)
        partial = sums = None
        if parts > 1:
            partial = torch.empty((*query.shape[:2], parts, query.shape[2]), dtype=torch.float32, device=query.device)
            sums = empty((*query.shape[:2], parts, 2), dtype=torch.float32, device=query.device)
        self._kernels.attend(
            query,
            keys,
            values,
            out,
            paging=self._paging,
            page=self._cache.shape.block_tokens,
            scale=how.scale,
            window=how.window,
            softcap=how.softcap,
            partial=partial,
            sums=sums,
        )
        return out


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    """Return (T, heads, dim) of (heads, T, dim), the last dimension contiguous."""
    tensor = tensor.transpose(0, 1)
    return tensor if tensor.stride(2) == 1 else tensor.contiguous()
