"""CUDA graphs of decode steps: a model's thousand kernel launches replayed as one.

Captured while the engine is parked, over the addresses that the KV arena keeps for life, so they are good after the promotion has put the
real blocks there. There is one graph for each of some batch sizes. A smaller batch is filled up with rows that have no new token: their K
and V go nowhere (slot -1) and they attend to nothing, so no block of anybody is touched.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shadowsup.workers.transformers.attention import KvCache, Step, attending
from shadowsup.workers.transformers.attention_cuda import KernelAttention
from shadowsup.workers.transformers.batch import Piece
from shadowsup.workers.transformers.paging import Paging, parts_of, rows_of_tile

_IDS, _POSITIONS, _SLOTS, _COUNTS = range(4)
_WARM_RUNS = 2


def batch_sizes(max_batch: int) -> list[int]:
    """Return the batch sizes that get a graph: 1, 2, 4, 8, then every eighth, and ``max_batch``."""
    return sorted({size for size in (1, 2, 4, *range(8, max_batch, 8)) if size < max_batch} | {max_batch})


class DecodeGraphs:
    """``max_context``: tokens, the longest sequence. `run` must be followed by a wait for the device before it is called again."""

    def __init__(
        self, model: torch.nn.Module, cache: KvCache, heads: int, device: torch.device, *, max_batch: int, max_context: int
    ) -> None:
        self._model, self._cache, self._device = model, cache, device
        self._heads = heads
        self._block_tokens = cache.shape.block_tokens
        self._sizes = batch_sizes(max_batch)
        rows, width = _whole(max_batch), _whole(-(-max_context // self._block_tokens))
        self._staged = torch.zeros((4, rows), dtype=torch.int64, pin_memory=True)
        self._inputs = torch.zeros((4, rows), dtype=torch.int64, device=device)
        self._staged_tables = torch.zeros((rows, width), dtype=torch.int32, pin_memory=True)
        self._tables = torch.zeros((rows, width), dtype=torch.int32, device=device)
        self._order = torch.arange(rows, dtype=torch.int32, device=device)
        self._zeros = torch.zeros(rows, dtype=torch.int32, device=device)
        self._rows: list[tuple[Sequence[int], int]] = [((), 0)] * rows
        """Of each row: the list of blocks that its table was filled from, and how many of them are there."""
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, torch.Tensor]] = {}

    @property
    def count(self) -> int:
        return len(self._graphs)

    @torch.inference_mode()
    def capture(self) -> None:
        """Capture all; the largest first, whose memory the others then share. Raises whatever the model or torch raises."""
        self._idle_rows(0)
        self._inputs.copy_(self._staged)
        pool = torch.cuda.graph_pool_handle()
        stream = torch.cuda.Stream(self._device)
        stream.wait_stream(torch.cuda.current_stream(self._device))
        for size in reversed(self._sizes):
            with torch.cuda.stream(stream):
                for _ in range(_WARM_RUNS):  # compiles, and loads what libraries load at a first call
                    self._forward(size)
            stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool, stream=stream):
                logits = self._forward(size)
            self._graphs[size] = graph, logits
        torch.cuda.synchronize(self._device)

    def take(self, pieces: Sequence[Piece]) -> bool:
        """Return whether this is a step for a graph."""
        return 0 < len(pieces) <= self._sizes[-1] and all(len(piece.tokens) == 1 for piece in pieces)

    @torch.inference_mode()
    def run(self, pieces: Sequence[Piece]) -> torch.Tensor:
        """Queue the step; returns logits (S, vocabulary) of the pieces that sample, good until the next call."""
        page, size = self._block_tokens, next(size for size in self._sizes if size >= len(pieces))
        self._staged[_IDS, : len(pieces)] = torch.tensor([piece.tokens[0] for piece in pieces])
        self._staged[_POSITIONS, : len(pieces)] = torch.tensor([piece.start for piece in pieces])
        self._staged[_SLOTS, : len(pieces)] = torch.tensor(
            [piece.blocks[piece.start // page] * page + piece.start % page for piece in pieces]
        )
        self._staged[_COUNTS, : len(pieces)] = 1
        self._idle_rows(len(pieces))
        self._inputs.copy_(self._staged, non_blocking=True)
        for row, piece in enumerate(pieces):
            self._fill_table(row, piece)
        graph, logits = self._graphs[size]
        graph.replay()
        if all(piece.samples for piece in pieces):
            return logits[: len(pieces)]
        return logits[[row for row, piece in enumerate(pieces) if piece.samples]]

    def _idle_rows(self, first: int) -> None:
        self._staged[:, first:] = 0
        self._staged[_SLOTS, first:] = -1

    def _fill_table(self, row: int, piece: Piece) -> None:
        """Bring a row of the block tables up to date: mostly nothing, now and then one block, everything for another sequence."""
        known, filled = self._rows[row]
        used = piece.start // self._block_tokens + 1
        if known is not piece.blocks:
            filled = 0
        if filled < used:
            self._staged_tables[row, filled:used] = torch.tensor(piece.blocks[filled:used], dtype=torch.int32)
            self._tables[row, filled:used].copy_(self._staged_tables[row, filled:used], non_blocking=True)
            self._rows[row] = piece.blocks, used

    def _forward(self, size: int) -> torch.Tensor:
        shape, inputs = self._cache.shape, self._inputs
        paging = Paging(
            tables=self._tables,
            starts=inputs[_POSITIONS],
            firsts=self._order,
            counts=inputs[_COUNTS],
            tile_sequence=self._order[:size],
            tile_begin=self._zeros,
            rows=rows_of_tile(1, self._heads // shape.heads, shape.dtype),
            parts=parts_of(size, shape.heads),
        )
        step = Step(size, shape, KernelAttention(self._cache, inputs[_SLOTS], paging))
        with attending(step):
            out = self._model(
                input_ids=inputs[_IDS : _IDS + 1, :size],
                position_ids=inputs[_POSITIONS : _POSITIONS + 1, :size],
                use_cache=False,
                logits_to_keep=0,  # of every row
            )
        return out.logits[0]


def _whole(count: int) -> int:
    """Round up so that every row of a table begins at 16 bytes."""
    return -(-count // 4) * 4
