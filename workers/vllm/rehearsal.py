"""Seam: the step that a failover begins with, before it counts (0.26 and 0.32; both model runners).

vLLM warms up with prefills of a few tokens and decode steps of short requests. A failover begins otherwise: many requests at once, long
contexts whose blocks are all there, and of each the last few tokens to compute. Kernels that such a step is the first to use are loaded in
the midst of it: the driver loads a kernel when it is launched for the first time. So an engine that nobody waits for runs such steps
over scratch.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

SHORT_TOKENS = 512
"""A context for which attention is not split."""
LONG_TOKENS = 16_384
"""A context for which it is, as long as there are few requests."""
FEW_REQUESTS = 16
MOST_REQUESTS = 64
"""More would leave memory with this process that it may never need: 0.7 GB with 256 (8B)."""
MOST_ON_CPU = 2

_NAME = "shadowsup-rehearsal-"

log = logging.getLogger("shadowsup.engine")


@dataclass(frozen=True)
class Scene:
    """One step: so many requests, each with so many tokens of context, the last ``computed`` of which it computes."""

    requests: int
    context: int
    computed: int


def scenes(
    *, requests: int, batch_tokens: int, model_len: int, block_tokens: int, long: bool = True, on_cpu: bool = False
) -> Iterator[Scene]:
    """Yield what to rehearse.

    Args:
        requests: that may run at once.
        batch_tokens: that a step may compute.
        model_len: the longest context, in tokens.
        block_tokens: of a KV block; a request that goes on computes at most so many.
        long: whether long contexts are to be among them.
    """
    most = min(requests, MOST_ON_CPU if on_cpu else MOST_REQUESTS)
    count = 1
    while True:
        count = min(count, most)
        contexts = [SHORT_TOKENS, *([LONG_TOKENS] if long and count <= FEW_REQUESTS and not on_cpu else [])]
        for context in sorted({min(context, model_len - 1) for context in contexts}):
            computed = min(block_tokens, batch_tokens // count, context)
            if computed > 0:
                yield Scene(count, context, computed)
        if count == most:
            return
        count *= 2


def rehearse(worker: Any, hurried: Callable[[], bool], *, long: bool = True) -> None:
    """Run the steps of `scenes` on a worker that is warm and whose KV is scratch. Leaves the state of random numbers as it was: a request
    without a seed gets one from there, and vLLM promises the same ones for the same ``--seed``.

    Args:
        worker: vLLM's.
        hurried: asked between two of them: whether somebody waits for this engine now. The same on all ranks.
        long: as for `scenes`.
    """
    import torch

    drawn = np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):  # requests that are greedy draw nothing from a device's
            _rehearse(worker, hurried, long)
    finally:
        np.random.set_state(drawn)


def _rehearse(worker: Any, hurried: Callable[[], bool], long: bool) -> None:
    runner = worker.model_runner
    scheduler = worker.vllm_config.scheduler_config
    sizes = [int(group.kv_cache_spec.block_size) for group in runner.kv_cache_config.kv_cache_groups]
    for scene in scenes(
        requests=scheduler.max_num_seqs,
        batch_tokens=scheduler.max_num_batched_tokens,
        model_len=worker.model_config.max_model_len,
        block_tokens=min(sizes),
        long=long,
        on_cpu=worker.device.type == "cpu",
    ):
        if hurried():
            return
        _play(worker, scene, sizes, int(runner.kv_cache_config.num_blocks))


def _play(worker: Any, scene: Scene, block_sizes: Sequence[int], blocks: int) -> None:
    from vllm.sampling_params import SamplingParams
    from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput

    names = [f"{_NAME}{number}" for number in range(scene.requests)]
    ids = [0] * scene.context
    needed = [-(-scene.context // size) for size in block_sizes]

    def blocks_of(number: int) -> tuple[list[int], ...]:
        # There may be fewer blocks than these requests would fill: what is read and written is scratch.
        return tuple([1 + (number * count + place) % max(1, blocks - 1) for place in range(count)] for count in needed)

    step, over = SchedulerOutput.make_empty(), SchedulerOutput.make_empty()
    step.scheduled_new_reqs = [
        NewRequestData(
            req_id=name,
            prompt_token_ids=ids,
            mm_features=[],
            sampling_params=SamplingParams(max_tokens=2, temperature=0.0),
            pooling_params=None,
            block_ids=blocks_of(number),
            num_computed_tokens=scene.context - scene.computed,
            lora_request=None,
            prefill_token_ids=ids,
        )
        for number, name in enumerate(names)
    ]
    step.num_scheduled_tokens = dict.fromkeys(names, scene.computed)
    step.total_num_scheduled_tokens = scene.computed * scene.requests
    step.num_common_prefix_blocks = [0] * len(block_sizes)
    over.finished_req_ids = set(names)
    try:
        worker.execute_model(step)
        sampled = worker.sample_tokens(None)
        if hasattr(sampled, "get_output"):
            sampled.get_output()
    finally:
        worker.execute_model(over)
