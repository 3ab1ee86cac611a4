"""Seam: what vLLM's first model runner (V1; a CPU build's, too) compiles when the first request asks for it (read in 0.26, run with 0.32).

The ranks of logprobs are a function under ``torch.compile``: 4 to 14 seconds in the middle of a step on two cores, in which nobody gets a
token. The second runner (V2) warms its own kernels with a request that uses all of them
(`SamplingParams.for_sampler_warmup`), so nothing is done for it.
"""

from __future__ import annotations

from typing import Any

ROWS = 2
"""One row would be compiled for one row."""


def warm(runner: Any) -> None:
    """Have ``runner`` compile that now, before its engine parks."""
    import torch

    sampler = getattr(runner, "sampler", None)
    gather = getattr(sampler, "gather_logprobs", None)
    if gather is None or not hasattr(runner, "_dummy_sampler_run"):
        return
    device = runner.device
    with torch.inference_mode():  # a compiled function is one for each mode
        logits = torch.zeros(ROWS, runner.model_config.get_vocab_size(), device=device, dtype=torch.float32)
        gather(logits.log_softmax(dim=-1, dtype=torch.float32), 1, torch.zeros(ROWS, device=device, dtype=torch.int64))
