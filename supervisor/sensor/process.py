"""The sensor's loop: read every device, wait for an Xid until the next reading is due, send what there is."""

from __future__ import annotations

import contextlib
import os
import select
import time
from collections.abc import Callable, Sequence
from typing import Any

import zmq

from shadowsup.supervisor.sensor.nvml import Device, Unsupported, XidEvents, without
from shadowsup.supervisor.sensor.watch import GpuWatch
from shadowsup.wire.engine import encode
from shadowsup.wire.sensor import SENSOR, GpuNews, GpuNewsKind, GpuReading, SensorBeat


class Sensor:
    """Reads through ``nvml`` (initialised) and sends by ``send``, a frame a call.

    Args:
        uuids: the devices. One that NVML does not know is reported as lost; one that it cannot tell of yet is asked for again.
        stopped: fd that becomes readable when the process shall end.
    """

    def __init__(self, nvml: Any, uuids: Sequence[str], send: Callable[[bytes], None], *, interval_s: float, stopped: int) -> None:
        self._send = send
        self._interval_s = interval_s
        self._stopped = stopped
        self._nvml = nvml
        self._devices: dict[str, Device] = {}
        self._watches = {uuid: GpuWatch() for uuid in uuids}
        self._events = XidEvents(nvml, [])

    def run(self) -> None:
        """Until told to stop."""
        due_s = time.monotonic()
        while not self._told_to_stop(0.0):
            news = self._wait(due_s)
            if not news and time.monotonic() < due_s:
                continue
            due_s = time.monotonic() + self._interval_s
            self._send(encode(self._beat(news)))

    def _wait(self, until_s: float) -> list[GpuNews]:
        """Wait for an Xid, in pieces, so that a stop is not waited for."""
        left_s = min(until_s - time.monotonic(), 0.25)
        if left_s <= 0:
            return []
        try:
            event = self._events.wait(left_s)
        except Unsupported:
            self._told_to_stop(left_s)
            return []
        if event is None:
            return []
        uuid, xid = event
        return [GpuNews(uuid=uuid, kind=GpuNewsKind.XID, number=xid, text=f"Xid {xid}", at_s=time.monotonic())]

    def _beat(self, news: list[GpuNews]) -> SensorBeat:
        readings, known = [], len(self._devices)
        for uuid, watch in self._watches.items():
            reading, more = watch.take(self._read(uuid), time.monotonic())
            readings.append(reading)
            news.extend(more)
        if len(self._devices) > known:
            self._events.listen(list(self._devices.values()))
        return SensorBeat(pid=os.getpid(), sent_s=time.monotonic(), interval_s=self._interval_s, gpus=tuple(readings), news=tuple(news))

    def _read(self, uuid: str) -> GpuReading:
        try:
            device = self._devices.get(uuid) or Device(self._nvml, uuid)
        except Exception as error:
            return without(uuid, error)
        self._devices[uuid] = device
        return device.read()

    def _told_to_stop(self, within_s: float) -> bool:
        return bool(select.select([self._stopped], [], [], within_s)[0])


@contextlib.contextmanager
def dialled(endpoint: str) -> Any:
    """Yield a function that sends a frame to the supervisor at ``endpoint``. It never waits: an old reading is worth nothing."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
    dealer = context.socket(zmq.DEALER)
    dealer.setsockopt(zmq.LINGER, 0)
    dealer.setsockopt(zmq.ROUTING_ID, SENSOR.encode())
    dealer.setsockopt(zmq.SNDHWM, 4)
    dealer.connect(endpoint)

    def send(frame: bytes) -> None:
        with contextlib.suppress(zmq.Again):  # no supervisor now
            dealer.send(frame, zmq.NOBLOCK)

    try:
        yield send
    finally:
        dealer.close()
        context.term()
