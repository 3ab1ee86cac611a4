"""A streaming client that notes when each piece of text arrived."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec

IN_FLIGHT_S = 0.05
"""How long after a kill text of the dead engine may still arrive."""


@dataclass(kw_only=True, eq=False)
class Stream:
    """What one client saw. Times are ``time.monotonic()`` seconds."""

    sent_s: float
    arrivals: list[float] = field(default_factory=list)
    """One for each event that carried text or token ids."""
    counts: list[int] = field(default_factory=list)
    """Tokens of each arrival; 1 where the server does not send ids."""
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    usage: dict[str, Any] | None = None
    error: str | None = None
    done: bool = False
    ended: bool = False
    """Nothing more will come, for whatever reason."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    async def reached(self, count: int) -> None:
        """Wait until ``count`` pieces have arrived or the stream has ended."""
        while len(self.arrivals) < count and not self.ended:
            self.changed.clear()
            await self.changed.wait()

    @property
    def first_s(self) -> float | None:
        """Seconds from sending to the first text."""
        return self.arrivals[0] - self.sent_s if self.arrivals else None

    def resumed_after(self, moment_s: float) -> float | None:
        """Seconds from ``moment_s`` (a kill) to the first token of the successor; None when nothing came any more."""
        return resumed_after([self.sent_s, *self.arrivals], moment_s)

    def longest_gap_s(self) -> float:
        """The longest time between two arrivals, in seconds."""
        return longest_gap_s(self.arrivals)


def resumed_after(arrivals: Sequence[float], moment_s: float) -> float | None:
    """Return the seconds from ``moment_s`` to the end of the silence that it caused; None when nothing came any more.

    Text that was already on its way when the engine died arrives just after the kill. So it is the end of the longest silence among those
    that begin before ``moment_s`` + `IN_FLIGHT_S`; what stalls the stream later is in `longest_gap_s`.

    Args:
        arrivals: in order, the first one before ``moment_s``.
    """
    previous = max((at for at in arrivals if at <= moment_s), default=moment_s)
    longest, resumed = 0.0, None
    for at in (at for at in arrivals if at > moment_s):
        if previous > moment_s + IN_FLIGHT_S:
            break
        if at - previous > longest:
            longest, resumed = at - previous, at - moment_s
        previous = at
    return resumed


def longest_gap_s(arrivals: Sequence[float]) -> float:
    """Return the longest time between two of ``arrivals`` (in order), in seconds."""
    return max((later - earlier for earlier, later in itertools.pairwise(arrivals)), default=0.0)


async def stream_chat(
    session: aiohttp.ClientSession,
    url: str,
    payload: dict[str, Any],
    stream: Stream | None = None,
) -> Stream:
    """POST ``payload`` (streamed, with usage and token ids) to ``url`` and follow it to its end. Errors end up in `Stream.error`.

    A server that does not know the extension ``return_token_ids`` is asked again without it; there the text alone can be compared.
    """
    seen = stream or Stream(sent_s=time.monotonic())
    seen.sent_s = time.monotonic()
    body = {**payload, "stream": True, "stream_options": {"include_usage": True}}
    try:
        if await _ask(session, url, {**body, "return_token_ids": True}, seen) == 400 and "return_token_ids" in (seen.error or ""):
            seen.error = None
            await _ask(session, url, body, seen)
    except (aiohttp.ClientError, OSError, ValueError) as error:
        seen.error = f"{type(error).__name__}: {error}"
    finally:
        seen.ended = True
        seen.changed.set()
    return seen


async def _ask(session: aiohttp.ClientSession, url: str, body: dict[str, Any], seen: Stream) -> int:
    async with session.post(url, json=body) as response:
        if response.status != 200:
            seen.error = f"HTTP {response.status}: {(await response.text())[:500]}"
            return response.status
        async for line in response.content:
            if not line.startswith(b"data: "):
                continue
            if line.startswith(b"data: [DONE]"):
                seen.done = True
                break
            _take(seen, msgspec.json.decode(line[6:]))
    return 200


def _take(seen: Stream, event: dict[str, Any]) -> None:
    if "error" in event:
        seen.error = str(event["error"])
        return
    if event.get("usage"):
        seen.usage = event["usage"]
    for choice in event.get("choices", ()):
        piece = choice["delta"].get("content") if "delta" in choice else choice.get("text")
        ids = choice.get("token_ids") or ()
        if piece or ids:
            seen.arrivals.append(time.monotonic())
            seen.counts.append(len(ids) or 1)
            seen.text += piece or ""
            seen.token_ids += ids
            seen.changed.set()
        if choice.get("finish_reason"):
            seen.finish_reason = choice["finish_reason"]
