"""Does the API server's event loop turn? A page that it shares with EngineCore, whose beats tell (`Beat.front_s`).

An answered ``/health`` would prove no more, and cost a connection each time. The loop itself writes when it last turned, so a server that
is stopped, or whose loop is held by something, is seen as such though EngineCore beats on.

The page also counts the requests that the server has, so that one that is stopped over a prompt which EngineCore has not seen yet is
looked at as one with work. They are counted by an ASGI middleware, which is an option of vLLM's (``--middleware``; 0.26, 0.32).
"""

from __future__ import annotations

import asyncio
import mmap
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

TURN_S = 0.05
"""Between two turns that are told. A beat comes every 0.2 s."""

Message = MutableMapping[str, Any]


class Turns:
    """The page. It is made before the fork and belongs to both processes. Each field is one aligned word: nobody reads half of it."""

    def __init__(self) -> None:
        self._page = mmap.mmap(-1, mmap.PAGESIZE)
        self._turned = memoryview(self._page)[0:8].cast("d")
        self._open = memoryview(self._page)[8:16].cast("q")

    def begin(self, loop: asyncio.AbstractEventLoop) -> None:
        """API server: tell of every turn of ``loop`` from its next one on."""

        def turn() -> None:
            self._turned[0] = time.monotonic()
            loop.call_later(TURN_S, turn)

        loop.call_soon(turn)

    def came(self) -> None:
        """API server: a request came."""
        self._open[0] += 1

    def went(self) -> None:
        """API server: a request has its answer, or its client left."""
        self._open[0] -= 1

    def read(self) -> tuple[float, int]:
        """Return when the loop last turned (CLOCK_MONOTONIC, s; 0.0: not yet) and how many requests the server had then."""
        return self._turned[0], self._open[0]


turns: Turns | None = None
"""Of this engine, made by its first process."""


def share() -> Turns:
    """Make the page of this engine. Before EngineCore is forked."""
    global turns
    turns = Turns()
    return turns


class Counted:
    """ASGI middleware: counts the requests that are being answered."""

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        self._app = app

    async def __call__(self, scope: Message, receive: Callable[..., Awaitable[Message]], send: Callable[..., Awaitable[None]]) -> None:
        page = turns
        if page is None or scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        page.came()
        try:
            await self._app(scope, receive, send)
        finally:
            page.went()
