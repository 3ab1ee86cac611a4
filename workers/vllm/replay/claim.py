"""What the gateway writes into a request's extra arguments (``vllm_xargs``). Imports neither vLLM nor torch.

The names are told in `shadowsup.supervisor.gateway.held_request`, which writes them and seals them. A client can put the same names into
its own extra arguments, on many of vLLM's paths: without the seal they say nothing, and are dropped.
"""

from __future__ import annotations

import base64
import binascii
import sys
from array import array
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from shadowsup.wire.seal import PREFIX, SEAL, ours, sealed

REQUEST, EPOCH, PROMPT, OUTPUT, PIECES, STAGE = (PREFIX + name for name in ("request", "epoch", "prompt", "output", "pieces", "stage"))

HELD, HELD_BEFORE, MORE = (PREFIX + name for name in ("held", "held_before", "more"))
"""From the API server to EngineCore: hold this request back; the one of the same id that was held back goes on, with this output; so many
others come right after it."""

MOST_SEEN = 65536
"""Requests that are remembered, to refuse a second one of the same id and epoch."""


class BadClaim(ValueError):
    """Raised when the extra arguments are not what the gateway writes."""


@dataclass(frozen=True, slots=True)
class Claim:
    """One request's."""

    request: str
    epoch: int
    prompt: list[int]
    output: list[int]
    pieces: list[int]
    """Sizes, in ids, of the events in which ``output`` was delivered."""
    stage: str = ""
    """It comes ahead of a failover and waits, under this key."""

    @property
    def goes_on(self) -> bool:
        """Whether it is, or will be, the continuation of another engine's; its prompt is known then."""
        return bool(self.output or self.stage)


def of(extra: Mapping[str, Any] | None, key: Callable[[], bytes]) -> Claim | None:
    """Return what the gateway claims; None: nothing.

    Args:
        key: returns what the gateway seals with; called only if there is a seal.

    Raises:
        BadClaim: it is sealed, and not what the gateway writes.
    """
    if not extra or SEAL not in extra or not sealed(key(), extra):
        return None
    if REQUEST not in extra:
        raise BadClaim(f"there is no {REQUEST}")
    request, epoch = extra[REQUEST], extra.get(EPOCH)
    if not isinstance(request, str) or not isinstance(epoch, int):
        raise BadClaim(f"{REQUEST} must be a string and {EPOCH} a number")
    prompt, output, pieces = (_unpacked(extra, key) for key in (PROMPT, OUTPUT, PIECES))
    if sum(pieces) != len(output) or bool(output) > bool(prompt):
        raise BadClaim(f"{OUTPUT} has {len(output)} ids, {PIECES} has {sum(pieces)}, {PROMPT} has {len(prompt)}")
    stage = extra.get(STAGE, "")
    if not isinstance(stage, str) or (stage and (output or not prompt)):
        raise BadClaim(f"{STAGE} must be a string, and goes with {PROMPT} alone")
    return Claim(request, epoch, prompt, output, pieces, stage)


def output_of(sampling_params: Any) -> list[int]:
    """Return the ids that a request begins with, as `rest` leaves them: all that EngineCore and the model runner need."""
    extra = getattr(sampling_params, "extra_args", None)
    return _unpacked(extra, OUTPUT) if extra and OUTPUT in extra else []


def rest(extra: Mapping[str, Any], claim: Claim | None) -> dict[str, Any]:
    """Return the extra arguments as they go on to EngineCore: the client's, and the output that a replay begins with.

    Args:
        claim: what was found in ``extra``; None: what has our names there is not ours, and goes.
    """
    theirs = {key: value for key, value in extra.items() if not ours(key)}
    return theirs | {OUTPUT: extra[OUTPUT]} if claim is not None and claim.output else theirs


class Seen:
    """Refuses a (request, epoch) that was there before."""

    def __init__(self) -> None:
        self._seen: OrderedDict[tuple[str, int], None] = OrderedDict()

    def first(self, request: str, epoch: int) -> bool:
        """Return whether it is the first, and remember it."""
        key = (request, epoch)
        if key in self._seen:
            return False
        self._seen[key] = None
        if len(self._seen) > MOST_SEEN:
            self._seen.popitem(last=False)
        return True


def _unpacked(extra: Mapping[str, Any], key: str) -> list[int]:
    """Return ids that are written as base64 of little-endian u32."""
    text = extra.get(key, "")
    try:
        return ids_of(base64.b64decode(text, validate=True))
    except (TypeError, ValueError, binascii.Error) as error:
        raise BadClaim(f"{key} is not base64 of 32-bit numbers: {error}") from None


def ids_of(data: bytes) -> list[int]:
    """Return ids that are written as little-endian u32.

    Raises:
        ValueError: it is not a whole number of them.
    """
    ids = array("I", data)
    if sys.byteorder == "big":
        ids.byteswap()
    return ids.tolist()


def packed(ids: list[int]) -> str:
    """Return ids as the gateway writes them."""
    written = array("I", ids)
    if sys.byteorder == "big":
        written.byteswap()
    return base64.b64encode(written.tobytes()).decode()
