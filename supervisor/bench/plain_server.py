"""The same engine without shadowsup: ``python -m shadowsup.supervisor.bench.plain_server SPEC.json --port N``.

One process, as people run engines today: it loads its weights, keeps its KV cache and prefix index to itself, and speaks HTTP. When it is
killed all of that is gone. What it shares with the node is the engine adapter, so that a comparison shows the supervision alone. It
listens when it is ready, on the loopback; it is for measuring, and has only the streaming chat endpoint that the clients here use.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import logging
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import NoReturn

import msgspec
from aiohttp import web

from shadowsup.errors import ShadowsupError
from shadowsup.supervisor.bench.plain_memory import NoLedger, PrivateWeights, map_private
from shadowsup.supervisor.gateway import params
from shadowsup.supervisor.gateway.errors import ApiError
from shadowsup.wire.engine import EngineSpec
from shadowsup.wire.link import Accepted, Rejected, Submit, Token
from shadowsup.workers import kept_kv, process, registry
from shadowsup.workers.api import Engine
from shadowsup.workers.arena import KvArena
from shadowsup.workers.doorbell import Doorbell
from shadowsup.workers.main import read_spec

IDLE_S = 1.0
STALLED_S = 0.01
"""How soon a step is tried again that could do nothing though requests wait (as in `shadowsup.workers.runtime`)."""

Event = Accepted | Token | Rejected
_encode = msgspec.json.Encoder().encode

log = logging.getLogger("shadowsup.plain")


def load(spec: EngineSpec) -> Engine:
    """Return the engine of ``spec``, loaded, warm and active over memory of its own.

    Raises:
        ShadowsupError: it cannot be loaded.
    """
    device = spec.gpus[spec.rank] if spec.gpus else "host"
    engine = registry.factory(spec.kind)()
    engine.load(spec, PrivateWeights(device), log.info)
    size = sum(kept_kv.slab_sizes(engine.geometry().size, device))
    arena = KvArena.reserve(size, device)
    map_private(arena, size, device)
    engine.warm(arena)
    engine.promote(NoLedger().as_writer(), fenced=True)
    return engine


class Loop:
    """Steps the engine; what it says goes to ``tell`` on ``loop``, once a step."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._bell = Doorbell()
        self._inbox: deque[Submit | str] = deque()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._queues: dict[str, asyncio.Queue[Event]] = {}

    def serve(self, loop: asyncio.AbstractEventLoop) -> NoReturn:
        """Step for ever; on the thread that loaded the engine."""
        engine, inbox = self._engine, self._inbox
        while True:
            self._bell.clear()  # before the inbox is looked at: what comes later rings again
            while inbox:
                message = inbox.popleft()
                if isinstance(message, Submit):
                    engine.submit(message)
                else:
                    engine.cancel(message)
            if not (engine.inflight or engine.queued):
                self._bell.wait(IDLE_S)
                continue
            result = engine.step()
            if result.events:
                loop.call_soon_threadsafe(self._tell, result.events)
            if not result.progressed:
                self._bell.wait(STALLED_S)

    def open(self, submit: Submit) -> asyncio.Queue[Event]:
        """Start a request; its events come into the queue that is returned."""
        queue = self._queues[submit.rid] = asyncio.Queue()
        self._inbox.append(submit)
        self._bell.ring()
        return queue

    def close(self, rid: str, *, cancel: bool) -> None:
        del self._queues[rid]
        if cancel:
            self._inbox.append(rid)
            self._bell.ring()

    def _tell(self, events: Sequence[Event]) -> None:
        for event in events:
            if event.rid in self._queues:
                self._queues[event.rid].put_nowait(event)


class Server:
    """HTTP over a `Loop`."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._numbers = itertools.count(1)

    def application(self) -> web.Application:
        made = web.Application()
        made.router.add_post("/v1/chat/completions", self._chat)
        return made

    async def _chat(self, http: web.Request) -> web.StreamResponse:
        try:
            given = params.chat(await http.json())
            if not given.stream:
                raise ApiError(400, "this server streams only", param="stream")
        except ApiError as error:
            return web.Response(status=error.status, body=error.body(), content_type="application/json")
        rid = f"plain-{next(self._numbers)}"
        queue = self._loop.open(Submit(rid=rid, epoch=NoLedger.epoch, messages=given.messages, sampling=given.sampling))
        finished = False
        try:
            accepted = await queue.get()
            if isinstance(accepted, Rejected):
                finished = True
                refusal = ApiError(accepted.status, accepted.message, param=accepted.param)
                return web.Response(status=refusal.status, body=refusal.body(), content_type="application/json")
            assert isinstance(accepted, Accepted)
            response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
            await response.prepare(http)
            head = {"id": rid, "object": "chat.completion.chunk", "created": int(time.time()), "model": given.model}
            tokens = 0
            while not finished:
                event = await queue.get()
                assert isinstance(event, Token)
                tokens += len(event.ids)
                finished = event.finish_reason is not None
                choice = {"index": 0, "delta": {"content": event.text}, "finish_reason": event.finish_reason}
                if given.return_token_ids:
                    choice["token_ids"] = event.ids
                await response.write(_event({**head, "choices": [choice]}))
            if given.include_usage:
                await response.write(_event({**head, "choices": [], "usage": _usage(accepted, tokens)}))
            await response.write_eof(b"data: [DONE]\n\n")
            return response
        finally:
            self._loop.close(rid, cancel=not finished)


def _event(body: object) -> bytes:
    return b"data: " + _encode(body) + b"\n\n"


def _usage(accepted: Accepted, tokens: int) -> dict[str, object]:
    prompt = len(accepted.prompt_ids)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": tokens,
        "total_tokens": prompt + tokens,
        "prompt_tokens_details": {"cached_tokens": accepted.cached_tokens},
    }


def _serve_http(loop: asyncio.AbstractEventLoop, application: web.Application, port: int) -> None:
    async def listen() -> None:
        runner = web.AppRunner(application, access_log=None)
        await runner.setup()
        # A successor takes the port that its predecessor had a moment ago.
        await web.TCPSite(runner, "127.0.0.1", port, reuse_address=True, backlog=1024).start()
        log.info("listening on 127.0.0.1:%d", port)

    asyncio.set_event_loop(loop)
    loop.run_until_complete(listen())
    loop.run_forever()


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="plain_server", description="An engine without shadowsup, for comparison.")
    parser.add_argument("spec", help="the engine's spec, JSON")
    parser.add_argument("--port", type=int, required=True)
    options = parser.parse_args(arguments)
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(message)s")
    process.settle()
    try:
        engine = load(read_spec(options.spec))
    except ShadowsupError as error:
        print(f"plain server: {error}", file=sys.stderr)
        return 1
    steps = Loop(engine)
    loop = asyncio.new_event_loop()
    threading.Thread(target=_serve_http, args=(loop, Server(steps).application(), options.port), daemon=True).start()
    with contextlib.suppress(KeyboardInterrupt):
        steps.serve(loop)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
