"""CUDA graphs of small steps: a model's thousand kernel launches replayed as one.

Captured over the addresses that the KV arena keeps for life, so they are good whatever is mapped there when they run. There are two kinds:
steps in which every sequence has one new token (decode), by the number of sequences; and steps of a few hundred tokens of any sequences
(what a failover replays, short prompts beside decoding), by the number of tokens. A smaller step is filled up: with tokens whose K and V go
nowhere (slot -1), and with tiles of a sequence that has no new tokens. So no block of anybody is touched by what fills up, and capturing
writes nothing at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from shadowsup.workers.compiling import compiling
from shadowsup.workers.transformers.attention import KvCache, Step, attending
from shadowsup.workers.transformers.attention_cuda import KernelAttention
from shadowsup.workers.transformers.batch import Piece
from shadowsup.workers.transformers.paging import Paging, parts_of, rows_of_tile

_WARM_RUNS = 2
_SINGLE_COPIES = 4
"""Rows of the block tables that are copied one by one; a copy costs 10 µs to start, as much as half a megabyte takes."""
MIXED_TOKENS = (64, 128, 256, 512)
"""Above that the device has enough to do for the launches to be hidden behind it."""


def batch_sizes(max_batch: int) -> list[int]:
    """Return the batch sizes that get a graph: 1, 2, 4, 8, then every eighth, and ``max_batch``."""
    return sorted({size for size in (1, 2, 4, *range(8, max_batch, 8)) if size < max_batch} | {max_batch})


@dataclass(frozen=True)
class Size:
    """What a graph has room for. ``rows``, ``parts``: see `Paging`."""

    tokens: int
    sequences: int
    tiles: int
    rows: int
    parts: int

    def lengths(self) -> dict[str, int]:
        """Return the lengths of the sections of the metadata. One sequence more: that of the tiles that do nothing."""
        of = dict.fromkeys(("ids", "positions", "slots"), self.tokens)
        of |= {"samples": self.sequences} | dict.fromkeys(("starts", "firsts", "counts"), self.sequences + 1)
        return of | dict.fromkeys(("tile_sequence", "tile_begin"), self.tiles)


class StepGraphs:
    """``max_context``: tokens, the longest sequence. `run` must be followed by a wait for the device before it is called again."""

    def __init__(
        self, model: torch.nn.Module, cache: KvCache, heads: int, device: torch.device, *, max_batch: int, max_context: int
    ) -> None:
        self._model, self._cache, self._device = model, cache, device
        self._page = cache.shape.block_tokens
        self._group = heads // cache.shape.heads
        kv_heads, dtype = cache.shape.heads, cache.shape.dtype
        one = rows_of_tile(1, self._group, dtype)
        self._decode = [Size(size, size, size, one, parts_of(size, kv_heads)) for size in batch_sizes(max_batch)]
        many = rows_of_tile(2, self._group, dtype)
        self._mixed = [
            # Many tiles of such a graph do nothing mostly, so their number says little about the device's load.
            Size(tokens, max_batch, max_batch + -(-tokens // (many // self._group)), many, max(2, min(8, 1024 // tokens)))
            for tokens in MIXED_TOKENS
        ]
        width = _whole(-(-max_context // self._page))
        longest = max(sum(map(_whole, size.lengths().values())) for size in (*self._decode, *self._mixed))
        # Of int64: ids and positions are wanted so, and the kernels take any.
        self._staged = torch.zeros(longest, dtype=torch.int64, pin_memory=True)
        self._inputs = torch.zeros(longest, dtype=torch.int64, device=device)
        self._staged_tables = torch.zeros((max_batch + 1, width), dtype=torch.int32, pin_memory=True)
        self._tables = torch.zeros((max_batch + 1, width), dtype=torch.int32, device=device)
        self._filled: list[tuple[Sequence[int], int]] = [((), 0)] * max_batch
        """Of each row of the tables: the list of blocks that it was filled from, and how many of them are there."""
        self._graphs: dict[Size, torch.cuda.CUDAGraph] = {}
        self._logits: torch.Tensor | None = None
        """(max_batch, vocabulary), of whichever graph ran last."""
        self._wanted: set[Size] = set()
        """Sizes that were asked for."""
        self._pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None
        # One for all captures: a library keeps a workspace for each stream.
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @property
    def count(self) -> int:
        return len(self._graphs)

    def capture(self) -> None:
        """Capture all, the largest first, whose memory the others then share. Raises whatever the model or torch raises."""
        for size in (*reversed(self._mixed), *reversed(self._decode)):
            self._capture(size)

    @torch.inference_mode()
    def _capture(self, size: Size) -> None:
        self._stage(size, [])
        self._inputs.copy_(self._staged)
        stream = self._stream
        assert stream is not None, "graphs are for GPUs"
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            for _ in range(_WARM_RUNS):  # compiles, and loads what libraries load at a first call
                self._forward(size)
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=stream):
            self._forward(size)
        self._graphs[size] = graph

    def size_of(self, pieces: Sequence[Piece]) -> Size | None:
        """Return the size of graph that is for this step; None: there is none."""
        count = len(pieces)
        tokens = sum(len(piece.tokens) for piece in pieces)
        if tokens == count:
            return next((size for size in self._decode if count <= size.sequences), None)
        return next((size for size in self._mixed if tokens <= size.tokens and count <= size.sequences), None)

    def ready(self, size: Size) -> bool:
        """Return whether there is a graph of this size; one that `capture` has not captured is when it is asked for the second time.

        Raises whatever the model or torch raises when it is captured.
        """
        if size not in self._graphs and size in self._wanted:
            with compiling("a CUDA graph"):
                self._capture(size)
        self._wanted.add(size)
        return size in self._graphs

    @torch.inference_mode()
    def run(self, size: Size, pieces: Sequence[Piece]) -> torch.Tensor:
        """Queue the step; returns logits (S, vocabulary) of the pieces that sample, in their order, good until the next call.

        ``size`` must be `ready`.
        """
        used = self._stage(size, pieces)
        self._inputs[:used].copy_(self._staged[:used], non_blocking=True)
        self._fill_tables(pieces)
        self._graphs[size].replay()
        assert self._logits is not None, "there is a graph"
        return self._logits[: sum(piece.samples for piece in pieces)]

    # --- metadata ---------------------------------------------------------------------------------------------------------------

    def _stage(self, size: Size, pieces: Sequence[Piece]) -> int:
        """Write the metadata of a step, filled up to ``size``; returns how long they are."""
        tokens, rows, page = np.zeros(0, np.int64), [0], self._page
        positions, slots = [tokens], [tokens]
        for piece in pieces:
            at = np.arange(piece.start, piece.context)
            first = piece.start // page
            blocks = np.array(piece.blocks[first : (piece.context - 1) // page + 1], np.int64)
            positions.append(at)
            slots.append(blocks[at // page - first] * page + at % page)
            rows.append(rows[-1] + len(at))
        sequence, begin = self._tiles(size, pieces)
        values: dict[str, tuple[Sequence[int] | npt.NDArray[np.int64], int]] = {
            "ids": ([token for piece in pieces for token in piece.tokens], 0),
            "positions": (np.concatenate(positions), 0),
            "slots": (np.concatenate(slots), -1),
            "samples": ([last - 1 for last, piece in zip(rows[1:], pieces, strict=True) if piece.samples], 0),
            "starts": ([piece.start for piece in pieces], 0),
            "firsts": (rows[:-1], 0),
            "counts": ([len(piece.tokens) for piece in pieces], 0),
            "tile_sequence": (sequence, size.sequences),
            "tile_begin": (begin, 0),
        }
        staged = self._staged.numpy()
        place = 0
        for name, length in size.lengths().items():
            given, filler = values[name]
            staged[place : place + len(given)] = given
            staged[place + len(given) : place + length] = filler
            place += _whole(length)
        return place

    def _tiles(self, size: Size, pieces: Sequence[Piece]) -> tuple[list[int], list[int]]:
        """Return (sequence, first token) of each tile."""
        step = size.rows // self._group
        sequence: list[int] = []
        begin: list[int] = []
        for at, piece in enumerate(pieces):
            firsts = range(0, len(piece.tokens), step)
            sequence += [at] * len(firsts)
            begin += firsts
        return sequence, begin

    def _fill_tables(self, pieces: Sequence[Piece]) -> None:
        """Bring the block tables up to date: mostly nothing, now and then a block of a row, everything of a row for another sequence."""
        staged = self._staged_tables.numpy()
        changed: list[tuple[int, int, int]] = []
        for row, piece in enumerate(pieces):
            known, filled = self._filled[row]
            used = (piece.context - 1) // self._page + 1
            if known is not piece.blocks:
                filled = 0
            if filled < used:
                staged[row, filled:used] = piece.blocks[filled:used]
                self._filled[row] = piece.blocks, used
                changed.append((row, filled, used))
        if len(changed) > _SINGLE_COPIES:  # all replays of a failover: one copy, of whole rows
            end = changed[-1][0] + 1
            self._tables[:end].copy_(self._staged_tables[:end], non_blocking=True)
            return
        for row, filled, used in changed:
            self._tables[row, filled:used].copy_(self._staged_tables[row, filled:used], non_blocking=True)

    def _forward(self, size: Size) -> None:
        """Run the model over what `_inputs` has, with its logits to `_logits`."""
        views, place = {}, 0
        for name, length in size.lengths().items():
            views[name] = self._inputs[place : place + length]
            place += _whole(length)
        paging = Paging(
            tables=self._tables,
            starts=views["starts"],
            firsts=views["firsts"],
            counts=views["counts"],
            tile_sequence=views["tile_sequence"],
            tile_begin=views["tile_begin"],
            rows=size.rows,
            parts=size.parts,
            padded=True,
        )
        step = Step(size.tokens, self._cache.shape, KernelAttention(self._cache, views["slots"], paging))
        with attending(step):
            out = self._model(
                input_ids=views["ids"][None], position_ids=views["positions"][None], use_cache=False, logits_to_keep=views["samples"]
            )
        if self._logits is None:
            self._logits = torch.zeros((len(self._filled), out.logits.shape[-1]), dtype=out.logits.dtype, device=self._device)
        self._logits[: size.sequences].copy_(out.logits[0])


def _whole(count: int) -> int:
    """Round up so that what follows begins at 16 bytes: for other addresses Triton would compile anew."""
    return -(-count // 4) * 4
