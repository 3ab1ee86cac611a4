"""The link to one engine: a Unix socket that is dialled early, dialled again when it breaks, and carries frames both ways."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from typing import Protocol

import msgspec

from shadowsup.wire import link
from shadowsup.wire.engine import Route
from shadowsup.wire.framing import FrameError, Unpacker, pack
from shadowsup.wire.link import FromEngine, Hello, Stage, ToEngine

log = logging.getLogger(__name__)

DIAL_FIRST_S = 0.005
DIAL_MOST_S = 0.05
"""Pause before dialling again. Short at its longest, too: a client may be waiting for just this engine, and a failed dial costs 50 µs."""
BACKLOG = 8 * 2**20
"""Bytes unread by a parked engine (stopped, or about to be found dead) beyond which it is told of no more prompts."""
MALFORMED_PAUSE_S = 1.0
"""Pause after an engine that sent something that is not this protocol."""


class Listener(Protocol):
    """What a link reports to. The first of an engine's events on a connection is its `Hello`."""

    def link_events(self, engine: str, events: list[FromEngine]) -> None: ...

    def link_lost(self, engine: str) -> None: ...


class _Wire(asyncio.Protocol):
    """One connection. Whatever goes wrong on it closes it, and nothing else."""

    def __init__(self, owner: EngineLink) -> None:
        self._owner = owner
        self._unpacker = Unpacker()
        self.transport: asyncio.Transport | None = None
        self.greeted = False
        self.malformed = False
        self.lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        try:
            for payload in self._unpacker.feed(data):
                events = link.decode_from_engine(payload)
                if not self.greeted:
                    self._check_greeting(events)
                self._owner.received(events)
        except (FrameError, msgspec.MsgspecError, _NotOurEngine) as error:
            log.error("engine %s sent what is not the link protocol, its link is closed: %s", self._owner.route.engine, error)
            self.malformed = True
            assert self.transport is not None
            self.transport.abort()

    def _check_greeting(self, events: list[FromEngine]) -> None:
        first = events[0] if events else None
        if not isinstance(first, Hello):
            raise _NotOurEngine("the first message is not a hello")
        if first.engine != self._owner.route.engine:
            raise _NotOurEngine(f"the engine behind {self._owner.route.socket} says that it is {first.engine}")
        self.greeted = True

    # An end of file, a half-closed one included, closes the transport (asyncio's default for eof_received): an engine that will say no
    # more cannot serve.

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.lost.done():
            self.lost.set_result(None)
        self._owner.disconnected(self)


class _NotOurEngine(Exception):
    """Raised when the peer's greeting is not that of the engine this link is for."""


class EngineLink:
    """Keeps one engine dialled.

    Args:
        route: the engine and its socket.
        listener: told of what the engine says, and of the end of each connection on which it said anything.
    """

    def __init__(self, route: Route, listener: Listener) -> None:
        self.route = route
        self._listener = listener
        self._wire: _Wire | None = None
        self._task = asyncio.get_running_loop().create_task(self._keep_dialled(), name=f"link {route.engine}")

    def send(self, messages: Sequence[ToEngine]) -> bool:
        """Put ``messages`` in one frame; in several when they exceed what a frame may hold.

        Returns False when they are dropped: there is no connection, or they are all `Stage` and the engine does not read.
        """
        if self._wire is None or self._wire.transport is None or self._wire.transport.is_closing():
            return False
        transport = self._wire.transport
        if transport.get_write_buffer_size() > BACKLOG and all(isinstance(message, Stage) for message in messages):
            return False
        try:
            transport.write(pack(link.encode(messages)))
        except FrameError:
            if len(messages) == 1:
                raise
            half = len(messages) // 2
            return self.send(messages[:half]) and self.send(messages[half:])
        return True

    async def close(self) -> None:
        """Hang up and dial no more. The listener is not told."""
        wire, self._wire = self._wire, None
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task
        if wire is not None and wire.transport is not None:
            wire.transport.abort()
            await asyncio.wait([wire.lost])

    def received(self, events: list[FromEngine]) -> None:
        if self._wire is not None:
            self._listener.link_events(self.route.engine, events)

    def disconnected(self, wire: _Wire) -> None:
        if self._wire is wire:
            self._wire = None
            if wire.greeted:
                log.info("link to %s lost", self.route.engine)
                self._listener.link_lost(self.route.engine)

    async def _keep_dialled(self) -> None:
        loop = asyncio.get_running_loop()
        pause = DIAL_FIRST_S
        complained = ""
        while True:
            wire = _Wire(self)
            self._wire = wire
            try:
                await loop.create_unix_connection(lambda wire=wire: wire, self.route.socket)  # type: ignore[misc]
            except OSError as error:
                wire.lost.cancel()
                if not isinstance(error, (FileNotFoundError, ConnectionRefusedError)) and str(error) != complained:
                    complained = str(error)
                    log.error("cannot dial engine %s at %s: %s", self.route.engine, self.route.socket, error)
            else:
                await asyncio.wait([wire.lost])
                if wire.malformed:
                    pause = MALFORMED_PAUSE_S
                elif wire.greeted:
                    pause = DIAL_FIRST_S
            await asyncio.sleep(pause)
            pause = min(2 * pause, DIAL_MOST_S)
