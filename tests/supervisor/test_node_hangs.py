"""A whole node of real processes whose engines stand still, at default settings."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from node_world import WAIT_S, FakeNode, running, worker

PROMISED_S = 1.5
SOON_S = 6.0
"""Always, however busy the machine is; 30 s, the ceiling, if nothing were learnt from the beats."""
TRIES = 3
"""A machine that does other things as well may keep the promise late once, and not each time."""


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder with a short path, for sockets."""
    made = Path(tempfile.mkdtemp(prefix="shadowsup-toy-"))
    yield made
    shutil.rmtree(made)


def recovered(node: FakeNode, count: int) -> dict[str, object]:
    """Wait until so many recoveries are there and all is well; return the newest."""
    node.until(lambda s: s["workers"][0]["state"] == "healthy" and s["workers"][0]["epoch"] == count + 1)
    return node.recoveries()[count - 1]


def verdict_s(node: FakeNode, engine: str) -> float:
    """Return the moment of an engine's verdict, monotonic."""
    found = [e for e in node.events("engine.verdict") if e["engine"] == engine]
    return float(found[0]["mono_s"])


def test_p20_engines_that_stand_still_are_replaced_within_seconds_and_no_client_notices(folder: Path) -> None:
    wedge = folder / "wedge"
    with running(folder, worker(args={"step_s": 0.01, "wedge": str(wedge), "wedge_seqs": [2]})) as node:
        node.healthy()
        undisturbed = node.answer(tokens=300)

        seen_s: dict[str, list[float]] = {"stopped": [], "stuck": []}
        done = 0
        while done < TRIES * 2 and not all(took_s and min(took_s) < PROMISED_S for took_s in seen_s.values()):
            # The process is stopped: its heart is silent.
            answer = node.ask(tokens=300)
            answer.reached(60)
            active = node.engine("active")
            os.kill(active["pid"], signal.SIGSTOP)
            stopped_s = time.monotonic()
            found = recovered(node, done + 1)
            assert "no heartbeat" in str(found["cause"])
            seen_s["stopped"].append(verdict_s(node, active["id"]) - stopped_s)
            assert answer.done.wait(WAIT_S)
            assert (answer.error, answer.text) == ("", undisturbed)

            # The step loop is stuck: its heart beats on.
            answer = node.ask(tokens=300)
            answer.reached(60)
            active = node.engine("active")
            wedge.touch()
            stuck_s = time.monotonic()
            found = recovered(node, done + 2)
            assert "no step finished" in str(found["cause"])
            seen_s["stuck"].append(verdict_s(node, active["id"]) - stuck_s)
            wedge.unlink()
            assert answer.done.wait(WAIT_S)
            assert (answer.error, answer.text) == ("", undisturbed)
            done += 2
        assert all(min(took_s) < PROMISED_S and max(took_s) < SOON_S for took_s in seen_s.values()), seen_s

        # P34: the shadow is stopped, and nobody asks it anything.
        shadow = node.engine("shadow")
        os.kill(shadow["pid"], signal.SIGSTOP)
        node.until(lambda s: s["workers"][0]["state"] == "healthy" and all(e["id"] != shadow["id"] for e in s["workers"][0]["engines"]))
        assert len(node.recoveries()) == done
        assert node.answer(tokens=300) == undisturbed


def test_p20_an_engine_that_holds_the_gil_while_it_loads_is_let_be(folder: Path) -> None:
    """Its heart cannot beat for several times what the config believes of an engine that serves."""
    health = {"heartbeat": "100ms", "hang": {"floor": "600ms", "ceiling": "2s"}}
    with running(folder, worker(args={"step_s": 0.01, "hold_gil_s": 4.5}, health=health)) as node:
        node.healthy()
        assert node.events("engine.verdict") == []
        assert len(node.status()["workers"][0]["engines"]) == 2


def test_an_engine_that_is_stopped_while_it_starts_is_replaced_by_that_and_not_by_its_silence(folder: Path) -> None:
    with running(folder, worker(args={"step_s": 0.01, "hold_gil_s": 1.5})) as node:
        node.healthy()
        os.kill(node.engine("shadow")["pid"], signal.SIGKILL)
        starting = ("spawning", "loading", "warming")
        found = node.until(lambda s: any(e["state"] in starting and e["pid"] for e in s["workers"][0]["engines"]))
        newcomer = next(e for e in found["workers"][0]["engines"] if e["state"] in starting)
        os.kill(newcomer["pid"], signal.SIGSTOP)
        stopped_s = time.monotonic()
        node.until(lambda s: all(e["id"] != newcomer["id"] for e in s["workers"][0]["engines"]))
        assert verdict_s(node, newcomer["id"]) - stopped_s < 20.0, "a minute of silence would be plausible"
        node.healthy()
