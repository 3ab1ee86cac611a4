"""The link to the gateway over a real socket, without an engine behind it."""

from __future__ import annotations

import errno
import queue
import socket
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from sdk_world import PATIENCE_S, Gateway, submit

from shadowsup.wire import framing
from shadowsup.wire.engine import EngineState
from shadowsup.wire.link import Cancel, FromEngine, Hello, Token
from shadowsup.workers import link as link_module
from shadowsup.workers.errors import WorkerError
from shadowsup.workers.link import Incoming, LinkChanged, LinkServer

PARKED = Hello(worker="chat", engine="chat.1", state=EngineState.PARKED, epoch=0, model="m", max_context=10)
ACTIVE = Hello(worker="chat", engine="chat.1", state=EngineState.ACTIVE, epoch=1, model="m", max_context=10)


def token(text: str = "x") -> Token:
    return Token(rid="a", epoch=1, ids=(1,), text=text, chars=len(text))


class Link:
    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self.inbox: queue.Queue[Incoming] = queue.Queue()
        self.lines: list[str] = []
        self.server = LinkServer(self.path, hello=PARKED, deliver=self.deliver, log=self.lines.append, max_buffer=1 << 20)
        self.server.start()
        self.gateways: list[Gateway] = []

    def deliver(self, messages: Sequence[Incoming]) -> None:
        for message in messages:
            self.inbox.put(message)

    def connect(self) -> tuple[Gateway, int]:
        """Return the gateway and the number of its connection."""
        gateway = Gateway(self.path)
        self.gateways.append(gateway)
        while not isinstance(message := self.take(), LinkChanged) or message.number == 0:
            pass
        return gateway, message.number

    def take(self) -> Incoming:
        return self.inbox.get(timeout=PATIENCE_S)


@pytest.fixture
def link(tmp_path: Path) -> Iterator[Link]:
    made = Link(tmp_path / "l.sock")
    yield made
    made.server.close()
    for gateway in made.gateways:
        gateway.close()


def read(gateway: Gateway, count: int) -> list[FromEngine]:
    events = [gateway.next() for _ in range(count)]
    assert None not in events
    return [event for event in events if event is not None]


def test_only_its_user_may_connect_and_a_stale_socket_is_no_obstacle(tmp_path: Path) -> None:
    path = tmp_path / "l.sock"
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(path))
    server = LinkServer(str(path), hello=PARKED, deliver=lambda message: None)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    server.close()
    server.close()
    assert not path.exists()


def test_a_path_that_is_too_long_is_an_error_with_words(tmp_path: Path) -> None:
    with pytest.raises(WorkerError, match="cannot listen") as caught:
        LinkServer(str(tmp_path / ("x" * 120)), hello=PARKED, deliver=lambda message: None)
    assert "107" in caught.value.hint and caught.value.fatal


def test_says_hello_first_and_again_on_each_change(link: Link) -> None:
    gateway, _ = link.connect()
    assert gateway.hello == PARKED
    link.server.set_hello(ACTIVE)
    assert gateway.next() == ACTIVE
    assert link.connect()[0].hello == ACTIVE


def test_delivers_in_order_and_sends_a_list_as_one_frame(link: Link) -> None:
    gateway, number = link.connect()
    request = submit("a", "x")
    gateway.send(request, Cancel(rid="a"))
    gateway.send(request)
    assert [link.take() for _ in range(3)] == [request, Cancel(rid="a"), request]
    frames = gateway.frames
    assert link.server.send([token("1"), token("2"), token("3")], number)
    assert [event.text for event in read(gateway, 3) if isinstance(event, Token)] == ["1", "2", "3"]
    assert gateway.frames == frames + 1


def test_the_newest_gateway_wins_and_gets_nothing_that_was_meant_for_the_other(link: Link) -> None:
    first, old = link.connect()
    second, new = link.connect()
    assert first.next() is None
    assert not link.server.send([token("old")], old)
    assert link.server.send([token("new")], new)
    event = second.next()
    assert isinstance(event, Token) and event.text == "new"


def test_a_gateway_that_goes_away_is_told_to_the_inbox(link: Link) -> None:
    gateway, number = link.connect()
    gateway.send(submit("a", "x"))
    gateway.socket.shutdown(socket.SHUT_RDWR)
    assert link.take() == submit("a", "x")
    assert link.take() == LinkChanged(0)
    assert not link.server.send([token()], number)


def test_nonsense_is_disconnected(link: Link) -> None:
    for wrong in (framing.pack(b"\xc1"), b"\xff\xff\xff\xff"):
        gateway, _ = link.connect()
        gateway.socket.sendall(wrong)
        assert gateway.next() is None
        assert link.take() == LinkChanged(0)


def test_what_the_socket_does_not_take_is_sent_later_in_order(link: Link) -> None:
    gateway, number = link.connect()
    texts = [f"{index}:" + "y" * 5000 for index in range(150)]  # beyond the socket's buffer, within ours
    for text in texts:
        assert link.server.send([token(text)], number)
    assert [event.text for event in read(gateway, len(texts)) if isinstance(event, Token)] == texts
    assert link.server.send([token("direct")], number)
    assert read(gateway, 1)[0] == token("direct")


def test_a_gateway_that_does_not_read_is_cut_off_without_blocking(link: Link) -> None:
    gateway, number = link.connect()
    sent = 0
    while link.server.send([token("y" * 50_000)], number):
        sent += 1
        assert sent < 200, "nothing bounds what waits"
    assert link.take() == LinkChanged(0)
    assert any("does not read" in line for line in link.lines)
    fresh, again = link.connect()
    assert link.server.send([token()], again) and fresh.next() == token()
    assert gateway.socket.fileno() >= 0


class Full:
    """A listener of a process without a free descriptor, for a while."""

    def __init__(self, listener: socket.socket, times: int) -> None:
        self._listener = listener
        self._times = times
        self.asked = 0

    def accept(self) -> tuple[socket.socket, object]:
        self.asked += 1
        if self.asked <= self._times:
            raise OSError(errno.EMFILE, "Too many open files")
        return self._listener.accept()

    def fileno(self) -> int:
        return self._listener.fileno()

    def close(self) -> None:
        self._listener.close()


def test_without_a_free_descriptor_the_listener_rests_and_then_accepts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Full] = []
    listen = link_module._listen
    monkeypatch.setattr(link_module, "_listen", lambda path: made.append(Full(listen(path), 2)) or made[0])
    link = Link(tmp_path / "l.sock")
    try:
        link.connect()
        assert made[0].asked == 3
        assert [line for line in link.lines if "Too many open files" in line]
    finally:
        link.server.close()
        for gateway in link.gateways:
            gateway.close()
