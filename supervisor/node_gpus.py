"""The GPUs of a node, watched while it runs: what the sensor reads and reports goes to the workers, to the desk and to the journal."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence

from shadowsup.supervisor import device_memory, gpu_holders, status
from shadowsup.supervisor.config import WorkerConfig
from shadowsup.supervisor.gpu_desk import GpuDesk
from shadowsup.supervisor.node_sensor import SensorPart, Troubles, learn_overheads
from shadowsup.supervisor.node_setup import Plan
from shadowsup.supervisor.node_worker import WorkerOwner
from shadowsup.supervisor.part_set import PartSet
from shadowsup.supervisor.policy import messages as m
from shadowsup.wire.sensor import GpuNews, SensorBeat

SENSOR_LOOK_S = 2.0
"""How often the age of the sensor's readings is looked at."""


class GpuWatch:
    """One for a node. It decides nothing: the workers' policies are told.

    Args:
        parts: the sensor comes to be one of them, once it is begun.
        workers: by name; may grow.
        desk: knows which GPUs there are, and is told what was read of them.
        overheads: where it is written down what an engine takes beside its kept memory.
    """

    def __init__(self, parts: PartSet, workers: Mapping[str, WorkerOwner], desk: GpuDesk, overheads: device_memory.Overheads) -> None:
        self._parts = parts
        self._workers = workers
        self._desk = desk
        self._journal = parts.host.journal
        self._troubles = Troubles(self._notice, self._cleared)
        self._overheads = overheads

    async def name_holders(self, workers: Sequence[WorkerConfig], report: Callable[[str], None]) -> None:
        """Say who else uses the GPUs of these workers, before anything of the node does."""
        gpus = self._desk.gpus
        used = {uuid for worker in workers for uuid in (*worker.gpus, *worker.spares)}
        wanted = [gpu for gpu in gpus if gpu["uuid"] in used or str(gpu["index"]) in used] or gpus
        for line in (await asyncio.to_thread(gpu_holders.look, wanted)).lines():
            report(f"warning: {line}")
            self._journal.add("gpu.held", line, level="warning")

    def begin(self, plan: Plan, endpoint: str) -> None:
        """Have a sensor read the GPUs from now on. ``plan``: of the node's start; ``endpoint``: where beats are taken."""
        sensor = self._parts.sensor = SensorPart(self._parts.host, [gpu["uuid"] for gpu in self._desk.gpus], endpoint, self._news)
        self._parts.begin(sensor)
        self._parts.host.run_task(self._watch(sensor, plan))

    def take_beat(self, beat: SensorBeat) -> bool:
        """Take readings; returns whether there was news among them."""
        sensor = self._parts.sensor
        if sensor is None or not sensor.owns(beat):
            return False  # of a predecessor
        self._desk.saw(beat.gpus)
        self._troubles.take(beat)
        for reading in beat.gpus:
            self._used(reading.uuid, reading.util / 100 if reading.util is not None else None)
        return sensor.take_beat(beat)

    def _notice(self, notice: m.GpuNotice) -> None:
        """A GPU is in trouble: every worker that has it, as one of its own or as a spare, is told."""
        if not self._desk.is_loss(notice):
            return
        for owner in self._workers.values():
            owner.put(m.GpuWarned(notice))

    def _cleared(self, uuid: str, kind: m.GpuTrouble) -> None:
        """That trouble is over."""
        for owner in self._workers.values():
            owner.put(m.GpuCleared(uuid, kind))

    def _used(self, uuid: str, util: float | None) -> None:
        """Utilisation of a GPU, 0.0 to 1.0; None: unknown. Cheap: it may be called several times a second."""
        for owner in self._workers.values():
            owner.gpu_used(uuid, util)

    async def _watch(self, sensor: SensorPart, plan: Plan) -> None:
        while True:
            await asyncio.sleep(SENSOR_LOOK_S)
            sensor.end_if_silent(time.monotonic())
            if sensor.stale(time.monotonic()):
                continue
            kept = status.kept_by_device(self._parts.keeper)
            for uuid, size in learn_overheads(sensor, self._workers, plan.overhead_keys, plan.baselines, kept, self._overheads).items():
                words = f"an engine takes {device_memory.gib(size)} of GPU {uuid} beside weights and KV"
                self._journal.add("gpu.overhead", words, data={"gpu_uuid": uuid, "bytes": size})

    def _news(self, news: GpuNews) -> None:
        index = next((gpu["index"] for gpu in self._desk.gpus if gpu["uuid"] == news.uuid), "?")
        data = {"gpu_uuid": news.uuid, "number": news.number}
        self._journal.add(f"gpu.{news.kind.value}", f"GPU {index} ({news.uuid}): {news.text}", level="warning", data=data)
