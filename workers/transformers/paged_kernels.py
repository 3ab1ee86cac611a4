"""GPU kernels of paged attention. Importing this module needs Triton; what they compute and how they are called: `paging`.

`_attend` is FlashAttention-2's forward (Dao, 2023, arXiv:2307.08691) over block tables. The query heads that share a KV head are rows of
one tile, so that K and V are read once for all of them. Where there are too few tiles to fill the device, the keys of each are cut into
parts (flash-decoding) and `_combine` puts the parts together; everything is added up in a fixed order, so a result is the same each time.
"""

from __future__ import annotations

import importlib
from typing import Any

# Not import statements: Triton is on no machine without a GPU, and type checkers would call it missing here and untyped there.
triton: Any = importlib.import_module("triton")
tl: Any = importlib.import_module("triton.language")

_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit(do_not_specialize=["key_row", "key_head", "value_row", "value_head"])
def _store(  # type: ignore[no-untyped-def]
    key,
    value,
    keys,
    values,
    slots,
    key_row,
    key_head,
    value_row,
    value_head,
    HEADS: tl.constexpr,
    HEADS_PAD: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
):
    token = tl.program_id(0)
    slot = tl.load(slots + token).to(tl.int64)
    head = tl.arange(0, HEADS_PAD)[:, None]
    dim = tl.arange(0, DIM_PAD)[None, :]
    # A slot below 0 is that of a row which only fills a graph up: it must not touch any block.
    live = (head < HEADS) & (dim < DIM) & (slot >= 0)
    to = slot * (HEADS * DIM) + head * DIM + dim
    row = token.to(tl.int64)
    tl.store(keys + to, tl.load(key + row * key_row + head * key_head + dim, mask=live), mask=live)
    tl.store(values + to, tl.load(value + row * value_row + head * value_head + dim, mask=live), mask=live)


