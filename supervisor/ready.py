"""When is a ``command`` engine ready? By HTTP, by a command, by a line it prints, or when it says so itself (sd_notify)."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit

from shadowsup.supervisor.errors import SupervisorError
from shadowsup.supervisor.process import Child, SpawnPlan

OUTPUT_KEPT = 500
"""Bytes of a probe command's output that its detail may quote."""


class Clock(Protocol):
    """Time, injected so that tests of timeouts are exact and instant."""

    def monotonic(self) -> float: ...

    async def sleep(self, delay_s: float) -> None: ...


class LoopClock:
    """The running loop's own time."""

    def monotonic(self) -> float:
        return asyncio.get_running_loop().time()

    async def sleep(self, delay_s: float) -> None:
        await asyncio.sleep(delay_s)


class Probe(Protocol):
    """One way to know. ``detail`` says, for people, what the last check saw."""

    detail: str

    async def check(self) -> bool:
        """Look once and return whether it is ready. Probes that are told wait here until they are. May be cancelled at any time."""


class HttpProbe:
    """``GET`` of an ``http://`` URL: a status of 2xx or 3xx is ready.

    Raises:
        SupervisorError: not such a URL.
    """

    def __init__(self, url: str, *, timeout_s: float = 2.0) -> None:
        parts = urlsplit(url)
        try:
            port = parts.port or 80
        except ValueError as error:
            raise SupervisorError(f"{url} has no usable port: {error}") from error
        if parts.scheme != "http" or not parts.hostname:
            raise SupervisorError(f"{url} cannot be probed", "give an http:// URL of this machine")
        self.detail = "not asked yet"
        self._url = url
        self._address = (parts.hostname, port)
        target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        # HTTP/1.0: no chunks, and the server closes; some servers want a Host all the same.
        self._request = f"GET {target} HTTP/1.0\r\nHost: {parts.netloc}\r\nUser-Agent: shadowsup\r\nConnection: close\r\n\r\n".encode()
        self._timeout_s = timeout_s

    async def check(self) -> bool:
        try:
            async with asyncio.timeout(self._timeout_s):
                answer = await self._first_line()
        except TimeoutError:
            self.detail = f"{self._url} gave no answer within {self._timeout_s:g} s"
            return False
        except OSError as error:
            self.detail = f"{self._url}: {os.strerror(error.errno) if error.errno else error}"
            return False
        words = answer.split(maxsplit=2)
        if len(words) < 2 or not words[0].startswith(b"HTTP/") or not words[1].isdigit():
            self.detail = f"{self._url} did not answer in HTTP"
            return False
        status = int(words[1])
        self.detail = f"{self._url} answered {status}"
        return 200 <= status < 400

    async def _first_line(self) -> bytes:
        reader, writer = await asyncio.open_connection(*self._address, limit=8192)
        try:
            writer.write(self._request)
            return await reader.readline()
        except ValueError:  # a line beyond the limit
            return b""
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()


class ExecProbe:
    """A command: exit status 0 is ready. It is killed with its group after ``timeout_s``."""

    def __init__(self, argv: Sequence[str], *, env: Mapping[str, str], cwd: Path | None = None, timeout_s: float = 10.0) -> None:
        self.detail = "not run yet"
        self._argv, self._env, self._cwd, self._timeout_s = argv, env, cwd, timeout_s

    async def check(self) -> bool:
        """Raises SupervisorError when the command cannot be started."""
        read, write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        # The flag is the pipe end's, so the command's own end has to block as it would anywhere.
        os.set_blocking(write, True)
        try:
            plan = SpawnPlan(what="the readiness probe", argv=self._argv, env=self._env, cwd=self._cwd, stdout=write, stderr=write)
            child = Child.spawn(plan)
        except BaseException:
            os.close(read)
            raise
        finally:
            os.close(write)
        output = bytearray()

        def readable() -> None:
            with contextlib.suppress(BlockingIOError):
                if not (chunk := os.read(read, 65536)):
                    loop.remove_reader(read)
                output.extend(chunk)
                del output[:-OUTPUT_KEPT]

        loop = asyncio.get_running_loop()
        loop.add_reader(read, readable)
        try:
            async with asyncio.timeout(self._timeout_s):
                code = await child.wait()
            readable()
            last = output.decode(errors="replace").strip().rpartition("\n")[2]
            self.detail = f"{self._argv[0]} exited with {code}" + (f": {last}" if last else "")
            return code == 0
        except TimeoutError:
            self.detail = f"{self._argv[0]} took longer than {self._timeout_s:g} s"
            return False
        finally:
            if child.alive:
                child.signal_group(signal.SIGKILL)
                await asyncio.shield(child.wait())
            child.close()
            loop.remove_reader(read)
            os.close(read)


