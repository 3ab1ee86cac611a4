"""Readiness of engines that speak no protocol of ours."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from shadowsup.supervisor.errors import SupervisorError
from shadowsup.supervisor.ready import ExecProbe, HttpProbe, LogProbe, NotifySocket, wait_ready

ENV = {"PATH": os.environ["PATH"]}


class FakeClock:
    """Time passes when someone sleeps, at once."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s

    async def sleep(self, delay_s: float) -> None:
        await asyncio.sleep(0)
        self.now_s += delay_s


class ShortSleeps(FakeClock):
    """Only the pauses between checks pass; a deadline is never reached by waiting for it."""

    async def sleep(self, delay_s: float) -> None:
        if delay_s > 1.0:
            await asyncio.Event().wait()
        await super().sleep(delay_s)


class Server:
    """Answers each connection with the next line, then closes."""

    def __init__(self, *answers: bytes) -> None:
        self.answers = list(answers)
        self.requests: list[bytes] = []
        self.port = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.requests.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(self.answers.pop(0))
        writer.close()


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    server = Server()
    listener = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    server.port = listener.sockets[0].getsockname()[1]
    yield server
    listener.close()
    await listener.wait_closed()


async def test_http_is_ready_with_the_first_good_status(server: Server) -> None:
    server.answers = [b"HTTP/1.1 503 Loading\r\n\r\n", b"nonsense\r\n", b"", b"HTTP/1.1 204 No Content\r\n\r\n"]
    probe = HttpProbe(f"http://127.0.0.1:{server.port}/health?deep=1")
    details = []
    for expected in (False, False, False, True):
        assert await probe.check() is expected
        details.append(probe.detail.rpartition("?deep=1")[2])
    assert details == [" answered 503", " did not answer in HTTP", " did not answer in HTTP", " answered 204"]
    assert server.requests[0].startswith(b"GET /health?deep=1 HTTP/1.0\r\nHost: 127.0.0.1:")


async def test_http_refused_or_silent_is_not_ready() -> None:
    with socket.socket() as taken:  # and nobody listens there
        taken.bind(("127.0.0.1", 0))
        probe = HttpProbe(f"http://127.0.0.1:{taken.getsockname()[1]}")
        assert not await probe.check()
        assert "refused" in probe.detail
    with socket.create_server(("127.0.0.1", 0)) as silent:
        probe = HttpProbe(f"http://127.0.0.1:{silent.getsockname()[1]}/", timeout_s=0.02)
        assert not await probe.check()
        assert "no answer within 0.02 s" in probe.detail
    for wrong in ("https://127.0.0.1/", "/health", "http://127.0.0.1:99999/"):
        with pytest.raises(SupervisorError):
            HttpProbe(wrong)


async def test_readiness_is_polled_at_the_interval_until_the_deadline(server: Server) -> None:
    server.answers = [b"HTTP/1.1 503 x\r\n\r\n"] * 5 + [b"HTTP/1.1 200 x\r\n\r\n"]
    clock = ShortSleeps()
    await wait_ready(HttpProbe(f"http://127.0.0.1:{server.port}/"), interval_s=0.5, timeout_s=60, clock=clock)
    assert clock.now_s == 102.5
    assert len(server.requests) == 6


async def test_deadline_says_what_was_seen_last(tmp_path: Path) -> None:
    flag = tmp_path / "ready"
    probe = ExecProbe(["sh", "-c", f"test -e {flag} || {{ echo starting; echo still loading >&2; exit 3; }}"], env=ENV)
    with pytest.raises(SupervisorError, match="not ready after 30 s: sh exited with 3: still loading"):
        await wait_ready(probe, interval_s=10.0, timeout_s=30.0, clock=Stepping(10.0))
    flag.touch()
    await wait_ready(probe, timeout_s=30.0)


class Stepping(FakeClock):
    """The pauses of ``step_s`` pass at once, the wait for the deadline does not."""

    def __init__(self, step_s: float) -> None:
        super().__init__()
        self.step_s = step_s
        self.waits = 0

    async def sleep(self, delay_s: float) -> None:
        # Each turn of the loop sleeps twice: for the deadline beside the check, then for the interval.
        self.waits += 1
        if self.waits % 2:
            await asyncio.Event().wait()
        self.now_s += delay_s


async def test_probe_command_that_hangs_is_killed_with_its_group() -> None:
    probe = ExecProbe(["sh", "-c", "sleep 60 & sleep 60"], env=ENV, timeout_s=0.05)
    assert not await probe.check()
    assert probe.detail == "sh took longer than 0.05 s"


async def test_probe_command_that_does_not_exist_is_an_error_at_once() -> None:
    with pytest.raises(SupervisorError, match="cannot start the readiness probe: there is no program"):
        await wait_ready(ExecProbe(["no-such-program-here"], env=ENV), timeout_s=30)


async def test_flood_of_a_probe_command_is_not_kept() -> None:
    probe = ExecProbe(["sh", "-c", "head -c 3000000 /dev/zero | tr '\\0' x"], env=ENV)
    assert await probe.check()
    assert len(probe.detail) < 600


async def test_line_of_output_makes_ready_and_its_absence_an_error() -> None:
    async def matched() -> str:
        return "running on :80"

    async def ended() -> str:
        raise SupervisorError("chat.1 has ended without a line that matches 'x'")

    async def never() -> str:
        await asyncio.Event().wait()
        return ""

    probe = LogProbe(matched())
    await wait_ready(probe, timeout_s=30)
    assert probe.detail == "it printed 'running on :80'"
    with pytest.raises(SupervisorError, match="has ended without"):
        await wait_ready(LogProbe(ended()), timeout_s=30)
    probe = LogProbe(never())
    with pytest.raises(SupervisorError, match="not ready after 30 s: the line was not printed yet"):
        await wait_ready(probe, timeout_s=30, clock=FakeClock())
    await probe.close()
    await probe.close()


def notify(path: str, text: str) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.sendto(text.encode(), path)


async def test_notify_socket_follows_the_protocol(tmp_path: Path) -> None:
    said: asyncio.Queue[str] = asyncio.Queue()
    sock = NotifySocket(tmp_path / "n.sock", said.put_nowait)
    assert sock.path.stat().st_mode & 0o777 == 0o600
    notify(str(sock.path), "STATUS=loading 41%\nWATCHDOG=1\nnonsense\nREADY=0")
    assert await said.get() == "loading 41%"
    assert sock.detail == "it says: loading 41%"
    with pytest.raises(SupervisorError, match="not ready after 1 s: it says: loading 41%"):
        await wait_ready(sock, timeout_s=1.0, clock=FakeClock())
    code = "import os, socket; socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM).sendto(b'READY=1', os.environ['NOTIFY_SOCKET'])"
    await asyncio.to_thread(subprocess.run, [sys.executable, "-c", code], env={"NOTIFY_SOCKET": str(sock.path)}, check=True)
    await wait_ready(sock, timeout_s=30.0)
    notify(str(sock.path), "STOPPING=1\nSTATUS=bye")
    assert await said.get() == "bye"
    assert sock.detail == "it said STOPPING=1"
    sock.close()
    sock.close()
    assert not sock.path.exists()


async def test_notify_socket_replaces_a_stale_one_and_refuses_a_path_too_long(tmp_path: Path) -> None:
    (tmp_path / "n.sock").touch()
    NotifySocket(tmp_path / "n.sock").close()
    with pytest.raises(SupervisorError, match="shorter runtime directory"):
        NotifySocket(tmp_path / ("n" * 200))
