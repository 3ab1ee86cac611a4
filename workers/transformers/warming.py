"""What an engine runs before it is parked, so that nothing is run for the first time while somebody waits: a first call compiles kernels,
loads a library's code for that size, and asks the device for memory."""

from __future__ import annotations

import logging

import torch

from shadowsup.wire.link import Sampling
from shadowsup.workers.api import KvGeometry
from shadowsup.workers.sampling import Row, sample
from shadowsup.workers.scheduler import Limits
from shadowsup.workers.transformers.batch import Piece
from shadowsup.workers.transformers.executor import Executor

log = logging.getLogger("shadowsup.engine")

_TOTALS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192)
"""Tokens of a step: matrix products of these heights; libraries choose their kernels by such steps."""

_KEPT_WARM = 512
"""Tokens of the step whose memory an engine keeps while it is parked: a first step then asks the device for little."""


def run(executor: Executor, limits: Limits, geometry: KvGeometry, max_context: int, vocabulary: int, *, everything: bool) -> None:
    """Run steps of every kind over the cache, whose content is lost; nothing must be kept in it. ``everything`` False: just one step."""
    steps = _Steps(geometry, max_context, vocabulary)
    if executor.device.type != "cuda":
        _sample(executor.forward(steps.prompt(min(limits.max_batch_tokens, 2 * geometry.block_tokens))))
        for rows in {1, min(2, limits.max_batch)}:
            _sample(executor.forward(steps.tails(rows, rows)))
        return
    if not everything:
        _greedy(executor.forward(steps.tails(8 * limits.max_batch, limits.max_batch)))
        return
    for total in (*(one for one in _TOTALS if one < limits.max_batch_tokens), limits.max_batch_tokens):
        executor.forward(steps.prompt(total))
        _sample(executor.forward(steps.tails(total, limits.max_batch)))
    executor.finish()
    torch.cuda.empty_cache()
    executor.forward(steps.tails(min(_KEPT_WARM, limits.max_batch_tokens), limits.max_batch))
    executor.finish()
    log.info("device memory of tensors: %d MiB in use, %d MiB taken", *(size >> 20 for size in _tensors()))


class _Steps:
    """Makes steps. Blocks are any that there are: all of them are scratch."""

    def __init__(self, geometry: KvGeometry, max_context: int, vocabulary: int) -> None:
        self._geometry, self._max_context, self._vocabulary = geometry, max_context, vocabulary

    def prompt(self, tokens: int) -> list[Piece]:
        """One sequence from its beginning."""
        return [self._piece(0, min(tokens, self._max_context - 1))]

    def tails(self, tokens: int, most: int) -> list[Piece]:
        """``tokens`` in all, over ``most`` sequences at most that have a block each already: what a failover replays."""
        count = min(most, tokens)
        size = self._geometry.block_tokens
        start = size if self._max_context > 2 * size else 0
        longest = self._max_context - 1 - start
        return [self._piece(start, min(longest, tokens // count + (at < tokens % count))) for at in range(count)]

    def _piece(self, start: int, tokens: int) -> Piece:
        size = self._geometry.block_tokens
        blocks = [at % self._geometry.blocks for at in range(-(-(start + tokens + 1) // size))]
        return Piece([at % self._vocabulary for at in range(tokens)], start, blocks, True)


def _tensors() -> tuple[int, int]:
    """Return (bytes in use, bytes taken from the device) of torch in this process, kept memory not counted."""
    return torch.cuda.memory_allocated(), torch.cuda.memory_reserved()


def _greedy(logits: torch.Tensor) -> None:
    sample(logits.clone(), [Row(Sampling(seed=1, temperature=0.0), (), 3, frozenset())] * len(logits))


def _sample(logits: torch.Tensor) -> None:
    """Greedily, and with everything that a request can ask for."""
    _greedy(logits)
    drawn = Sampling(seed=1, temperature=1.0, top_p=0.9, frequency_penalty=0.5, min_tokens=2)
    sample(logits, [Row(drawn, (1,), 3, frozenset({0}))] * len(logits))
