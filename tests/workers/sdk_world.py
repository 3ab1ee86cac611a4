"""What an engine process lives among: a keeper, a supervisor's ROUTER and a gateway, as plain and synchronous as can be."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import zmq

from shadowsup.memkeeper.client import KeeperClient
from shadowsup.wire import engine as wire
from shadowsup.wire import framing, link
from shadowsup.wire.engine import Beat, EngineSpec, EngineState, KvSpec, Order, Promote, Promoted, Report
from shadowsup.wire.link import Accepted, Hello, Rejected, Replay, Sampling, Submit, Token

TESTS = Path(__file__).resolve().parent.parent
PATIENCE_S = 30.0


def environment() -> dict[str, str]:
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [str(TESTS), os.environ.get("PYTHONPATH", "")])),
        "OMP_NUM_THREADS": "1",
    }


class Keeper:
    """A memkeeper process."""

    def __init__(self, path: str, backend: str = "host") -> None:
        self.path = path
        ready, theirs = os.pipe()
        command = [sys.executable, "-m", "shadowsup.memkeeper", "--socket", path, "--backend", backend, "--ready-fd", str(theirs)]
        self.process = subprocess.Popen(command, pass_fds=[theirs], env=environment())
        os.close(theirs)
        try:
            assert os.read(ready, 1) == b"1", "the keeper did not come up"
        finally:
            os.close(ready)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@dataclass(eq=False)
class Engine:
    spec: EngineSpec
    process: subprocess.Popen[bytes]
    lifeline: socket.socket

    @property
    def id(self) -> str:
        return self.spec.engine

    def kill(self, number: int = signal.SIGKILL) -> None:
        self.process.send_signal(number)

    def wait(self) -> int:
        return self.process.wait(PATIENCE_S)


class Supervisor:
    """The ROUTER side. `expect` takes messages as they come and remembers every engine's newest beat."""

    def __init__(self, path: str) -> None:
        self.endpoint = f"ipc://{path}"
        self.beats: dict[str, Beat] = {}
        self.reports: list[Report] = []
        self._context = zmq.Context()
        self._router: zmq.Socket[bytes] | None = None
        self.open()

    def open(self) -> None:
        self._router = self._context.socket(zmq.ROUTER)
        self._router.setsockopt(zmq.LINGER, 0)
        self._router.bind(self.endpoint)

    def close_socket(self) -> None:
        assert self._router is not None
        self._router.close()
        self._router = None
        self.beats.clear()

    def close(self) -> None:
        if self._router is not None:
            self.close_socket()
        self._context.term()

    def order(self, engine: Engine | str, order: Order) -> None:
        assert self._router is not None
        name = engine if isinstance(engine, str) else engine.id
        self._router.send_multipart([name.encode(), wire.encode(order)])

    def receive(self, timeout_s: float) -> tuple[str, Report] | None:
        assert self._router is not None
        if not self._router.poll(max(1, int(timeout_s * 1000))):
            return None
        name, data = self._router.recv_multipart()
        report = wire.decode_report(data)
        if isinstance(report, Beat):
            self.beats[report.engine] = report
        self.reports.append(report)
        return name.decode(), report

    def expect(self, wanted: Callable[[Report], Any], timeout_s: float = PATIENCE_S) -> Any:
        """Return the first report from now on for which ``wanted`` is true."""
        deadline = time.monotonic() + timeout_s
        while (left := deadline - time.monotonic()) > 0:
            got = self.receive(left)
            if got is not None and wanted(got[1]):
                return got[1]
        raise AssertionError(f"not reported in {timeout_s} s; last: {self.reports[-5:]}")

    def state(self, engine: Engine, state: EngineState) -> Beat:
        known = self.beats.get(engine.id)
        if known is not None and known.state is state:
            return known
        beat: Beat = self.expect(lambda report: isinstance(report, Beat) and report.engine == engine.id and report.state is state)
        return beat

    def promote(self, engine: Engine | str, epoch: int, **options: bool) -> Promoted:
        name = engine if isinstance(engine, str) else engine.id
        self.order(name, Promote(epoch=epoch, **options))
        promoted: Promoted = self.expect(lambda report: isinstance(report, Promoted) and report.engine == name)
        return promoted


@dataclass
class Stream:
    """What a client of one request has got."""

    submit: Submit
    prompt_ids: tuple[int, ...] = ()
    ids: list[int] = field(default_factory=list)
    text: str = ""
    cached: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    rejected: Rejected | None = None

    @property
    def done(self) -> bool:
        return self.finish_reason is not None or self.rejected is not None

    def take(self, event: link.FromEngine) -> None:
        if isinstance(event, Accepted):
            self.prompt_ids = self.prompt_ids or event.prompt_ids  # a replay's acceptance does not repeat them
            self.cached.append(event.cached_tokens)
        elif isinstance(event, Token):
            self.ids += event.ids
            self.text += event.text
            self.finish_reason = event.finish_reason
            assert event.chars == len(self.text), "characters lost or repeated"
        elif isinstance(event, Rejected):
            self.rejected = event

    def replay(self, epoch: int) -> Submit:
        if not self.prompt_ids:
            return msgspec.structs.replace(self.submit, epoch=epoch)
        replay = Replay(prompt_ids=self.prompt_ids, output_ids=tuple(self.ids), delivered_chars=len(self.text))
        return msgspec.structs.replace(self.submit, epoch=epoch, replay=replay)


