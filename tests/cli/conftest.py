"""Fixtures for command-line tests: a runtime directory, a run of the command line in this process, and one as a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from cli_fakes import FakeSupervisor

from shadowsup.supervisor.cli.app import run

Serve = Callable[..., FakeSupervisor]


@dataclass(frozen=True)
class Output:
    code: int
    out: str
    err: str


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """No test sees this user's nodes or leaves files in their home."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name in ("XDG_STATE_HOME", "SHADOWSUP_RUNTIME_DIR", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "home"


@pytest.fixture
def folder() -> Iterator[Path]:
    """A short, private runtime directory (socket paths are limited to 107 bytes)."""
    with tempfile.TemporaryDirectory(prefix="ssc-") as path:
        yield Path(path)


@pytest.fixture
def cli(capfd: pytest.CaptureFixture[str]) -> Callable[..., Output]:
    """Run a command line in this process."""

    def call(*arguments: object) -> Output:
        code = run([str(argument) for argument in arguments])
        found = capfd.readouterr()
        return Output(int(code), found.out, found.err)

    return call


@pytest.fixture
def spawn() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start ``shadowsup`` as a process of its own; what still runs at the end of the test is killed."""
    processes: list[subprocess.Popen[str]] = []

    def start(*arguments: object, **environ: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-m", "shadowsup.supervisor.cli", *(str(argument) for argument in arguments)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | environ,
        )
        processes.append(process)
        return process

    yield start
    for process in processes:
        if process.poll() is None:
            process.kill()
        process.communicate()
