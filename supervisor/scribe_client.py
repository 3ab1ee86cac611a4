"""The supervisor's side of the scribe: give it pipes, ask it for output, replace it without anyone who prints noticing."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import itertools
import os
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shadowsup.memkeeper.channel import OwnedFd
from shadowsup.supervisor import scribe_protocol as wire
from shadowsup.supervisor.errors import SupervisorError
from shadowsup.supervisor.peer import Peer, dial

ANSWER_TIMEOUT_S = 5.0
"""Between request and answer; the scribe may have to read a full pipe first."""

PIPE_SIZE = 256 * 1024
"""Bytes that a process may print while the scribe is being replaced (four times Linux's default)."""


class _Lost(Exception):
    """The connection ended before the answer came."""


@dataclass(frozen=True, kw_only=True)
class StreamStats:
    """Counters of one stream, bytes. ``dropped``: read, but not written (disk full, gone or too slow)."""

    stream: str
    source: str
    path: str
    received: int
    dropped: int
    ended: bool
    error: str = ""
    """Why its file cannot be written just now; empty when it can."""


@dataclass(frozen=True)
class _Pipe:
    """``fd``: our dup of the read end, which keeps the pipe alive while there is no scribe."""

    add: wire.Add
    fd: int


class ScribeClient:
    """Needs a running loop. One connection at a time; `connect` again after ``on_lost``."""

    def __init__(self, socket_path: Path) -> None:
        self._path = socket_path
        self.on_ended: Callable[[str], None] | None = None
        """Called with the stream when all its writers are gone and everything was read."""
        self.on_lost: Callable[[str], None] | None = None
        """Called with the reason when the scribe's connection is gone: start another, then `connect` again."""
        self._pipes: dict[str, _Pipe] = {}
        self._peer: Peer | None = None
        self._connected = asyncio.Event()
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[wire.FromScribe]] = {}
        self._matches: dict[int, asyncio.Future[str | None]] = {}
        self._taken_over: dict[int, list[wire.Figures]] = {}

    @property
    def connected(self) -> bool:
        return self._peer is not None

    async def connect(self, timeout_s: float = 10.0) -> None:
        """Dial; hand a fresh scribe every stream we hold, take over from a living one every stream it holds.

        Raises:
            SupervisorError: nobody answers.
        """
        self._drop("connecting again")
        self._peer = Peer(await dial(self._path, "the scribe", timeout_s), self._frame, self._lost)
        try:
            await self._ask(wire.Takeover(number=next(self._numbers)), timeout_s)
        except _Lost as error:
            raise SupervisorError(f"the scribe at {self._path} went away: {error}") from error
        self._connected.set()

    async def open(self, stream: str, *, source: str, path: Path, max_size: int = 64 << 20, keep: int = 5, tail_lines: int = 200) -> int:
        """Make a pipe, give its read end to the scribe and return the write end, for a spawn (stdout and stderr); the caller closes it.

        Args:
            stream: its name, e.g. the engine id. A name may come again: the new pipe then continues the stream.
            source: what each line is marked with.
            path: file it is written to, with every other stream of that path.
            max_size: bytes of the file before it is rotated.
            keep: rotated files that are kept.
            tail_lines: lines that `tail` can return.

        Without a connection the pipe is handed over at the next `connect`; until then output waits in it.

        Raises:
            SupervisorError: out of fds.
        """
        try:
            read, write = os.pipe2(os.O_CLOEXEC)
        except OSError as error:
            raise SupervisorError(
                f"cannot make a pipe for {stream}: {error.strerror}", "raise the limit of open files (ulimit -n)"
            ) from error
        with contextlib.suppress(OSError):  # beyond the user's share of pipe memory it stays at its default
            fcntl.fcntl(write, fcntl.F_SETPIPE_SZ, PIPE_SIZE)
        add = wire.Add(
            number=0,
            key=uuid.uuid4().hex,
            stream=stream,
            source=source,
            path=str(path),
            max_size=max_size,
            keep=keep,
            tail_lines=tail_lines,
        )
        self._pipes[add.key] = _Pipe(add, read)
        if self._connected.is_set():
            self._hand(self._pipes[add.key])
        return write

    async def tail(self, stream: str, lines: int = 50) -> list[str]:
        """Return the last lines (as written by the process, no mark), also of a stream that has ended.

        Raises:
            SupervisorError: no such stream, or no scribe.
        """
        answer = await self._request(wire.Tail(number=next(self._numbers), stream=stream, lines=lines))
        assert isinstance(answer, wire.Lines)
        return answer.lines

    async def watch(self, stream: str, pattern: str) -> str:
        """Wait for a line that `re.search` finds ``pattern`` in (the lines kept so far count) and return it.

        Goes on over a scribe that is replaced. Cancel it to stop.

        Raises:
            SupervisorError: no such stream, not a pattern, or the stream ended without such a line.
        """
        while True:
            await self._connected.wait()
            number = next(self._numbers)
            match: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
            self._matches[number] = match
            try:
                await self._ask(wire.Watch(number=number, stream=stream, pattern=pattern))
                line = await match
            except _Lost:
                continue
            finally:
                if self._matches.pop(number, None) is not None and not match.done() and self._peer is not None:
                    self._peer.send(wire.encode(wire.Unwatch(number=0, watch=number)))
                match.cancel()
            if line is None:
                raise SupervisorError(f"{stream} has ended without a line that matches {pattern!r}")
            return line

    async def stats(self) -> list[StreamStats]:
        """Return the counters of every stream, those that ended lately too.

        Raises:
            SupervisorError: no scribe.
        """
        answer = await self._request(wire.GetStats(number=next(self._numbers)))
        assert isinstance(answer, wire.Stats)
        return [
            StreamStats(
                stream=each.stream,
                source=each.source,
                path=each.path,
                received=each.received,
                dropped=each.dropped,
                ended=each.ended,
                error=answer.errors.get(each.path, ""),
            )
            for each in answer.streams
        ]

    async def close(self, *, stop: bool = False) -> None:
        """Drop the connection and the pipes. ``stop``: first tell the scribe to write what is in them and to exit. Idempotent."""
        if stop and self._peer is not None:
            with contextlib.suppress(SupervisorError):
                await self._request(wire.Quit(number=next(self._numbers)))
        self._drop("closed")
        pipes, self._pipes = self._pipes, {}
        for pipe in pipes.values():
            os.close(pipe.fd)

    # --- the connection -----------------------------------------------------------------------------------------------------------

    async def _request(self, request: wire.ToScribe) -> wire.FromScribe:
        try:
            return await self._ask(request)
        except _Lost as error:
            raise SupervisorError(f"there is no scribe to ask: {error}") from error

    async def _ask(self, request: wire.ToScribe, timeout_s: float = ANSWER_TIMEOUT_S) -> wire.FromScribe:
        if self._peer is None:
            raise _Lost("not connected")
        answer: asyncio.Future[wire.FromScribe] = asyncio.get_running_loop().create_future()
        self._answers[request.number] = answer
        self._peer.send(wire.encode(request))
        try:
            async with asyncio.timeout(timeout_s):
                message = await answer
        except TimeoutError as error:
            raise SupervisorError(f"the scribe did not answer within {timeout_s:g} s") from error
        finally:
            self._answers.pop(request.number, None)
        if isinstance(message, wire.Refused):
            raise SupervisorError(message.message)
        return message

    def _hand(self, pipe: _Pipe) -> None:
        assert self._peer is not None
        self._peer.send(wire.encode(pipe.add), [OwnedFd(os.dup(pipe.fd))])

    def _frame(self, payload: bytes) -> None:
        match message := wire.decode_answer(payload):
            case wire.Matched():
                match_ = self._matches.get(message.watch)
                if match_ is not None and not match_.done():
                    match_.set_result(message.line)
            case wire.Ended():
                self._end(message.key)
            case wire.Held():
                self._take_over(message)
            case _:
                answer = self._answers.get(message.number)
                if answer is not None and not answer.done():
                    answer.set_result(message)

    def _take_over(self, held: wire.Held) -> None:
        assert self._peer is not None
        living = [each for each in held.streams if not each.ended]
        for each, fd in zip(living, self._peer.take_fds(len(living)), strict=True):
            if each.key in self._pipes:
                os.close(fd)
                continue
            add = wire.Add(
                number=0,
                key=each.key,
                stream=each.stream,
                source=each.source,
                path=each.path,
                max_size=each.max_size,
                keep=each.keep,
                tail_lines=each.tail_lines,
            )
            self._pipes[each.key] = _Pipe(add, fd)
        so_far = self._taken_over.setdefault(held.number, [])
        so_far += held.streams
        if held.more:
            return
        known = {each.key: each for each in self._taken_over.pop(held.number)}
        for key, pipe in list(self._pipes.items()):
            if key not in known:
                self._hand(pipe)
            elif known[key].ended:
                self._end(key)
        answer = self._answers.get(held.number)
        if answer is not None and not answer.done():
            answer.set_result(held)

    def _end(self, key: str) -> None:
        pipe = self._pipes.pop(key, None)
        if pipe is None:
            return
        os.close(pipe.fd)
        if self.on_ended is not None:
            self.on_ended(pipe.add.stream)

    def _lost(self, reason: str) -> None:
        self._drop(reason)
        if self.on_lost is not None:
            self.on_lost(reason)

    def _drop(self, reason: str) -> None:
        self._connected.clear()
        if self._peer is not None:
            self._peer.close()
            self._peer = None
        self._taken_over.clear()
        waiting: list[asyncio.Future[Any]] = [*self._answers.values(), *self._matches.values()]
        for future in waiting:
            if not future.done():
                future.set_exception(_Lost(reason))
                future.exception()  # whoever waits gets it; whoever stopped waiting is not missed
