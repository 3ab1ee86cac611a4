"""Runs one generation for one client: the text of its stream, as server-sent events or as a whole."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from dataclasses import dataclass, field

from aiohttp import web

from shadowsup.supervisor.gateway import shapes
from shadowsup.supervisor.gateway.errors import internal
from shadowsup.supervisor.gateway.gateway import Gateway
from shadowsup.supervisor.gateway.metrics import Metrics
from shadowsup.supervisor.gateway.outlet import MOST_PENDING_CHARS, TextOutlet
from shadowsup.supervisor.gateway.params import Generation
from shadowsup.supervisor.gateway.stream import Stream, StreamState
from shadowsup.supervisor.gateway.worker import Worker

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Record:
    """What the access log says of a request."""

    started_s: float
    id: str = field(default_factory=lambda: secrets.token_hex(12))
    worker: str = ""
    tokens: int = 0
    replays: int = 0
    failed: bool = False
    """Ended in a 5xx or an error event."""


class _Keepalive:
    """Tells the outlet when the client has heard nothing for ``period_s``. `heard` is called for each write, so it only notes the time."""

    def __init__(self, outlet: TextOutlet, period_s: float) -> None:
        self._outlet = outlet
        self._period_s = period_s
        self._loop = asyncio.get_running_loop()
        self._heard_s = self._loop.time()
        self._timer = self._loop.call_later(period_s, self._look)

    def heard(self) -> None:
        self._heard_s = self._loop.time()

    def stop(self) -> None:
        self._timer.cancel()

    def _look(self) -> None:
        due_s = self._heard_s + self._period_s
        if due_s <= self._loop.time():
            self._outlet.keepalive()
            due_s = self._loop.time() + self._period_s
        self._timer = self._loop.call_at(due_s, self._look)


class Generator:
    """Answers generation requests.

    Args:
        gateway: where streams are opened.
        metrics: told of times.
        keepalive_s: a comment goes to a streaming client that has heard nothing for so long.
    """

    def __init__(self, gateway: Gateway, metrics: Metrics, keepalive_s: float) -> None:
        self._gateway = gateway
        self._metrics = metrics
        self._keepalive_s = keepalive_s

    async def answer(self, http: web.Request, worker: Worker, generation: Generation, record: Record) -> web.StreamResponse:
        """Run one generation to its end. When this is cancelled (the client left), so is the stream.

        Raises:
            ApiError: it failed before a byte of the response was sent.
        """

        def cut_off() -> None:
            self._metrics.slow_client(worker.name)
            log.warning("the client of %s does not read: cut off", record.id)
            if http.transport is not None:
                http.transport.abort()

        outlet = TextOutlet(MOST_PENDING_CHARS, cut_off) if generation.stream else TextOutlet()
        stream = Stream(record.id, generation, outlet, asyncio.get_running_loop().time())
        self._gateway.open(worker, stream)
        try:
            return await (self._stream if generation.stream else self._whole)(http, worker, stream, outlet, record)
        finally:
            if stream.state is not StreamState.DONE:
                self._gateway.cancel(worker, stream)
            record.tokens = stream.output_tokens
            record.replays = stream.replays

    async def _whole(self, http: web.Request, worker: Worker, stream: Stream, outlet: TextOutlet, record: Record) -> web.StreamResponse:
        texts: list[str] = []
        while True:
            news = await outlet.news()
            if news.error is not None:
                raise news.error
            if news.text and not texts:
                self._first_text(worker, record)
            texts.append(news.text)
            if news.finish_reason is not None:
                body = shapes.whole(
                    stream, _public_id(stream, record), worker.route.served_name, int(time.time()), "".join(texts), news.finish_reason
                )
                return web.Response(body=body, content_type="application/json", headers={"x-request-id": record.id})

    async def _stream(self, http: web.Request, worker: Worker, stream: Stream, outlet: TextOutlet, record: Record) -> web.StreamResponse:
        given = stream.generation
        chunks = shapes.Chunks(stream, _public_id(stream, record), worker.route.served_name, int(time.time()))
        response = web.StreamResponse(
            headers={
                "Content-Type": "text/event-stream; charset=utf-8",
                "Cache-Control": "no-cache",
                "X-Accel-Buffering": "no",  # a proxy in front must not collect what is meant to flow
                "x-request-id": record.id,
            }
        )
        keepalive = _Keepalive(outlet, self._keepalive_s)
        opened = False
        try:
            while True:
                news = await outlet.news()
                if not response.prepared:
                    if news.error is not None:
                        raise news.error
                    await response.prepare(http)
                parts: list[bytes] = []
                if not opened and (news.text or news.finish_reason):
                    opened = True
                    parts.append(chunks.opening())
                    self._first_text(worker, record)
                if news.text:
                    parts.append(chunks.text(news.text))
                if news.error is not None:
                    record.failed = True
                    parts.append(shapes.error_event(news.error))
                    await response.write_eof(b"".join(parts))
                    return response
                if news.finish_reason is not None:
                    parts.append(chunks.finish(news.finish_reason))
                    if given.include_usage:
                        parts.append(chunks.usage(stream))
                    parts.append(shapes.DONE)
                    await response.write_eof(b"".join(parts))
                    return response
                if not parts:  # nothing but the keepalive
                    held = stream.state is StreamState.HELD
                    parts.append(shapes.comment("waiting for the engine" if held else "waiting for the next token"))
                await response.write(b"".join(parts))
                keepalive.heard()
        except ConnectionError:  # the client is gone
            raise
        except Exception:
            if not response.prepared:
                raise
            log.exception("stream %s broke", record.id)
            record.failed = True
            await response.write_eof(shapes.error_event(internal()))
            return response
        finally:
            keepalive.stop()

    def _first_text(self, worker: Worker, record: Record) -> None:
        self._metrics.first_text(worker.name, asyncio.get_running_loop().time() - record.started_s)


def _public_id(stream: Stream, record: Record) -> str:
    return ("chatcmpl-" if stream.generation.chat else "cmpl-") + record.id
