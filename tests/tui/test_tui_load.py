"""A large node costs next to nothing to look at. The figures themselves are ``benchmarks/tui_load.py``'s, on a quiet machine; here the
bounds are wide, for machines that do other things as well, and still far below what a dashboard costs that draws everything anew."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest


@pytest.mark.e2e
def test_64_engines_and_8_gpus_are_cheap_to_watch_and_keys_are_answered_at_once() -> None:
    spec = importlib.util.spec_from_file_location("tui_load", Path(__file__).parents[2] / "benchmarks" / "tui_load.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found = module.measure(seconds=2.0, keys=4, lines=100_000)
    assert found["overview_core_share"] < 0.25
    assert found["key_to_screen_s"]["p50"] < 0.5
    assert found["log_scroll_s"]["p50"] < 0.5
    assert found["log_lines"] == 100_000
    assert found["rss"] < 400 << 20
    assert 10_000 < found["overview_bytes_per_s"] < 1_000_000  # the figures do change, and not everything is drawn for it
