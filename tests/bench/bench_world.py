"""A node of the toy engine, for benches that start their own, and the scripts of benchmarks/, which are no package."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType

TESTS = Path(__file__).parents[1]
ENGINE_PATH = os.pathsep.join(filter(None, [str(TESTS), os.environ.get("PYTHONPATH", "")]))
"""Engines run the code that the tests run; PYTHONSAFEPATH keeps the current folder out of it."""
START = (sys.executable, str(TESTS / "supervisor" / "node_world.py"), "{config}", "{runtime}")
ADAPTERS = {"transformers": "fake_engine:create"}


def benchmark(name: str) -> ModuleType:
    """Return the script of this name as a module of its own."""
    spec = importlib.util.spec_from_file_location(name, TESTS.parent / "benchmarks" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
