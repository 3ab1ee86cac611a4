"""Seams: `EngineCore.preprocess_add_request` and `_handle_client_request` (read in 0.26.0 and 0.32.0, run with 0.32.0): a request begins
with output.

It is then like one that was preempted, its blocks taken and its turn come again: nothing computed, prompt and output there, looked up in
the prefix cache together, scheduled as one prefill. `max_tokens`, `min_tokens` and the length of the context count the output
(`check_stop`), and the second model runner (V2) takes ids, penalties, and the positions that seeded sampling hashes from what the scheduler
says. It stays WAITING, though: a model runner (V1) asked to resume a request that it does not know fails.

One that comes ahead of a failover is made, its blocks named, and kept here instead of going to the scheduler; what goes on later under
its id brings the output alone. Messages of one API server are taken in order, and an abort forgets what is kept.
"""

from __future__ import annotations

import gc
import queue
from collections.abc import Callable
from typing import Any

from shadowsup.workers.vllm.replay import claim as claims

MORE_S = 0.005
"""How long the busy loop waits for each of the requests that are to go on together. They come some 0.2 ms apart."""

_original: dict[str, Callable[..., Any]] = {}
HELD_BACK = object()
"""Goes through the input queue in place of a request that is held back."""
_held: dict[str, tuple[Any, bytes]] = {}
"""By request id, with the salt of its blocks' names. The thread that reads the socket puts in and takes out; the busy loop takes out what
is aborted."""


class NoToken(Exception):
    """Raised when output has an id that the model has no token for. vLLM fails the one request; such an id would end the engine."""


class NotHeld(Exception):
    """Raised when nothing is held under a request's id. vLLM fails the one request."""


def install() -> None:
    """Idempotent."""
    from vllm.v1.engine.core import EngineCore, EngineCoreProc

    if _original:
        return
    _original["preprocess"] = EngineCore.preprocess_add_request
    _original["handle"] = EngineCoreProc._handle_client_request
    EngineCore.preprocess_add_request = _preprocess_add_request
    EngineCoreProc._handle_client_request = _handle_client_request


def _preprocess_add_request(engine: Any, request: Any) -> Any:
    extra = getattr(request.sampling_params, "extra_args", None) or {}
    if claims.HELD_BEFORE in extra:
        return _go_on(engine, request), request.current_wave
    if claims.HELD not in extra:
        made, wave = _original["preprocess"](engine, request)
        output = claims.output_of(made.sampling_params)
        if output:
            begin(made, output, engine.vllm_config.model_config.get_vocab_size())
        return made, wave
    hasher = engine.scheduler.hasher
    salt = hasher.salt
    made, wave = _original["preprocess"](engine, request)
    _held[request.request_id] = (made, salt if hasher.salt == salt else b"")
    return HELD_BACK, wave


def _go_on(engine: Any, request: Any) -> Any:
    made, salt = _held.pop(request.request_id, (None, b""))
    if made is None:
        raise NotHeld(f"the request {request.request_id} was not sent ahead")
    made.sampling_params = request.sampling_params
    made.sampling_params.extra_args = {key: value for key, value in request.sampling_params.extra_args.items() if key != claims.HELD_BEFORE}
    made.arrival_time = request.arrival_time
    if salt != engine.scheduler.hasher.salt:  # the blocks are others than those that were followed
        made.block_hashes.clear()
    begin(made, claims.output_of(made.sampling_params), engine.vllm_config.model_config.get_vocab_size())
    return made


def _handle_client_request(core: Any, request_type: Any, request: Any) -> None:
    """Take a request, and with it those that are to go on in the same step.

    Without these the first of them has a step to itself, for whose end all others wait. A loop: there may be more of them than Python has
    frames.
    """
    from vllm.v1.engine import EngineCoreRequestType

    add = EngineCoreRequestType.ADD
    if request_type != add:
        _handle_other(core, request_type, request)
        return
    more = _handle_added(core, request_type, request)
    while more:
        try:
            request_type, request = core.input_queue.get(timeout=MORE_S)
        except queue.Empty:
            return
        if request_type == add:
            more = _handle_added(core, request_type, request)
        else:
            core._handle_client_request(request_type, request)  # as the busy loop would; of these none is followed by others


def _handle_added(core: Any, request_type: Any, request: Any) -> int:
    """Returns how many are to be taken with it."""
    if request[0] is HELD_BACK:
        # Out of the youngest generations: the collection that comes in the midst of a failover would walk all ids of all prompts.
        gc.collect(1)
        return 0
    _original["handle"](core, request_type, request)
    extra = getattr(request[0].sampling_params, "extra_args", None)
    return extra.get(claims.MORE, 0) if extra else 0


def _handle_other(core: Any, request_type: Any, request: Any) -> None:
    from vllm.v1.engine import EngineCoreRequestType

    if request_type == EngineCoreRequestType.ABORT:
        for request_id in request:
            _held.pop(request_id, None)
    _original["handle"](core, request_type, request)


def begin(request: Any, output: list[int], vocabulary: int) -> None:
    """Have a new request begin with ``output``.

    Raises:
        NoToken: there is an id that is not below ``vocabulary``.
    """
    if max(output, default=0) >= vocabulary:
        raise NoToken(f"the output to go on from has the id {max(output)}, but the model has {vocabulary} tokens")
    request.append_output_token_ids(output)  # hashes the full blocks, too
    # Of a prefill of the prompt alone: the scheduler asserts that no more than the prompt was found.
    request.prefill_stats = None
