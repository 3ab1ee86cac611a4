"""Fixtures of the engine side's tests."""

from __future__ import annotations

import pytest
import sdk_world

world = pytest.fixture(sdk_world.world)
