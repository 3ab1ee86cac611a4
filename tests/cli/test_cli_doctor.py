"""The verb ``doctor``: its lines, its JSON, its exit code."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parents[1] / "supervisor"))
from doctor_world import FakeMachine, gpu, with_gpus

Cli = Callable[..., Any]
CONFIG = """\
version: 1
workers:
  - {name: chat, engine: transformers, model: /m, gpus: [0], shadows: 2}
  - {name: web, engine: command, command: [x, "{port}"], ready: {http: /}}
"""


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> FakeMachine:
    fake = FakeMachine()
    monkeypatch.setattr("shadowsup.supervisor.doctor.machine.ThisMachine", lambda: fake)
    return fake


def test_a_line_a_check_and_the_sum(cli: Cli, machine: FakeMachine) -> None:
    machine.probes = with_gpus(gpu(compute_mode=3))
    result = cli("doctor")
    assert result.code == 0, result.err  # a warning is no failure
    lines = result.out.splitlines()
    assert lines[0] == "ok       python        3.12.3, /usr/bin/python3"
    (number,) = [n for n, line in enumerate(lines) if line.startswith("warning  compute-mode")]
    assert lines[number + 1].split("→ ")[1] == "nvidia-smi -i 0 -c DEFAULT"
    assert lines[-1].endswith("1 warning, 0 failed")


def test_with_a_config_what_it_needs_decides_the_exit_code(cli: Cli, machine: FakeMachine, tmp_path: Path) -> None:
    path = tmp_path / "node.yaml"
    path.write_text(CONFIG)
    result = cli("doctor", path, "-o", "json")
    answer = json.loads(result.out)
    assert (result.code, answer["schema"], answer["ok"]) == (1, 1, False)
    failed = [check for check in answer["checks"] if check["level"] == "failed"]
    assert [check["check"] for check in failed] == ["driver"]
    assert all(set(check) == {"check", "level", "evidence", "remedy"} for check in answer["checks"])
    machine.probes = with_gpus(gpu())
    assert cli("doctor", path).code == 0


def test_quiet_shows_what_is_not_ok(cli: Cli, machine: FakeMachine) -> None:
    machine.taken = "127.0.0.1:8000: the port is taken by pid 5 (nginx), user root"
    lines = cli("doctor", "-q").out.splitlines()
    assert not any(line.startswith("ok ") for line in lines)
    assert any(line.startswith("warning  port") for line in lines)


def test_a_config_that_is_wrong_is_told_as_ever(cli: Cli, machine: FakeMachine, tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text("version: 2\n")
    result = cli("doctor", tmp_path / "bad.yaml")
    assert (result.code, result.out) == (2, "")
    assert "bad.yaml:1:" in result.err
