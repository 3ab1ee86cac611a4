"""The control socket, the beat socket and the records, over real sockets and files."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from shadowsup.supervisor.beats import BeatRouter
from shadowsup.supervisor.client import ControlClient, follow_events
from shadowsup.supervisor.control import ControlServer
from shadowsup.supervisor.errors import SupervisorError
from shadowsup.supervisor.journal import Journal, LineFile
from shadowsup.supervisor.protocol import Recovery
from shadowsup.supervisor.recovery import RecoveryBook
from shadowsup.supervisor.runtime_dir import CONTROL_SOCKET, EVENTS_SOCKET
from shadowsup.wire.engine import Beat, EngineState, Failed, Phase, Promote, Report, decode_order, encode


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    made: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield made
    made.term()


async def called(folder: Path, verb: str, **args: Any) -> Any:
    def ask() -> Any:
        with ControlClient(folder, 10.0) as client:
            return client.call(verb, **args)

    return await asyncio.to_thread(ask)


async def test_verbs_answer_and_refusals_keep_their_words(tmp_path: Path, context: zmq.Context[zmq.Socket[bytes]]) -> None:
    async def slow(arguments: dict[str, Any]) -> str:
        await asyncio.sleep(0)
        return "later " + arguments["x"]

    def refuse(_: dict[str, Any]) -> None:
        raise SupervisorError("cannot", "do this instead", exit_code=2)

    def broken(_: dict[str, Any]) -> None:
        raise KeyError("oops")

    verbs = {"now": lambda arguments: {"got": arguments}, "slow": slow, "refuse": refuse, "broken": broken}
    server = ControlServer(context, tmp_path / CONTROL_SOCKET, tmp_path / EVENTS_SOCKET, verbs)
    try:
        assert (tmp_path / CONTROL_SOCKET).stat().st_mode & 0o777 == 0o600
        assert await called(tmp_path, "now", a=1) == {"got": {"a": 1}}
        assert await called(tmp_path, "slow", x="y") == "later y"
        with pytest.raises(SupervisorError, match="cannot") as refusal:
            await called(tmp_path, "refuse")
        assert (refusal.value.hint, refusal.value.exit_code) == ("do this instead", 2)
        with pytest.raises(SupervisorError, match="KeyError"):
            await called(tmp_path, "broken")
        with pytest.raises(SupervisorError, match="no verb 'fly'"):
            await called(tmp_path, "fly")
        answers = await asyncio.gather(*(called(tmp_path, "now", n=n) for n in range(10)))
        assert [answer["got"]["n"] for answer in answers] == list(range(10))
    finally:
        await server.close()


async def test_what_is_no_request_gets_an_answer_and_does_no_harm(tmp_path: Path, context: zmq.Context[zmq.Socket[bytes]]) -> None:
    server = ControlServer(context, tmp_path / CONTROL_SOCKET, tmp_path / EVENTS_SOCKET, {"now": lambda _: 1})
    dealer = context.socket(zmq.DEALER)
    dealer.setsockopt(zmq.LINGER, 0)
    dealer.connect(f"ipc://{tmp_path / CONTROL_SOCKET}")
    try:
        dealer.send(b"\xff not json")
        reply = json.loads(await asyncio.to_thread(dealer.recv))
        assert (reply["ok"], reply["exit_code"]) == (False, 2)
        assert await called(tmp_path, "now") == 1
    finally:
        dealer.close()
        await server.close()


@pytest.mark.parametrize("result", [object(), "nested"])
async def test_a_result_that_cannot_be_written_is_answered_and_not_lost(
    tmp_path: Path, context: zmq.Context[zmq.Socket[bytes]], result: object
) -> None:
    nested: list[Any] = []
    for _ in range(100_000):
        nested = [nested]
    server = ControlServer(
        context,
        tmp_path / CONTROL_SOCKET,
        tmp_path / EVENTS_SOCKET,
        {"now": lambda _: nested if result == "nested" else result, "ok": lambda _: 1},
    )
    try:
        with pytest.raises(SupervisorError, match="cannot be written"):
            await called(tmp_path, "now")
        assert await called(tmp_path, "ok") == 1
    finally:
        await server.close()


async def test_a_client_follows_events_without_a_gap(tmp_path: Path, context: zmq.Context[zmq.Socket[bytes]]) -> None:
    journal = Journal(None)
    verbs = {"events": lambda a: {"events": [{"n": e.n, "event": e.event} for e in journal.since(a.get("since"))]}}
    server = ControlServer(context, tmp_path / CONTROL_SOCKET, tmp_path / EVENTS_SOCKET, verbs)
    journal.publish = server.publish
    seen: list[int] = []
    first, enough = threading.Event(), threading.Event()

    def follow() -> None:
        with ControlClient(tmp_path, 10.0) as client:
            for event in follow_events(client, None, enough.is_set):
                seen.append(event["n"])
                first.set()
                if len(seen) == 50:
                    return

    journal.add("before")
    following = asyncio.get_running_loop().run_in_executor(None, follow)
    try:
        await asyncio.to_thread(first.wait, 30.0)
        for _ in range(49):
            journal.add("after")
        await asyncio.wait_for(following, 30.0)
        assert seen == list(range(1, 51))
    finally:
        enough.set()
        await server.close()


# --- beats --------------------------------------------------------------------------------------------------------------------------


def beat(engine: str, step: int = 0) -> Beat:
    return Beat(
        engine=engine,
        pid=1,
        sent_s=0.0,
        state=EngineState.PARKED,
        phase=Phase.PARKED,
        epoch=0,
        step=step,
        inflight=0,
        queued=0,
        last_step_s=0.0,
        tokens_total=0,
    )


class Peer:
    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], router: BeatRouter, name: str) -> None:
        self.socket = context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.IDENTITY, name.encode())
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.connect(router.endpoint)

    async def receive(self) -> object:
        return decode_order(await asyncio.to_thread(self.socket.recv))


async def test_reports_arrive_in_order_and_orders_find_their_engine(tmp_path: Path, context: zmq.Context[zmq.Socket[bytes]]) -> None:
    heard: asyncio.Queue[tuple[str, Report]] = asyncio.Queue()

    def take(peer: str, report: Report) -> bool:
        heard.put_nowait((peer, report))
        return False

    router = BeatRouter(context, tmp_path / "beat.sock", take)
    peers = [Peer(context, router, f"chat.{n}") for n in (1, 2)]
    try:
        assert (tmp_path / "beat.sock").stat().st_mode & 0o777 == 0o600
        for step in range(200):
            peers[0].socket.send(encode(beat("chat.1", step)))
        peers[1].socket.send(encode(Failed(engine="chat.2", stage="load", message="no")))
        async with asyncio.timeout(30.0):
            found = [await heard.get() for _ in range(201)]
        assert [r.step for peer, r in found if peer == "chat.1" and isinstance(r, Beat)] == list(range(200))
        assert [r.message for _, r in found if isinstance(r, Failed)] == ["no"]
        order = Promote(epoch=3)
        assert router.send("chat.2", order)
        assert await peers[1].receive() == order
        # Batched reading must not lose the edge: one more message after the quiet.
        peers[0].socket.send(encode(beat("chat.1", 200)))
        async with asyncio.timeout(30.0):
            assert (await heard.get())[0] == "chat.1"
    finally:
        for peer in peers:
            peer.socket.close()
        router.close()


async def test_garbage_and_false_names_are_counted_and_dropped(tmp_path: Path, context: zmq.Context[zmq.Socket[bytes]]) -> None:
    heard: asyncio.Queue[tuple[str, Report]] = asyncio.Queue()

    def take(peer: str, report: Report) -> bool:
        heard.put_nowait((peer, report))
        raise RuntimeError("a bad event must not end the reading of all others")

    router = BeatRouter(context, tmp_path / "beat.sock", take)
    peer = Peer(context, router, "chat.1")
    try:
        peer.socket.send(b"\xc1garbage")
        peer.socket.send(encode(beat("chat.2")))
        peer.socket.send(encode(beat("chat.1")))
        peer.socket.send(encode(beat("chat.1")))
        async with asyncio.timeout(30.0):
            assert [(await heard.get())[0] for _ in range(2)] == ["chat.1", "chat.1"]
        assert router.rejected == 2
        assert router.send("nobody", Promote(epoch=1)) in (True, False)
    finally:
        peer.socket.close()
        router.close()


async def test_a_connection_that_its_successor_has_overtaken_is_no_false_name(
    tmp_path: Path, context: zmq.Context[zmq.Socket[bytes]], caplog: pytest.LogCaptureFixture
) -> None:
    """So it is at each start of vLLM: its API server beats until it has forked EngineCore, which goes on under the same name."""
    heard: list[int] = []

    def take(peer: str, report: Report) -> bool:
        assert isinstance(report, Beat) and peer == "chat.1"
        heard.append(report.step)
        return False

    router = BeatRouter(context, tmp_path / "beat.sock", take)
    router._watch(False)  # as while nothing happens: what is said waits until somebody looks

    async def until(holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(30.0):
            while not holds():
                router.drain()
                await asyncio.sleep(0.001)

    first = Peer(context, router, "chat.1")
    peers = [first]
    try:
        first.socket.send(encode(beat("chat.1", 0)))
        await until(lambda: heard == [0])
        for round_ in range(1, 20):
            peers[-1].socket.send(encode(beat("chat.1", round_)))
            peers[-1].socket.close(linger=5000)
            peers.append(Peer(context, router, "chat.1"))
            peers[-1].socket.send(encode(beat("chat.1", 100 + round_)))
            await until(lambda: heard[-1] == 100 + round_)  # noqa: B023
        assert router.rejected == 0 and not caplog.records
        nobody = context.socket(zmq.DEALER)  # no name at all, and one whom nobody has heard
        peers.append(Peer(context, router, "chat.3"))
        nobody.connect(router.endpoint)
        nobody.send(encode(beat("chat.2", 1)))
        await until(lambda: router.rejected == 1)
        nobody.close(linger=0)
        assert "in the name of 'chat.2'" in caplog.text
    finally:
        for peer in peers:
            peer.socket.close()
        router.close()


# --- records ------------------------------------------------------------------------------------------------------------------------


def test_events_are_numbered_kept_and_written(tmp_path: Path) -> None:
    published: list[bytes] = []
    journal = Journal(tmp_path / "events.jsonl", published.append)
    for number in range(5):
        journal.add("engine.state", f"step {number}", worker="chat" if number % 2 else "other", engine="chat.1", data={"x": number})
    journal.close()
    assert journal.last == 5
    assert [e.n for e in journal.since(3)] == [3, 4, 5]
    assert [e.n for e in journal.since(None, worker="chat")] == [2, 4]
    lines = (tmp_path / "events.jsonl").read_text().splitlines()
    assert [json.loads(line)["n"] for line in lines] == [json.loads(line)["n"] for line in published] == [1, 2, 3, 4, 5]
    assert (tmp_path / "events.jsonl").stat().st_mode & 0o777 == 0o600


def test_a_history_file_is_rotated_and_a_folder_that_is_gone_costs_lines_only(tmp_path: Path) -> None:
    file = LineFile(tmp_path / "lines", max_size=100)
    for number in range(30):
        file.append(f"line {number:03}".encode())
    file.close()
    kept = (tmp_path / "lines").read_text() + (tmp_path / "lines.1").read_text()
    assert "line 029" in kept
    assert (tmp_path / "lines").stat().st_size <= 100
    lost = LineFile(tmp_path / "nowhere" / "lines")
    lost.append(b"x")
    lost.append(b"y")
    lost.close()
    assert lost.lost == 2


def test_a_disk_that_hangs_costs_the_lines_beyond_the_bound(tmp_path: Path) -> None:
    import os

    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)  # opening it for writing waits for a reader: as a hung disk does
    file = LineFile(fifo, backlog=5)
    for number in range(20):
        file.append(str(number).encode())
    assert file.lost >= 14
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    file.close()
    os.close(reader)


def test_recoveries_are_numbered_once_and_written_when_done(tmp_path: Path) -> None:
    book = RecoveryBook(tmp_path / "recoveries.jsonl")
    made = [Recovery(n=0, worker=w, kind="shadow", cause="died", ts=0.0, epoch=2, from_engine=f"{w}.1") for w in ("chat", "chat", "code")]
    for recovery in made:
        assert book.note(recovery)
        assert not book.note(recovery)
    made[0].fence_ms = 3.0
    book.note(made[0], done=True)
    book.note(made[0], done=True)
    assert [r.n for r in book.all("chat")] == [1, 2]
    assert book.last("chat") is made[1]
    assert book.counts("chat") == {"shadow": 1}
    book.close()
    lines = [json.loads(line) for line in (tmp_path / "recoveries.jsonl").read_text().splitlines()]
    assert [(line["n"], line["fence_ms"]) for line in lines] == [(1, 3.0), (2, None), (3, None)]
