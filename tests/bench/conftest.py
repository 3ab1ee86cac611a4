"""A config of the toy engine, for benches that start a node of their own."""

from __future__ import annotations

from typing import Any

import pytest
from bench_world import ENGINE_PATH


@pytest.fixture
def content() -> dict[str, Any]:
    """Return a config whose one worker is the toy."""
    worker = {
        "name": "chat",
        "engine": "transformers",
        "model": "toy",
        "args": {"step_s": 0.01},
        "kv": {"size": "1MiB"},
        "env": {"PYTHONPATH": ENGINE_PATH, "PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": "1"},
        "stop": {"timeout": "5s"},
    }
    return {"version": 1, "workers": [worker]}
