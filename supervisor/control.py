"""The control socket: requests of CLI, dashboard and other clients in, replies and events out (`shadowsup.supervisor.protocol`)."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import zmq

from shadowsup.errors import ShadowsupError
from shadowsup.supervisor.errors import ExitCode, SupervisorError
from shadowsup.supervisor.protocol import Reply, Request
from shadowsup.supervisor.runtime_dir import not_of_group

Verb = Callable[[dict[str, Any]], Any | Awaitable[Any]]
"""Takes the arguments, returns what goes into `Reply.result`; raises ShadowsupError. Reading verbs are plain functions and never wait."""

READING_VERBS = frozenset({"status", "memory", "recoveries", "logs", "blocks", "inspect", "ping", "events", "revisions"})
"""What members of ``node.group`` may ask. A verb that is not named here is an order."""

MAX_REQUEST = 1024 * 1024
"""Bytes of one message; ZeroMQ drops the connection of a peer that sends a longer one."""
MAX_BATCH = 200
"""Requests taken at once before the loop gets its turn: who floods this socket must not keep a failover waiting."""
MAX_SHOWN = 100

log = logging.getLogger("shadowsup.control")


@dataclass(frozen=True, kw_only=True)
class Reading:
    """A second pair of sockets, for the members of a group. Only reading verbs are answered there; an order is refused.

    ZeroMQ does not tell who is at the other end, so who may do what is a matter of which socket they can open: the kernel checks the
    mode of a Unix socket when somebody connects.
    """

    control: Path
    events: Path
    group: int


@dataclass(frozen=True)
class _Door:
    """One ROUTER, and what is answered there. Its fd outlives it in the loop's list for a moment, so it is kept."""

    router: zmq.Socket[bytes]
    fd: int
    reading: bool


class ControlServer:
    """Needs a running loop. Reading verbs are answered in the loop's turn in which they arrive, whatever the engines do."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        control: Path,
        events: Path,
        verbs: Mapping[str, Verb],
        *,
        mode: int = 0o600,
        reading: Reading | None = None,
    ) -> None:
        """Raises SupervisorError: the sockets of ``reading`` cannot be given to its group."""
        self._verbs = verbs
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._again: asyncio.Handle | None = None
        self._publisher = context.socket(zmq.PUB)
        self._publisher.setsockopt(zmq.LINGER, 0)
        self._publisher.setsockopt(zmq.SNDHWM, 20_000)
        self._publisher.setsockopt(zmq.MAXMSGSIZE, MAX_REQUEST)
        self._doors: list[_Door] = []
        try:
            _bind(self._publisher, events, mode)
            self._open(context, control, mode, reading=False)
            if reading is not None:
                _bind(self._publisher, reading.events, 0o660, reading.group)
                self._open(context, reading.control, 0o660, reading=True, group=reading.group)
        except BaseException:
            self._shut()
            raise

    def _open(self, context: zmq.Context[zmq.Socket[bytes]], path: Path, mode: int, *, reading: bool, group: int | None = None) -> None:
        router = context.socket(zmq.ROUTER)
        router.setsockopt(zmq.LINGER, 200)
        router.setsockopt(zmq.MAXMSGSIZE, MAX_REQUEST)
        door = _Door(router, int(router.getsockopt(zmq.FD)), reading)
        self._doors.append(door)
        _bind(router, path, mode, group)
        self._loop.add_reader(door.fd, self._drain)

    def publish(self, event: bytes) -> None:
        """Send one event (JSON) to whoever listens; a subscriber that does not read loses some and sees the gap."""
        if not self._publisher.closed:
            self._publisher.send_multipart([b"event", event], zmq.NOBLOCK)

    async def close(self) -> None:
        """Let running requests end for a moment, then close. Idempotent."""
        if self._publisher.closed:
            return
        for door in self._doors:
            self._loop.remove_reader(door.fd)
        if self._again is not None:
            self._again.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=0.2)
        for task in list(self._tasks):
            task.cancel()
        self._shut()

    def _shut(self) -> None:
        for door in self._doors:
            self._loop.remove_reader(door.fd)
            door.router.close()
        self._publisher.close()

    def _drain(self) -> None:
        for door in self._doors:
            for _ in range(MAX_BATCH):
                try:
                    frames = door.router.recv_multipart(zmq.NOBLOCK)
                except zmq.ZMQError:
                    break
                self._take(door, frames)
            else:
                self._look_soon()  # the others on this loop have their turn first

    def _take(self, door: _Door, frames: list[bytes]) -> None:
        try:
            request = msgspec.json.decode(frames[-1], type=Request)
        except (msgspec.MsgspecError, RecursionError) as error:
            self._reply(door, frames[:-1], Reply(id=0, ok=False, error=f"not a request: {error}", exit_code=ExitCode.USAGE))
            return
        verb = self._verbs.get(request.verb)
        if verb is None:
            known = ", ".join(sorted(self._verbs))
            words, hint = f"no verb {request.verb[:MAX_SHOWN]!r}", f"known here: {known}"
            self._reply(door, frames[:-1], Reply(id=request.id, ok=False, error=words, hint=hint, exit_code=ExitCode.USAGE))
            return
        if door.reading and request.verb not in READING_VERBS:
            words, hint = f"{request.verb} is an order, and members of node.group may only read", "ask the user that runs the node, or root"
            self._reply(door, frames[:-1], Reply(id=request.id, ok=False, error=words, hint=hint, exit_code=ExitCode.FAILED))
            return
        try:
            answer = verb(request.args)
        except Exception as error:
            self._reply(door, frames[:-1], _refusal(request, error))
            return
        if isinstance(answer, Awaitable):
            task = self._loop.create_task(self._later(door, frames[:-1], request, answer))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        else:
            self._reply(door, frames[:-1], Reply(id=request.id, ok=True, result=answer))

    async def _later(self, door: _Door, envelope: list[bytes], request: Request, answer: Awaitable[Any]) -> None:
        try:
            reply = Reply(id=request.id, ok=True, result=await answer)
        except Exception as error:
            reply = _refusal(request, error)
        self._reply(door, envelope, reply)

    def _reply(self, door: _Door, envelope: list[bytes], reply: Reply) -> None:
        if door.router.closed:
            return
        try:
            door.router.send_multipart([*envelope, _encoded(reply)], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            log.warning("a reply was not sent: %s", error)
        self._look_soon()  # edge-triggered fd, see `beats`

    def _look_soon(self) -> None:
        if self._again is None:
            self._again = self._loop.call_soon(self._look_again)

    def _look_again(self) -> None:
        self._again = None
        if not self._publisher.closed:
            self._drain()


def _encoded(reply: Reply) -> bytes:
    """A result that cannot be written (nested beyond the stack, or no JSON) is an answer all the same."""
    try:
        return msgspec.json.encode(reply)
    except (RecursionError, TypeError, ValueError) as error:
        words = f"the answer cannot be written: {type(error).__name__}: {error}"
        return msgspec.json.encode(Reply(id=reply.id, ok=False, error=words, exit_code=ExitCode.FAILED))


def _bind(sock: zmq.Socket[bytes], path: Path, mode: int, group: int | None = None) -> None:
    """Bind at ``path``, open to nobody but us until mode and group are what they should be."""
    before = os.umask(0o177)
    try:
        sock.bind(f"ipc://{path}")
    finally:
        os.umask(before)
    if group is not None:
        try:
            os.chown(path, -1, group)
        except PermissionError:
            raise SupervisorError(*not_of_group(group)) from None
    path.chmod(mode)


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
