"""The examples that come with the program are there, are what they say, and are current."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shadowsup.supervisor import examples
from shadowsup.supervisor.config.loader import loads

Cli = Callable[..., Any]
ROOT = Path(__file__).parents[2]
COMPLETIONS = {"bash": "shadowsup", "zsh": "_shadowsup", "fish": "shadowsup.fish"}


def test_each_file_of_the_folder_is_an_example_by_its_name(cli: Cli) -> None:
    there = {str(path.relative_to(ROOT / "configs")) for path in (ROOT / "configs").rglob("*") if path.is_file() and path.suffix != ".pyc"}
    assert set(cli("config", "example").out.split()) == there
    assert cli("config", "example", "prometheus/alerts.yaml").out == (ROOT / "configs/prometheus/alerts.yaml").read_text()
    assert cli("config", "example", "alerts.yaml").out == (ROOT / "configs/prometheus/alerts.yaml").read_text()
    wrong = cli("config", "example", "shadow")
    assert (wrong.code, "there are: command.yaml" in wrong.err) == (2, True)


@pytest.mark.parametrize("name", [name for name in examples.names() if name.endswith(".yaml") and "/" not in name])
def test_every_example_of_a_config_is_right(name: str) -> None:
    loaded = loads(examples.read(name), ROOT / "configs" / name, environ={})
    assert loaded.config.workers


@pytest.mark.parametrize("shell", COMPLETIONS)
def test_the_completion_files_are_what_the_verb_prints(cli: Cli, shell: str) -> None:
    shipped = examples.read(f"completions/{COMPLETIONS[shell]}")
    assert cli("completion", shell).out == shipped, f"run: shadowsup completion {shell} > configs/completions/{COMPLETIONS[shell]}"
