"""A node whose supervisor is killed: everything serves on, and the next start takes all of it over."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from node_world import WAIT_S, Answer, FakeNode, running, worker

from shadowsup.supervisor.client import ControlClient
from shadowsup.supervisor.errors import NotRunning

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path


def runs(pid: int) -> bool:
    """Whether there is such a process, and more of it than an exit status that nobody has asked for."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


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


def held(node: FakeNode) -> set[str]:
    """Return the segments that the keeper has."""
    pid = node.status()["memkeeper"]["pid"]
    targets = [str(link.readlink()) for link in Path(f"/proc/{pid}/fd").iterdir()]
    return {target for target in targets if "memfd:shadowsup-" in target}


def wait_for_index(node: FakeNode) -> None:
    """Wait until it is on disk what the node's segments are."""
    deadline = time.monotonic() + WAIT_S
    while not (node.runtime / "segments.json").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)  # nothing tells of a file


def start_again(node: FakeNode) -> float:
    """Start a supervisor; return how long it took until the node was running with all of it adopted."""
    began_s = time.monotonic()
    node.process = node.start()
    node.until(lambda status: status["node"]["state"] == "running")
    return time.monotonic() - began_s


def ask_all(node: FakeNode, pieces: int = 0, tokens: int = 150) -> list[Answer]:
    """Ask for eight stories at once, and wait until each has so many pieces."""
    answers = [node.ask(f"story {number}", tokens) for number in range(8)]
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
        with pytest.raises(NotRunning) as caught:
            ControlClient(node.runtime, 5.0).__enter__()
        assert "6 processes of this node serve on" in caught.value.hint
        start_again(node)
        assert node.healthy()["epoch"] == 1
        assert pids(node.status()) == before
        assert texts(answers) == undisturbed
        answers = ask_all(node, 10)
        os.kill(node.engine("active")["pid"], signal.SIGKILL)
        assert texts(answers) == undisturbed
        recovery = node.recovery(1)
        assert (recovery["kind"], recovery["blocks_dropped"], recovery["requests_resumed"]) == ("shadow", 0, 8)
        assert recovery["blocks_kept"] > 0


def test_an_active_that_dies_without_a_supervisor_is_succeeded_first_thing_and_its_streams_were_held(folder: Path) -> None:
    with running(folder) as node:
        node.healthy()
        undisturbed = texts(ask_all(node))
        answers = ask_all(node, 10)
        active, shadow = node.engine("active"), node.engine("shadow")
        kill_supervisor(node)
        os.kill(active["pid"], signal.SIGKILL)
        start_again(node)
        assert texts(answers) == undisturbed
        node.healthy()
        assert node.engine("active")["pid"] == shadow["pid"]
        recovery = node.recovery(1)
        assert (recovery["kind"], recovery["from_engine"], recovery["to_engine"]) == ("shadow", active["id"], shadow["id"])
        assert "no supervisor" in recovery["cause"]
        assert recovery["blocks_kept"] > 0


def test_what_died_besides_is_replaced_and_what_lives_is_not(folder: Path) -> None:
    with running(folder) as node:
        node.healthy()
        before, expected = node.status(), node.answer()
        active = node.engine("active")["pid"]
        dead = {name: pid for name, pid in pids(before).items() if name != "memkeeper" and pid != active}
        kill_supervisor(node)
        for pid in dead.values():
            os.kill(pid, signal.SIGKILL)
        start_again(node)
        node.healthy()
        node.until(lambda status: status["nursery"][0]["state"] == "running")
        after = pids(node.status())
        assert node.engine("active")["pid"] == active
        assert after["memkeeper"] == before["memkeeper"]["pid"]
        assert not set(after.values()) & set(dead.values())
        assert node.status()["gateway"]["listen"] == before["gateway"]["listen"]
        assert node.answer() == expected


