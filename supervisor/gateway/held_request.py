"""What a client asked of an engine with an HTTP server of its own, and how the request is written for each engine that gets it.

Such an engine (vLLM) is sent what the client wrote, and beside it

- ``return_token_ids``, so that the gateway knows what was generated (it is taken out of what the client sees),
- ``vllm_xargs``: the keys below, which the plugin in the engine reads and takes out.

===================== ===================================================================================================================
``shadowsup_request`` id of the request; the engine refuses a second one with the same id and epoch
``shadowsup_epoch``   the epoch the gateway believes the engine to be in
``shadowsup_prompt``  replay only: ids of the prompt, little-endian u32, base64. A template that tells the time would render another one
``shadowsup_output``  replay only: the ids that were generated and delivered, likewise
``shadowsup_pieces``  replay only: how many ids each delivered event had, likewise: parsers are fed the same pieces again
``shadowsup_stage``   sent ahead to a parked engine, with the prompt and without output: wait, under this key (`shadowsup.wire.staged`)
``shadowsup_seal``    over all of them (`shadowsup.wire.seal`): without it the engine believes none of them
===================== ===================================================================================================================
"""

from __future__ import annotations

import base64
import json
import sys
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from shadowsup.supervisor.gateway.errors import invalid
from shadowsup.wire.seal import PREFIX as OURS
from shadowsup.wire.seal import SEAL, seal

XARGS = "vllm_xargs"
_FIELDS_OF_OURS = (XARGS, "return_token_ids", "include_reasoning")


@dataclass(frozen=True, slots=True)
class Replay:
    """What a successor needs to go on with an answer: ids of prompt and output, and the sizes of the pieces in which it was delivered."""

    prompt_ids: array[int]
    output_ids: array[int]
    pieces: array[int]


class Asked:
    """One request.

    Args:
        chat: whether it is a chat.
        body: the parsed JSON.
        raw: the same as it came.
        key: what the gateway's own words are sealed with; an engine believes only those that have its node's.

    Raises:
        ApiError: 400 when it uses a name that is ours.
    """

    def __init__(self, chat: bool, body: dict[str, Any], raw: bytes, key: bytes = b"") -> None:
        refuse_our_names(body)
        self._key = key
        self.chat = chat
        self.raw = raw
        self.stream = body.get("stream") is True
        self.obstacle = obstacle(body)
        """Why an answer that has begun cannot be continued by another engine; empty when it can."""
        self.wants_ids = body.get("return_token_ids") is True
        self.hides_reasoning = body.get("include_reasoning") is False
        options = body.get("stream_options")
        self.include_usage = isinstance(options, dict) and options.get("include_usage") is True
        self._xargs: dict[str, Any] = body.get(XARGS) or {}
        self._body = body
        self._head = b""

    @property
    def followed(self) -> bool:
        """Whether the gateway follows the answer's tokens. An answer that is not streamed is begun anew by the next engine."""
        return self.stream and not self.obstacle

    def written_for(self, rid: str, epoch: int, replay: Replay | None) -> bytes:
        """Return the body for an engine.

        Args:
            rid: id of this attempt.
            epoch: of the engine.
            replay: what was delivered; None: nothing yet.
        """
        if not self.followed:
            return self.raw
        xargs: dict[str, Any] = {OURS + "request": rid, OURS + "epoch": epoch}
        if replay is not None:
            xargs[OURS + "prompt"] = packed(replay.prompt_ids)
            xargs[OURS + "output"] = packed(replay.output_ids)
            xargs[OURS + "pieces"] = packed(replay.pieces)
        return self._written(xargs)

    def written_ahead(self, rid: str, key: str, prompt_ids: array[int]) -> bytes:
        """Return the body for a parked engine, which may have to go on with it."""
        return self._written({OURS + "request": rid, OURS + "epoch": 0, OURS + "prompt": packed(prompt_ids), OURS + "stage": key})

    def _written(self, xargs: dict[str, Any]) -> bytes:
        if not self._head:
            ours: dict[str, Any] = {"return_token_ids": True}
            if "include_reasoning" in self._body:
                ours["include_reasoning"] = True  # hidden reasoning hides its ids, too: the gateway hides it instead
            theirs = {key: value for key, value in self._body.items() if key not in _FIELDS_OF_OURS}
            self._head = _encode(theirs | ours)[:-1] + f', "{XARGS}": '.encode()
            self._body = {}  # a long prompt is kept once
        return self._head + _encode(self._xargs | xargs | {SEAL: seal(self._key, xargs)}) + b"}"


def packed(ids: array[int]) -> str:
    """Return ``ids`` as base64 of little-endian u32: a tenth of the time and half the size of a JSON array."""
    return base64.b64encode(little_endian(ids)).decode()


def little_endian(ids: array[int]) -> bytes:
    """Return ``ids`` as little-endian u32."""
    assert ids.itemsize == 4
    if sys.byteorder == "big":
        ids = array("I", ids)
        ids.byteswap()
    return ids.tobytes()


def _encode(value: dict[str, Any]) -> bytes:
    # The standard library's encoder: it writes integers of any size, as the client may have sent them.
    return json.dumps(value, ensure_ascii=False).encode()


def refuse_our_names(body: dict[str, Any]) -> None:
    """Tell a client that it cannot have these names. Where it could say them unseen the engine drops them.

    Raises:
        ApiError: 400.
    """
    xargs = body.get(XARGS)
    if isinstance(xargs, dict):
        for key in xargs:
            if key.startswith(OURS):
                raise invalid(f"Names that begin with {OURS} are this gateway's own", f"{XARGS}.{key}")


def _several_prompts(body: dict[str, Any]) -> bool:
    prompt = body.get("prompt")
    return isinstance(prompt, list) and len(prompt) > 0 and not all(type(item) is int for item in prompt)


def _has_media(body: dict[str, Any]) -> bool:
    messages = body.get("messages")
    for message in messages if isinstance(messages, list) else ():
        content = message.get("content") if isinstance(message, dict) else None
        for part in content if isinstance(content, list) else ():
            if not isinstance(part, dict) or part.get("type") not in ("text", "refusal", "thinking"):
                return True
    return False


def _more_than_one(name: str) -> Callable[[dict[str, Any]], bool]:
    return lambda body: body.get(name) not in (None, 1)


def _given(*names: str) -> Callable[[dict[str, Any]], bool]:
    return lambda body: any(body.get(name) not in (None, False) for name in names)


OBSTACLES: tuple[tuple[str, Callable[[dict[str, Any]], bool]], ...] = (
    ("n > 1", _more_than_one("n")),
    ("best_of > 1", _more_than_one("best_of")),
    ("beam search", _given("use_beam_search")),
    ("several prompts in one request", _several_prompts),
    ("prompt_logprobs", _given("prompt_logprobs", "prompt_logprob_token_ids", "prompt_logprob_start")),
    ("echo", _given("echo")),
    ("images, audio and other media", _has_media),
    ("prompt_embeds", _given("prompt_embeds")),
    ("kv_transfer_params", _given("kv_transfer_params", "ec_transfer_params")),
    ("thinking_token_budget", _given("thinking_token_budget")),
    ("truncate_prompt_tokens", _given("truncate_prompt_tokens")),
    ("vllm_xargs that is no object", lambda body: not isinstance(body.get(XARGS) or {}, dict)),
)
"""What cannot be continued faithfully by another engine, or has not been shown to be: name for people, and how to tell. docs/replay.md."""


def obstacle(body: dict[str, Any]) -> str:
    """Return the name of the first `OBSTACLES` that a request has; empty when there is none."""
    return next((name for name, holds in OBSTACLES if holds(body)), "")
