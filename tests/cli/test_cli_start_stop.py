"""``start`` and ``stop``: in the foreground, detached, twice, failing, and after a supervisor that died."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cli_fakes import STATUS, FakeSupervisor, Refusal, until

from shadowsup.supervisor import identity as ids
from shadowsup.supervisor.registry import Entry, Registry

Cli = Callable[..., Any]
FAKE = Path(__file__).parent / "cli_fake_node.py"
CONFIG = """\
version: 1
node: {name: demo, state_dir: STATE}
workers:
  - {name: chat, engine: transformers, model: x}
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "node.yaml"
    path.write_text(CONFIG.replace("STATE", str(tmp_path / "state")))
    return path


Node = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def node(folder: Path) -> Iterator[Node]:
    """Run ``shadowsup`` with the fake node to its end; a node that it left in the background is killed after the test."""

    def run(*arguments: object, how: str = "ok") -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, str(FAKE), "--runtime-dir", str(folder), *(str(argument) for argument in arguments)],
            capture_output=True,
            text=True,
            timeout=30,
            env=os.environ | {"FAKE_NODE": how},
        )

    yield run
    record = folder / "node.json"
    if record.exists():
        os.kill(json.loads(record.read_text())["pid"], signal.SIGKILL)


def background_pid(folder: Path) -> int:
    return int(json.loads((folder / "node.json").read_text())["pid"])


