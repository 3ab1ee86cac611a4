"""``completion``: what a shell asks for, and what it gets."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cli_fakes import STATUS, FakeSupervisor

from shadowsup.supervisor.cli.verbs import VERBS

Cli = Callable[..., Any]


def completed(line: str, folder: Path) -> list[str]:
    """Return what is offered at the end of a command line, as a shell asks for it."""
    words = line.split(" ")
    environ = {"_SHADOWSUP_COMPLETE": "bash_complete", "COMP_WORDS": line, "COMP_CWORD": str(len(words) - 1)}
    done = subprocess.run(
        [sys.executable, "-m", "shadowsup.supervisor.cli"],
        env=os.environ | environ | {"SHADOWSUP_RUNTIME_DIR": str(folder)},
        capture_output=True,
        text=True,
    )
    assert done.stderr == ""
    return [entry.partition(",")[2] for entry in done.stdout.splitlines() if entry]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_shell_gets_a_script_that_it_accepts(cli: Cli, shell: str, tmp_path: Path) -> None:
    result = cli("completion", shell)
    assert (result.code, result.err) == (0, "")
    assert f"_SHADOWSUP_COMPLETE={shell}_complete" in result.out
    if (found := shutil.which(shell)) is not None:
        script = tmp_path / "script"
        script.write_text(result.out)
        subprocess.run([found, "-n", str(script)], check=True)


def test_verbs_options_workers_and_engines_are_completed(folder: Path) -> None:
    with FakeSupervisor(folder, {"status": STATUS}):
        assert completed("shadowsup re", folder) == [verb for verb in VERBS if verb.startswith("re")]
        assert "--no-wait" in completed("shadowsup restart --", folder)
        assert completed("shadowsup failover ", folder) == ["chat"]
        assert completed("shadowsup kill ch", folder) == ["chat.2", "chat.3"]
        assert completed("shadowsup config sh", folder) == ["show"]


def test_without_a_node_there_is_nothing_to_complete_and_no_noise(folder: Path) -> None:
    assert completed("shadowsup failover ", folder) == []


def test_verbs_are_completed_without_importing_them(folder: Path) -> None:
    environ = {"_SHADOWSUP_COMPLETE": "bash_complete", "COMP_WORDS": "shadowsup s", "COMP_CWORD": "1"}
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "shadowsup.supervisor.cli"], env=os.environ | environ, capture_output=True, text=True
    )
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert not imported & {"shadowsup.supervisor.cli.status", "shadowsup.supervisor.cli.start", "zmq"}


def test_another_shell_is_a_usage_error(cli: Cli) -> None:
    assert cli("completion", "tcsh").code == 2
