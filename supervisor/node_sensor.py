"""The sensor, seen by the supervisor: its process, its readings, how old they are, and what bad news it brings."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from shadowsup.supervisor.device_memory import Overheads, measured
from shadowsup.supervisor.part_process import Part, PartHost
from shadowsup.supervisor.policy import messages as m
from shadowsup.supervisor.policy.model import WorkerState
from shadowsup.supervisor.policy.part import PartSettings, PartState
from shadowsup.wire.sensor import GpuNews, GpuNewsKind, GpuReading, SensorBeat

if TYPE_CHECKING:
    from shadowsup.supervisor.node_worker import WorkerOwner

SILENT_S = 10.0
"""A sensor that says nothing for so long hangs in the driver: it is killed and replaced. Reading 8 GPUs takes some 10 ms."""
RECOVERY_XID = 154
"""The Xid by which the driver tells that it wants a recovery action."""
STALE_BEATS = 3.0
"""Readings older than so many intervals are shown as stale."""


class SensorPart(Part):
    """Reads NVML. Whatever becomes of it, nothing else of the node waits for it.

    Args:
        uuids: the devices to read.
        endpoint: where the supervisor takes beats.
        on_news: told of each piece of bad news, on the loop.
    """

    what = "sensor"

    def __init__(
        self, host: PartHost, uuids: Sequence[str], endpoint: str, on_news: Callable[[GpuNews], None], nvml: str = "pynvml"
    ) -> None:
        super().__init__(host, PartSettings(name="sensor", ready_s=30.0))
        self.beat: SensorBeat | None = None
        self.heard_s = 0.0
        self._uuids = uuids
        self._endpoint = endpoint
        self._on_news = on_news
        self._nvml = nvml
        self._since_s = 0.0

    def argv(self, ready_fd: int) -> Sequence[str]:
        self._since_s = time.monotonic()
        command = [sys.executable, "-m", "shadowsup.supervisor.sensor", "--endpoint", self._endpoint, "--nvml", self._nvml]
        return [*command, *(word for uuid in self._uuids for word in ("--gpu", uuid)), "--ready-fd", str(ready_fd)]

    async def take_over(self) -> None:
        self._since_s = time.monotonic()

    def owns(self, beat: SensorBeat) -> bool:
        """Return whether a beat is of the present process, not of a predecessor."""
        return self.child is not None and beat.pid == self.child.pid

    def take_beat(self, beat: SensorBeat) -> bool:
        """Take readings; returns whether there was news among them."""
        if not self.owns(beat):
            return False
        self.beat, self.heard_s = beat, time.monotonic()
        for news in beat.news:
            self._on_news(news)
        return bool(beat.news)

    def end_if_silent(self, now_s: float) -> None:
        """Kill a sensor that hangs; its successor may find the driver well again. Called now and then."""
        if self.child is None or self.state is not PartState.RUNNING:
            return
        if now_s - max(self.heard_s, self._since_s) >= SILENT_S:
            self.policy.reason = f"NVML did not answer for {now_s - max(self.heard_s, self._since_s):.0f} s"
            self.host.journal.add("sensor.hung", f"{self.name}: {self.policy.reason}", level="warning", pid=self.child.pid)
            self._since_s = now_s  # one SIGKILL in SILENT_S: in the driver it may not end at once
            self.child.signal_group(signal.SIGKILL)

    def readings(self) -> dict[str, GpuReading]:
        """Return the last reading of each device."""
        return {reading.uuid: reading for reading in self.beat.gpus} if self.beat is not None else {}

    def age_s(self, now_s: float) -> float | None:
        """Return how old the readings are; None: there are none."""
        return now_s - self.heard_s if self.beat is not None else None

    def stale(self, now_s: float) -> bool:
        age_s = self.age_s(now_s)
        return self.beat is None or age_s is None or age_s > STALE_BEATS * self.beat.interval_s


class Troubles:
    """What is wrong with each GPU now, from readings, told to whoever decides: when it begins, and when it is over.

    Args:
        warned, cleared: told of it.
    """

    def __init__(self, warned: Callable[[m.GpuNotice], None], cleared: Callable[[str, m.GpuTrouble], None]) -> None:
        self._warned = warned
        self._cleared = cleared
        self._now: dict[tuple[str, m.GpuTrouble], m.GpuNotice] = {}

    def take(self, beat: SensorBeat) -> None:
        """Take the readings and the news of a beat."""
        for reading in beat.gpus:
            self._compare(reading, beat.sent_s)
        for news in beat.news:
            number, text = news.number, news.text
            if news.kind is GpuNewsKind.RECOVERY:  # what Xid 154 stands for; the driver says what it wants through NVML
                number, text = RECOVERY_XID, f"recovery action: {news.text}"
            elif news.kind is not GpuNewsKind.XID:
                continue  # a reading says so as well, for as long as it lasts
            self._warned(m.GpuNotice(uuid=news.uuid, kind=m.GpuTrouble.XID, number=number, text=text, since_s=news.at_s))

    def _compare(self, reading: GpuReading, now_s: float) -> None:
        width, most = reading.pcie_width, reading.pcie_width_max
        narrow = bool(width and most and width < most)
        for kind, there, number, text in (
            (m.GpuTrouble.LOST, reading.lost, 0, "it has fallen off the bus"),
            (m.GpuTrouble.ECC, reading.ecc_rose > 0, reading.ecc_rose, f"uncorrected memory errors rose by {reading.ecc_rose}"),
            (m.GpuTrouble.PCIE, narrow, width or 0, f"PCIe link at x{width} of x{most}"),
        ):
            key = (reading.uuid, kind)
            known = self._now.get(key)
            if not there:
                if known is not None:
                    del self._now[key]
                    self._cleared(reading.uuid, kind)
            elif known is None or known.number != number:
                notice = m.GpuNotice(
                    uuid=reading.uuid, kind=kind, number=number, text=text, since_s=known.since_s if known is not None else now_s
                )
                self._now[key] = notice
                self._warned(notice)


_PURPOSES = ("weights", "kv")


def gpu_status(gpu: dict[str, Any], sensor: SensorPart | None, kept: dict[str, int], pids: Iterable[int], now_s: float) -> dict[str, Any]:
    """Return a GPU as `status` shows it.

    Args:
        gpu: what is known of it without a sensor.
        kept: bytes of kept memory on it by kind.
        pids: the processes of our engines.
    """
    found = {**gpu, "memory": {**{kind: kept.get(kind, 0) for kind in _PURPOSES}, "engines": None, "foreign": None}}
    reading = sensor.readings().get(gpu["uuid"]) if sensor is not None else None
    if sensor is None or reading is None:
        return found
    figures = msgspec.structs.asdict(reading)
    processes = figures.pop("processes")
    figures["memory_total"] = figures["memory_total"] or gpu["memory_total"]
    found.update(figures, warnings=list(reading.warnings), throttled=list(reading.throttled))
    found["age_s"], found["stale"] = round(sensor.age_s(now_s) or 0.0, 3), sensor.stale(now_s)
    if found["state"] == "ok" and (reading.lost or reading.warnings):
        found["state"] = "lost" if reading.lost else "warning"
    if reading.memory_used is not None:
        ours = set(pids)
        mine = sum(used for pid, used in (processes or {}).items() if pid in ours)
        rest = max(0, reading.memory_used - sum(kept.values()))
        # In a PID namespace of its own a container sees other numbers than NVML: then whose the rest is cannot be told.
        found["memory"].update({"engines": mine, "foreign": max(0, rest - mine)} if mine else {"other": rest})
    return found


def learn_overheads(
    sensor: SensorPart,
    owners: Mapping[str, WorkerOwner],
    keys: Mapping[str, Mapping[str, str]],
    baselines: Mapping[str, int],
    kept: Mapping[str, Mapping[str, int]],
    book: Overheads,
) -> dict[str, int]:
    """Once all that is on a GPU is up and quiet, what is neither kept nor others' is what its engines cost it.

    Args:
        keys: worker → device UUID → the key in ``book``.
        baselines: device UUID → bytes in use before this node.
        kept: device UUID → kind → bytes of our segments.

    Returns: device UUID → bytes an engine, of those that were news.
    """
    news = {}
    for uuid, reading in sensor.readings().items():
        here = [owners[name] for name, mine in keys.items() if uuid in mine and name in owners]
        if not here or reading.memory_used is None or any(owner.policy.state is not WorkerState.HEALTHY for owner in here):
            continue
        engines = sum(len(owner.policy.engines) for owner in here)
        if engines != sum(1 + owner.policy.settings.shadows for owner in here):
            continue  # one more is on its way in or out
        size = measured(reading.memory_used, baselines.get(uuid, 0), sum(kept.get(uuid, {}).values()), engines)
        if size is not None and book.learn({keys[owner.name][uuid]: size for owner in here}):
            news[uuid] = size
    return news