# --- start ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_in_the_foreground_each_step_is_a_line_and_a_signal_stops_it(config: Path, folder: Path, number: signal.Signals) -> None:
    process = subprocess.Popen(
        [sys.executable, str(FAKE), "--runtime-dir", str(folder), "start", str(config)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline().endswith("first step\n")
    assert process.stdout.readline().endswith("serving chat\n")
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert (out, err, process.returncode) == ("", "", 0)


def test_detached_it_goes_on_and_stop_waits_for_its_end(config: Path, folder: Path, node: Node, tmp_path: Path) -> None:
    started = node("start", config, "-d")
    assert started.returncode == 0, started.stderr
    pid = background_pid(folder)
    assert started.stdout == f"started: pid {pid}, in {folder}\n"
    assert "first step" in started.stderr
    assert os.getsid(pid) not in (os.getsid(0), os.getpid())
    until(lambda: "serving chat" in (tmp_path / "state/logs/supervisor.log").read_text())  # said once it answers
    stopped = node("stop")
    assert (stopped.returncode, stopped.stdout) == (0, "stopped\n")
    assert ids.of(pid) is None or not ids.alive(ids.of(pid))  # type: ignore[arg-type]
    assert node("stop").returncode == 3


def test_detached_with_wait_it_returns_when_every_worker_is_healthy(config: Path, node: Node) -> None:
    started = node("start", config, "-d", "--wait")
    assert started.returncode == 0
    assert started.stdout.startswith("healthy after ")


def test_detached_with_wait_a_worker_that_is_down_is_a_failure_with_its_reason(config: Path, node: Node) -> None:
    started = node("start", config, "-d", "--wait", how="down")
    assert started.returncode == 1
    assert "worker chat is down: exits at once" in started.stderr


@pytest.mark.parametrize("detach", [[], ["-d"]])
def test_a_node_that_cannot_be_brought_up_says_why(config: Path, node: Node, detach: list[str]) -> None:
    started = node("start", config, *detach, how="fail")
    assert started.returncode == 1
    assert "port 8000 is taken by pid 1 (init)" in started.stderr
    assert "choose another gateway.listen" in started.stderr
    assert "Traceback" not in started.stderr


def test_detached_a_node_that_is_killed_while_it_starts_is_a_failure(config: Path, node: Node) -> None:
    started = node("start", config, "-d", how="crash")
    assert started.returncode == 1
    assert "was killed before the node was up" in started.stderr
    assert "supervisor.log" in started.stderr


def test_detached_a_node_that_ends_by_itself_has_its_exit_code(config: Path, node: Node) -> None:
    started = node("start", config, "-d", how="end")
    assert started.returncode == 7


@pytest.mark.parametrize("detach", [[], ["-d"]])
def test_a_bug_is_one_line_and_the_trace_is_kept(config: Path, node: Node, detach: list[str], tmp_path: Path) -> None:
    started = node("start", config, *detach, how="bug")
    assert started.returncode == 1
    assert "RuntimeError: a bug" in started.stderr
    assert "Traceback" not in started.stderr
    kept = tmp_path / ("state/logs/supervisor.log" if detach else "home/.local/state/shadowsup/errors.log")
    assert str(kept) in started.stderr
    assert "Traceback" in kept.read_text()


def test_a_second_start_is_refused_with_who_has_the_node(config: Path, folder: Path, cli: Cli) -> None:
    with FakeSupervisor(folder, {"status": STATUS}):
        for extra in ([], ["-d"]):
            result = cli("--runtime-dir", folder, "start", config, *extra)
            assert result.code == 100
            assert f"supervised already by pid {os.getpid()}, in {folder}" in result.err


def test_a_wrong_config_starts_nothing(tmp_path: Path, folder: Path, cli: Cli) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text("version: 1\nworkers:\n  - {name: chat, engine: vllm, model: x, shadow: 1}\n")
    result = cli("--runtime-dir", folder / "run", "start", path)
    assert result.code == 2
    assert "did you mean 'shadows'?" in result.err
    assert not (folder / "run").exists()


def test_the_dashboard_wants_a_terminal_before_anything_is_started(config: Path, folder: Path, cli: Cli) -> None:
    for arguments in (("start", config, "--tui"), ("tui",), ("tui", "--replay", "none")):
        result = cli("--runtime-dir", folder, *arguments)
        assert result.code == 2
        assert "needs a terminal" in result.err
    assert "neither" in cli("tui", "--replay", "x", "--write").err


def test_a_state_directory_that_cannot_be_written_is_told(tmp_path: Path, config: Path, folder: Path, cli: Cli) -> None:
    (tmp_path / "state").touch()
    result = cli("--runtime-dir", folder, "start", config, "-d")
    assert result.code == 1
    assert "supervisor.log" in result.err


# --- stop -------------------------------------------------------------------------------------------------------------------


def test_stop_of_one_worker_waits_until_its_engines_are_gone(folder: Path, cli: Cli) -> None:
    looks = iter([("healthy", "active"), ("draining", "active"), ("stopped", "stopping"), ("stopped", "gone")])

    def status(_: dict[str, Any]) -> dict[str, Any]:
        state, engine = next(looks)
        return {
            "workers": [
                {"name": "other", "state": "healthy"},
                {"name": "chat", "state": state, "engines": [{"id": "chat.1", "state": engine, "inflight": 3}]},
            ]
        }

    with FakeSupervisor(folder, {"status": status, "stop": {}}) as supervisor:
        result = cli("--runtime-dir", folder, "stop", "chat")
    assert (result.code, result.out) == (0, "chat: stopped\n")
    assert "chat: draining, chat.1 left" in result.err
    assert result.err.startswith("chat has 1 engine and 3 requests in flight;")
    assert supervisor.asked[1] == ("stop", {"worker": "chat"})


def test_a_stop_that_takes_too_long_can_be_left(folder: Path, cli: Cli) -> None:
    with FakeSupervisor(folder, {"status": STATUS, "stop": {}}):
        result = cli("--runtime-dir", folder, "stop", "--timeout", "0.3")
    assert result.code == 1
    assert "still stopping" in result.err
    assert "chat.2: active" in result.err


def test_a_stop_that_is_refused_says_why(folder: Path, cli: Cli) -> None:
    def refuse(_: dict[str, Any]) -> None:
        raise Refusal("not now", "later")

    with FakeSupervisor(folder, {"stop": refuse}):
        result = cli("--runtime-dir", folder, "stop")
    assert (result.code, result.err) == (1, "shadowsup: not now\n    later\n")


def test_a_supervisor_that_hangs_is_named_with_what_to_do(folder: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shadowsup.supervisor.cli.stop._ANSWER_S", 0.1)
    with FakeSupervisor(folder, {}):
        result = cli("--runtime-dir", folder, "stop")
    assert result.code == 4
    assert f"kill -9 {os.getpid()}" in result.err


# --- stop after a supervisor that died --------------------------------------------------------------------------------------

Stray = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture
def stray() -> Iterator[Stray]:
    """Start a process in a session of its own that says when it is ready."""
    processes: list[subprocess.Popen[bytes]] = []

    def start(code: str = "", **environ: str) -> subprocess.Popen[bytes]:
        script = f"import signal, subprocess, sys, time\n{code}\nprint(flush=True)\ntime.sleep(600)"
        process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, start_new_session=True, env=os.environ | environ)
        processes.append(process)
        assert process.stdout is not None
        process.stdout.readline()
        return process

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def record(folder: Path, *entries: tuple[subprocess.Popen[bytes], str, str]) -> None:
    registry = Registry(folder / "processes.json")
    for process, what, tag in entries:
        identity = ids.of(process.pid)
        assert identity is not None
        registry.record(Entry(identity=identity, what=what, engine="chat.1" if what == "engine" else "", tag=tag, pgid=process.pid))


def test_what_a_dead_supervisor_left_is_ended_in_order_and_cleaned(folder: Path, cli: Cli, stray: Stray) -> None:
    keeper, engine, gateway = stray(), stray(), stray()
    record(folder, (keeper, "keeper", ""), (engine, "engine", ""), (gateway, "gateway", ""))
    (folder / "keeper.sock").touch()
    (folder / "engines").mkdir()
    result = cli("--runtime-dir", folder, "stop")
    assert result.code == 0
    assert [line.split()[1] for line in result.err.splitlines()] == ["gateway", "engine", "keeper"]
    assert f"ended what it had left: gateway (pid {gateway.pid}), engine chat.1 (pid {engine.pid}), keeper (pid {keeper.pid})" in result.out
    assert [process.wait(60) for process in (gateway, engine, keeper)] == [-signal.SIGTERM] * 3
    assert not folder.exists()
    folder.mkdir()


def test_what_does_not_go_by_itself_is_killed_with_its_whole_tree(folder: Path, stray: Stray) -> None:
    from shadowsup.supervisor.cli.leftovers import end_leftovers

    # The helper leaves the session, as a daemon would; its environment still tells whose it is.
    engine = stray(
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "helper = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], start_new_session=True)\n"
        "print(helper.pid, flush=True)",
        SHADOWSUP_ENGINE="demo/chat.1/x",
    )
    children = Path(f"/proc/{engine.pid}/task/{engine.pid}/children").read_text().split()
    record(folder, (engine, "engine", "demo/chat.1/x"))
    assert end_leftovers(folder, lambda _: None, grace_s=0.2) == [f"engine chat.1 (pid {engine.pid})"]
    assert engine.wait(5) == -signal.SIGKILL
    assert len(children) == 1
    until(lambda: (stat := ids.read_stat(int(children[0]))) is None or stat.dead)
    folder.mkdir()


def test_a_stranger_that_has_the_pid_now_is_left_alone(folder: Path, cli: Cli, stray: Stray) -> None:
    stranger = stray()
    identity = ids.of(stranger.pid)
    assert identity is not None
    before = ids.Identity(pid=identity.pid, start_time=identity.start_time - 100, boot_id=identity.boot_id)
    Registry(folder / "processes.json").record(Entry(identity=before, what="engine", pgid=stranger.pid))
    result = cli("--runtime-dir", folder, "stop")
    assert (result.code, result.out) == (0, "no supervisor was running; ended what it had left: files only\n")
    assert stranger.poll() is None
    folder.mkdir()


def test_nothing_running_and_nothing_left_is_not_running(folder: Path, cli: Cli) -> None:
    (folder / "something-else").touch()
    assert cli("--runtime-dir", folder, "stop").code == 3
    assert (folder / "something-else").exists()
    assert cli("--runtime-dir", folder / "nowhere", "stop").code == 3


def test_a_broken_list_of_processes_stops_the_cleaning(folder: Path, cli: Cli) -> None:
    (folder / "processes.json").write_text("nonsense")
    result = cli("--runtime-dir", folder, "stop")
    assert result.code == 1
    assert "not a list of processes" in result.err
    assert (folder / "processes.json").exists()
