"""The gateway's line to the supervisor: beats out, orders in. While there is no supervisor, the gateway goes on without."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import msgspec
import zmq
import zmq.asyncio

from shadowsup.wire import engine as wire
from shadowsup.wire.engine import DrainGateway, GatewayBeat, NodeFigures, Routes

log = logging.getLogger(__name__)

IDENTITY = b"gateway"
FIRST_BEAT_S = 0.01
"""Between two tries to send the first beat."""


class SupervisorChannel:
    """A DEALER that beats and hands on orders.

    Args:
        endpoint: of the supervisor's ROUTER; it need not exist yet, and may go and come back.
        heartbeat_s: between two beats.
        beat: makes the next beat.
        order: told of each order, in the order in which they were sent.
        figures: told of the node's figures, encoded.
    """

    def __init__(
        self,
        endpoint: str,
        heartbeat_s: float,
        beat: Callable[[], GatewayBeat],
        order: Callable[[Routes | DrainGateway], None],
        figures: Callable[[bytes], None] = lambda _: None,
    ) -> None:
        self._heartbeat_s = heartbeat_s
        self._beat = beat
        self._order = order
        self._figures = figures
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.IDENTITY, IDENTITY)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.RECONNECT_IVL, 20)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, 200)
        # Beats are for a supervisor that is there: none are queued for one that comes later.
        self._socket.setsockopt(zmq.IMMEDIATE, 1)
        self._socket.connect(endpoint)
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(self._beats(), name="beats"), loop.create_task(self._orders(), name="orders")]

    async def beat_now(self) -> bool:
        """Send a beat; return whether there is a supervisor to take it."""
        try:
            await self._socket.send(wire.encode(self._beat()), zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        self._socket.close()
        self._context.term()

    async def _beats(self) -> None:
        # The connection takes a moment: until a beat is taken, try in quick succession, for the routes come as its answer.
        while not await self.beat_now():  # noqa: ASYNC110
            await asyncio.sleep(min(FIRST_BEAT_S, self._heartbeat_s))
        while True:
            await asyncio.sleep(self._heartbeat_s)
            await self.beat_now()

    async def _orders(self) -> None:
        while True:
            data = await self._socket.recv()
            try:
                order = wire.decode_order(data)
            except msgspec.MsgspecError as error:
                log.error("the supervisor sent what is not an order: %s", error)
                continue
            if isinstance(order, NodeFigures):
                self._figures(order.data)
            elif isinstance(order, (Routes, DrainGateway)):
                try:
                    self._order(order)
                except Exception:  # whatever is wrong with this order, the next must still be heard
                    log.exception("an order could not be carried out")
                await self.beat_now()
            else:
                log.error("the supervisor sent the order %s, which is not for a gateway", type(order).__name__)
