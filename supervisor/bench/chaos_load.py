"""The load of ``bench chaos``: clients that stream all the time, and a judge that compares each answer with the undisturbed one."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from shadowsup.supervisor.bench.client import Stream, stream_chat
from shadowsup.supervisor.bench.figures import difference, partial_difference
from shadowsup.supervisor.bench.prompts import Chat, payload
from shadowsup.supervisor.errors import SupervisorError


@dataclass(frozen=True, kw_only=True)
class Question:
    """A request and the answer to it that nothing disturbed."""

    payload: dict[str, Any]
    reference: Stream


@dataclass(kw_only=True)
class Tally:
    """What the clients saw."""

    finished: int = 0
    tokens: int = 0
    """Compared with the reference, one by one."""
    cut: int = 0
    """Ended by a death of the gateway, which drops its connections; what had come until then was compared."""
    wrong: list[dict[str, Any]] = field(default_factory=list)
    blocks: int = 0
    """Full blocks of the prompts."""
    cached: int = 0
    """Of these, found in kept KV."""
    longest_gap_s: float = 0.0


async def questions(session: aiohttp.ClientSession, url: str, model: str, chats: Sequence[Chat], output_tokens: int) -> list[Question]:
    """Ask each chat undisturbed, every second one with sampling and a seed.

    Raises:
        SupervisorError: an answer failed.
    """
    made = []
    for number, chat in enumerate(chats):
        asked = payload(model, chat, output_tokens)
        if number % 2:
            asked |= {"temperature": 0.8, "seed": number}
        made.append(asked)
    references = []
    for start in range(0, len(made), 8):
        references += await asyncio.gather(*(stream_chat(session, url, each) for each in made[start : start + 8]))
    for reference in references:
        if reference.error or not reference.done or reference.usage is None:
            raise SupervisorError(f"the undisturbed run failed: {reference.error or 'no end'}")
    return [Question(payload=asked, reference=reference) for asked, reference in zip(made, references, strict=True)]


class Load:
    """``clients`` that each ask one of ``asked`` after the other, from `start` to `finish`.

    Args:
        block_tokens: of the KV cache, for what was found in it.
        silence_s: a stream in which nothing moves for so long is lost.
        context: said of each wrong answer: what was going on (the faults so far).
    """

    def __init__(
        self,
        session: aiohttp.ClientSession,
        url: str,
        asked: Sequence[Question],
        clients: int,
        *,
        seed: int,
        block_tokens: int,
        silence_s: float,
        context: Callable[[float], dict[str, Any]],
    ) -> None:
        self.tally = Tally()
        self._session = session
        self._url = url
        self._asked = asked
        self._clients = clients
        self._seed = seed
        self._block_tokens = block_tokens
        self._silence_s = silence_s
        self._context = context
        self._tasks: list[asyncio.Task[None]] = []
        self._ending = False
        self._gateway_deaths = 0
        self._arrived = asyncio.Event()
        self._streams: set[Stream] = set()

    def start(self) -> None:
        self._tasks = [asyncio.create_task(self._client(random.Random(f"{self._seed}/{number}"))) for number in range(self._clients)]

    async def finish(self) -> None:
        """Let the streams that run end, and ask nothing more."""
        self._ending = True
        await asyncio.gather(*self._tasks)

    async def cancel(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def gateway_dies(self) -> None:
        """Every connection that is open now will drop."""
        self._gateway_deaths += 1

    @property
    def pieces(self) -> int:
        """Pieces of text that the streams of this moment have had."""
        return sum(len(stream.arrivals) for stream in self._streams)

    async def moves(self, timeout_s: float) -> bool:
        """Wait until the next stream ends or has got something. Returns whether one did in time."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                streams = list(self._streams)
                if not streams:
                    self._arrived.clear()
                    await self._arrived.wait()
                    return True
                waits = [asyncio.ensure_future(stream.reached(len(stream.arrivals) + 1)) for stream in streams]
                try:
                    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    for wait in waits:
                        wait.cancel()
                    await asyncio.gather(*waits, return_exceptions=True)
                return True
        return False

    async def _client(self, rng: random.Random) -> None:
        while not self._ending:
            question = rng.choice(self._asked)
            deaths = self._gateway_deaths
            stream = Stream(sent_s=time.monotonic())
            self._streams.add(stream)
            self._arrived.set()
            try:
                await self._follow(question, stream)
            finally:
                self._streams.discard(stream)
            self._judge(question, stream, cut=deaths != self._gateway_deaths)

    async def _follow(self, question: Question, stream: Stream) -> None:
        """Stream, until its end or until nothing has moved for too long."""
        task = asyncio.ensure_future(stream_chat(self._session, self._url, question.payload, stream))
        try:
            while not task.done():
                before = len(stream.arrivals)
                await asyncio.wait({task}, timeout=self._silence_s)
                if not task.done() and len(stream.arrivals) == before:
                    stream.error = f"hangs: nothing came for {self._silence_s:g} s after token {before}"
                    break
        finally:
            if not task.done():
                told = stream.error
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
                stream.error = told

    def _judge(self, question: Question, stream: Stream, *, cut: bool) -> None:
        tally, reference = self.tally, question.reference
        if cut and (stream.error or not stream.done):
            tally.cut += 1
            problem = partial_difference(reference, stream)
        else:
            tally.finished += 1
            problem = difference(reference, stream)
            if stream.usage is not None:
                full = (stream.usage["prompt_tokens"] - 1) // self._block_tokens
                tally.blocks += full
                cached = (stream.usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
                tally.cached += min(full, cached // self._block_tokens)
        tally.tokens += len(stream.token_ids) or len(stream.arrivals)
        tally.longest_gap_s = max(tally.longest_gap_s, stream.longest_gap_s())
        if problem:
            tally.wrong.append({"what": problem, "request": self._asked.index(question), **self._context(stream.sent_s)})
