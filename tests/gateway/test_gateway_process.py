"""The gateway as a process: its spec, its sockets, its end."""

from __future__ import annotations

import asyncio
import logging
import queue
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import msgspec
import pytest
from gateway.harness import CHAT, events, next_event, text_of, text_to_the_end
from gateway.stub_engine import StubEngine, StubSupervisor

from shadowsup.supervisor.errors import SupervisorError
from shadowsup.supervisor.gateway.process import _DroppingHandler
from shadowsup.supervisor.gateway.retune import retune
from shadowsup.wire.engine import DrainGateway, WorkerRoute
from shadowsup.wire.gateway import GatewaySpec, Retune

STREAM = CHAT | {"stream": True}


@dataclass
class Running:
    """A gateway process with one serving engine, and the listening socket that is its parent's."""

    process: asyncio.subprocess.Process
    listener: socket.socket
    supervisor: StubSupervisor
    engine: StubEngine
    http: aiohttp.ClientSession
    command: list[str]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.listener.getsockname()[1]}/v1/chat/completions"

    def ask(self, **more: object) -> asyncio.Task[aiohttp.ClientResponse]:
        async def send() -> aiohttp.ClientResponse:
            return await self.http.post(self.url, json=CHAT | more)

        return asyncio.create_task(send())

    async def start(self) -> asyncio.subprocess.Process:
        process = await asyncio.create_subprocess_exec(*self.command, pass_fds=[self.listener.fileno()], stderr=asyncio.subprocess.PIPE)
        self.process = process
        await self.supervisor.beat(lambda beat: beat.pid == process.pid)
        row = WorkerRoute(
            worker="chat", served_name="m", kind="link", state="healthy", epoch=1, engines=(self.engine.route,), give_up_after_s=60.0
        )
        await self.supervisor.route(row)
        await self.supervisor.beat(lambda beat: bool(beat.epochs))
        return process

    async def end(self) -> tuple[int, str]:
        """Wait for the end; return status and log."""
        _, log = await asyncio.wait_for(self.process.communicate(), 20)
        assert self.process.returncode is not None
        return self.process.returncode, log.decode()


@pytest.fixture
async def running(short_folder: Path) -> AsyncIterator[Running]:
    supervisor = StubSupervisor(short_folder)
    engine = await StubEngine("chat.1", short_folder).start()
    engine.activate(1)
    spec_file = short_folder / "spec.json"
    with socket.create_server(("127.0.0.1", 0)) as listener:
        spec = GatewaySpec(
            node="test",
            runtime_dir=str(short_folder),
            listen_fds=(listener.fileno(),),
            beat_endpoint=supervisor.endpoint,
            heartbeat_s=0.02,
            retune=str(short_folder / "settings.sock"),
        )
        spec_file.write_bytes(msgspec.json.encode(spec))
        command = [sys.executable, "-m", "shadowsup.supervisor.gateway", str(spec_file)]
        async with aiohttp.ClientSession() as http:
            started = Running(None, listener, supervisor, engine, http, command)  # type: ignore[arg-type]
            await started.start()
            yield started
            if started.process.returncode is None:
                started.process.kill()
                await started.end()
        await engine.close()
        supervisor.close()


async def test_sigterm_lets_requests_finish_takes_no_new_ones_and_exits_0(running: Running) -> None:
    asked = running.ask(stream=True)
    request = await running.engine.submit()
    running.engine.accept(request)
    running.engine.say(request, "a", (1,), 1)
    stream = events(await asked)
    await next_event(stream)
    assert text_of(await next_event(stream)) == "a"
    running.process.send_signal(signal.SIGTERM)
    await running.supervisor.beat(lambda beat: not beat.ready)
    running.engine.say(request, "b", (2,), 2, "stop")
    assert await text_to_the_end(stream) == ("b", "stop")
    status, log = await running.end()
    assert status == 0
    assert "POST /v1/chat/completions 200 worker=chat tokens=2 seconds=" in log and "replays=0" in log
    assert "Traceback" not in log


async def test_what_does_not_end_within_the_grace_fails_with_a_retryable_error(running: Running) -> None:
    asked = running.ask(stream=True)
    request = await running.engine.submit()
    whole = running.ask()
    await running.engine.submit()
    running.engine.accept(request)
    running.engine.say(request, "a", (1,), 1)
    stream = events(await asked)
    await next_event(stream)
    await next_event(stream)
    await running.supervisor.send(DrainGateway(grace_s=0.05))
    assert (await next_event(stream))["error"]["retryable"] is True
    response = await whole
    assert response.status == 503 and response.headers["x-should-retry"] == "true"
    assert (await running.end())[0] == 0


async def test_a_second_signal_ends_the_grace(running: Running) -> None:
    asked = running.ask()
    await running.engine.submit()
    running.process.send_signal(signal.SIGTERM)
    await running.supervisor.beat(lambda beat: not beat.ready)
    running.process.send_signal(signal.SIGTERM)
    assert (await asked).status == 503
    assert (await running.end())[0] == 0


