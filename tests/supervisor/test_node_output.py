"""What engines print, and how they end, in a whole node: neither holds up a failover or a stop."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from node_world import FakeNode, running, worker

pytestmark = pytest.mark.timeout(120)


class Flood:
    """Writes to a process's output as fast as it is taken."""

    def __init__(self, pid: int) -> None:
        self.written = 0
        self._fd = os.open(f"/proc/{pid}/fd/1", os.O_WRONLY)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        chunk = b"y" * 62 + b"\n"
        while not self._stop.is_set():
            self.written += os.write(self._fd, chunk * 1000)

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()
        os.close(self._fd)


def resident(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_p18_a_flood_of_output_costs_no_memory_no_heartbeat_and_no_failover(tmp_path: Path) -> None:
    with running(tmp_path, worker(logs={"max_size": "1MiB", "keep": 1})) as node:
        node.healthy()
        text = node.answer()
        scribe = node.status()["scribe"]["pid"]
        before = resident(scribe)
        flood = Flood(node.engine("active")["pid"])
        try:
            answer = node.ask()
            answer.reached(10)
            # Through the control socket: what is measured is that the supervisor hears, decides and answers meanwhile.
            assert node.engine("active")["heartbeat_age_s"] < 2.0
            victim = node.engine("active")["pid"]
            os.kill(victim, 9)
            assert answer.done.wait(60.0)
            node.until(lambda _: flood.written > 10_000_000)
        finally:
            flood.stop()
        assert answer.text == text
        assert not answer.error
        assert resident(scribe) < before + 64_000_000
        node.healthy()
        assert [recovery["kind"] for recovery in node.recoveries()] == ["shadow"]
        folder = node.state / "logs"
        sizes = {path.name: _size(path) for path in folder.glob("chat.log*")}
        assert set(sizes) <= {"chat.log", "chat.log.1"}
        assert sum(sizes.values()) < 3_000_000


def logs(node: FakeNode, *words: str) -> list[str]:
    command = [sys.executable, "-m", "shadowsup.supervisor.cli", "--runtime-dir", str(node.runtime), "logs", *words]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:  # just being rotated: as large as it may be
        return 1 << 20


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except FileNotFoundError:  # just being rotated
        return "loading toy"


def test_the_last_words_of_the_last_two_runs_are_there_whatever_came_after(tmp_path: Path) -> None:
    """P16, P18: a flood of the third engine rotates the log away many times over."""
    with running(tmp_path, worker(logs={"max_size": "64KiB", "keep": 1})) as node:
        node.healthy()
        for _ in range(2):
            victim = node.engine("active")
            os.kill(victim["pid"], 9)
            node.until(lambda s: any(e["id"] != victim["id"] and e["state"] == "active" for e in s["workers"][0]["engines"]))  # noqa: B023
            node.healthy()
        active = node.engine("active")["id"]
        flood = Flood(node.engine("active")["pid"])
        try:
            path = node.state / "logs" / "chat.log"
            node.until(lambda _: flood.written > 3_000_000 and "loading toy" not in _text(path))
        finally:
            flood.stop()
        node.until(lambda _: "loading toy" not in _text(path))
        said = logs(node, "chat", "--ended")
    for engine in ("chat.1", "chat.2"):
        assert any(f" {engine} | " in line and "loading toy" in line for line in said), said
        assert any(f" {engine} | " in line and "active in epoch" in line for line in said), said
    assert not any(f" {active} | " in line for line in said)


SLOW = """
import signal, sys, time, http.server
def leave(*_):
    print("cleaning up the device", flush=True)
    time.sleep(float(sys.argv[2]))
    print("clean", flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, leave)
class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
    def log_message(self, *_): pass
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Answer).serve_forever()
"""


def slow(seconds: float, timeout: str) -> dict[str, object]:
    command = [sys.executable, "-c", SLOW, "{port}", str(seconds)]
    ends = {"signal": "TERM", "timeout": timeout}
    return {"name": "server", "engine": "command", "command": command, "ready": {"http": "/"}, "stop": ends}


def stopped(node: FakeNode, last: str) -> list[str]:
    """Stop it, and return its lines once there is one that ends with ``last``: the scribe writes them in its own time."""
    node.worker_is("healthy", "server")
    node.call("stop", worker="server")
    node.worker_is("stopped", "server")
    log = node.state / "logs" / "server.log"
    node.until(lambda _: any(line.endswith(last) for line in log.read_text().splitlines()))
    return log.read_text().splitlines()


def test_p22_an_engine_that_needs_long_to_leave_gets_the_time_that_was_configured(tmp_path: Path) -> None:
    with running(tmp_path, slow(1.0, "30s")) as node:
        assert stopped(node, "| clean")[-1].endswith("| clean")
        assert node.events("engine.killed") == []


def test_p22_one_that_takes_longer_is_killed_and_that_is_said(tmp_path: Path) -> None:
    with running(tmp_path, slow(3600.0, "1s")) as node:
        assert stopped(node, "| cleaning up the device")[-1].endswith("| cleaning up the device")
        said = [event["message"] for event in node.call("events")["events"]]
        assert any("SIGKILL" in message for message in said), said
