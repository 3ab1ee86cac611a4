"""A whole node when something around it fails: the runtime directory, its own output, the order of commands."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from node_world import running, worker


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
