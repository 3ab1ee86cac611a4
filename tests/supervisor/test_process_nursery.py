"""Asking a nursery for engines: one that answers as it should, and ones that do not."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from shadowsup.memkeeper.channel import Channel, ChannelClosed, OwnedFd
from shadowsup.supervisor import identity as ids
from shadowsup.supervisor.errors import SupervisorError
from shadowsup.supervisor.nursery_client import NurseryClient
from shadowsup.supervisor.process import Child, Lifeline
from shadowsup.wire import nursery as wire
from shadowsup.wire.engine import EngineSpec, KvSpec


def spec(seq: int = 1) -> EngineSpec:
    return EngineSpec(
        node="demo",
        worker="chat",
        engine=f"chat.{seq}",
        seq=seq,
        kind="transformers",
        model="m",
        served_name="m",
        kv=KvSpec(size=1 << 20),
        runtime_dir="/r",
        keeper_socket="/r/keeper.sock",
        beat_endpoint="ipc:///r/beat.sock",
        link_socket="/r/link.sock",
    )


class Nursery:
    """A server of the protocol whose engines are `sleep`, holding the fds they were given."""

    def __init__(self, path: Path) -> None:
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(str(path))
        self.listener.listen()
        self.listener.setblocking(False)
        self.channel: Channel | None = None
        self.engines: list[subprocess.Popen[bytes]] = []
        self.answer: Callable[[wire.Fork, list[int]], None] = self.fork
        self.asked = asyncio.Event()
        self.greet = True
        asyncio.get_running_loop().add_reader(self.listener, self._accept)

    def _accept(self) -> None:
        sock, _ = self.listener.accept()
        self.hang_up()
        self.channel = Channel(sock)
        asyncio.get_running_loop().add_reader(sock, self._serve)
        if self.greet:
            self.send(wire.Ready(pid=1, preload="x", import_s=0.5, threads=1, max_threads=4))

    def _serve(self) -> None:
        assert self.channel is not None
        try:
            payloads = self.channel.receive()
        except ChannelClosed:
            self.hang_up()
            return
        for payload in payloads:
            request = wire.decode_request(payload)
            if isinstance(request, wire.Quit):
                self.hang_up()
                return
            self.answer(request, self.channel.take_fds(wire.FORK_FDS))
            self.asked.set()

    def send(self, message: wire.FromNursery, fds: tuple[int, ...] = ()) -> None:
        assert self.channel is not None
        self.channel.send(wire.encode(message), [OwnedFd(fd) for fd in fds])

    def spawn(self, request: wire.Fork, fds: list[int]) -> wire.Forked:
        lifeline, stdout, stderr = fds
        argv = ["sh", "-c", 'echo "$NAME"; echo err >&2; exec sleep 60']
        engine = subprocess.Popen(argv, env=request.env, stdout=stdout, stderr=stderr, pass_fds=[lifeline], start_new_session=True)
        for fd in fds:
            os.close(fd)
        self.engines.append(engine)
        identity = ids.of(engine.pid)
        assert identity is not None
        return wire.Forked(number=request.number, engine=request.spec.engine, pid=engine.pid, start_time=identity.start_time, fork_s=0.007)

    def fork(self, request: wire.Fork, fds: list[int]) -> None:
        forked = self.spawn(request, fds)
        self.send(forked, (os.pidfd_open(forked.pid),))

    def reap(self) -> None:
        """Wait for the newest engine and tell how it ended."""
        self.send(wire.Exited(engine="chat.1", pid=self.engines[-1].pid, status=self.engines[-1].wait()))

    def hang_up(self) -> None:
        if self.channel is not None:
            asyncio.get_running_loop().remove_reader(self.channel.fileno())
            self.channel.close()
            self.channel = None

    def close(self) -> None:
        self.hang_up()
        asyncio.get_running_loop().remove_reader(self.listener)
        self.listener.close()
        for engine in self.engines:
            engine.kill()
            engine.wait()


@pytest.fixture
async def nursery(tmp_path: Path) -> AsyncIterator[Nursery]:
    nursery = Nursery(tmp_path / "nursery.sock")
    yield nursery
    nursery.close()


@pytest.fixture
async def client(nursery: Nursery, tmp_path: Path) -> AsyncIterator[NurseryClient]:
    client = NurseryClient(tmp_path / "nursery.sock")
    yield client
    client.close()


async def test_engine_is_forked_with_its_fds_and_its_end_is_told(nursery: Nursery, client: NurseryClient) -> None:
    assert (await client.connect()).import_s == 0.5
    read, write = os.pipe()
    lifeline = Lifeline()
    forked = await client.fork(
        spec(), env={"NAME": "engine", "PATH": os.environ["PATH"]}, stdout=write, stderr=write, lifeline=lifeline.theirs
    )
    os.close(write)
    assert ids.alive(forked.identity)
    child = Child.adopt(forked.identity, what="engine", pidfd=forked.pidfd, lifeline=lifeline)
    client.on_exited = lambda engine, pid, status: child.exited(status)
    assert (await asyncio.to_thread(os.read, read, 100)).startswith(b"engine\n")
    os.close(read)
    told: asyncio.Queue[int] = asyncio.Queue()
    child.on_status = told.put_nowait
    child.signal(signal.SIGKILL)
    await child.lost()
    nursery.engines[-1].wait()
    await child.wait()
    nursery.reap()
    if child.returncode is None:
        assert await told.get() == -9
    assert child.returncode == -9
    child.close()


async def test_refusal_passes_the_words_on(nursery: Nursery, client: NurseryClient) -> None:
    def refuse(request: wire.Fork, fds: list[int]) -> None:
        for fd in fds:
            os.close(fd)
        nursery.send(wire.ForkRefused(number=request.number, engine="chat.1", message="it has 7 threads", hint="spawn cold"))

    nursery.answer = refuse
    await client.connect()
    with pytest.raises(SupervisorError, match=r"it has 7 threads \(spawn cold\)"):
        await client.fork(spec(), env={}, stdout=2, stderr=2, lifeline=2)


async def test_engine_that_comes_too_late_is_killed(nursery: Nursery, client: NurseryClient) -> None:
    late: list[wire.Forked] = []
    nursery.answer = lambda request, fds: late.append(nursery.spawn(request, fds))
    await client.connect()
    env = {"PATH": os.environ["PATH"]}
    with pytest.raises(SupervisorError, match=r"did not fork chat\.1 within 0\.05 s"):
        await client.fork(spec(), env=env, stdout=2, stderr=2, lifeline=2, timeout_s=0.05)
    await nursery.asked.wait()
    nursery.send(late[0], (os.pidfd_open(late[0].pid),))
    assert await asyncio.to_thread(nursery.engines[-1].wait) == -9


async def test_nursery_that_dies_fails_what_waits_and_says_so(nursery: Nursery, client: NurseryClient) -> None:
    lost: asyncio.Queue[str] = asyncio.Queue()

    def die(request: wire.Fork, fds: list[int]) -> None:
        for fd in fds:
            os.close(fd)
        asyncio.get_running_loop().call_soon(nursery.hang_up)

    nursery.answer = die
    client.on_lost = lost.put_nowait
    await client.connect()
    with pytest.raises(SupervisorError, match="is gone: the peer closed the connection"):
        await client.fork(spec(), env={}, stdout=2, stderr=2, lifeline=2)
    assert "closed" in await lost.get()
    assert client.ready is None
    with pytest.raises(SupervisorError, match="there is no nursery"):
        await client.fork(spec(), env={}, stdout=2, stderr=2, lifeline=2)
    nursery.answer = nursery.fork
    await client.connect()
    client.quit()
    await lost.get()


async def test_silent_nursery_is_given_up(nursery: Nursery, client: NurseryClient) -> None:
    nursery.greet = False
    with pytest.raises(SupervisorError, match=r"said nothing within 0\.05 s"):
        await client.connect(timeout_s=0.05)


async def test_nonsense_is_a_lost_nursery(nursery: Nursery, client: NurseryClient) -> None:
    lost: asyncio.Queue[str] = asyncio.Queue()
    client.on_lost = lost.put_nowait
    await client.connect()
    assert nursery.channel is not None
    nursery.channel.send(b"nonsense")
    assert await lost.get()
    await client.connect()
    nursery.send(wire.Forked(number=1, engine="chat.1", pid=1, start_time=1, fork_s=0.0))
    assert "named 1 fds" in await lost.get()
