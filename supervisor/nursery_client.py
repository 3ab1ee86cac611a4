"""The supervisor's side of a nursery (protocol: `shadowsup.wire.nursery`)."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shadowsup.memkeeper.channel import OwnedFd
from shadowsup.supervisor import identity as ids
from shadowsup.supervisor.errors import SupervisorError
from shadowsup.supervisor.identity import Identity
from shadowsup.supervisor.peer import Peer, dial
from shadowsup.supervisor.process import KILL_TIMEOUT_S, Child, send_signal
from shadowsup.wire import nursery as wire
from shadowsup.wire.engine import EngineSpec


@dataclass(frozen=True, kw_only=True)
class Forked:
    """A new engine process. ``pidfd`` is the caller's (`Child.adopt` takes it). ``fork_s``: seconds of the fork itself."""

    identity: Identity
    pidfd: int
    fork_s: float


class Spare:
    """A fork of the nursery that waits to take its place (`NurseryClient.clone`). It exits by itself when this is closed or we die."""

    def __init__(self, forked: Forked, line: socket.socket, what: str) -> None:
        self.child = Child.adopt(forked.identity, what=what, pidfd=forked.pidfd)
        self._line = line

    def take_over(self, ready_fd: int) -> Child | None:
        """Make it serve; it writes to ``ready_fd`` when it does. The child is the caller's from now on; None: the spare is dead.

        Only once the nursery before it is gone: both serve at one path.
        """
        child, line = self.child, self._line
        try:
            if child.alive:
                socket.send_fds(line, [b"g"], [ready_fd])
                return child
        except OSError:
            pass
        finally:
            line.close()
        child.close()
        return None

    def close(self) -> None:
        """Let it end."""
        self._line.close()
        self.child.close()

    async def end(self) -> None:
        """End it, and return when it is gone. It serves nobody and holds nothing, so nothing need be cleaned up."""
        self.child.signal(signal.SIGKILL)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(KILL_TIMEOUT_S):
                await self.child.wait()
        self.close()


