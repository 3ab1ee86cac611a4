"""The sensor as a process, with an NVML that answers, hangs, crashes, refuses or loses its GPU (P30)."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
import zmq
from fake_nvml import UUID

from shadowsup.supervisor import node_sensor
from shadowsup.supervisor.beats import BeatRouter
from shadowsup.supervisor.journal import Journal
from shadowsup.supervisor.node_sensor import SensorPart, gpu_status
from shadowsup.supervisor.part_process import PartHost
from shadowsup.supervisor.paths import NodePaths
from shadowsup.supervisor.policy.part import PartState
from shadowsup.supervisor.registry import Registry
from shadowsup.wire.engine import Report
from shadowsup.wire.sensor import GpuNews, GpuNewsKind, SensorBeat

WAIT_S = 30.0
GPU = {"uuid": UUID, "index": 0, "name": "H200", "memory_used": None, "memory_total": 1 << 37, "util": None, "state": "ok"}


class Quiet(SensorPart):
    """A sensor whose output goes nowhere."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.ended = asyncio.Event()

    def lost(self) -> None:
        self.ended.set()

    async def output(self) -> int:
        return os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)


class World:
    """The supervisor's end of a sensor, with a faked NVML behind it."""

    def __init__(self, folder: Path) -> None:
        self.says = folder / "nvml.json"
        self.news: list[GpuNews] = []
        self.beats: list[SensorBeat] = []
        self._changed = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        self.router = BeatRouter(self._context, folder / "beat.sock", self._heard)
        paths = NodePaths(runtime=folder, state=folder)
        self.journal = Journal(None)
        host = PartHost(paths=paths, journal=self.journal, registry=Registry(paths.processes), scribe=None, run_task=self._run)  # type: ignore[arg-type]
        self.sensor = Quiet(host, [UUID], self.router.endpoint, self.news.append, nvml="fake_nvml")

    def nvml(self, **says: Any) -> None:
        other = self.says.with_suffix(".new")
        other.write_text(json.dumps(says))
        other.rename(self.says)

    def _heard(self, peer: str, report: Report) -> bool:
        assert isinstance(report, SensorBeat)
        news = self.sensor.take_beat(report)
        self.beats.append(report)
        self._changed.set()
        return news

    def _run(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        return task

    async def until(self, condition: Callable[[SensorBeat], bool], since: int = 0) -> SensorBeat:
        """Return the newest of the beats that have come, from number ``since`` on, for which ``condition`` holds."""
        async with asyncio.timeout(WAIT_S):
            while True:
                self._changed.clear()
                for beat in reversed(self.beats[since:]):  # several may come at once, and only one of them with the news
                    if condition(beat):
                        return beat
                await self._changed.wait()

    async def next(self) -> SensorBeat:
        return await self.until(lambda beat: True, len(self.beats))

    async def close(self) -> None:
        await self.sensor.stop()
        self.sensor.close()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.router.close()
        self._context.term()


@pytest.fixture
async def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    path = os.pathsep.join(filter(None, (str(Path(__file__).parent), os.environ.get("PYTHONPATH"))))
    monkeypatch.setenv("PYTHONPATH", path)
    monkeypatch.setenv("FAKE_NVML", str(tmp_path / "nvml.json"))
    made = World(tmp_path)
    made.nvml()
    yield made
    await made.close()


async def test_figures_arrive_and_what_a_device_does_not_say_is_left_open(world: World) -> None:
    world.sensor.start()
    (reading,) = (await world.next()).gpus
    assert (reading.memory_used, reading.util, reading.power_w, reading.temperature_c) == (5 << 30, 87, 412.5, 51)
    assert reading.power_limit_w is None
    assert reading.throttled == ("hardware slowdown",)
    assert reading.processes == {os.getpid(): 1 << 30}
    found = gpu_status(GPU, world.sensor, {"weights": 2 << 30, "kv": 1 << 30}, [os.getpid()], time.monotonic())
    assert found["memory"] == {"weights": 2 << 30, "kv": 1 << 30, "engines": 1 << 30, "foreign": 1 << 30}
    assert (found["state"], found["stale"], found["memory_total"], found["clock_sm_mhz"]) == ("ok", False, 141 << 30, 1980)


async def test_in_a_container_memory_that_is_not_kept_is_said_to_be_other(world: World) -> None:
    world.sensor.start()
    await world.next()
    found = gpu_status(GPU, world.sensor, {"kv": 4 << 30}, [999_999_999], time.monotonic())
    assert found["memory"] == {"weights": 0, "kv": 4 << 30, "engines": None, "foreign": None, "other": 1 << 30}


async def test_an_xid_is_news_at_once_and_once(world: World) -> None:
    world.nvml(xid=79)
    world.sensor.start()
    beat = await world.until(lambda beat: bool(beat.news))
    (news,) = beat.news
    assert (news.kind, news.number, news.uuid) == (GpuNewsKind.XID, 79, UUID)
    await world.next()
    assert world.news == [news]


async def test_a_driver_that_tells_of_no_xid_is_read_all_the_same(world: World) -> None:
    world.nvml(no_events=True)
    world.sensor.start()
    await world.next()
    await world.next()


async def test_a_lost_gpu_is_said_and_shown(world: World) -> None:
    world.sensor.start()
    first = await world.next()
    world.nvml(lost=True)
    told = await world.until(lambda beat: beat.gpus[0].lost)
    assert (await world.next()).pid == told.pid == first.pid, "waiting for its Xids must not end the sensor"
    assert [news.kind for news in world.news] == [GpuNewsKind.LOST]
    assert gpu_status(GPU, world.sensor, {}, [], time.monotonic())["state"] == "lost"


async def test_lanes_lost_are_a_warning_in_the_status(world: World) -> None:
    world.nvml(width=8)
    world.sensor.start()
    await world.next()
    found = gpu_status(GPU, world.sensor, {}, [], time.monotonic())
    assert (found["state"], found["warnings"]) == ("warning", ["PCIe link at x8 of x16"])
    assert gpu_status({**GPU, "state": "quarantined"}, world.sensor, {}, [], time.monotonic())["state"] == "quarantined"


async def test_an_nvml_that_hangs_is_killed_and_replaced_and_the_readings_are_said_to_be_old(world: World) -> None:
    """P30."""
    world.sensor.start()
    await world.sensor.started(WAIT_S)
    first = await world.next()  # one of after the start, from which silence counts
    world.nvml(then="hang")
    heard_s = world.sensor.heard_s
    later_s = heard_s + node_sensor.SILENT_S
    assert world.sensor.stale(later_s)
    world.sensor.end_if_silent(later_s - 0.1)
    assert world.sensor.child is not None
    assert world.sensor.child.pid == first.pid
    world.nvml()
    world.sensor.end_if_silent(later_s)
    again = await world.until(lambda beat: beat.pid != first.pid)
    assert world.sensor.pid == again.pid
    assert not world.sensor.stale(time.monotonic())
    assert "sensor.hung" in [event.event for event in world.journal.since(0)]


async def test_an_nvml_that_crashes_takes_only_the_sensor_with_it(world: World) -> None:
    """P30."""
    world.sensor.start()
    first = await world.next()
    world.nvml(then="crash")
    async with asyncio.timeout(WAIT_S):
        await world.sensor.ended.wait()
    world.nvml()
    again = await world.until(lambda beat: beat.pid != first.pid)
    assert again.gpus[0].memory_used == 5 << 30


async def test_a_driver_that_refuses_is_tried_again_and_the_reason_is_kept(world: World) -> None:
    world.nvml(then="refuse")
    world.sensor.start()
    with pytest.raises(Exception, match="sensor did not start: it ended with status 1"):
        await world.sensor.started(WAIT_S)
    assert world.sensor.state in (PartState.BACKOFF, PartState.STARTING)
    assert gpu_status(GPU, world.sensor, {}, [], time.monotonic())["util"] is None


async def test_p30_a_gpu_that_nvml_cannot_tell_of_for_a_while_is_not_lost(world: World) -> None:
    world.nvml(then="unknown", xid=31)
    world.sensor.start()
    (reading,) = (await world.next()).gpus
    assert (reading.lost, reading.warnings) == (False, ("no answer: Unknown Error",)), "nothing that runs there is to be ended for it"
    world.nvml(xid=31)
    await world.until(lambda beat: beat.gpus[0].memory_used == 5 << 30)
    await world.until(lambda beat: any(news.number == 31 for news in beat.news))
