"""Seam: `EngineCore.preprocess_add_request` (read in 0.26.0 and 0.32.0, run with 0.32.0): a request begins with output.

It is then like one that was preempted, its blocks taken and its turn come again: nothing computed, prompt and output there, looked up in
the prefix cache together, scheduled as one prefill. `max_tokens`, `min_tokens` and the length of the context count the output
(`check_stop`), and the second model runner (V2) takes ids, penalties, and the positions that seeded sampling hashes from what the scheduler
says. It stays WAITING, though: a model runner (V1) asked to resume a request that it does not know fails.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shadowsup.workers.vllm.replay import claim as claims

_original: dict[str, Callable[..., Any]] = {}


def install() -> None:
    """Idempotent."""
    from vllm.v1.engine.core import EngineCore

    if _original:
        return
    _original["preprocess"] = EngineCore.preprocess_add_request
    EngineCore.preprocess_add_request = _preprocess_add_request


def _preprocess_add_request(engine: Any, request: Any) -> Any:
    made, wave = _original["preprocess"](engine, request)
    output = claims.output_of(made.sampling_params)
    if output:
        begin(made, output)
    return made, wave


def begin(request: Any, output: list[int]) -> None:
    """Have a new request begin with ``output``."""
    request.append_output_token_ids(output)  # hashes the full blocks, too
    # Of a prefill of the prompt alone: the scheduler asserts that no more than the prompt was found.
    request.prefill_stats = None
