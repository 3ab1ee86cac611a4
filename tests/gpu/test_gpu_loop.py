"""A loop of one's own with its memory on a GPU goes on after kill -9, as it does on the CPU (tests/workers/test_loop_life.py)."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "workers"))

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]


def test_a_loop_over_device_memory_goes_on_after_kill_9(device: str) -> None:
    from sdk_world import World
    from test_loop_life import a_loop_on_a_device_goes_on

    world = World("cuda")
    try:
        loops = a_loop_on_a_device_goes_on(world, gpus=(device,))
        assert loops.lines == ["cuda [122, 121, 120]", "cuda [122, 121, 120]", "nothing", "kept"]
    finally:
        world.close()
