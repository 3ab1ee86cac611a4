"""The dashboard in a real terminal (tmux), before a real node: a drill, its waterfall, a config that is edited, applied and taken back."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from shadowsup.supervisor.client import ControlClient

WAIT_S = 60.0
CONFIG = """\
# The toy engine in a terminal.
version: 1
node: {{name: toy, state_dir: {state}}}
gateway: {{listen: 127.0.0.1:0}}
workers:
  - name: chat
    engine: transformers
    model: toy
    args: {{step_s: 0.01}}
    kv: {{size: 1MiB}}
    stop: {{timeout: 5s}}
    env:
      OMP_NUM_THREADS: "1"
      PYTHONPATH: {tests}
      GREETING: hello"""
"""The last line has no end, so that the end of the text is a place to write at."""

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(300),
    pytest.mark.skipif(shutil.which("tmux") is None, reason="there is no tmux here"),
]


COMMAND = """\
version: 1
node: {{name: together, state_dir: {state}}}
gateway: {{listen: 127.0.0.1:0}}
workers:
  - name: files
    engine: command
    command: [{python}, -m, http.server, "{{port}}", --bind, 127.0.0.1]
    ready: {{http: /}}
"""


class Tmux:
    """One terminal, in a tmux server of its own."""

    def __init__(self, folder: Path, command: list[str]) -> None:
        # Sockets of tmux have short paths, whatever the folder of the tests is called.
        self._tmux = ["tmux", "-L", f"shadowsup-{os.getpid()}", "-f", os.devnull]
        words = " ".join(shlex.quote(word) for word in command)
        env = {**os.environ, "TERM": "xterm-256color", "LC_ALL": "C.UTF-8"}
        subprocess.run([*self._tmux, "new-session", "-d", "-x", "130", "-y", "40", f"{words}; sleep 300"], check=True, env=env)

    def screen(self) -> str:
        return subprocess.run([*self._tmux, "capture-pane", "-p"], check=True, capture_output=True, text=True).stdout

    def press(self, *keys: str) -> None:
        for key in keys:
            subprocess.run([*self._tmux, "send-keys", key], check=True)

    def type(self, text: str) -> None:
        subprocess.run([*self._tmux, "send-keys", "-l", text], check=True)

    def sees(self, *texts: str) -> str:
        """Wait for texts on the screen."""
        deadline = time.monotonic() + WAIT_S
        while not all(text in (screen := self.screen()) for text in texts):
            assert time.monotonic() < deadline, f"{texts}:\n{screen}"
            time.sleep(0.05)  # a terminal has no event to wait for
        return screen

    def close(self) -> None:
        subprocess.run([*self._tmux, "kill-server"], check=False, capture_output=True)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[tuple[Path, Path]]:
    """A running node of the toy engine; yields (runtime directory, config)."""
    tests = Path(__file__).parents[1]
    config, runtime = tmp_path / "node.yaml", tmp_path / "run"
    config.write_text(CONFIG.format(state=tmp_path / "state", tests=tests))
    (tmp_path / "toy").mkdir()
    script = tests / "supervisor" / "node_world.py"
    with (tmp_path / "output").open("wb") as sink:
        process = subprocess.Popen([sys.executable, str(script), str(config), str(runtime)], stdout=sink, stderr=sink)
    try:
        until(lambda: status(runtime)["workers"][0]["state"] == "healthy", tmp_path / "output")
        yield runtime, config
    finally:
        process.terminate()
        try:
            process.wait(WAIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def status(runtime: Path) -> dict[str, Any]:
    with ControlClient(runtime, 10.0) as client:
        found: dict[str, Any] = client.call("status")
        return found


def until(condition: Callable[[], bool], output: Path | None = None) -> None:
    deadline = time.monotonic() + WAIT_S
    while True:
        try:
            if condition():
                return
        except Exception:
            if time.monotonic() > deadline:
                raise
        assert time.monotonic() < deadline, output.read_text() if output is not None else ""
        time.sleep(0.05)


def test_a_drill_and_a_change_of_the_config_from_the_dashboard(node: tuple[Path, Path]) -> None:
    runtime, config = node
    before = config.read_bytes()
    pid = status(runtime)["workers"][0]["engines"][0]["pid"]
    terminal = Tmux(runtime, [sys.executable, "-m", "shadowsup.supervisor.cli", "--runtime-dir", str(runtime), "tui", "--write"])
    try:
        terminal.sees("toy ● running", "└ chat.1", "● healthy", "Kill")
        terminal.press("x")
        terminal.sees("Kill chat.1, as a drill?", f"pid {pid}", "chat.2 takes over")
        terminal.press("Right", "Enter")
        until(lambda: all(e["pid"] != pid for e in status(runtime)["workers"][0]["engines"]))
        terminal.press("2")
        terminal.sees("chat.1 → chat.2", "frozen", "promoted", "refilled", "◍ parked")
        terminal.press("]", "]")
        terminal.sees("it was a drill: SIGKILL to chat.1")

        # The config: one word more, in its place; every other byte as it was.
        terminal.press("4")
        terminal.sees("GREETING: hello", "no problems")
        terminal.press("C-End")
        terminal.type("_you")
        terminal.sees("GREETING: hello_you", "modified")
        terminal.press("C-s")
        terminal.sees("+      GREETING: hello_you", "Consequences", "chat", "Apply")
        assert config.read_bytes() == before
        terminal.press("Right", "Right", "Enter")
        until(lambda: config.read_bytes() == before.replace(b"hello", b"hello_you"))
        until(lambda: (status(runtime).get("reload") or {}).get("state") == "done")
        terminal.sees("reload 1 done", "Undo apply")
        terminal.press("F9")
        terminal.sees("Bring back r1")
        terminal.press("Right", "Enter")
        until(lambda: config.read_bytes() == before)
        until(lambda: (status(runtime).get("reload") or {}).get("state") == "done")
        assert status(runtime)["workers"][0]["state"] in ("healthy", "degraded")
        terminal.press("q")
    finally:
        terminal.close()


def test_a_node_that_is_started_with_its_dashboard_is_stopped_with_it_if_wished(tmp_path: Path) -> None:
    config, runtime = tmp_path / "node.yaml", tmp_path / "run"
    config.write_text(COMMAND.format(state=tmp_path / "state", python=sys.executable))
    command = [sys.executable, "-m", "shadowsup.supervisor.cli", "--runtime-dir", str(runtime), "start", str(config), "--tui"]
    terminal = Tmux(tmp_path, command)
    try:
        terminal.sees("together ● running", "files.1", "● healthy")
        terminal.press("q")
        terminal.sees("What about node together?", "Leave it running")
        terminal.press("Right", "Enter")
        until(lambda: not runtime.exists())
        terminal.sees("stopped")
    finally:
        terminal.close()
        subprocess.run([*command[:5], "stop"], check=False, capture_output=True)
