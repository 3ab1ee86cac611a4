"""Control socket and beats under what is no request and no report: each is answered or counted, and the next one is served."""

from __future__ import annotations

import asyncio
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from fuzz_tools import anything, of_union, open_fds, payloads, structs
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shadowsup.supervisor.beats import BeatRouter
from shadowsup.supervisor.control import ControlServer
from shadowsup.supervisor.errors import SupervisorError
from shadowsup.supervisor.protocol import Reply, Request
from shadowsup.wire.engine import GatewayBeat, Report, encode

MARK = 4_711_000_001
BEAT = encode(
    GatewayBeat(
        pid=MARK,
        sent_s=0.0,
        ready=True,
        connections=0,
        streams_held=0,
        inflight=0,
        requests_total=0,
        errors_total=0,
        tokens_total=0,
        replays_total=0,
    )
)


class Servers:
    """A control server and a beat router on a loop in a thread."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.got = threading.Event()
        self.ready, self._stop = threading.Event(), asyncio.Event()
        self.thread = threading.Thread(target=lambda: asyncio.run(self._run()))
        self.thread.start()
        assert self.ready.wait(60.0)
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()

    async def _run(self) -> None:
        self.loop = asyncio.get_running_loop()
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()

        def refuse(arguments: dict[str, Any]) -> Any:
            raise SupervisorError("no")

        async def later(arguments: dict[str, Any]) -> Any:
            return arguments

        verbs: dict[str, Any] = {"ping": lambda _: 1, "echo": lambda a: a, "refuse": refuse, "later": later, "int": lambda a: int(a["n"])}
        control = ControlServer(context, self.folder / "control.sock", self.folder / "events.sock", verbs)
        beats = BeatRouter(context, self.folder / "beat.sock", self._heard)
        self.ready.set()
        await self._stop.wait()
        beats.close()
        await control.close()
        context.term()

    def _heard(self, peer: str, report: Report) -> bool:
        if isinstance(report, GatewayBeat) and report.pid == MARK:
            self.got.set()
        return True

    def expect(self) -> None:
        self.got.clear()

    def dealer(self, name: str, identity: bytes = b"") -> zmq.Socket[bytes]:
        made = self.context.socket(zmq.DEALER)
        made.setsockopt(zmq.LINGER, 0)
        made.setsockopt(zmq.RCVTIMEO, 10_000)
        if identity:
            made.setsockopt(zmq.IDENTITY, identity)
        made.connect(f"ipc://{self.folder / name}")
        return made

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self._stop.set)
        self.thread.join(10.0)
        self.context.term()


@pytest.fixture(scope="module")
def servers() -> Iterator[Servers]:
    with tempfile.TemporaryDirectory(prefix="shadowsup-fuzz-") as folder:
        made = Servers(Path(folder))
        try:
            yield made
        finally:
            made.close()


verbs = st.sampled_from(["ping", "echo", "refuse", "later", "int", "", "status", "x" * 500])
requests = payloads(structs(Request).flatmap(lambda one: verbs.map(lambda verb: {**one, "verb": verb})), msgspec.json.encode)
deep = st.integers(10, 3000).map(lambda depth: b'{"id":1,"verb":"echo","args":{"x":' + b"[" * depth + b"]" * depth + b"}}")


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(sent=st.lists(st.one_of(requests, deep), max_size=6), frames=st.lists(st.binary(max_size=20), max_size=3))
def test_every_request_is_answered_and_the_next_one_is_served(servers: Servers, sent: list[bytes], frames: list[bytes]) -> None:
    before = open_fds()
    dealer = servers.dealer("control.sock")
    try:
        for payload in sent:
            dealer.send(payload)
        if frames:
            dealer.send_multipart([*frames, b'{"id":6,"verb":"ping"}'])
        dealer.send(b'{"id":7000001,"verb":"ping"}')
        for _ in range(len(sent) + bool(frames) + 1):  # an answer to each, whatever it was
            answer = dealer.recv_multipart()[-1]
            try:
                reply = msgspec.json.decode(answer, type=Reply)
            except RecursionError:  # an echo of what was nested as deep as the server could take, and our stack is less deep
                assert answer.startswith(b'{"id":')
                continue
            assert reply.ok or reply.error
    finally:
        dealer.close()
    assert open_fds() <= before + 12  # ZeroMQ closes a connection a moment after its socket


reports = payloads(of_union(Report), msgspec.msgpack.encode)


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(sent=st.lists(reports, max_size=6), identity=st.sampled_from([b"", b"chat.1", b"gateway", b"\xff\xfe"]), more=st.booleans())
def test_what_is_no_report_does_no_harm_to_those_that_are(servers: Servers, sent: list[bytes], identity: bytes, more: bool) -> None:
    dealer = servers.dealer("beat.sock", identity)
    good = servers.dealer("beat.sock", b"gateway" if identity != b"gateway" else b"")
    try:
        for payload in sent:
            dealer.send_multipart([payload, b"surplus"] if more else [payload])
        speaker = good if identity != b"gateway" else dealer
        servers.expect()
        speaker.send(BEAT)
        assert servers.got.wait(60.0)
    finally:
        dealer.close()
        good.close()


@settings(deadline=None)
@given(value=anything)
def test_what_was_decoded_is_of_the_type_that_was_asked_for(value: object) -> None:
    try:
        data = msgspec.json.encode(value)
    except (msgspec.MsgspecError, TypeError, ValueError):
        return
    try:
        request = msgspec.json.decode(data, type=Request)
    except msgspec.MsgspecError:
        return
    assert isinstance(request.id, int) and isinstance(request.verb, str) and isinstance(request.args, dict)
