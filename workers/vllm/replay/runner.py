"""Seams: the first model runner, V1 (read in 0.26.0 and 0.32.0, run with 0.32.0 on a CPU): `CachedRequestState`, `_update_states`.

It keeps a request's ids itself and takes a new request to have no output. (The second, V2, is sent all ids with each new request.) A seeded
request also has a generator there, from which each token has drawn: it is made to draw as often again, by the sampler itself, since what a
draw takes from the generator differs by release and device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shadowsup.workers.vllm.replay import claim as claims

_original: dict[str, Callable[..., Any]] = {}


def install() -> None:
    """Have the seams put in place in each process that has a worker, once that has imported what they need. Idempotent."""
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    if _original:
        return
    # Not in `init_worker`: in a spawned process it is what loads the plugins.
    _original["init"] = WorkerWrapperBase.init_device
    WorkerWrapperBase.init_device = _init_device


def _init_device(wrapper: Any) -> Any:
    _patch()
    return _original["init"](wrapper)


def _patch() -> None:
    from vllm.v1.worker.gpu_input_batch import CachedRequestState
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    if "update" in _original:
        return
    _original["state"] = CachedRequestState.__post_init__
    _original["update"] = GPUModelRunner._update_states
    CachedRequestState.__post_init__ = _begin_state
    GPUModelRunner._update_states = _update_states


def _begin_state(state: Any) -> None:
    _original["state"](state)
    if not state.output_token_ids:
        state.output_token_ids.extend(claims.output_of(state.sampling_params))


def _update_states(runner: Any, scheduler_output: Any) -> Any:
    done = _original["update"](runner, scheduler_output)
    for new in scheduler_output.scheduled_new_reqs:
        state = runner.requests.get(new.req_id)
        drawn = len(claims.output_of(new.sampling_params))
        if drawn and state is not None and state.generator is not None:
            _draw(runner, state.generator, drawn)
    return done


def _draw(runner: Any, generator: Any, times: int) -> None:
    import torch

    sampler = runner.sampler.topk_topp_sampler
    for _ in range(times):
        logits = torch.zeros((1, runner.input_batch.vocab_size), dtype=torch.float32, device=runner.device)
        sampler(logits, {0: generator}, None, None)
