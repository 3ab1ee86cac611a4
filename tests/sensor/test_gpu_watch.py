"""What a node makes of the sensor's beats: its workers and its desk are told, and nobody else's beats count."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shadowsup.supervisor import gpu_holders
from shadowsup.supervisor.device_memory import Overheads
from shadowsup.supervisor.gpu_desk import GpuDesk
from shadowsup.supervisor.journal import Journal
from shadowsup.supervisor.node_gpus import GpuWatch
from shadowsup.supervisor.node_sensor import SensorPart
from shadowsup.supervisor.node_setup import Plan
from shadowsup.supervisor.part_process import Part, PartHost
from shadowsup.supervisor.part_set import PartSet
from shadowsup.supervisor.paths import NodePaths
from shadowsup.supervisor.policy import messages as m
from shadowsup.supervisor.registry import Registry
from shadowsup.wire.sensor import GpuNews, GpuNewsKind, GpuReading, SensorBeat

A, B = "GPU-a", "GPU-b"
PID = 7


class Owner:
    def __init__(self) -> None:
        self.events: list[Any] = []
        self.util: list[tuple[str, float | None]] = []
        self.policy = SimpleNamespace(engines={})

    def put(self, event: Any) -> None:
        self.events.append(event)

    def gpu_used(self, uuid: str, util: float | None) -> None:
        self.util.append((uuid, util))


class Begun(PartSet):
    """Parts of which no process is started."""

    def begin(self, part: Part) -> bool:
        part.child = SimpleNamespace(pid=PID)  # type: ignore[assignment]
        return False


class World:
    def __init__(self, folder: Path) -> None:
        paths = NodePaths(runtime=folder, state=folder)
        self.journal, registry = Journal(None), Registry(paths.processes)
        self.tasks: list[asyncio.Task[None]] = []
        host = PartHost(paths=paths, journal=self.journal, registry=registry, scribe=None, run_task=self._run)  # type: ignore[arg-type]
        self.parts = Begun(host, None, on_nursery=lambda part, state: None, on_exited=lambda engine, status: None)
        self.owner = Owner()
        workers: Any = {"chat": self.owner}
        desk = GpuDesk([{"uuid": A, "index": 0}, {"uuid": B, "index": 1}], workers, self.journal, registry)
        self.watch = GpuWatch(self.parts, workers, desk, Overheads(paths.overheads))

    def _run(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        self.tasks.append(asyncio.get_running_loop().create_task(work))
        return self.tasks[-1]

    def beat(self, *gpus: GpuReading, news: tuple[GpuNews, ...] = (), pid: int = PID) -> bool:
        return self.watch.take_beat(SensorBeat(pid=pid, sent_s=1.0, interval_s=1.0, gpus=gpus, news=news))

    def told(self) -> list[tuple[str, str]]:
        return [(event.event, event.message) for event in self.journal.since(None)]

    async def close(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        self.journal.close()


async def test_readings_and_news_reach_every_worker_and_the_journal(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.watch.begin(Plan(), "ipc://nowhere")
    assert isinstance(world.parts.sensor, SensorPart)
    assert world.parts.all == [world.parts.sensor]
    xid = GpuNews(uuid=B, kind=GpuNewsKind.XID, number=79, text="off the bus", at_s=0.5)
    assert world.beat(GpuReading(uuid=A, util=50), GpuReading(uuid=B, lost=True), news=(xid,))
    assert world.owner.util == [(A, 0.5), (B, None)]
    kinds = [event.notice.kind for event in world.owner.events]
    assert kinds == [m.GpuTrouble.LOST, m.GpuTrouble.XID]
    assert world.told() == [("gpu.xid", f"GPU 1 ({B}): off the bus")]
    world.owner.events.clear()
    assert not world.beat(GpuReading(uuid=A), GpuReading(uuid=B))
    assert world.owner.events == [m.GpuCleared(B, m.GpuTrouble.LOST)]
    await world.close()


async def test_a_slot_that_never_had_more_lanes_has_lost_none(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.watch.begin(Plan(), "ipc://nowhere")
    world.beat(GpuReading(uuid=A, pcie_width=8, pcie_width_max=16))
    assert world.owner.events == []
    world.beat(GpuReading(uuid=A, pcie_width=4, pcie_width_max=16))
    assert [(event.notice.kind, event.notice.number) for event in world.owner.events] == [(m.GpuTrouble.PCIE, 4)]
    await world.close()


async def test_beats_of_another_process_than_the_present_sensor_count_for_nothing(tmp_path: Path) -> None:
    world = World(tmp_path)
    assert not world.beat(GpuReading(uuid=A, lost=True)), "there is no sensor yet"
    world.watch.begin(Plan(), "ipc://nowhere")
    assert not world.beat(GpuReading(uuid=A, util=50, lost=True), pid=PID + 1)
    assert (world.owner.events, world.owner.util) == ([], [])
    await world.close()


async def test_who_else_holds_the_gpus_of_the_workers_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world, asked, said = World(tmp_path), [], []

    def look(gpus: list[dict[str, Any]]) -> Any:
        asked.append([gpu["uuid"] for gpu in gpus])
        return SimpleNamespace(lines=lambda: ["GPU 1 is held by pid 17"])

    monkeypatch.setattr(gpu_holders, "look", look)
    worker: Any = SimpleNamespace(gpus=("1",), spares=())
    await world.watch.name_holders([worker], said.append)
    await world.watch.name_holders([], said.append)
    assert asked == [[B], [A, B]]
    assert said == ["warning: GPU 1 is held by pid 17"] * 2
    assert world.told() == [("gpu.held", "GPU 1 is held by pid 17")] * 2
    await world.close()