def test_without_its_keeper_a_worker_serves_on_and_every_shadow_still_has_the_blocks(folder: Path) -> None:
    with running(folder) as node:
        node.healthy()
        undisturbed = texts(ask_all(node, tokens=300))
        answers = ask_all(node, 10, 300)
        before = pids(node.status())
        wait_for_index(node)
        memory = held(node)
        kill_supervisor(node)
        os.kill(before["memkeeper"], signal.SIGKILL)
        start_again(node)
        node.until(lambda status: status["memkeeper"]["state"] == "running")
        after = pids(node.status())
        assert {name for name in after if after[name] != before[name]} == {"memkeeper"}
        os.kill(node.engine("active")["pid"], signal.SIGKILL)
        assert texts(answers) == undisturbed
        node.until(lambda _: any(one["refill_ms"] for one in node.recoveries()))
        [recovery] = node.recoveries()
        assert (recovery["kind"], recovery["blocks_dropped"]) == ("shadow", 0)
        assert recovery["blocks_kept"] > 0
        # The shadow that came later has the blocks as well.
        assert held(node) == memory, "the very segments, and none beside them"
        node.healthy()
        os.kill(node.engine("active")["pid"], signal.SIGKILL)
        # A beat may tell of the promotion before the report with the figures does.
        node.until(lambda _: len(node.recoveries()) == 2 and node.recoveries()[-1]["blocks_kept"] is not None)
        last = max(node.recoveries(), key=lambda one: one["epoch"])
        assert (last["kind"], last["blocks_dropped"]) == ("shadow", 0) and last["blocks_kept"] > 0
        assert texts(ask_all(node, tokens=300)) == undisturbed


def test_a_start_that_was_cut_short_is_finished_with_the_engine_that_was_loading(folder: Path) -> None:
    with running(folder, worker(args={"step_s": 0.01, "load_s": 1.5})) as node:
        found = node.until(lambda status: any(e["state"] == "loading" for w in status["workers"] for e in w["engines"]))
        [engine] = found["workers"][0]["engines"]
        kill_supervisor(node)
        start_again(node)
        node.until(lambda status: status["workers"][0]["state"] in ("healthy", "degraded"))
        assert node.engine("active")["pid"] == engine["pid"]
        assert node.answer()


def test_a_stop_that_was_cut_short_is_undone_by_a_start(folder: Path) -> None:
    with running(folder) as node:
        node.healthy()
        expected = node.answer()
        answer = node.ask(tokens=400)
        answer.reached(10)
        node.process.terminate()  # waits for the stream
        node.until(lambda status: status["node"]["state"] == "stopping")
        kill_supervisor(node)
        start_again(node)
        assert answer.done.wait(WAIT_S)
        assert not answer.error
        node.until(lambda status: status["gateway"]["state"] == "running" and status["gateway"]["pid"] is not None)
        node.healthy()
        assert node.answer() == expected


def test_what_runs_goes_on_as_it_was_started_though_the_config_has_changed(folder: Path) -> None:
    with running(folder) as node:
        node.healthy()
        before = pids(node.status())
        config = json.loads(node.config.read_text())
        config["workers"][0]["shadows"] = 2
        config["workers"][0]["env"]["API_TOKEN"] = "do-not-show"
        node.config.write_text(json.dumps(config))
        kill_supervisor(node)
        start_again(node)
        assert pids(node.status()) == before
        assert node.status()["workers"][0]["shadows"] == 1
        wanted = ("workers.chat.env.API_TOKEN, workers.chat.shadows", f"shadowsup reload {node.config}")
        node.until(lambda _: all(words in node.output.read_text() for words in wanted))  # a thread of its own prints
        said = node.output.read_text()
        assert "do-not-show" not in said


def test_p28_an_adoption_that_fails_leaves_all_as_it_was_and_the_next_one_succeeds(folder: Path) -> None:
    with running(folder) as node:
        node.healthy()
        before = pids(node.status())
        kill_supervisor(node)
        os.kill(before["gateway"], signal.SIGKILL)
        spec = node.runtime / "gateway.json"
        spec.unlink()
        spec.mkdir()  # where it cannot be written, no gateway comes up
        failed = node.start()
        assert failed.wait(WAIT_S) == 1
        assert "serves on" in node.output.read_text()
        alive = {name for name, pid in before.items() if runs(pid)}
        assert alive == before.keys() - {"gateway"}
        spec.rmdir()
        start_again(node)
        node.healthy()
        after = pids(node.status())
        assert {name for name in after if after[name] != before[name]} == {"gateway"}