async def test_the_socket_outlives_the_gateway_and_new_connections_wait_for_the_next(running: Running) -> None:
    running.process.kill()
    assert (await running.end())[0] == -signal.SIGKILL
    asked = running.ask()  # nobody accepts it
    await running.start()
    request = await running.engine.submit()
    running.engine.accept(request)
    running.engine.say(request, "ok", (1,), 2, "stop")
    assert (await asked).status == 200


async def test_it_takes_another_address_limits_and_keys_while_a_stream_of_the_old_one_goes_on(running: Running, short_folder: Path) -> None:
    asked = running.ask(stream=True)
    request = await running.engine.submit()
    running.engine.accept(request)
    running.engine.say(request, "a", (1,), 1)
    stream = events(await asked)
    await next_event(stream)
    assert text_of(await next_event(stream)) == "a"
    keys = short_folder / "keys"
    keys.write_text("sesame\n")
    old_url = running.url
    running.listener.close()  # as the supervisor does with its own
    with socket.create_server(("127.0.0.1", 0)) as listener:
        settings = Retune(api_key_file=str(keys), max_inflight=1)
        await asyncio.to_thread(retune, short_folder / "settings.sock", settings, [listener], 10.0)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1/chat/completions"
    with pytest.raises(aiohttp.ClientConnectorError):
        await running.http.post(old_url.replace("127.0.0.1", "localhost"), json=CHAT)  # not over the connection that is kept open
    assert (await running.http.post(url, json=CHAT)).status == 401
    full = await running.http.post(url, json=CHAT, headers={"authorization": "Bearer sesame"})
    assert full.status == 429, "the stream from before counts"
    running.engine.say(request, "b", (2,), 2, "stop")
    assert await text_to_the_end(stream) == ("b", "stop")


async def test_an_address_that_it_cannot_serve_changes_nothing(running: Running, short_folder: Path) -> None:
    path = short_folder / "settings.sock"
    with (
        socket.create_server(("127.0.0.1", 0)) as good,
        socket.socket(type=socket.SOCK_DGRAM) as bad,
        pytest.raises(SupervisorError, match="cannot take other settings"),
    ):
        await asyncio.to_thread(retune, path, Retune(max_inflight=1), [good, bad], 10.0)
    asked = running.ask()
    request = await running.engine.submit()
    running.engine.accept(request)
    running.engine.say(request, "ok", (1,), 2, "stop")
    assert (await asked).status == 200


async def test_idle_connections_are_closed_by_a_drain(running: Running) -> None:
    reader, writer = await asyncio.open_connection(*running.listener.getsockname())
    writer.write(b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n")
    assert b"200 OK" in await reader.readuntil(b"ok\n")
    running.process.send_signal(signal.SIGTERM)
    assert await asyncio.wait_for(reader.read(), 10) == b""
    writer.close()
    assert (await running.end())[0] == 0


async def test_a_supervisor_that_comes_back_is_beaten_to_again(running: Running) -> None:
    running.supervisor.close()
    running.supervisor = StubSupervisor(Path(running.engine.path).parent)
    try:
        beat = await running.supervisor.beat()
        assert beat.routes_version == 1 and beat.epochs == {"chat": 1}
        asked = running.ask()
        request = await running.engine.submit()
        running.engine.accept(request)
        running.engine.say(request, "ok", (1,), 2, "stop")
        assert (await asked).status == 200
        running.process.send_signal(signal.SIGTERM)
        assert (await running.end())[0] == 0
    finally:
        running.supervisor.close()


@pytest.mark.parametrize("arguments", [[], ["/nonexistent.json"], ["a", "b"]])
def test_without_a_usable_spec_it_says_so_and_exits_2(arguments: list[str]) -> None:
    run = subprocess.run([sys.executable, "-m", "shadowsup.supervisor.gateway", *arguments], capture_output=True, text=True, check=False)
    assert run.returncode == 2 and run.stderr.count("\n") == 1 and "Traceback" not in run.stderr


def test_nothing_heavy_is_imported() -> None:
    heavy = {"torch", "transformers", "numpy", "pydantic", "textual", "psutil"}
    code = f"import sys, shadowsup.supervisor.gateway.process; sys.exit(str({heavy} & sys.modules.keys() or 0))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.stderr.strip() == "0"


def test_log_lines_beyond_the_bound_are_dropped_and_counted() -> None:
    lines: queue.Queue[logging.LogRecord] = queue.Queue(2)
    handler = _DroppingHandler(lines)

    def write(number: int) -> None:
        handler.handle(logging.makeLogRecord({"msg": "line %d", "args": (number,)}))

    for number in range(5):
        write(number)
    assert [lines.get_nowait().getMessage() for _ in range(2)] == ["line 0", "line 1"]
    write(5)
    assert lines.get_nowait().getMessage() == "(3 log lines were dropped before this one) line 5"
