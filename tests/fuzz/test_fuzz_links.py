"""Framing, the engine's link and the scribe under any bytes in any pieces."""

from __future__ import annotations

import contextlib
import socket
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from fuzz_tools import of_union, open_fds, payloads
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shadowsup.memkeeper.channel import Channel, ChannelClosed
from shadowsup.supervisor import scribe_protocol
from shadowsup.supervisor.scribe import Scribe
from shadowsup.supervisor.scribe import listen as scribe_listen
from shadowsup.wire import framing
from shadowsup.wire import link as wire
from shadowsup.wire.engine import EngineState
from shadowsup.workers.link import Incoming, LinkServer

HELLO = wire.Hello(worker="chat", engine="chat.1", state=EngineState.ACTIVE, epoch=1, model="toy", max_context=64)


@given(payloads=st.lists(st.binary(max_size=200), max_size=8), cuts=st.lists(st.integers(0, 1700), max_size=8))
def test_frames_come_out_as_they_went_in_whatever_the_pieces(payloads: list[bytes], cuts: list[int]) -> None:
    stream = b"".join(map(framing.pack, payloads))
    unpacker, out, at = framing.Unpacker(), [], 0
    for cut in sorted(cut for cut in cuts if cut < len(stream)):
        out += unpacker.feed(stream[at:cut])
        at = cut
    out += unpacker.feed(stream[at:])
    assert out == payloads


@given(data=st.binary(max_size=400), limit=st.integers(0, 64))
def test_an_announced_length_beyond_the_bound_is_refused_before_it_is_stored(data: bytes, limit: int) -> None:
    unpacker = framing.Unpacker(limit)
    with contextlib.suppress(framing.FrameError):
        for payload in unpacker.feed(data):
            assert len(payload) <= limit
        assert len(unpacker._buffer) < framing.HEADER_SIZE + limit


@pytest.fixture(scope="module")
def link() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="shadowsup-fuzz-") as folder:
        path = Path(folder) / "link.sock"

        def deliver(messages: Sequence[Incoming]) -> None:
            assert all(isinstance(message, Incoming) for message in messages)

        server = LinkServer(str(path), hello=HELLO, deliver=deliver)
        server.start()
        try:
            yield path
            assert server._thread.is_alive()
        finally:
            server.close()


to_engine = payloads(st.lists(of_union(wire.ToEngine), max_size=3))


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(sent=st.lists(st.one_of(to_engine.map(framing.pack), st.binary(max_size=60)), max_size=5))
def test_a_gateway_that_breaks_the_protocol_is_followed_by_one_that_does_not(link: Path, sent: list[bytes]) -> None:
    before = open_fds()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as bad, contextlib.suppress(OSError):
        bad.connect(str(link))
        for data in sent:
            bad.sendall(data)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as good:
        good.settimeout(10.0)
        good.connect(str(link))
        unpacker, messages = framing.Unpacker(), []
        while not messages:
            data = good.recv(65_536)
            assert data, "the engine hung up on a good gateway"
            messages += [one for payload in unpacker.feed(data) for one in wire.decode_from_engine(payload)]
    assert messages[0] == HELLO
    assert open_fds() <= before + 4


@pytest.fixture(scope="module")
def scribe() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="shadowsup-fuzz-") as folder:
        path = Path(folder) / "scribe.sock"
        listener = scribe_listen(path)
        made = Scribe(listener)
        wake, signalled = socket.socketpair()
        thread = threading.Thread(target=made.run, args=(wake,))
        thread.start()
        try:
            yield path
            assert thread.is_alive()
        finally:
            made.stop()
            signalled.send(b"x")
            thread.join(10.0)
            for each in (listener, wake, signalled):
                each.close()


def _harmless(message: object) -> bool:
    """Whether it may be sent at all: the fuzzer is the supervisor here, which may order an end and any file to be written."""
    return not isinstance(message, dict) or message.get("type") not in ("quit", "add")


to_scribe = payloads(of_union(scribe_protocol.ToScribe).filter(_harmless))


def _quits(payload: bytes) -> bool:
    try:
        return isinstance(scribe_protocol.decode_request(payload), scribe_protocol.Quit | scribe_protocol.Add)
    except Exception:
        return False


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(sent=st.lists(st.one_of(to_scribe.filter(lambda data: not _quits(data)).map(framing.pack), st.binary(max_size=60)), max_size=5))
def test_a_supervisor_that_breaks_the_protocol_is_followed_by_one_that_does_not(scribe: Path, sent: list[bytes]) -> None:
    before = open_fds()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as bad, contextlib.suppress(OSError):
        bad.connect(str(scribe))
        for data in sent:
            bad.sendall(data)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.connect(str(scribe))
    good = Channel(sock)
    try:
        good.send(scribe_protocol.encode(scribe_protocol.GetStats(number=9)))
        sock.setblocking(True)
        sock.settimeout(10.0)
        answers: list[bytes] = []
        while not answers:
            try:
                answers = good.receive()
            except ChannelClosed as error:
                raise AssertionError("the scribe hung up on a good supervisor") from error
        assert scribe_protocol.decode_answer(answers[0]) == scribe_protocol.Stats(number=9, streams=[], errors={})
    finally:
        good.close()
    assert open_fds() <= before + 4
