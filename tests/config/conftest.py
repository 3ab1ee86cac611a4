"""Fixtures for config tests: a config from text, and the problems of one."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from shadowsup.supervisor.config import ConfigError, LoadedConfig, load
from shadowsup.supervisor.errors import Problem

Load = Callable[..., LoadedConfig]
Problems = Callable[..., list[Problem]]

MINIMAL = """\
version: 1
workers:
  - name: chat
    engine: transformers
    model: x
"""


@pytest.fixture
def load_text(tmp_path: Path) -> Load:
    """Load dedented text as a file; variables come from ``environ`` alone."""

    def run(text: str, environ: Mapping[str, str] | None = None) -> LoadedConfig:
        path = tmp_path / "node.yaml"
        path.write_text(textwrap.dedent(text))
        return load(path, environ or {})

    return run


@pytest.fixture
def problems(load_text: Load) -> Problems:
    """Return the problems of a text that must not load."""

    def run(text: str, environ: Mapping[str, str] | None = None) -> list[Problem]:
        with pytest.raises(ConfigError) as caught:
            load_text(text, environ)
        return list(caught.value.problems)

    return run


@pytest.fixture
def worker_problems(problems: Problems) -> Problems:
    """Return the problems of a minimal worker with more lines (from line 6 on, indented by 4)."""

    def run(lines: str, environ: Mapping[str, str] | None = None) -> list[Problem]:
        return problems(MINIMAL + textwrap.indent(textwrap.dedent(lines).strip("\n"), "    ") + "\n", environ)

    return run
