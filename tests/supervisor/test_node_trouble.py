"""A whole node when something around it fails: the runtime directory, its own output, the order of commands."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from node_world import running, worker

from shadowsup.supervisor.errors import SupervisorError


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
        assert answer.done.wait(20.0), "the fence never came"
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
