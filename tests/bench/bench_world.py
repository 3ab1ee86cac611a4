"""A node of the toy engine, for benches that start their own."""

from __future__ import annotations

import os
import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]
ENGINE_PATH = os.pathsep.join(filter(None, [str(TESTS), os.environ.get("PYTHONPATH", "")]))
"""Engines run the code that the tests run; PYTHONSAFEPATH keeps the current folder out of it."""
START = (sys.executable, str(TESTS / "supervisor" / "node_world.py"), "{config}", "{runtime}")
ADAPTERS = {"transformers": "fake_engine:create"}