class LogProbe:
    """A line of output, as `ScribeClient.watch` finds it. ``matched`` is awaited at most once."""

    def __init__(self, matched: Awaitable[str]) -> None:
        self.detail = "the line was not printed yet"
        self._matched = asyncio.ensure_future(matched)

    async def check(self) -> bool:
        """Wait for the line.

        Raises:
            SupervisorError: the output has ended without it.
        """
        line = await asyncio.shield(self._matched)
        self.detail = f"it printed {line!r}"
        return True

    async def close(self) -> None:
        """Stop waiting. Idempotent."""
        self._matched.cancel()
        await asyncio.gather(self._matched, return_exceptions=True)


class NotifySocket:
    """The receiving end of sd_notify(3). Make it before the process, whose ``NOTIFY_SOCKET`` is ``str(path)``; `close` it.

    Args:
        path: of the socket, in a folder that only we can reach.
        on_status: called with each ``STATUS=`` text.

    Raises:
        SupervisorError: no socket can be made there.
    """

    def __init__(self, path: Path, on_status: Callable[[str], None] | None = None) -> None:
        self.detail = "it has not said READY=1 yet"
        self._path = path
        self._on_status = on_status
        self._ready = asyncio.Event()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        try:
            path.unlink(missing_ok=True)
            self._socket.bind(str(path))
            path.chmod(0o600)
        except OSError as error:
            self._socket.close()
            raise SupervisorError(
                f"cannot make the notify socket {path}: {error.strerror or error}", "use a shorter runtime directory"
            ) from error
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._socket.fileno(), self._readable)

    @property
    def path(self) -> Path:
        return self._path

    async def check(self) -> bool:
        """Wait until it says READY=1."""
        await self._ready.wait()
        return True

    def close(self) -> None:
        """Remove the socket. Idempotent."""
        if self._socket.fileno() >= 0:
            self._loop.remove_reader(self._socket.fileno())
            self._socket.close()
            self._path.unlink(missing_ok=True)

    def _readable(self) -> None:
        while True:
            try:
                # Fds that come along (FDSTORE, BARRIER) are closed by the kernel, which is what a sender of BARRIER waits for.
                message = self._socket.recv(65536)
            except BlockingIOError:
                return
            for line in message.decode(errors="replace").splitlines():
                self._told(*line.partition("=")[::2])

    def _told(self, name: str, value: str) -> None:
        match name, value:
            case "READY", "1":
                self.detail = "it said READY=1"
                self._ready.set()
            case "STOPPING", "1":
                self.detail = "it said STOPPING=1"
            case "STATUS", _:
                if not self._ready.is_set():
                    self.detail = f"it says: {value}"
                if self._on_status is not None:
                    self._on_status(value)
            case _:  # WATCHDOG, MAINPID and what may come: not ours to follow
                pass


async def wait_ready(probe: Probe, *, interval_s: float = 0.5, timeout_s: float, clock: Clock | None = None) -> None:
    """Check until ready, ``interval_s`` after each answer.

    Raises:
        SupervisorError: not ready within ``timeout_s``, with the probe's last detail; or what the probe itself raises.
    """
    clock = clock or LoopClock()
    deadline_s = clock.monotonic() + timeout_s
    while (left_s := deadline_s - clock.monotonic()) > 0:
        if await _within(probe, left_s, clock):
            return
        await clock.sleep(min(interval_s, max(deadline_s - clock.monotonic(), 0.0)))
    raise SupervisorError(f"not ready after {timeout_s:g} s: {probe.detail}", "is the readiness condition right? see the engine's output")


async def _within(probe: Probe, left_s: float, clock: Clock) -> bool:
    """One check, given up at the deadline."""
    check = asyncio.ensure_future(probe.check())
    timer = asyncio.ensure_future(clock.sleep(left_s))
    try:
        await asyncio.wait({check, timer}, return_when=asyncio.FIRST_COMPLETED)
        return check.done() and check.result()
    finally:
        for task in (check, timer):
            task.cancel()
        await asyncio.gather(check, timer, return_exceptions=True)
