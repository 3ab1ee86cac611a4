"""Runs the requests of a `HeldWorker`: forwards each to the engine that serves, holds its client while there is none, replays.

::

    wait for an engine ──► ask it ──► read its events ──► the end
          ▲                  │              │
          └──── refused ─────┴─── cut off ──┘      a comment every keepalive period, whatever it waits for

An engine where the request waits already (`shadowsup.supervisor.gateway.held_stage`) is not asked, but told to go on.

What reaches the client is whole events that `Answer` let through. A request whose answer is not followed (not streamed, or with an
`OBSTACLES`) is sent again as it was as long as its client has nothing of an answer; after that it is broken off with a retryable error.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Coroutine
from typing import Any

import aiohttp
from aiohttp import web

from shadowsup.supervisor.gateway import shapes
from shadowsup.supervisor.gateway.answer import Answer, EngineFailed
from shadowsup.supervisor.gateway.answer_events import Misstep
from shadowsup.supervisor.gateway.errors import ApiError, unavailable
from shadowsup.supervisor.gateway.generate import Record
from shadowsup.supervisor.gateway.held import HeldWorker, Patience, Target
from shadowsup.supervisor.gateway.held_plain import AnsweredError, EngineError, check_event, tokens_in
from shadowsup.supervisor.gateway.held_request import Asked
from shadowsup.supervisor.gateway.held_servers import Asking, Reading, Servers
from shadowsup.supervisor.gateway.held_stage import Lines, Staging
from shadowsup.supervisor.gateway.held_turn import LONG_ENOUGH_S, Turn
from shadowsup.supervisor.gateway.metrics import Metrics
from shadowsup.supervisor.gateway.proxy import headers_back
from shadowsup.supervisor.gateway.sse import EventSplitter

log = logging.getLogger(__name__)

_STREAM_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # a proxy in front must not collect what is meant to flow
}
_CUT_OFF = (aiohttp.ClientError, OSError, TimeoutError, EOFError)


class HeldProxy:
    """Answers requests for workers whose engines have a server.

    Args:
        servers: of the engines.
        metrics: told of times.
        keepalive_s: a comment goes to a streaming client that has heard nothing for so long.
        key: what is said to engines beside what clients said is sealed with it.
    """

    def __init__(self, servers: Servers, metrics: Metrics, keepalive_s: float, key: bytes) -> None:
        self.servers = servers
        self.key = key
        self.lines = Lines()
        self.metrics = metrics
        self.keepalive_s = keepalive_s

    async def answer(self, http: web.Request, worker: HeldWorker, asked: Asked | None, raw: bytes, record: Record) -> web.StreamResponse:
        """Answer one request, over as many engines as it takes. When this is cancelled (the client left), so is the engine's part.

        Args:
            http: the client's request.
            worker: who serves it.
            asked: a generation; None: a request of another kind, passed on as it is.
            raw: its body.

        Raises:
            ApiError: it failed before a byte of the response was sent.
            ConnectionError: the client is gone.
        """
        worker.inflight += 1
        run = _Run(self, http, worker, asked, raw, record)
        try:
            return await run.to_the_end()
        except ApiError as error:
            if not run.response.prepared:
                raise
            return await run.fail(error)
        except _ClientLeft:
            raise ConnectionResetError from None
        finally:
            run.leave()
            worker.inflight -= 1
            await run.nothing_waits()


class _ClientLeft(Exception):
    """Raised when the client cannot be written to. Not a ConnectionError: those are the engines'."""


