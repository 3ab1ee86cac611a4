"""A running dashboard without a terminal, and how a test talks to it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

from textual.css.query import NoMatches
from textual.pilot import Pilot
from tui_node import BEGAN

from shadowsup.tui.app import Dashboard

WAIT_S = 30.0
"""Far beyond what anything takes: the machine may be busy."""


class Driver:
    """A running dashboard, and how a test talks to it."""

    def __init__(self, app: Dashboard, pilot: Pilot[Any]) -> None:
        self.app = app
        self.pilot = pilot

    async def press(self, *keys: str) -> None:
        await self.pilot.press(*keys)
        await self.pilot.pause()

    async def type(self, text: str) -> None:
        names = {" ": "space", ":": "colon", "\n": "enter", "_": "underscore", "-": "minus", ".": "full_stop", "#": "number_sign"}
        await self.press(*(names.get(char, char) for char in text))

    async def until(self, condition: Callable[[], Any], what: str = "") -> Any:
        """Wait for the screen to say something: it is drawn when it is drawn."""
        deadline = time.monotonic() + WAIT_S
        while not (found := self._try(condition)):
            assert time.monotonic() < deadline, f"{what or 'it'} did not happen:\n{self.text()}"
            await self.pilot.pause()
            await asyncio.sleep(0.01)
        return found

    @staticmethod
    def _try(condition: Callable[[], Any]) -> Any:
        try:
            return condition()
        except NoMatches:  # the screen is just being put together
            return None

    async def sees(self, *texts: str) -> str:
        """Wait until all of ``texts`` are on the screen; return the screen."""
        await self.until(lambda: all(text in self.text() for text in texts), f"{texts}")
        return self.text()

    def text(self) -> str:
        """Return what is on the screen now."""
        lines = self.app.screen._compositor.render_strips(self.app.size)
        return "\n".join("".join(segment.text for segment in strip).rstrip() for strip in lines)


@contextlib.asynccontextmanager
async def driving(
    feed: Any, *, write: bool = True, size: tuple[int, int] = (120, 40), wall: Callable[[], float] = lambda: BEGAN
) -> AsyncIterator[Driver]:
    """Run a dashboard without a terminal."""
    app = Dashboard(feed, writable=write, wall=wall)
    async with app.run_test(size=size, notifications=True) as pilot:
        yield Driver(app, pilot)
