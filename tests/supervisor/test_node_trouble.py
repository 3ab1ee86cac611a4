"""A whole node when something around it fails: the runtime directory, its own output, the order of commands."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq
from node_world import running, worker

from shadowsup.supervisor.errors import SupervisorError
from shadowsup.wire.engine import Beat, EngineState, KvCounts, Phase, Stop, decode_order, encode


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder with a short path, for sockets."""
    made = Path(tempfile.mkdtemp(prefix="shadowsup-toy-"))
    yield made
    shutil.rmtree(made)


def test_a_failover_is_carried_out_to_its_end_though_no_process_can_be_recorded(folder: Path) -> None:
    with running(folder, worker(kv={"size": "1MiB", "reserve": 2})) as node:
        node.healthy()
        undisturbed = node.answer(tokens=150)
        answer = node.ask(tokens=150)
        answer.reached(5)
        # The list of processes is written under this name first: as if the runtime directory were full.
        obstacle = node.runtime / f".processes.json.{node.process.pid}"
        obstacle.mkdir()
        os.kill(node.engine("active")["pid"], signal.SIGKILL)
        assert answer.done.wait(40.0), "the fence never came"
        assert (answer.error, answer.text) == ("", undisturbed)
        gateway = node.status()["gateway"]["pid"]
        os.kill(gateway, signal.SIGKILL)
        node.until(lambda s: s["gateway"]["state"] == "backoff")
        obstacle.rmdir()
        node.until(lambda s: s["gateway"]["state"] == "running")
        node.healthy()
        assert node.answer(tokens=150) == undisturbed


def test_a_node_that_can_print_nothing_serves_and_stops_all_the_same(folder: Path) -> None:
    output = folder / "output"
    output.symlink_to("/dev/full")  # its log lies on a disk that is full
    with running(folder) as node:
        node.healthy()
        output.unlink()
        output.touch()
        assert node.answer()


def test_a_node_whose_terminal_stands_still_serves_and_stops_all_the_same(folder: Path) -> None:
    output = folder / "output"
    os.mkfifo(output)
    terminal = os.open(output, os.O_RDWR | os.O_NONBLOCK)
    try:
        with contextlib.suppress(BlockingIOError):
            while os.write(terminal, bytes(65536)):
                pass
        with running(folder) as node:
            node.healthy()
            output.unlink()
            output.touch()
            assert node.answer()
    finally:
        os.close(terminal)


def test_a_node_that_stops_starts_nothing_anew(folder: Path) -> None:
    with running(folder) as node:
        node.healthy()
        os.kill(node.engine("active")["pid"], signal.SIGSTOP)
        os.kill(node.engine("shadow")["pid"], signal.SIGSTOP)
        node.process.terminate()
        node.until(lambda s: s["workers"][0]["state"] == "stopping")
        with pytest.raises(SupervisorError, match="is stopping"):
            node.call("restart", worker="chat")


def test_a_nursery_that_lost_its_connection_is_replaced(folder: Path) -> None:
    with running(folder) as node:
        node.healthy()
        nursery = node.status()["nursery"][0]["pid"]
        with socket.socket(socket.AF_UNIX) as stranger:
            stranger.connect(str(node.runtime / "nursery-0.sock"))  # the newest connection wins
            node.until(lambda s: s["nursery"][0]["state"] == "running" and s["nursery"][0]["pid"] not in (None, nursery))
        shadow = node.engine("shadow")
        os.kill(shadow["pid"], signal.SIGKILL)
        node.until(lambda s: any(e["state"] == "parked" and e["pid"] != shadow["pid"] for e in s["workers"][0]["engines"]))
        assert node.events("engine.spawn_failed") == []


def test_an_engine_that_nobody_asked_for_is_told_to_stop(folder: Path) -> None:
    """A nursery may die between the fork and its answer."""
    with running(folder) as node:
        node.healthy()
        context = zmq.Context()
        engine = context.socket(zmq.DEALER)
        try:
            engine.setsockopt(zmq.ROUTING_ID, b"chat.77")
            engine.connect(f"ipc://{node.runtime}/beat.sock")
            idle = KvCounts(blocks=1, valid=0, free=1, quarantined=0, reserve=0)
            beat = Beat(
                engine="chat.77",
                pid=1,
                sent_s=0.0,
                state=EngineState.PARKED,
                phase=Phase.PARKED,
                epoch=0,
                step=0,
                inflight=0,
                queued=0,
                last_step_s=0.0,
                tokens_total=0,
                kv=idle,
            )
            engine.send(encode(beat))
            assert engine.poll(30_000), "it holds its memory for ever"
            assert decode_order(engine.recv()) == Stop()
        finally:
            engine.close(linger=0)
            context.term()
