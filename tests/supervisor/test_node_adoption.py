"""A node whose supervisor is killed: everything serves on, and the next start takes all of it over."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from node_world import WAIT_S, Answer, FakeNode, running

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path


def kill_supervisor(node: FakeNode) -> None:
    node.close()
    node.process.kill()
    node.process.wait()


def pids(status: dict[str, Any]) -> dict[str, int]:
    """Return the pid of every process of the node but the supervisor's."""
    found = {name: status[name]["pid"] for name in ("memkeeper", "gateway", "scribe") if name in status}
    found |= {f"nursery-{number}": nursery["pid"] for number, nursery in enumerate(status["nursery"])}
    found |= {engine["id"]: engine["pid"] for each in status["workers"] for engine in each["engines"]}
    return found


def start_again(node: FakeNode) -> float:
    """Start a supervisor; return how long it took until the node was running with all of it adopted."""
    began_s = time.monotonic()
    node.process = node.start()
    node.until(lambda status: status["node"]["state"] == "running")
    return time.monotonic() - began_s


def ask_all(node: FakeNode, pieces: int = 0) -> list[Answer]:
    """Ask for eight stories at once, and wait until each has so many pieces."""
    answers = [node.ask(f"story {number}", 120) for number in range(8)]
    for answer in answers:
        answer.reached(pieces)
    return answers


def texts(answers: list[Answer]) -> list[str]:
    for answer in answers:
        assert answer.done.wait(WAIT_S)
        assert not answer.error, answer.error
    return [answer.text for answer in answers]


def test_p02_the_next_start_adopts_every_process_and_no_stream_notices(folder: Path) -> None:
    with running(folder) as node:
        node.healthy()
        undisturbed = texts(ask_all(node))
        before = pids(node.status())
        answers = ask_all(node, 10)
        kill_supervisor(node)
        start_again(node)
        assert node.healthy()["epoch"] == 1
        assert pids(node.status()) == before
        assert texts(answers) == undisturbed
        answers = ask_all(node, 10)
        os.kill(node.engine("active")["pid"], signal.SIGKILL)
        assert texts(answers) == undisturbed
        node.until(lambda _: any(one["refill_ms"] for one in node.recoveries()))
        [recovery] = node.recoveries()
        assert (recovery["kind"], recovery["blocks_dropped"], recovery["requests_resumed"]) == ("shadow", 0, 8)
        assert recovery["blocks_kept"] > 0
