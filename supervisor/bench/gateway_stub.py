"""A stub engine for the gateway's benchmark: sends the time of sending as the text of each token, over the link or as plain HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import time

from shadowsup.wire import link
from shadowsup.wire.engine import EngineState
from shadowsup.wire.framing import Unpacker, pack
from shadowsup.wire.link import Accepted, Hello, Submit, Token

STAMP = 16
"""Characters of a time of sending: nanoseconds of the monotonic clock, padded."""

_OK = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s"
_STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n"
_ABOUT = (
    b'{"object":"list","data":[{"id":"m","object":"model"}],"model_path":"m","served_model_name":"m","is_generation":true,"status":"ok"}'
)
"""Whatever a router asks about a worker before it sends requests to it."""


def _stamp() -> str:
    return f"{time.monotonic_ns():<{STAMP}d}"


class StubEngine:
    """Accepts requests and sends a token to each of them when told. One kind of client at a time: over the link, or over HTTP."""

    def __init__(self) -> None:
        self.left = asyncio.Event()
        """Set when the gateway hung up."""
        self._arrived = asyncio.Condition()
        self._requests: dict[str, int] = {}
        """Request over the link → characters sent."""
        self._link: asyncio.StreamWriter | None = None
        self._direct: list[asyncio.StreamWriter] = []

    async def wait_for(self, count: int) -> None:
        """Wait until so many requests are here."""
        async with self._arrived:
            await self._arrived.wait_for(lambda: len(self._requests) + len(self._direct) == count)

    async def step(self, *, last: bool = False) -> None:
        """Send one token to each request, as an engine does: in one frame, or an event a stream. ``last``: it is each one's last."""
        if self._requests:
            await self._step_link(last)
        else:
            await self._step_http(last)

    # --- over the link ----------------------------------------------------------------------------------------------------------

    async def serve_link(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve the gateway."""
        self._link = writer
        hello = Hello(worker="bench", engine="bench.1", state=EngineState.ACTIVE, epoch=1, model="m", max_context=1 << 20)
        writer.write(pack(link.encode([hello])))
        unpacker = Unpacker()
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(1 << 16):
                for payload in unpacker.feed(data):
                    for message in link.decode_to_engine(payload):
                        if isinstance(message, Submit):
                            writer.write(pack(link.encode([Accepted(rid=message.rid, epoch=1, prompt_ids=(1, 2, 3), cached_tokens=0)])))
                            async with self._arrived:
                                self._requests[message.rid] = 0
                                self._arrived.notify_all()
        writer.close()
        self.left.set()

    async def _step_link(self, last: bool) -> None:
        assert self._link is not None
        text, events = _stamp(), []
        for rid in self._requests:
            self._requests[rid] += len(text)
            reason = "length" if last else None
            events.append(Token(rid=rid, epoch=1, ids=(7,), text=text, chars=self._requests[rid], finish_reason=reason))
        self._link.write(pack(link.encode(events)))
        await self._link.drain()
        if last:
            self._requests.clear()

    # --- over HTTP --------------------------------------------------------------------------------------------------------------

    async def serve_http(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve a client without a gateway, or a router of somebody else's."""
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                length = head.partition(b"content-length:")[2].partition(b"\r\n")[0]
                await reader.readexactly(int(length or 0))
                if head.startswith(b"post /v1/chat/completions "):
                    writer.write(_STREAM)
                    async with self._arrived:
                        self._direct.append(writer)
                        self._arrived.notify_all()
                    return
                writer.write(_OK % (len(_ABOUT), _ABOUT))
        writer.close()

    async def _step_http(self, last: bool) -> None:
        chunk = b'data: {"id":"chatcmpl-000000000000000000000000","object":"chat.completion.chunk","created":1700000000,"model":"m",'
        chunk += b'"choices":[{"index":0,"delta":{"content":"' + _stamp().encode() + b'"},"logprobs":null,"finish_reason":null}]}\n\n'
        for writer in self._direct:
            writer.write(b"%x\r\n" % len(chunk) + chunk + b"\r\n" + (b"0\r\n\r\n" if last else b""))
        await asyncio.gather(*(writer.drain() for writer in self._direct))
        if last:
            for writer in self._direct:
                writer.close()
            self._direct.clear()
