"""Requests that are sent ahead to parked engines with a server of their own, so that a failover has little left to do.

When a stream has begun, each parked engine of its worker gets the request with the ids of the prompt (`Asked.written_ahead`), prepares
everything, and waits; now and then it is told what was generated since, and says it again. In the failover one `Go` for each stream, all
in one frame, takes the place of a replay: neither the prompt nor most of the output is sent, parsed, rendered or compared then.

Everything here is an addition. Whatever goes wrong with it (the engine does not take it, its words are not those that were delivered, a
connection breaks) leaves the stream without something ahead at this engine, and it is replayed.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from array import array
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import aiohttp
import msgspec
from aiohttp import web

from shadowsup.supervisor.gateway.answer import Answer, EngineFailed
from shadowsup.supervisor.gateway.answer_events import Misstep, Retelling
from shadowsup.supervisor.gateway.errors import ApiError
from shadowsup.supervisor.gateway.held import HeldWorker, Target
from shadowsup.supervisor.gateway.held_request import Asked, little_endian
from shadowsup.supervisor.gateway.held_servers import Servers
from shadowsup.supervisor.gateway.sse import EventSplitter
from shadowsup.wire import staged
from shadowsup.wire.framing import FrameError, Unpacker, pack

log = logging.getLogger(__name__)

TELL_TOKENS = 8
"""A parked engine is told of a stream's output when so much of it is new. What it has not been told it retells in the failover, 0.1 ms each
token: at most 20 ms for 32 streams. Both grow with the number of streams, and its EngineCore takes longer for them meanwhile."""
AT_ONCE = 4
"""Requests that a parked engine prepares at a time: its processes are neighbours of those that serve."""
MOST_TOKENS = 4_000_000
"""Of prompts that wait at one engine, some 100 bytes each in its two processes."""
OVER = (aiohttp.ClientError, OSError, TimeoutError, EOFError, Misstep, EngineFailed, ApiError)
"""What ends one that waits."""


class Line:
    """The connection to one parked engine's server on which is said what becomes of what waits there.

    Args:
        path: of its socket.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None
        self._due: list[staged.ToServer] = []
        self._dialling = asyncio.Lock()
        self.preparing = asyncio.Semaphore(AT_ONCE)
        self.tokens = 0
        """Of the prompts that wait."""
        self.users: dict[str, Callable[[], None]] = {}
        """By key: what to call when nothing waits under it any more."""

    async def dial(self) -> None:
        """Connect, unless that is done. Raises OSError."""
        async with self._dialling:
            if self._writer is None or self._writer.is_closing():
                reader, self._writer = await asyncio.open_unix_connection(self._path)
                self._reading = asyncio.create_task(self._read(reader), name="what waits")

    def say(self, message: staged.ToServer) -> None:
        """Send ``message`` with all others of this turn of the loop. One that cannot be sent is lost, and its user is told."""
        if not self._due:
            asyncio.get_running_loop().call_soon(self._flush)
        self._due.append(message)

    def _flush(self) -> None:
        due, self._due = self._due, []
        if self._writer is None or self._writer.is_closing():
            for message in due:
                self._gone(message.key)
            return
        self._writer.write(pack(staged.encode(due)))

    async def _read(self, reader: asyncio.StreamReader) -> None:
        unpacker = Unpacker()
        try:
            while data := await reader.read(1 << 16):
                for frame in unpacker.feed(data):
                    for message in staged.decode_for_gateway(frame):
                        self._gone(message.key)
        except (OSError, FrameError, msgspec.MsgspecError) as error:
            log.warning("what waits at %s: %s", self._path, error)
        finally:
            if self._writer is not None:
                self._writer.close()
            for key in list(self.users):
                self._gone(key)

    def _gone(self, key: str) -> None:
        gone = self.users.pop(key, None)
        if gone is not None:
            gone()

    async def close(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)
        if self._writer is not None:  # also if what reads had not begun
            self._writer.transport.abort()


class Lines:
    """One `Line` for each server while anything waits there."""

    def __init__(self) -> None:
        self._lines: dict[str, tuple[Line, int]] = {}

    @asynccontextmanager
    async def using(self, upstream: str) -> AsyncIterator[Line]:
        """Yield the line to ``unix:/path``."""
        line, users = self._lines.get(upstream) or (Line(staged.socket_of(upstream.removeprefix("unix:"))), 0)
        self._lines[upstream] = (line, users + 1)
        try:
            yield line
        finally:
            line, users = self._lines[upstream]
            if users > 1:
                self._lines[upstream] = (line, users - 1)
            else:
                del self._lines[upstream]
                await line.close()


@dataclass(slots=True)
class Ahead:
    """One request that waits at one engine, or has been let go there."""

    key: str
    line: Line
    answer: aiohttp.ClientResponse
    retelling: Retelling
    prompt: array[int]
    """The ids that it was sent."""
    events: EventSplitter = field(default_factory=EventSplitter)
    told_tokens: int = 0
    told_pieces: int = 0
    over: asyncio.Event = field(default_factory=asyncio.Event)
    """Nothing waits any more, or goes on."""
    reading: asyncio.Task[None] | None = None
    """Reads what is said ahead."""


