"""Requests that may be what ends the engines they reach go to the next one after another, so that it is seen which one it is.

An engine's death takes all its requests with it, and all of them go to its successor at once. When that dies too, one of them may be the
reason (a combination of parameters that the engine does not survive), and it would end every engine that there is.
"""

from __future__ import annotations

import asyncio

QUICK_S = 5.0
"""An engine that dies later than this after it got a request did not die of it."""
SUSPECT_AFTER = 2
"""Engines lost in a row, each soon after it got the request and before a token of it, that make a suspect."""
MOST_LOST = 5
"""As many make it guilty: it has been alone with the last ones."""


class Turn:
    """One request's place in its worker's line of suspects.

    Args:
        line: the worker's.
    """

    def __init__(self, line: asyncio.Lock) -> None:
        self._line = line
        self._mine = False
        self._timer: asyncio.TimerHandle | None = None
        self.sent_s = 0.0
        self.lost = 0
        """Engines lost in a row."""

    @property
    def suspect(self) -> bool:
        return self.lost >= SUSPECT_AFTER

    @property
    def guilty(self) -> bool:
        return self.lost >= MOST_LOST

    async def take(self) -> None:
        """Wait until it is this request's turn."""
        if not self._mine:
            await self._line.acquire()
            self._mine = True

    def sent(self) -> None:
        """An engine has the request."""
        loop = asyncio.get_running_loop()
        self.sent_s = loop.time()
        if self._timer is not None:
            self._timer.cancel()
        if self._mine:
            self._timer = loop.call_later(QUICK_S, self.leave)

    def engine_lost(self, now: float, *, inside: bool) -> None:
        """The engine is gone, or what it said was its last.

        Args:
            inside: whether the request was in it then.
        """
        if inside:
            self.lost = self.lost + 1 if now - self.sent_s < QUICK_S else 0
        self.leave()

    def progress(self) -> None:
        """A token came."""
        self.lost = 0
        self.leave()

    def leave(self) -> None:
        """Let the next one go. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._mine:
            self._mine = False
            self._line.release()