class Gateway:
    """One connection to one engine. ``frames``: how many came."""

    def __init__(self, path: str) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.connect(path)
        self._unpacker = framing.Unpacker()
        self._events: list[link.FromEngine] = []
        self.frames = 0
        hello = self.next()
        assert isinstance(hello, Hello)
        self.hello = hello

    def close(self) -> None:
        self.socket.close()

    def send(self, *messages: link.ToEngine) -> None:
        self.socket.sendall(framing.pack(link.encode(messages)))

    def next(self, timeout_s: float = PATIENCE_S) -> link.FromEngine | None:
        """Return the next event; None at the end of the stream.

        Raises:
            TimeoutError: nothing came.
        """
        while not self._events:
            ready, _, _ = select.select([self.socket], [], [], timeout_s)
            if not ready:
                raise TimeoutError
            try:
                data = self.socket.recv(1 << 20)
            except ConnectionResetError:
                data = b""
            if not data:
                return None
            for payload in self._unpacker.feed(data):
                self.frames += 1
                self._events += link._from_engine.decode(payload)
        return self._events.pop(0)

    def hello_state(self, state: EngineState) -> Hello:
        while True:
            event = self.next()
            assert event is not None
            if isinstance(event, Hello) and event.state is state:
                return event

    def pump(self, streams: dict[str, Stream], until: Callable[[], bool]) -> bool:
        """Give events to ``streams`` until ``until``; False when the engine is gone first."""
        while not until():
            event = self.next()
            if event is None:
                return False
            if not isinstance(event, Hello):
                streams[event.rid].take(event)
        return True


class World:
    """A runtime directory with all of it. Use `close`."""

    def __init__(self, backend: str = "host") -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="ss-", dir="/tmp")  # short: paths of sockets are
        self.path = Path(self._directory.name)
        self.keeper = Keeper(str(self.path / "keeper.sock"), backend)
        self.supervisor = Supervisor(str(self.path / "beat.sock"))
        self.engines: list[Engine] = []
        self.gateways: list[Gateway] = []

    def spec(self, seq: int, **changes: Any) -> EngineSpec:
        spec = EngineSpec(
            node="test",
            worker="chat",
            engine=f"chat.{seq}",
            seq=seq,
            kind="fake_engine:create",
            model="fake-model",
            served_name="fake",
            kv=KvSpec(size=512 * 1024, block_tokens=16),
            heartbeat_s=0.05,
            runtime_dir=str(self.path),
            keeper_socket=str(self.path / "keeper.sock"),
            beat_endpoint=self.supervisor.endpoint,
            link_socket=str(self.path / f"chat.{seq}.sock"),
        )
        return msgspec.structs.replace(spec, **changes)

    def spawn(self, seq: int, *, env: dict[str, str] | None = None, command: Sequence[str] = (), **changes: Any) -> Engine:
        """``command``: a program of its own in place of `shadowsup.workers.main`."""
        ours, theirs = socket.socketpair()
        spec = self.spec(seq, lifeline_fd=theirs.fileno(), **changes)
        path = self.path / f"chat.{seq}.json"
        path.write_bytes(msgspec.json.encode(spec))
        argv = command or [sys.executable, "-m", "shadowsup.workers.main", str(path)]
        ours_too = {**environment(), **(env or {}), wire.SPEC_VARIABLE: str(path)}
        process = subprocess.Popen(argv, pass_fds=[theirs.fileno()], env=ours_too, start_new_session=True)
        theirs.close()
        engine = Engine(spec, process, ours)
        self.engines.append(engine)
        return engine

    def parked(self, seq: int, **changes: Any) -> Engine:
        engine = self.spawn(seq, **changes)
        self.supervisor.state(engine, EngineState.PARKED)
        return engine

    def gateway(self, engine: Engine) -> Gateway:
        gateway = Gateway(engine.spec.link_socket)
        self.gateways.append(gateway)
        return gateway

    def active(self, seq: int, epoch: int = 1, **changes: Any) -> tuple[Engine, Gateway]:
        engine = self.parked(seq, **changes)
        self.supervisor.promote(engine, epoch)
        return engine, self.gateway(engine)

    def keeper_client(self, name: str = "test") -> KeeperClient:
        return KeeperClient(str(self.path / "keeper.sock"), name)

    def close(self) -> None:
        for gateway in self.gateways:
            gateway.close()
        for engine in self.engines:
            engine.process.kill()
            engine.process.wait()
            engine.lifeline.close()
        self.supervisor.close()
        self.keeper.kill()
        self._directory.cleanup()


def world() -> Iterator[World]:
    made = World()
    try:
        yield made
    finally:
        made.close()


def submit(rid: str, prompt: str, *, epoch: int = 1, **sampling: Any) -> Submit:
    options = {"temperature": 0.0, "seed": 7, "max_tokens": 64, **sampling}
    return Submit(rid=rid, epoch=epoch, prompt=prompt, sampling=Sampling(**options))


def run_streams(gateway: Gateway, submits: list[Submit]) -> dict[str, Stream]:
    """Submit and run to the end."""
    streams = {one.rid: Stream(one) for one in submits}
    gateway.send(*submits)
    assert gateway.pump(streams, lambda: all(stream.done for stream in streams.values())), "the engine went away"
    return streams