def test_p28_records_that_cannot_be_read_stop_the_start_and_nothing_else(folder: Path) -> None:
    with running(folder) as node:
        node.healthy()
        before = pids(node.status())
        kill_supervisor(node)
        plan = node.runtime / "plan.json"
        content = plan.read_bytes()
        plan.write_bytes(content[: len(content) // 2])
        failed = node.start()
        assert failed.wait(WAIT_S) == 1
        assert "cannot be adopted" in node.output.read_text()
        plan.write_bytes(content)
        start_again(node)
        assert pids(node.status()) == before


def test_a_command_goes_on_with_its_port_and_is_not_probed_again(folder: Path) -> None:
    command = {
        "name": "web",
        "engine": "command",
        "command": [sys.executable, "-m", "http.server", "{port}", "--bind", "127.0.0.1"],
        "ready": {"http": "/"},
    }
    with running(folder, command) as node:
        first = node.worker_is("healthy", "web")
        kill_supervisor(node)
        start_again(node)
        second = node.worker_is("healthy", "web")
        assert (second["upstream"], second["epoch"], second["engines"][0]["pid"]) == (
            first["upstream"],
            first["epoch"],
            first["engines"][0]["pid"],
        )
        os.kill(second["engines"][0]["pid"], signal.SIGKILL)
        node.until(lambda status: status["workers"][0]["state"] == "healthy" and status["workers"][0]["epoch"] == first["epoch"] + 1)


CLOCK = """
import time
from pathlib import Path

_real, _real_ns = time.time, time.time_ns


def _shift():
    try:
        return float(Path({path!r}).read_text())
    except (OSError, ValueError):  # not there yet, or just being written
        return 0.0


time.time = lambda: _real() + _shift()
time.time_ns = lambda: _real_ns() + int(_shift() * 1e9)
"""


def test_starts_that_failed_are_not_forgotten_with_the_supervisor(folder: Path) -> None:
    broken = {"name": "broken", "engine": "command", "command": [sys.executable, "-c", "raise SystemExit(7)"], "ready": {"http": "/"}}
    with running(folder, worker(), {**broken, "restart": {"backoff": ["0s", "60s"]}}) as node:
        node.healthy()
        before = node.until(lambda s: s["workers"][1]["state"] == "backoff")["workers"][1]
        kill_supervisor(node)
        start_again(node)
        after = node.status()["workers"][1]
        assert after["state"] == "backoff", "no new start for the death of a supervisor"
        assert (after["reason"], after["engines"]) == (before["reason"], [])


def test_p15_a_clock_that_jumps_back_delays_no_recovery_no_adoption_and_no_stop(
    folder: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The jump is a fake, in every process of the node: the machine's clock is not ours to set."""
    site, clock = tmp_path_factory.mktemp("site"), folder / "clock"
    (site / "sitecustomize.py").write_text(CLOCK.format(path=str(clock)))
    paths = os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH")]))
    monkeypatch.setenv("PYTHONPATH", paths)
    toy = worker()
    with running(folder, {**toy, "env": {**toy["env"], "PYTHONPATH": f"{site}:{toy['env']['PYTHONPATH']}"}}) as node:
        node.healthy()
        undisturbed = texts(ask_all(node))
        answers = ask_all(node, 10)
        clock.write_text("-3600")
        os.kill(node.engine("active")["pid"], signal.SIGKILL)
        assert texts(answers) == undisturbed
        assert 0 <= node.recovery(1)["promote_ms"] < 20_000
        before = pids(node.status())
        kill_supervisor(node)
        clock.write_text("-7200")
        start_again(node)
        assert pids(node.status()) == before
        assert texts(ask_all(node)) == undisturbed
        ages = [engine["heartbeat_age_s"] for engine in node.healthy()["engines"]]
        assert all(0 <= age < 20 for age in ages)
        assert abs(float(node.status()["time_s"]) - (time.time() - 7200)) < 60, "the jump was real to it"
