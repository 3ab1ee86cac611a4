"""What one request still has to tell its client: text that piles up while the client does not read is merged, and bounded."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import NamedTuple

from shadowsup.supervisor.gateway.errors import ApiError

MOST_PENDING_CHARS = 256 * 1024
"""Characters that may wait for one client, beyond what its socket and the transport already buffer. A reader that is this far behind is
cut off: its text would grow in our memory for as long as its engine writes."""


class News(NamedTuple):
    """What came since the last time. At most one of ``finish_reason`` and ``error`` is set, and then nothing follows."""

    text: str
    finish_reason: str | None
    error: ApiError | None
    idle: bool
    """The keepalive is due: nothing was written for a while."""


class TextOutlet:
    """Between a `Stream`, which never waits, and the one coroutine that writes to the client.

    Args:
        bound: characters that may pend; None: no bound (a response that is sent as a whole).
        overflow: called once when they do not suffice.
    """

    __slots__ = ("_bound", "_error", "_finish_reason", "_idle", "_overflow", "_parts", "_size", "_waiter")

    def __init__(self, bound: int | None = None, overflow: Callable[[], None] | None = None) -> None:
        self._bound = bound
        self._overflow = overflow
        self._parts: list[str] = []
        self._size = 0
        self._finish_reason: str | None = None
        self._error: ApiError | None = None
        self._idle = False
        self._waiter: asyncio.Future[None] | None = None

    def put(self, text: str) -> None:
        self._parts.append(text)
        if self._bound is not None:
            self._size += len(text)
            if self._size > self._bound:
                self._bound = None
                if self._overflow is not None:
                    self._overflow()
        self._wake()

    def finish(self, reason: str) -> None:
        self._finish_reason = reason
        self._wake()

    def fail(self, error: ApiError) -> None:
        self._error = error
        self._wake()

    def keepalive(self) -> None:
        """The client has heard nothing for too long."""
        self._idle = True
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def news(self) -> News:
        """Wait until there is something to tell, and take it."""
        if not (self._parts or self._finish_reason or self._error or self._idle):
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
            self._waiter = None
        parts = self._parts
        text = parts[0] if len(parts) == 1 else "".join(parts)
        news = News(text, self._finish_reason, self._error, self._idle)
        parts.clear()
        self._size = 0
        self._idle = False
        return news
