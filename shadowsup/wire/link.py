"""Gateway ↔ engine: one Unix-socket link for each engine, frames of `shadowsup.wire.framing`, each a msgpack *array* of messages.

The engine listens, the gateway dials every engine of its routing table, parked ones too. The engine speaks first (`Hello`) and again on
each change of state or epoch. All events of one step travel in one frame.

Replay: a request that was in flight when its engine died is submitted to the successor with `Replay`. The ids of the prompt are those
of `Accepted` (before it, the gateway sends the original request again without replay). The engine treats ``output_ids`` as output
(penalties, stop strings, min/max tokens, seeded sampling by position) and emits only text beyond ``delivered_chars``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from shadowsup.wire.engine import EngineState


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """``temperature`` 0.0 = greedy. ``seed``: the gateway always sets one (random where the client gave none)."""

    max_tokens: int | None = None
    """None: until the context is full."""
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 = off."""
    seed: int
    stop: tuple[str, ...] = ()
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    ignore_eos: bool = False


class Replay(msgspec.Struct, frozen=True, kw_only=True):
    """``staged``: the `Stage` on this connection that said what the prompt is; then ``prompt_ids`` is empty."""

    prompt_ids: tuple[int, ...] = ()
    output_ids: tuple[int, ...]
    delivered_chars: int
    staged: str = ""


class Submit(msgspec.Struct, frozen=True, kw_only=True, tag="submit"):
    """One of ``messages`` (chat template applied by the engine), ``prompt`` and ``prompt_ids`` is set; none if the replay is staged."""

    rid: str
    epoch: int
    """The epoch of the engine this is meant for; the engine rejects another one, and a (rid, epoch) it already has."""
    messages: tuple[dict[str, Any], ...] | None = None
    prompt: str | None = None
    prompt_ids: tuple[int, ...] | None = None
    sampling: Sampling
    replay: Replay | None = None


class Cancel(msgspec.Struct, frozen=True, kw_only=True, tag="cancel"):
    rid: str


class Stage(msgspec.Struct, frozen=True, kw_only=True, tag="stage"):
    """To a parked engine: a stream of this prompt is running elsewhere, and would be replayed here. What depends on the prompt alone
    (moving and hashing it) is done now, not in the failover. ``rid``: names it on this connection, until `Unstage` or its `Submit`."""

    rid: str
    prompt_ids: tuple[int, ...]


class Unstage(msgspec.Struct, frozen=True, kw_only=True, tag="unstage"):
    """These streams have ended; unknown ones are ignored."""

    rids: tuple[str, ...]


ToEngine = Submit | Cancel | Stage | Unstage


class Hello(msgspec.Struct, frozen=True, kw_only=True, tag="hello"):
    worker: str
    engine: str
    state: EngineState
    epoch: int
    """0 while parked."""
    model: str
    max_context: int
    """Tokens, prompt and output together."""


class Accepted(msgspec.Struct, frozen=True, kw_only=True, tag="accepted"):
    """Always before the first token of a request (a replayed one too). ``cached_tokens``: prompt+replayed tokens found in kept KV.

    ``prompt_ids``: empty for a replay, whose ids the gateway has. With 64 GB of KV in use reading them would take it 14 ms.
    """

    rid: str
    epoch: int
    cached_tokens: int
    prompt_ids: tuple[int, ...] = ()


class Token(msgspec.Struct, frozen=True, kw_only=True, tag="token"):
    """One request's share of one step. ``chars``: length of all text emitted for the request up to and including ``text``.

    ``ids`` may be empty (text released at the end) and ``text`` may be empty (held back: stop prefix, half a character).
    """

    rid: str
    epoch: int
    ids: tuple[int, ...]
    text: str
    chars: int
    finish_reason: str | None = None
    """``stop | length`` on the last event of a request."""


class Rejected(msgspec.Struct, frozen=True, kw_only=True, tag="rejected"):
    """The request ends with this. ``status``: HTTP status; ``retryable``: another engine, or the same later, may take it."""

    rid: str
    epoch: int
    status: int
    message: str
    param: str | None = None
    retryable: bool = False


FromEngine = Hello | Accepted | Token | Rejected

_to_engine = msgspec.msgpack.Decoder(list[ToEngine])
_from_engine = msgspec.msgpack.Decoder(list[FromEngine])
_encoder = msgspec.msgpack.Encoder()


def encode(messages: Sequence[ToEngine | FromEngine]) -> bytes:
    """Return the payload of one frame."""
    return _encoder.encode(messages)


def decode_to_engine(payload: bytes) -> list[ToEngine]:
    """Raises msgspec.MsgspecError when ``payload`` is not a list of such messages."""
    return _to_engine.decode(payload)


def decode_from_engine(payload: bytes) -> list[FromEngine]:
    """Raises msgspec.MsgspecError when ``payload`` is not a list of such messages."""
    return _from_engine.decode(payload)
