"""A node of the toy engine, for benches that start their own."""

from __future__ import annotations

import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]
START = (sys.executable, str(TESTS / "supervisor" / "node_world.py"), "{config}", "{runtime}")
ADAPTERS = {"transformers": "fake_engine:create"}
