"""Seam: how many CUDA graphs are captured (read in 0.26 and 0.32; both model runners take the sizes from ``compilation_config``).

vLLM captures 51 batch sizes by default, each twice, which takes 4 to 6 s of a start (H200, 8B shape) and lets a decode step of 33
requests be padded to 40. An engine that clients wait for captures fewer: such a step is padded to 48. Outputs of a step that is padded
differently may differ in the last bits, as they do between any two batches; a single stream has its own graph either way.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from typing import Any

PADDED = 1.5
"""A batch is padded to at most this multiple of its size."""

log = logging.getLogger("shadowsup.engine")


def thinned(sizes: Sequence[int], keep: Collection[int] = ()) -> list[int]:
    """Return the fewest of ``sizes`` (ascending) with which no batch is padded to more than `PADDED` times its size where it was not
    before; the first, the last and ``keep`` stay."""
    kept: list[int] = []
    for place, size in enumerate(sizes):
        ends = place in {0, len(sizes) - 1}
        if ends or size in keep or sizes[place + 1] > PADDED * (kept[-1] + 1):
            kept.append(size)
    return kept


def hurry(vllm_config: Any) -> None:
    """Have the model runner of ``vllm_config`` capture fewer sizes. Call it when the model is compiled, since the name of what was
    compiled, in vLLM's cache, contains the sizes, and before the KV cache is initialised, when the runner takes them."""
    compilation = vllm_config.compilation_config
    sizes = sorted(compilation.cudagraph_capture_sizes or ())
    whole = max((size for size in sizes if size <= vllm_config.scheduler_config.max_num_seqs), default=0)  # all sequences decode
    kept = thinned(sizes, keep=[whole, *(int(size) for size in compilation.compile_sizes or ())])
    if len(kept) < len(sizes):
        log.info("clients wait: CUDA graphs of %d batch sizes instead of %d", len(kept), len(sizes))
        compilation.cudagraph_capture_sizes = kept
