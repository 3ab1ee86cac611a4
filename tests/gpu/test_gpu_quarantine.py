"""Kernels of a killed engine go on writing for some milliseconds. What follows for its successor, proven in both directions.

The dead engine was writing blocks that are not valid; the reserve it never had. Between the end of file of its lifeline and its pidfd a
successor that keeps the rule writes reserve blocks only.
"""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from gpu_child import Engine
from gpu_rig import MIB, Child, ends, export, start_engine

pytestmark = pytest.mark.gpu

BLOCK, BLOCKS, RESERVE = 2 * MIB, 32, 8
IN_FLIGHT = (BLOCKS - RESERVE) * BLOCK
OURS = 0x77


class Scene:
    """Shared blocks, mapped here and in an engine whose kernel writes all of them but the reserve, without end."""

    def __init__(self, engine: Engine, exporter: Child, device: str) -> None:
        self.engine = engine
        (fd,), _ = export(exporter, BLOCKS * BLOCK)
        engine.map([fd], [BLOCKS * BLOCK], "read-write")
        self.span = len(engine.spans) - 1
        engine.fill(self.span, 0, BLOCKS * BLOCK, 0)
        self.dying, _ = start_engine(device)
        self.dying.ask("prepare")
        self.dying.ask("map", [fd], sizes=[BLOCKS * BLOCK], access="read-write")
        (self.lifeline,), _ = self.dying.lifeline_at(900)
        self.pidfd = os.pidfd_open(self.dying.process.pid)
        os.close(fd)

    def kill_while_it_writes(self) -> float:
        """Return the seconds from SIGKILL to the end of file of the lifeline: the moment a successor begins."""
        self.dying.ask("scribble", span=0, offset=0, size=IN_FLIGHT, for_s=10.0)
        while self.engine.digest(self.span, IN_FLIGHT - 4096, 4096)["distinct"] == [0]:
            pass
        killed = time.perf_counter()
        self.dying.process.send_signal(signal.SIGKILL)
        ((_, seconds),) = ends({self.lifeline.fileno(): "lifeline"}, killed)
        return seconds

    def fence(self) -> None:
        """Wait until the process is gone, and with it its work on the GPU."""
        assert select.select([self.pidfd], [], [], 10)[0]

    def write(self, offset: int, size: int) -> None:
        assert self.engine.fill(self.span, offset, size, OURS) == {"refused": ""}

    def foreign(self, offset: int, size: int) -> bool:
        """Whether there is anything in these bytes that we did not write."""
        distinct = self.engine.digest(self.span, offset, size)["distinct"]
        return bool(distinct != [OURS])

    def close(self) -> None:
        self.dying.close()
        os.close(self.pidfd)
        self.lifeline.close()
        self.engine.spans.pop().close()


@contextmanager
def scene(engine: Engine, exporter: Child, device: str) -> Iterator[Scene]:
    made = Scene(engine, exporter, device)
    try:
        yield made
    finally:
        made.close()


@pytest.mark.parametrize("attempt", range(3))
def test_reserve_blocks_see_no_foreign_write(engine: Engine, exporter: Child, device: str, attempt: int) -> None:
    with scene(engine, exporter, device) as blocks:
        blocks.kill_while_it_writes()
        blocks.write(IN_FLIGHT, RESERVE * BLOCK)
        blocks.fence()
        assert not blocks.foreign(IN_FLIGHT, RESERVE * BLOCK)


@pytest.mark.parametrize("attempt", range(3))
def test_without_the_rule_the_dead_engine_overwrites_its_successor(engine: Engine, exporter: Child, device: str, attempt: int) -> None:
    with scene(engine, exporter, device) as blocks:
        blocks.kill_while_it_writes()
        blocks.write(0, IN_FLIGHT)
        blocks.fence()
        assert blocks.foreign(0, IN_FLIGHT), "writes were expected here; without them this test proves nothing"


def test_after_the_fence_quarantined_blocks_are_safe(engine: Engine, exporter: Child, device: str) -> None:
    with scene(engine, exporter, device) as blocks:
        blocks.kill_while_it_writes()
        blocks.fence()
        blocks.write(0, IN_FLIGHT)
        until = time.monotonic() + 0.2
        while time.monotonic() < until:
            assert not blocks.foreign(0, IN_FLIGHT)


def test_death_is_seen_long_before_the_fence(engine: Engine, exporter: Child, device: str) -> None:
    with scene(engine, exporter, device) as blocks:
        seconds = blocks.kill_while_it_writes()
        assert not select.select([blocks.pidfd], [], [], 0)[0], "the fence came first: the lifeline is worth nothing here"
        assert seconds < 0.02
        blocks.fence()