class Staging:
    """What one stream has waiting, at which engines.

    Args:
        worker: whose engines; its table of routes says which there are.
        http, asked, rid: the client's request.
        follows: its answer.
    """

    def __init__(
        self, servers: Servers, lines: Lines, worker: HeldWorker, http: web.Request, asked: Asked, rid: str, follows: Answer
    ) -> None:
        self._servers = servers
        self._lines = lines
        self._worker = worker
        self._http = http
        self._asked = asked
        self._rid = rid
        self._follows = follows
        self._tasks: dict[str, asyncio.Task[None]] = {}
        """By upstream. A task that has ended stays: its engine is not tried again."""
        self._ready: dict[str, Ahead] = {}
        worker.stagings.add(self)

    def look(self) -> None:
        """The table of routes has changed, or the answer has grown."""
        if self._follows.prompt_ids is None or self._follows.finished:
            return
        there = {f"unix:{engine.socket}" for engine in self._worker.route.engines}
        for upstream in [upstream for upstream in self._tasks if upstream not in there]:
            self._tasks.pop(upstream).cancel()
        serving = self._worker.route.upstream
        for upstream in there - self._tasks.keys() - {serving} if serving else ():
            self._tasks[upstream] = asyncio.create_task(self._wait_at(upstream), name=f"{self._rid} waits")
        for upstream, ahead in self._ready.items():
            if upstream != serving and self._follows.output_tokens - ahead.told_tokens >= TELL_TOKENS:
                output, pieces = self._news(ahead)
                ahead.line.say(staged.Told(key=ahead.key, output=output, pieces=pieces))

    def waits(self, target: Target) -> bool:
        """Say whether anything waits at ``target``."""
        ahead = self._ready.get(target.upstream)
        return ahead is not None and ahead.prompt is self._follows.prompt_ids

    async def go(self, target: Target, rid: str) -> Ahead:
        """Let what waits at ``target`` go on, as the request ``rid``. From here on its answer is the caller's to read, until `drop`."""
        ahead = self._ready.pop(target.upstream)
        output, pieces = self._news(ahead)
        ahead.line.say(staged.Go(key=ahead.key, request=rid, epoch=target.epoch, output=output, pieces=pieces))
        assert ahead.reading is not None
        ahead.reading.cancel()
        await asyncio.wait([ahead.reading])
        return ahead

    def drop(self, target: Target) -> None:
        """What was let go at ``target`` has ended, in whatever way."""
        task = self._tasks.get(target.upstream)
        if task is not None:
            task.cancel()

    async def close(self) -> None:
        self._worker.stagings.discard(self)
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _news(self, ahead: Ahead) -> tuple[bytes, bytes]:
        output, pieces = self._follows.since(ahead.told_tokens, ahead.told_pieces)
        ahead.told_tokens += len(output)
        ahead.told_pieces += len(pieces)
        return little_endian(output), little_endian(pieces)

    async def _wait_at(self, upstream: str) -> None:
        """Send the request ahead and read what its server says of it, until it is let go. Then hold the connection until cancelled."""
        try:
            async with self._servers.using(upstream) as session, self._lines.using(upstream) as line:
                await self._prepared(upstream, session, line)
        except OVER as error:
            log.info("request %s does not wait at %s: %s: %s", self._rid, upstream, type(error).__name__, error)
        finally:
            self._ready.pop(upstream, None)

    async def _prepared(self, upstream: str, session: aiohttp.ClientSession, line: Line) -> None:
        prompt = self._follows.prompt_ids
        assert prompt is not None
        if line.tokens + len(prompt) > MOST_TOKENS:
            return
        key = f"{self._rid}.{secrets.token_hex(8)}"
        line.tokens += len(prompt)
        answer: aiohttp.ClientResponse | None = None
        ahead: Ahead | None = None
        try:
            async with line.preparing:
                body = self._asked.written_ahead(self._rid, key, prompt)
                answer = await self._servers.ask(session, upstream, self._http, body, self._rid)
                if answer.status != 200 or not answer.content_type.startswith("text/event-stream"):
                    raise Misstep(f"it answers with status {answer.status}")
                await line.dial()
                line.users[key] = answer.close
                ahead = Ahead(key, line, answer, Retelling(prompt), prompt)
                while self._asked.chat and not ahead.retelling.begun:  # other streams begin with their first token
                    await self._read_some(ahead)
            self._ready[upstream] = ahead
            ahead.reading = asyncio.create_task(self._read_on(upstream, ahead), name=f"{self._rid} ahead")
            await ahead.over.wait()
        finally:
            if ahead is not None and ahead.reading is not None:
                ahead.reading.cancel()
            line.tokens -= len(prompt)
            line.users.pop(key, None)
            if answer is not None:
                answer.close()

    async def _read_on(self, upstream: str, ahead: Ahead) -> None:
        try:
            while True:
                await self._read_some(ahead)
        except OVER as error:
            log.info("request %s waits no more at %s: %s: %s", self._rid, upstream, type(error).__name__, error)
            self._ready.pop(upstream, None)
            ahead.over.set()

    async def _read_some(self, ahead: Ahead) -> None:
        chunk = await ahead.answer.content.readany()
        if not chunk:
            raise EOFError("its answer has ended")
        for event in ahead.events.feed(chunk):
            ahead.retelling.take(event)