class NurseryClient:
    """Needs a running loop. One connection; it does not come back by itself: a nursery that is gone is replaced."""

    def __init__(self, socket_path: Path) -> None:
        self._path = socket_path
        self.on_exited: Callable[[str, int, int], None] | None = None
        """Called with (engine, pid, returncode as `subprocess` has it). Set it before `connect`: what ended meanwhile comes first."""
        self.on_lost: Callable[[str], None] | None = None
        """Called with the reason when the connection ends. Its engines live on."""
        self.ready: wire.Ready | None = None
        """What the nursery said of itself; None without a connection."""
        self._peer: Peer | None = None
        self._numbers = itertools.count(1)
        self._forks: dict[int, asyncio.Future[Forked]] = {}
        self._greeting: asyncio.Future[None] | None = None

    async def connect(self, timeout_s: float = 60.0) -> wire.Ready:
        """Dial and wait for its greeting, which comes when its imports are done. Returns it; `Ready.children` are there to adopt.

        Raises:
            SupervisorError: nobody answers in time.
        """
        self.close()
        loop = asyncio.get_running_loop()
        started_s = loop.time()
        sock = await dial(self._path, "the nursery", timeout_s)
        greeting = self._greeting = loop.create_future()
        self._peer = Peer(sock, self._frame, self._lost)
        try:
            async with asyncio.timeout_at(started_s + timeout_s):
                await greeting
        except TimeoutError as error:
            self.close()
            raise SupervisorError(f"the nursery at {self._path} said nothing within {timeout_s:g} s") from error
        except BaseException:
            self.close()
            raise
        assert self.ready is not None
        return self.ready

    async def fork(
        self, spec: EngineSpec, *, env: Mapping[str, str], stdout: int, stderr: int, lifeline: int, timeout_s: float = 10.0
    ) -> Forked:
        """Fork an engine. The fds stay the caller's. An engine that comes after all, when nobody waits any more, is killed.

        Raises:
            SupervisorError: refused (with the nursery's words), lost, or no answer in time: spawn it cold then.
        """

        def request(number: int) -> wire.ToNursery:
            return wire.Fork(number=number, spec=spec, env=dict(env))

        return await self._ask(request, spec.engine, (lifeline, stdout, stderr), timeout_s)

    async def clone(self, *, stdout: int, stderr: int, what: str, timeout_s: float = 10.0) -> Spare:
        """Fork a spare of the nursery. The fds stay the caller's.

        Raises:
            SupervisorError: refused, lost, or no answer in time.
        """
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                forked = await self._ask(lambda number: wire.Clone(number=number), "a spare", (theirs.fileno(), stdout, stderr), timeout_s)
            return Spare(forked, ours, what)
        except BaseException:
            ours.close()
            raise

    async def _ask(self, request: Callable[[int], wire.ToNursery], who: str, fds: tuple[int, int, int], timeout_s: float) -> Forked:
        if self._peer is None:
            raise SupervisorError(f"there is no nursery to fork {who}")
        number = next(self._numbers)
        answer: asyncio.Future[Forked] = asyncio.get_running_loop().create_future()
        self._forks[number] = answer
        self._peer.send(wire.encode(request(number)), [OwnedFd(os.dup(fd)) for fd in fds])
        taken = False
        try:
            async with asyncio.timeout(timeout_s):
                forked = await answer
            taken = True
            return forked
        except TimeoutError as error:
            raise SupervisorError(f"the nursery did not fork {who} within {timeout_s:g} s") from error
        finally:
            del self._forks[number]
            # Cancelled at the very moment when the answer came.
            if not taken and answer.done() and not answer.cancelled() and answer.exception() is None:
                _discard(answer.result())

    def quit(self) -> None:
        """Ask the nursery to exit; its engines live on."""
        if self._peer is not None:
            self._peer.send(wire.encode(wire.Quit()))

    def close(self) -> None:
        """Drop the connection; the nursery and its engines live on. Idempotent."""
        self._drop("closed")

    def _frame(self, payload: bytes) -> None:
        match message := wire.decode_answer(payload):
            case wire.Ready():
                self.ready = message
                if self._greeting is not None and not self._greeting.done():
                    self._greeting.set_result(None)
            case wire.Forked():
                self._forked(message)
            case wire.ForkRefused():
                answer = self._forks.get(message.number)
                if answer is not None and not answer.done():
                    answer.set_exception(SupervisorError(message.message, message.hint))
            case wire.Exited():
                if self.on_exited is not None:
                    self.on_exited(message.engine, message.pid, message.status)

    def _forked(self, message: wire.Forked) -> None:
        assert self._peer is not None
        (pidfd,) = self._peer.take_fds(1)
        identity = Identity(pid=message.pid, start_time=message.start_time, boot_id=ids.boot_id())
        forked = Forked(identity=identity, pidfd=pidfd, fork_s=message.fork_s)
        answer = self._forks.get(message.number)
        if answer is None or answer.done():
            _discard(forked)
        else:
            answer.set_result(forked)

    def _lost(self, reason: str) -> None:
        self._drop(reason)
        if self.on_lost is not None:
            self.on_lost(reason)

    def _drop(self, reason: str) -> None:
        self.ready = None
        if self._peer is not None:
            self._peer.close()
            self._peer = None
        error = SupervisorError(f"the nursery at {self._path} is gone: {reason}")
        waiting: list[asyncio.Future[Any]] = [*self._forks.values()]
        if self._greeting is not None:
            waiting.append(self._greeting)
        for future in waiting:
            if not future.done():
                future.set_exception(error)
                future.exception()  # whoever waits gets it; whoever stopped waiting is not missed
        self._greeting = None


def _discard(forked: Forked) -> None:
    """End an engine that nobody waits for: left alone it would be supervised by no one."""
    send_signal(forked.pidfd, signal.SIGKILL, "an engine forked too late")
    os.close(forked.pidfd)
