"""The control socket: requests of CLI, dashboard and other clients in, replies and events out (`shadowsup.supervisor.protocol`)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import zmq

from shadowsup.errors import ShadowsupError
from shadowsup.supervisor.errors import ExitCode
from shadowsup.supervisor.protocol import Reply, Request

Verb = Callable[[dict[str, Any]], Any | Awaitable[Any]]
"""Takes the arguments, returns what goes into `Reply.result`; raises ShadowsupError. Reading verbs are plain functions and never wait."""

log = logging.getLogger("shadowsup.control")


class ControlServer:
    """Needs a running loop. Reading verbs are answered in the loop's turn in which they arrive, whatever the engines do."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], control: Path, events: Path, verbs: Mapping[str, Verb], *, mode: int = 0o600
    ) -> None:
        self._verbs = verbs
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._again: asyncio.Handle | None = None
        self._publisher = context.socket(zmq.PUB)
        self._publisher.setsockopt(zmq.LINGER, 0)
        self._publisher.setsockopt(zmq.SNDHWM, 20_000)
        self._publisher.bind(f"ipc://{events}")
        self._router = context.socket(zmq.ROUTER)
        self._router.setsockopt(zmq.LINGER, 200)
        self._router.bind(f"ipc://{control}")
        for path in (control, events):
            path.chmod(mode)
        self._fd = int(self._router.getsockopt(zmq.FD))
        self._loop.add_reader(self._fd, self._drain)

    def publish(self, event: bytes) -> None:
        """Send one event (JSON) to whoever listens; a subscriber that does not read loses some and sees the gap."""
        if not self._publisher.closed:
            self._publisher.send_multipart([b"event", event], zmq.NOBLOCK)

    async def close(self) -> None:
        """Let running requests end for a moment, then close. Idempotent."""
        if self._router.closed:
            return
        self._loop.remove_reader(self._fd)
        if self._again is not None:
            self._again.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=0.2)
        for task in list(self._tasks):
            task.cancel()
        self._router.close()
        self._publisher.close()

    def _drain(self) -> None:
        while True:
            try:
                frames = self._router.recv_multipart(zmq.NOBLOCK)
            except zmq.ZMQError:
                return
            self._take(frames)

    def _take(self, frames: list[bytes]) -> None:
        try:
            request = msgspec.json.decode(frames[-1], type=Request)
        except msgspec.MsgspecError as error:
            self._reply(frames[:-1], Reply(id=0, ok=False, error=f"not a request: {error}", exit_code=ExitCode.USAGE))
            return
        verb = self._verbs.get(request.verb)
        if verb is None:
            known = ", ".join(sorted(self._verbs))
            reply = Reply(id=request.id, ok=False, error=f"no verb {request.verb!r}", hint=f"known here: {known}", exit_code=ExitCode.USAGE)
            self._reply(frames[:-1], reply)
            return
        try:
            answer = verb(request.args)
        except Exception as error:
            self._reply(frames[:-1], _refusal(request, error))
            return
        if isinstance(answer, Awaitable):
            task = self._loop.create_task(self._later(frames[:-1], request, answer))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        else:
            self._reply(frames[:-1], Reply(id=request.id, ok=True, result=answer))

    async def _later(self, envelope: list[bytes], request: Request, answer: Awaitable[Any]) -> None:
        try:
            reply = Reply(id=request.id, ok=True, result=await answer)
        except Exception as error:
            reply = _refusal(request, error)
        self._reply(envelope, reply)

    def _reply(self, envelope: list[bytes], reply: Reply) -> None:
        if self._router.closed:
            return
        try:
            self._router.send_multipart([*envelope, msgspec.json.encode(reply)], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            log.warning("a reply was not sent: %s", error)
        # Edge-triggered fd, see `beats`.
        if self._again is None:
            self._again = self._loop.call_soon(self._look_again)

    def _look_again(self) -> None:
        self._again = None
        if not self._router.closed:
            self._drain()


def _refusal(request: Request, error: Exception) -> Reply:
    if isinstance(error, ShadowsupError):
        code = int(getattr(error, "exit_code", ExitCode.FAILED))
        return Reply(id=request.id, ok=False, error=error.message, hint=error.hint, exit_code=code)
    log.error("verb %s failed", request.verb, exc_info=error)
    return Reply(
        id=request.id,
        ok=False,
        error=f"{request.verb} failed inside the supervisor: {type(error).__name__}: {error}",
        hint="the supervisor's log has the details",
        exit_code=ExitCode.FAILED,
    )
