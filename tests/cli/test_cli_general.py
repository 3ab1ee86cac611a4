"""The command line as a whole: fast, quiet, and without a trace of Python."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cli_fakes import STATUS, FakeSupervisor

from shadowsup import __version__
from shadowsup.supervisor.cli.verbs import VERBS

Cli = Callable[..., Any]
Spawn = Callable[..., subprocess.Popen[str]]
CONFIGS = Path(__file__).parents[2] / "configs"


def imports(*arguments: object) -> set[str]:
    """Return the modules that a command line imports."""
    process = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "shadowsup.supervisor.cli", *(str(argument) for argument in arguments)],
        capture_output=True,
        text=True,
    )
    return {line.rpartition("|")[2].strip() for line in process.stderr.splitlines() if line.startswith("import time:")}


def test_version(cli: Cli) -> None:
    assert cli("version").out.startswith(f"shadowsup {__version__} (Python ")
    assert json.loads(cli("version", "-o", "json").out)["version"] == __version__
    assert cli("--version").out == f"shadowsup {__version__}\n"


def test_help_names_every_verb_and_the_exit_codes(cli: Cli) -> None:
    text = cli("--help").out
    assert all(f"  {verb} " in text for verb in VERBS)
    assert "100 supervised already" in text
    assert max(len(line) for line in text.splitlines()) <= 80


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_a_help_that_fits(cli: Cli, verb: str) -> None:
    result = cli(verb, "--help")
    assert result.code == 0
    assert len(result.out.splitlines()) > 4
    assert max(len(line) for line in result.out.splitlines()) <= 80


def test_what_is_not_needed_is_not_imported(folder: Path) -> None:
    heavy = {"torch", "textual", "pydantic", "numpy", "aiohttp", "asyncio", "yaml", "psutil", "prometheus_client"}
    assert not imports("version") & (heavy | {"zmq", "msgspec", "shadowsup.supervisor.cli.status"})
    assert not imports("--help") & (heavy | {"zmq", "msgspec"})
    with FakeSupervisor(folder, {"status": STATUS}):
        used = imports("--runtime-dir", folder, "status")
    # pyzmq itself imports asyncio in some versions; nothing of ours does.
    assert "zmq" in used
    assert not used & (heavy - {"asyncio"})


def test_version_and_status_are_fast(folder: Path) -> None:
    def best_of_five(*arguments: object) -> float:
        times = []
        for _ in range(5):
            began_s = time.perf_counter()
            subprocess.run(
                [sys.executable, "-m", "shadowsup.supervisor.cli", *(str(argument) for argument in arguments)],
                check=True,
                capture_output=True,
            )
            times.append(time.perf_counter() - began_s)
        return min(times)

    assert best_of_five("version") < 0.25
    with FakeSupervisor(folder, {"status": STATUS}):
        assert best_of_five("--runtime-dir", folder, "status") < 0.4


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["statsu"], "did you mean 'status'?"),
        (["status", "--ouput", "json"], "--output"),
        (["status", "-o", "xml"], "table"),
        (["kill"], "ENGINE"),
        (["failover"], "WORKER"),
        (["config", "shw"], "shw"),
        (["start"], "CONFIG"),
    ],
)
def test_a_usage_error_is_exit_code_2_and_names_the_help(cli: Cli, arguments: list[str], told: str) -> None:
    result = cli(*arguments)
    assert result.code == 2
    assert told in result.err
    assert "--help" in result.err
    assert result.out == ""


def test_an_unexpected_error_is_one_line_and_the_trace_is_kept(cli: Cli, monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    def explode() -> None:
        raise ZeroDivisionError("first line\nsecond line")

    monkeypatch.setattr("platform.python_version", explode)
    result = cli("version")
    kept = home / ".local/state/shadowsup/errors.log"
    assert result.code == 1
    assert result.err == f"shadowsup: unexpected ZeroDivisionError: first line\n    the full trace is in {kept}\n"
    assert "second line" in kept.read_text()
    assert kept.stat().st_mode & 0o777 == 0o600


def test_the_trace_is_kept_elsewhere_when_home_cannot_be_written(cli: Cli, monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    def explode() -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("platform.python_version", explode)
    home.touch()
    result = cli("version")
    kept = Path(result.err.strip().rpartition(" ")[2])
    assert "Traceback" in kept.read_text()
    kept.unlink()


def test_a_reader_that_has_enough_is_no_error(folder: Path) -> None:
    many = {"schema": 1, "events": [{"n": n, "ts": 0, "event": "x", "message": "y" * 60} for n in range(20_000)]}
    with FakeSupervisor(folder, {"events": many}):
        process = subprocess.Popen(
            [sys.executable, "-m", "shadowsup.supervisor.cli", "--runtime-dir", str(folder), "events"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        assert process.stdout is not None and process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        err = process.stderr.read()
        process.stderr.close()
        assert (process.wait(60), err) == (0, b"")


def test_a_standard_output_that_is_full_is_an_error_in_words(folder: Path) -> None:
    with Path("/dev/full").open("w") as full:
        process = subprocess.run(
            [sys.executable, "-m", "shadowsup.supervisor.cli", "version"], stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert process.returncode == 1
    assert "No space left" in process.stderr
    assert "Traceback" not in process.stderr


# --- validate and config ----------------------------------------------------------------------------------------------------


def test_validate_is_one_line_when_all_is_well(cli: Cli) -> None:
    path = CONFIGS / "node.yaml"
    assert cli("validate", path).out == f"{path}: ok (node demo, 1 worker: chat)\n"
    assert json.loads(cli("validate", path, "-o", "json").out) == {"schema": 1, "ok": True, "problems": [], "warnings": []}


def test_validate_tells_everything_on_stderr_and_as_json(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text("version: 1\nnode:\n\tname: x\nworkers:\n  - {name: a, engine: transformers, model: '${NOPE}', shadow: 1}\n")
    result = cli("validate", path)
    assert (result.code, result.out) == (2, "")
    assert [line.split(":")[1:3] for line in result.err.splitlines() if str(path) in line] == [["3", "1"], ["5", "45"], ["5", "55"]]
    assert result.err.endswith("3 errors\n")
    found = json.loads(cli("validate", path, "-o", "json").out)
    assert found["ok"] is False
    assert [problem["line"] for problem in found["problems"]] == [3, 5, 5]
    missing = json.loads(cli("validate", tmp_path / "nope.yaml", "-o", "json").out)
    assert "no such file" in missing["problems"][0]["message"]


def test_warnings_are_told_and_are_no_errors(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "open.yaml"
    path.write_text("version: 1\ngateway: {listen: '0.0.0.0:80'}\nworkers:\n  - {name: a, engine: transformers, model: x}\n")
    result = cli("validate", path)
    assert result.code == 0
    assert f"warning: {path}:2:19: gateway.listen" in result.err


def test_the_effective_config_and_the_schema_are_shown(cli: Cli) -> None:
    text = cli("config", "show", CONFIGS / "node.yaml").out
    assert "give_up_after: auto" in text
    assert json.loads(cli("config", "show", CONFIGS / "node.yaml", "-o", "json").out)["workers"][0]["kv"]["size"] == "256MiB"
    assert json.loads(cli("config", "schema").out) == json.loads((CONFIGS / "node.schema.json").read_text())


def test_the_config_of_the_running_node_is_shown_without_naming_it(cli: Cli, folder: Path) -> None:
    (folder / "node.json").write_text(json.dumps({"config": str(CONFIGS / "node.yaml")}))
    with FakeSupervisor(folder, {}):
        assert "name: demo" in cli("--runtime-dir", folder, "config", "show").out
    (folder / "node.json").write_text("{}")
    result = cli("--runtime-dir", folder, "config", "show")
    assert result.code == 2
    assert "name the file" in result.err


def test_it_runs_as_a_module_and_as_a_script() -> None:
    script = Path(sys.executable).with_name("shadowsup")
    for command in ([sys.executable, "-m", "shadowsup.supervisor.cli"], [str(script)]):
        if command[0] == str(script) and not os.access(script, os.X_OK):
            continue
        assert subprocess.run([*command, "version"], capture_output=True, check=True).stdout.startswith(b"shadowsup ")
