"""Seams in the API server (read in 0.26.0 and 0.32.0, run with 0.32.0).

- `OutputProcessor.add_request`: every request passes here before EngineCore hears of it. The claim is taken out of its extra arguments,
  and with it whatever else has our names there (it is a client's, from whichever path). A duplicate is refused, and a replay's output goes
  through the new request's detokenizer, stop strings and logprobs.
- `RequestOutputCollector`: what its request's task reads. It gives out that output first, as one piece, before EngineCore says anything.
  (Requests that come ahead of a failover: `shadowsup.workers.vllm.replay.stage`.)
- `OpenAIServingChat` and `OpenAIServingCompletion`, `BaseRenderer.tokenize_prompts_async`: a replay's prompt is not tokenized again. With
  32 conversations of 8,000 tokens that would take longer than all else in a failover.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from shadowsup.wire.seal import key_of, ours
from shadowsup.workers.errors import WorkerError
from shadowsup.workers.vllm import current
from shadowsup.workers.vllm.replay import claim as claims
from shadowsup.workers.vllm.replay.claim import BadClaim, Claim, Seen

log = logging.getLogger("shadowsup.engine")

_original: dict[str, Callable[..., Any]] = {}
_seen = Seen()
_prompt: ContextVar[list[int] | None] = ContextVar("shadowsup_prompt", default=None)
_collector: type[Any] | None = None


class Retold(str):
    """Text that was delivered before, and the (text, ids) of the events it was delivered in."""

    pieces: list[tuple[str, list[int]]]


def install() -> None:
    """Idempotent."""
    global _collector
    from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
    from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
    from vllm.renderers.base import BaseRenderer
    from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector

    if _original:
        return
    _original["add"] = OutputProcessor.add_request
    _original["tokenize"] = BaseRenderer.tokenize_prompts_async
    OutputProcessor.add_request = _add_request
    BaseRenderer.tokenize_prompts_async = _tokenize_prompts_async
    OpenAIServingChat.create_chat_completion = _with_known_prompt(OpenAIServingChat.create_chat_completion)
    OpenAIServingCompletion.create_completion = _with_known_prompt(OpenAIServingCompletion.create_completion)

    class RetellingCollector(RequestOutputCollector):
        """Gives out ``retold`` first."""

        retold: Any = None

        def tell(self, told: Any) -> None:
            """Have ``told`` given out before what EngineCore says."""
            self.retold = told if self.retold is None else joined(self.retold, told)
            self.ready.set()

        def get_nowait(self) -> Any:
            retold, self.retold = self.retold, None
            return super().get_nowait() if retold is None else retold

        async def get(self) -> Any:
            while self.retold is None and self.output is None:
                self.ready.clear()
                await self.ready.wait()
            retold, self.retold = self.retold, None
            return await super().get() if retold is None else retold

    _collector = RetellingCollector


def retelling(queue: Any) -> Any:
    """Make a collector one that gives out what it is told first; return it."""
    queue.__class__ = _collector
    return queue


def refusal(message: str) -> Exception:
    """Return the error that tells the gateway that it must not send this."""
    from vllm.exceptions import VLLMValidationError

    error: Exception = VLLMValidationError(message, parameter="vllm_xargs")
    return error


def _add_request(
    processor: Any, request: Any, prompt: str | None, parent_req: Any = None, request_index: int = 0, queue: Any = None, **more: Any
) -> None:
    claim = taken(request)
    if claim is not None and claim.output:
        check(request, claim, parent_req)
    _original["add"](processor, request, prompt, parent_req, request_index, queue, **more)
    if claim is not None and claim.output:
        try:
            retold = retell(processor.request_states[request.request_id], claim)
        except BaseException:
            processor.abort_requests([request.request_id], internal=True)
            raise
        retelling(queue).tell(retold)


def taken(request: Any) -> Claim | None:
    """Take the claim out of a request, and give it the prompt that is claimed."""
    params = request.sampling_params
    extra = getattr(params, "extra_args", None) or {}
    if not any(map(ours, extra)):
        return None
    try:
        claim = claims.of(extra, key)
    except BadClaim as error:
        raise refusal(str(error)) from None
    # Whoever said it: EngineCore believes what has our names.
    params.extra_args = claims.rest(extra, claim) or None
    if claim is None:
        log.info("extra arguments with our names that are not the gateway's were dropped")
        return None
    if not claim.stage:
        only_once(claim.request, claim.epoch)
    if claim.goes_on and request.prompt_token_ids != claim.prompt:
        request.prompt_token_ids = list(claim.prompt)
    return claim


@functools.cache
def key() -> bytes:
    """Return what the gateway of this engine's node seals with.

    Raises:
        BadClaim: it cannot be known, and so nothing believed.
    """
    try:
        return key_of(Path(current.read_spec().runtime_dir))
    except (OSError, WorkerError) as error:
        log.error("what the gateway says cannot be told from what clients say: %s", error)
        raise BadClaim("this engine cannot tell whose words these are") from None


def only_once(request: str, epoch: int) -> None:
    """Refuse a second one."""
    if not _seen.first(request, epoch):
        raise refusal(f"the request {request} has been here in epoch {epoch}")


def check(request: Any, claim: Claim, parent_req: Any) -> None:
    """Refuse what cannot be continued."""
    from vllm.sampling_params import RequestOutputKind

    params = request.sampling_params
    wrong = [
        (parent_req is not None, "n > 1"),
        (params.output_kind != RequestOutputKind.DELTA, "an answer that is not streamed"),
        (bool(request.mm_features), "multimodal input"),
        (request.prompt_embeds is not None, "prompt embeddings"),
        (params.prompt_logprobs is not None, "prompt logprobs"),
        (params.max_tokens is not None and len(claim.output) >= params.max_tokens, "an answer that has all its tokens"),
    ]
    for is_wrong, what in wrong:
        if is_wrong:
            raise refusal(f"{what} cannot be continued")


def retell(state: Any, claim: Claim) -> Any:
    """Put a claim's output through the new request ``state`` and return vLLM's RequestOutput of it."""
    return told(state, claim.output, claim.pieces)


def told(state: Any, output: list[int], sizes: list[int]) -> Any:
    """Put output that was delivered in pieces of ``sizes`` through a request's ``state``; return vLLM's RequestOutput of it."""
    detokenizer = state.detokenizer
    pieces: list[tuple[str, list[int]]] = []
    at = 0
    for size in sizes:
        ids = output[at : at + size]
        at += size
        stopped = detokenizer.update(ids, False)
        if stopped is not None:
            raise refusal(f"the output that was delivered has the stop string {stopped!r}")
        pieces.append((detokenizer.get_next_output_text(False, True), ids))
    _name_tokens(state.logprobs_processor, output)
    completion = state._new_completion_output(list(output), None, None)
    completion.text = _retold(pieces)
    if state.stream_interval > 1:
        state.sent_tokens_offset = detokenizer.num_output_tokens()
    retold = state._new_request_output(state.external_req_id, [completion], False)
    retold.num_cached_tokens = None  # that the replay hits is no saving of the client's
    return retold


def _retold(pieces: list[tuple[str, list[int]]]) -> Retold:
    text = Retold("".join(text for text, _ in pieces))
    text.pieces = pieces
    return text


def joined(first: Any, second: Any) -> Any:
    """Return one RequestOutput that says both, of which nothing was given out yet."""
    pieces = [*first.outputs[0].text.pieces, *second.outputs[0].text.pieces]
    first.add(second, aggregate=True)
    first.outputs[0].text = _retold(pieces)
    return first


def _name_tokens(processor: Any, output: list[int]) -> None:
    """Give each token an entry, so that those after it have the right place and text offset. Its probability was told already."""
    if processor.num_logprobs is None:
        return
    import numpy as np
    from vllm.v1.outputs import LogprobsLists

    for token in output:
        processor._update_sample_logprobs(LogprobsLists(np.array([[token]]), np.array([[0.0]]), np.array([1]), None))


def _with_known_prompt(original: Callable[..., Any]) -> Callable[..., Any]:
    async def create(serving: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            claim = claims.of(request.vllm_xargs, key)
        except BadClaim:
            claim = None  # refused where every request passes
        known = _prompt.set(claim.prompt if claim is not None and claim.goes_on else None)
        try:
            return await original(serving, request, *args, **kwargs)
        finally:
            _prompt.reset(known)

    return create


async def _tokenize_prompts_async(renderer: Any, prompts: Any, params: Any) -> Any:
    known = _prompt.get()
    if known is None or len(prompts) != 1 or set(prompts[0]) - {"prompt", "cache_salt"}:
        return await _original["tokenize"](renderer, prompts, params)
    return [{**prompts[0], "prompt_token_ids": list(known)}]