class _Run:
    """One client's request from its arrival to its end."""

    def __init__(self, owner: HeldProxy, http: web.Request, worker: HeldWorker, asked: Asked | None, raw: bytes, record: Record) -> None:
        self._owner = owner
        self._http = http
        self._worker = worker
        self._asked = asked
        self._raw = raw
        self._record = record
        self._loop = asyncio.get_running_loop()
        self._heard_s = self._loop.time()
        self._patience = Patience(self._heard_s)
        self.turn = Turn(record.id)
        self._lived: asyncio.TimerHandle | None = None
        self._interrupted_s: float | None = None
        self._last_token_s: float | None = None
        self._last_epoch = -1
        self._resubmissions = 0
        self._follows = Answer(asked) if asked is not None and asked.followed else None
        self._ahead: Staging | None = None
        if asked is not None and self._follows is not None:
            self._ahead = Staging(owner.servers, owner.lines, worker, http, asked, record.id, self._follows)
        self._streams = asked is not None and asked.stream
        self._begun = False  # the client has something of an answer; comments are none
        self.response = web.StreamResponse(headers=_STREAM_HEADERS | {"x-request-id": record.id})

    async def nothing_waits(self) -> None:
        """Whatever was sent ahead is not needed any more."""
        if self._ahead is not None:
            await self._ahead.close()

    async def to_the_end(self) -> web.StreamResponse:
        while True:
            target = await self._engine()
            self._patience.tried(target)
            try:
                async with self._owner.servers.using(target.upstream) as session:
                    return await self._at(target, session)
            except EngineError as error:
                await self._refused(target, error)
            except EngineFailed as failure:
                if failure.code < 500:
                    raise ApiError(failure.code, str(failure)) from None
                self._lost(target, f"its engine said: {failure}")
                await self._suspect(target, str(failure), unavailable(f"The engine of worker {self._worker.name} failed: {failure}"))
            except Misstep as misstep:
                self._worker.counts.missteps += 1
                raise self._unreplayable(f"its successor told another answer: {misstep}") from None
            except aiohttp.ClientConnectorError:
                self._returned("its engine does not answer")
            except _CUT_OFF as error:
                self._lost(target, f"its engine broke off ({type(error).__name__})")
                self._patience.refused("its engine broke off", self._loop.time())

    # Waiting for an engine

    async def _engine(self) -> Target:
        """Wait for an engine to ask."""
        worker, patience = self._worker, self._patience
        target = patience.may_go(worker, self.turn, self._loop.time())
        if target is not None:
            return target
        worker.held += 1
        try:
            while True:
                change = worker.change()
                target = patience.may_go(worker, self.turn, self._loop.time())
                if target is not None:
                    return target
                again_s = patience.look_again_at_s(worker, self.turn, self._loop.time())
                await self._until(change.wait(), again_s, "waiting for the engine")
        finally:
            worker.held -= 1

    async def _until(self, event: Coroutine[Any, Any, object], at_s: float, what: str) -> None:
        """Wait for ``event`` until ``at_s``, and keep the client's connection alive meanwhile."""
        task = self._loop.create_task(event)
        try:
            while not task.done() and (now := self._loop.time()) < at_s:
                due_s = self._heard_s + self._owner.keepalive_s if self._streams else at_s
                await asyncio.wait({task}, timeout=max(0.0, min(at_s, due_s) - now))
                await self._keep_alive(what)
        finally:
            task.cancel()

    async def _keep_alive(self, what: str) -> None:
        if self._streams and self._loop.time() >= self._heard_s + self._owner.keepalive_s:
            await self._write(shapes.comment(what))

    async def _write(self, data: bytes) -> None:
        try:
            if not self.response.prepared:
                await self.response.prepare(self._http)
            await self.response.write(data)
        except ConnectionError:
            raise _ClientLeft from None
        self._heard_s = self._loop.time()

    async def _write_eof(self, data: bytes = b"") -> web.StreamResponse:
        try:
            if not self.response.prepared:
                await self.response.prepare(self._http)
            await self.response.write_eof(data)
        except ConnectionError:
            raise _ClientLeft from None
        return self.response

    # Asking one

    async def _at(self, target: Target, session: aiohttp.ClientSession) -> web.StreamResponse:
        """Send the request to ``target`` and read its answer; raises what tells that another must be asked."""
        if self._ahead is not None and self._follows is not None and self._follows.output_tokens and self._ahead.waits(target):
            answered = await self._gone_on(target, self._ahead, self._follows)
            if answered is not None:
                return answered
        body = self._body_for(target)
        asking = self._loop.create_task(self._owner.servers.ask(session, target.upstream, self._http, body, self._record.id))
        this = Asking(target, asking)
        self._worker.began(this)
        if self._follows is None:  # of what is not followed no token is seen
            self._lived = self._loop.call_later(LONG_ENOUGH_S, lambda: self._worker.line.lived(self.turn, self._loop.time()))
        try:
            while not asking.done():
                await asyncio.wait({asking}, timeout=self._owner.keepalive_s if self._streams else None)
                if not asking.done():
                    await self._keep_alive("waiting for the first token")
            if asking.cancelled():
                raise EOFError("dropped")
            answer = asking.result()
            if answer.status >= 400:
                raise EngineError(answer.status, headers_back(answer), await answer.read())
            if not answer.content_type.startswith("text/event-stream"):
                return await self._whole(answer)
            return await (self._streamed(answer) if self._follows is None else self._followed(answer, self._follows, EventSplitter()))
        finally:
            if self._lived is not None:
                self._lived.cancel()
            self._worker.over(this)
            this.drop()  # an engine whose client left stops generating
            with contextlib.suppress(asyncio.CancelledError, *_CUT_OFF):
                await asking

    async def _gone_on(self, target: Target, staging: Staging, follows: Answer) -> web.StreamResponse | None:
        """Let the request that waits at ``target`` go on and read its answer; None: it did not come so far as to say anything new."""
        ahead = await staging.go(target, self._rid_at(target))
        this = Reading(target, ahead.answer)
        self._worker.began(this)
        self._count_replay()
        known = follows.output_tokens
        try:
            follows.next_engine(ahead.retelling)
            return await self._followed(ahead.answer, follows, ahead.events)
        except (*_CUT_OFF, EngineFailed, Misstep) as error:
            if follows.output_tokens > known or follows.finished or self._worker.target != target or self._worker.ended is not None:
                raise
            log.warning("request %s waited in vain and is replayed: %s: %s", self._record.id, type(error).__name__, error)
            return None
        finally:
            self._worker.over(this)
            staging.drop(target)

    def _count_replay(self) -> None:
        self._record.replays += 1
        self._worker.counts.replays += 1

    def _rid_at(self, target: Target) -> str:
        rid = self._record.id
        if target.epoch == self._last_epoch:
            # An engine refuses a (request, epoch) that it has seen.
            self._resubmissions += 1
            rid = f"{rid}~{self._resubmissions}"
        elif self._follows is None and self._last_epoch >= 0:
            self._worker.counts.begun_anew += 1
        self._last_epoch = target.epoch
        return rid

    def _body_for(self, target: Target) -> bytes:
        if self._asked is None:
            return self._raw
        rid = self._rid_at(target)
        replay = None
        if self._follows is not None:
            replay = self._follows.replay()
            self._follows.next_engine()
        if replay is not None:
            self._count_replay()
        return self._asked.written_for(rid, target.epoch, replay)

    # When it fails

    def _lost(self, target: Target, why: str) -> None:
        """The engine broke off.

        Raises:
            ApiError: what the client has of the answer cannot be continued.
        """
        if self._worker.ended is not None:
            raise self._worker.ended
        log.info("request %s: %s", self._record.id, why)
        self._accuse(target)
        if not self._begun:
            return
        self._worker.lost(target)
        if self._interrupted_s is None:
            self._interrupted_s = self._loop.time()
        if self._follows is None:
            obstacle = self._asked.obstacle if self._asked is not None else "answers of this path are not followed"
            raise self._unreplayable(f"another cannot continue it: {obstacle}")

    def _accuse(self, target: Target) -> None:
        """An engine ended, or failed, with this request in it."""
        now = self._loop.time()
        if self._worker.broke(target, self.turn.sent_s, now):
            self._worker.line.lost(self.turn, now)
        else:
            self._worker.line.returned(self.turn)  # it found the engine dead

    def _returned(self, why: str) -> None:
        """The engine did not take it."""
        self._worker.line.returned(self.turn)
        self._patience.refused(why, self._loop.time())

    def leave(self) -> None:
        """It is over, one way or another."""
        self._worker.line.left(self.turn)

    def _unreplayable(self, why: str) -> ApiError:
        self._worker.counts.unreplayable += 1
        log.error("request %s cannot be continued: %s", self._record.id, why)
        return unavailable(f"The engine of worker {self._worker.name} died in the middle of this answer, and {why}")

    async def _refused(self, target: Target, error: EngineError) -> None:
        """An engine answered with an error: the client's, or the engine's?"""
        said = AnsweredError(error, self._worker.name)
        replayed = self._follows is not None and self._follows.output_tokens > 0
        if error.status < 500 or error.status == 501:
            raise self._unreplayable(f"its successor does not take it: {said.told}") if replayed else said
        self._worker.counts.refusals += 1
        if error.status == 500:
            self._accuse(target)
        else:
            self._worker.line.returned(self.turn)
        if self._begun:
            self._patience.refused(said.told, self._loop.time())
        else:
            await self._suspect(target, said.told, said)

    async def _suspect(self, target: Target, why: str, error: ApiError) -> None:
        """Wait for the routing table to say that this was the engine's death; if it does not, it was the request's own."""
        until_s = self._patience.failed(why, self._loop.time())
        if until_s is None:
            raise error
        while self._worker.target == target and self._worker.ended is None and self._loop.time() < until_s:
            await self._until(self._worker.change().wait(), until_s, "waiting for the engine")  # which may be of another worker

    async def fail(self, error: ApiError) -> web.StreamResponse:
        """End a stream that has begun with an error event."""
        self._record.failed = True
        event = error.event() if isinstance(error, AnsweredError) else shapes.error_event(error)
        try:
            return await self._write_eof(event)
        except _ClientLeft:
            raise ConnectionResetError from None

    # Reading its answer

    async def _whole(self, answer: aiohttp.ClientResponse) -> web.StreamResponse:
        body = await answer.read()
        if self._asked is not None:
            self._record.tokens = tokens = tokens_in(body)
            self._worker.counts.tokens += tokens
        headers = headers_back(answer)
        headers["x-request-id"] = self._record.id
        if self.response.prepared:  # a stream was asked for, and its client has had a comment already
            return await self._write_eof(b"data: " + b" ".join(body.split(b"\n")) + b"\n\n" + shapes.DONE)
        return web.Response(status=answer.status, body=body, headers=headers)

    async def _streamed(self, answer: aiohttp.ClientResponse) -> web.StreamResponse:
        """Pass on a stream that cannot be continued once the client has some of it."""
        if not self.response.prepared:
            self.response.headers.update(headers_back(answer))
        events = EventSplitter()
        while chunk := await self._chunk(answer):
            whole = events.feed(chunk)
            if self._asked is not None:
                for event in whole:
                    check_event(event)
            if not whole:
                continue
            if not self._begun:
                self._begun = True
                self._first_text()
            self._patience.progress(self._loop.time())
            await self._write(b"".join(whole))
        return await self._write_eof()

    async def _followed(self, answer: aiohttp.ClientResponse, follows: Answer, events: EventSplitter) -> web.StreamResponse:
        while True:
            chunk = await self._chunk(answer, follows)
            known = follows.output_tokens
            parts: list[bytes] = []
            failure: Exception | None = None
            for event in events.feed(chunk):
                try:
                    parts.append(follows.take(event))
                except (EngineFailed, Misstep) as error:
                    failure = error
                    break
            if follows.output_tokens > known:
                self._tokens(follows.output_tokens - known)
                if self._ahead is not None:
                    self._ahead.look()
            news = b"".join(parts)
            if news:
                self._begun = True
                await self._write(news)
            if follows.finished and not follows.done and (failure is not None or not chunk):
                await self._write(follows.end())
            if follows.done:
                return await self._write_eof()
            if failure is not None:
                raise failure
            if not chunk:
                raise EOFError("the stream ended in its middle")

    async def _chunk(self, answer: aiohttp.ClientResponse, follows: Answer | None = None) -> bytes:
        """Return what comes next; empty at the end."""
        while True:
            # Only who asked for a stream that we know gets comments, and waits for less than what the engine says.
            due_s = self._heard_s + self._owner.keepalive_s if self._streams else None
            try:
                async with asyncio.timeout_at(due_s):
                    return await answer.content.readany()
            except TimeoutError:
                await self._keep_alive("waiting for the next token")
            except _CUT_OFF:
                if follows is not None and follows.finished:
                    return b""  # nothing but the end is missing
                raise

    def _tokens(self, new: int) -> None:
        if not self._record.tokens:
            self._first_text()
        self._record.tokens += new
        self._worker.counts.tokens += new
        now = self._loop.time()
        if self._last_token_s is not None:
            self._worker.counts.gaps.observe((now - self._last_token_s) / new, new)
        self._last_token_s = now
        self._patience.progress(now)
        self._worker.line.progress(self.turn, new, now)
        if self._interrupted_s is not None and self._worker.resumed is not None:
            self._worker.resumed(now - self._interrupted_s)
        self._interrupted_s = None

    def _first_text(self) -> None:
        self._owner.metrics.first_text(self._worker.name, self._loop.time() - self._record.started_s)
