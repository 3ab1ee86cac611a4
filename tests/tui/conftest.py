"""A dashboard before a fake node, driven by keys."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tui_driver import driving
from tui_node import FakeNode

from shadowsup.tui.feed import LiveFeed


@pytest.fixture(autouse=True)
def same_everywhere(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The zone of the clock and the colours of the terminal are those of no machine."""
    monkeypatch.setenv("TZ", "UTC")
    monkeypatch.setenv("COLORTERM", "truecolor")
    for name in ("NO_COLOR", "VISUAL", "EDITOR", "TEXTUAL"):
        monkeypatch.delenv(name, raising=False)
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.fixture
def node() -> Iterator[FakeNode]:
    # A short name: how long it is decides where lines break.
    with tempfile.TemporaryDirectory(prefix="sst-") as folder, FakeNode(Path(folder) / "run") as fake:
        yield fake


@pytest.fixture
def drive(node: FakeNode) -> Callable[..., Any]:
    """Return a function that runs a dashboard before ``node``."""

    def run(**options: Any) -> Any:
        return driving(LiveFeed(node.folder, look_s=0.05), **options)

    return run
