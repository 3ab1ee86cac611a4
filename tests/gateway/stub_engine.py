"""An engine that says what a test tells it to, over a real link; and a supervisor that is a real ROUTER."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

import zmq
import zmq.asyncio
from prompt_shelf import PromptShelf

from shadowsup.wire import engine as wire
from shadowsup.wire import link
from shadowsup.wire.engine import DrainGateway, EngineState, GatewayBeat, Route, Routes, WorkerRoute
from shadowsup.wire.framing import Unpacker, pack
from shadowsup.wire.link import Accepted, Cancel, FromEngine, Hello, Rejected, Submit, ToEngine, Token

PROMPT = (11, 12, 13)
WAIT_S = 30.0
"""Far beyond what anything takes: the machine may be busy."""


class StubEngine:
    """Listens like an engine. ``frames`` holds what the gateway sent, frame by frame."""

    def __init__(self, name: str, folder: Path, worker: str = "chat") -> None:
        self.name = name
        self.claims = name
        """What it says it is."""
        self.worker = worker
        self.path = str(folder / f"{name}.sock")
        self.frames: asyncio.Queue[list[ToEngine]] = asyncio.Queue()
        self.shelf = PromptShelf()
        self.connected = asyncio.Event()
        self.disconnected = asyncio.Event()
        self.connections = 0
        self._state = EngineState.PARKED
        self._epoch = 0
        self._writer: asyncio.StreamWriter | None = None
        self._server: asyncio.Server | None = None

    @property
    def route(self) -> Route:
        return Route(engine=self.name, socket=self.path)

    async def start(self) -> StubEngine:
        self._server = await asyncio.start_unix_server(self._serve, self.path)
        return self

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self.connections += 1
        self.disconnected.clear()
        self._greet()
        self.connected.set()
        unpacker = Unpacker()
        self.shelf = PromptShelf()
        try:
            while data := await reader.read(1 << 16):
                for payload in unpacker.feed(data):
                    if frame := self.shelf.take(link.decode_to_engine(payload)):
                        self.frames.put_nowait(frame)
        except ConnectionError:
            pass
        finally:
            self.disconnected.set()
            self.connected.clear()
            writer.close()

    def _greet(self) -> None:
        self.send(Hello(worker=self.worker, engine=self.claims, state=self._state, epoch=self._epoch, model="m", max_context=1024))

    def become(self, state: EngineState, epoch: int) -> None:
        """Change state and say so, now or when the gateway dials."""
        self._state, self._epoch = state, epoch
        if self._writer is not None and self.connected.is_set():
            self._greet()

    def activate(self, epoch: int) -> None:
        self.become(EngineState.ACTIVE, epoch)

    def send(self, *messages: FromEngine) -> None:
        """Send ``messages`` in one frame."""
        self.send_raw(pack(link.encode(messages)))

    def send_raw(self, data: bytes) -> None:
        assert self._writer is not None
        self._writer.write(data)

    async def frame(self) -> list[ToEngine]:
        """Return the next frame from the gateway."""
        return await asyncio.wait_for(self.frames.get(), WAIT_S)

    async def submit(self) -> Submit:
        """Return the next frame, which must be one request."""
        (message,) = await self.frame()
        assert isinstance(message, Submit)
        return message

    async def cancelled(self) -> str:
        (message,) = await self.frame()
        assert isinstance(message, Cancel)
        return message.rid

    def accept(self, request: Submit, cached: int = 0) -> None:
        self.send(Accepted(rid=request.rid, epoch=request.epoch, prompt_ids=PROMPT, cached_tokens=cached))

    def say(self, request: Submit, text: str, ids: tuple[int, ...], end: int, finish: str | None = None) -> None:
        """Send one token event whose text ends at character ``end``."""
        self.send(Token(rid=request.rid, epoch=request.epoch, ids=ids, text=text, chars=end, finish_reason=finish))

    def reject(self, request: Submit, status: int, message: str, *, retryable: bool = False, param: str | None = None) -> None:
        self.send(Rejected(rid=request.rid, epoch=request.epoch, status=status, message=message, param=param, retryable=retryable))

    def die(self) -> None:
        """Close the socket and the connection at once, as a SIGKILL does."""
        if self._server is not None:
            self._server.close()
            self._server = None
        self.hang_up()

    def hang_up(self) -> None:
        """Break the connection; the socket goes on listening."""
        if self._writer is not None:
            self._writer.transport.abort()

    def half_close(self) -> None:
        assert self._writer is not None
        self._writer.write_eof()

    async def close(self) -> None:
        was_connected = self._writer is not None
        self.die()
        if was_connected:
            await self.disconnected.wait()


class StubSupervisor:
    """The supervisor's ROUTER. Send routes only after the first beat: a ROUTER drops what is for nobody."""

    def __init__(self, folder: Path) -> None:
        self.endpoint = f"ipc://{folder}/beat.sock"
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)  # the next gateway has the name of the last
        self._socket.bind(self.endpoint)
        self._version = 0

    async def beat(self, where: Callable[[GatewayBeat], bool] = lambda _: True) -> GatewayBeat:
        """Return a beat of from now on for which ``where`` holds: what lies here unread tells of what was."""
        since_s, report = time.monotonic(), None
        try:
            async with asyncio.timeout(WAIT_S):
                while True:
                    identity, data = await self._socket.recv_multipart()
                    assert identity == b"gateway"
                    report = wire.decode_report(data)
                    assert isinstance(report, GatewayBeat)
                    if report.sent_s >= since_s and where(report):
                        return report
        except TimeoutError:
            raise AssertionError(f"no such beat; the last one: {report}") from None

    async def route(self, *workers: WorkerRoute) -> None:
        """Send a routing table and wait until it is in force."""
        self._version += 1
        version = self._version
        await self.send(Routes(version=version, workers=workers))
        await self.beat(lambda beat: beat.routes_version == version)

    async def send(self, order: Routes | DrainGateway) -> None:
        await self._socket.send_multipart([b"gateway", wire.encode(order)])

    def close(self) -> None:
        self._socket.close()
        self._context.term()