@triton.jit(do_not_specialize=["table_row", "query_row", "query_head"])
def _attend(  # type: ignore[no-untyped-def]
    query,
    keys,
    values,
    out,
    sums,
    tables,
    starts,
    firsts,
    counts,
    tile_sequence,
    tile_begin,
    table_row,
    query_row,
    query_head,
    scale,
    window,
    softcap,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    PAGE: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    SPLIT: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
):
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    part = tl.program_id(2)
    parts = tl.num_programs(2)
    sequence = tl.load(tile_sequence + tile).to(tl.int64)
    begin = tl.load(tile_begin + tile)
    start = tl.load(starts + sequence).to(tl.int32)
    first = tl.load(firsts + sequence).to(tl.int64)
    count = tl.load(counts + sequence).to(tl.int32)
    GROUP: tl.constexpr = HEADS // KV_HEADS
    TOKENS: tl.constexpr = ROWS // GROUP

    row = tl.arange(0, ROWS)
    dim = tl.arange(0, DIM_PAD)
    token = begin + row // GROUP
    head = kv_head * GROUP + row % GROUP
    live = (token < count) & (row < TOKENS * GROUP)
    position = start + token
    real = dim < DIM
    at = first + token
    q = tl.load(query + at[:, None] * query_row + head[:, None] * query_head + dim[None, :], mask=live[:, None] & real[None, :], other=0.0)

    end = tl.where(count > begin, start + tl.minimum(begin + TOKENS, count), 0)
    low = 0
    if WINDOW:
        low = tl.maximum(start + begin - window + 1, 0) // KEYS * KEYS
    each = tl.cdiv(tl.cdiv(tl.maximum(end - low, 0), KEYS), parts) * KEYS
    low += part * each
    high = tl.minimum(low + each, end)

    best = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    gathered = tl.zeros([ROWS, DIM_PAD], tl.float32)
    table = tables + sequence * table_row
    for place in tl.range(low, high, KEYS):
        key = place + tl.arange(0, KEYS)
        there = key < high
        block = tl.load(table + key // PAGE, mask=there, other=0).to(tl.int64)
        slot = (block * PAGE + key % PAGE) * (KV_HEADS * DIM) + kv_head * DIM
        k = tl.load(keys + slot[None, :] + dim[:, None], mask=there[None, :] & real[:, None], other=0.0)
        scores = tl.dot(q, k, input_precision="ieee") * scale
        if SOFTCAP:
            scores = softcap * (2.0 / (1.0 + tl.exp(-2.0 * scores / softcap)) - 1.0)  # tanh that does not overflow
        seen = there[None, :] & (key[None, :] <= position[:, None])
        if WINDOW:
            seen = seen & (key[None, :] > position[:, None] - window)
        scores = tl.where(seen, scores * _LOG2_E, float("-inf"))
        higher = tl.maximum(best, tl.max(scores, 1))
        anchor = tl.where(higher == float("-inf"), 0.0, higher)  # a row that has seen no key yet
        weights = tl.exp2(scores - anchor[:, None])
        shrink = tl.exp2(best - anchor)
        total = total * shrink + tl.sum(weights, 1)
        v = tl.load(values + slot[:, None] + dim[None, :], mask=there[:, None] & real[None, :], other=0.0)
        gathered = gathered * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        best = higher

    to = at * HEADS + head
    wanted = live[:, None] & real[None, :]
    if SPLIT:
        to = to * parts + part
        tl.store(out + to[:, None] * DIM + dim[None, :], gathered, mask=wanted)
        tl.store(sums + to * 2, best, mask=live)
        tl.store(sums + to * 2 + 1, total, mask=live)
    else:
        norm = tl.where(total > 0.0, total, 1.0)
        tl.store(out + to[:, None] * DIM + dim[None, :], (gathered / norm[:, None]).to(out.dtype.element_ty), mask=wanted)


@triton.jit(do_not_specialize=["parts"])
def _combine(  # type: ignore[no-untyped-def]
    partial,
    sums,
    out,
    parts,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    PARTS_PAD: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64)  # a row and head
    part = tl.arange(0, PARTS_PAD)
    dim = tl.arange(0, DIM_PAD)
    there = part < parts
    real = dim < DIM
    at = place * parts + part
    best = tl.load(sums + at * 2, mask=there, other=float("-inf"))
    total = tl.load(sums + at * 2 + 1, mask=there, other=0.0)
    highest = tl.max(best, 0)
    weight = tl.where(total > 0.0, tl.exp2(best - tl.where(highest == float("-inf"), 0.0, highest)), 0.0)
    counts = (total > 0.0)[:, None] & real[None, :]  # what has no sum was not written either
    gathered = tl.load(partial + at[:, None] * DIM + dim[None, :], mask=counts, other=0.0)
    summed = tl.sum(total * weight, 0)
    result = tl.sum(gathered * weight[:, None], 0) / tl.where(summed > 0.0, summed, 1.0)
    tl.store(out + place * DIM + dim, result.to(out.dtype.element_ty), mask=real)


def power_of_two(value: int) -> int:
    """Return the least power of two that is not below ``value``."""
    return 1 << max(0, value - 1).bit_length()


def store(key: Any, value: Any, keys: Any, values: Any, slots: Any) -> None:
    """Write ``key`` and ``value`` (T, heads, dim) to rows ``slots`` (T,) of the cache's ``keys`` and ``values`` (slots, heads, dim).

    The last dimension is contiguous. Nothing is written for a slot below 0.
    """
    tokens, heads, dim = key.shape
    _store[(tokens,)](
        key,
        value,
        keys,
        values,
        slots,
        key.stride(0),
        key.stride(1),
        value.stride(0),
        value.stride(1),
        HEADS=heads,
        HEADS_PAD=power_of_two(heads),
        DIM=dim,
        DIM_PAD=power_of_two(dim),
        num_warps=4,
    )


def attend(
    query: Any,
    keys: Any,
    values: Any,
    out: Any,
    *,
    paging: Any,
    page: int,
    scale: float,
    window: int | None,
    softcap: float | None,
    partial: Any | None,
    sums: Any | None,
) -> None:
    """Fill ``out`` (T, heads, dim), contiguous.

    Args:
        query: (T, heads, dim), the last dimension contiguous.
        keys, values: (slots, kv heads, dim), contiguous.
        paging: `shadowsup.workers.transformers.paging.Paging`.
        page: tokens of a block.
        partial, sums: float32 (T, heads, parts, dim) and (T, heads, parts, 2) where ``paging.parts`` is above 1.
    """
    tokens, heads, dim = query.shape
    kv_heads = keys.shape[1]
    dim_pad = max(16, power_of_two(dim))
    wide = query.dtype.itemsize > 2
    split = paging.parts > 1
    _attend[(paging.tile_sequence.shape[0], kv_heads, paging.parts)](
        query,
        keys,
        values,
        partial if split else out,
        sums if split else out,
        paging.tables,
        paging.starts,
        paging.firsts,
        paging.counts,
        paging.tile_sequence,
        paging.tile_begin,
        paging.tables.stride(0),
        query.stride(0),
        query.stride(1),
        scale,
        window or 0,
        softcap or 1.0,
        HEADS=heads,
        KV_HEADS=kv_heads,
        DIM=dim,
        DIM_PAD=dim_pad,
        PAGE=page,
        ROWS=paging.rows,
        KEYS=32 if wide or dim_pad > 128 else 64,
        SPLIT=split,
        WINDOW=window is not None,
        SOFTCAP=softcap is not None,
        num_warps=8 if paging.rows >= 128 else 4,
        num_stages=2 if wide or dim_pad > 128 else 3,
    )
    if split:
        _combine[(tokens * heads,)](
            partial, sums, out, paging.parts, DIM=dim, DIM_PAD=power_of_two(dim), PARTS_PAD=power_of_two(paging.parts), num_warps=4
        )
