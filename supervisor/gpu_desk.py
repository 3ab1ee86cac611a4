"""The GPUs of a node between its sensor and the policies of its workers: who is told what, and which devices are out of use, and why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from shadowsup.supervisor.journal import Journal
from shadowsup.supervisor.policy import messages as m
from shadowsup.supervisor.policy.severity import RECOVERY_XID
from shadowsup.wire.sensor import GpuNews, GpuNewsKind, GpuReading

if TYPE_CHECKING:
    from shadowsup.supervisor.node_worker import WorkerOwner

_TROUBLE = {
    GpuNewsKind.XID: m.GpuTrouble.XID,
    GpuNewsKind.ECC: m.GpuTrouble.ECC,
    GpuNewsKind.PCIE: m.GpuTrouble.PCIE,
    GpuNewsKind.LOST: m.GpuTrouble.LOST,
    GpuNewsKind.RECOVERY: m.GpuTrouble.XID,
}
_PASSING = (m.GpuTrouble.ECC, m.GpuTrouble.PCIE, m.GpuTrouble.LOST)
"""What is over when the sensor no longer complains. An Xid is an event: nobody says that it is over."""


class GpuDesk:
    """One for a node.

    Args:
        gpus: as `status` shows them; their ``state`` is kept here.
        workers: by name; may grow.

    Attributes:
        spares: spare → the worker that is on it; shared by all policies, so that no two choose the same.
    """

    def __init__(self, gpus: Sequence[dict[str, Any]], workers: Mapping[str, WorkerOwner], journal: Journal) -> None:
        self.gpus = gpus
        self.spares: dict[str, str] = {}
        self._workers = workers
        self._journal = journal
        self._quarantine: dict[str, dict[str, str]] = {}
        """GPU → by whom → why."""
        self._warned: set[str] = set()
        self._lanes: dict[str, int] = {}

    def quarantine(self, gpus: tuple[str, ...], by: str, why: str) -> None:
        """Keep every worker off these."""
        fresh = [uuid for uuid in gpus if by not in self._quarantine.get(uuid, {})]
        for uuid in fresh:
            self._quarantine.setdefault(uuid, {})[by] = why
        self._show()
        if fresh:
            for owner in self._workers.values():
                owner.put(m.GpusQuarantined(frozenset(gpus), why))

    def release(self, by: str) -> None:
        """What kept some of them out of use is over."""
        freed = set()
        for uuid, reasons in list(self._quarantine.items()):
            if reasons.pop(by, None) is not None and not reasons:
                del self._quarantine[uuid]
                freed.add(uuid)
        self._show()
        if freed:
            names = ", ".join(sorted(freed))
            self._journal.add("gpu.released", f"GPU {names} is in use again: {by} has ended", data={"gpus": sorted(freed)})
            for owner in self._workers.values():
                owner.put(m.GpusReleased(frozenset(freed)))

    def forgive(self) -> None:
        """An operator says that they are well again: forget what failed, but not who still holds one."""
        holders = {engine for owner in self._workers.values() for engine in owner.policy.engines}
        for by in {by for reasons in self._quarantine.values() for by in reasons} - holders:
            self.release(by)

    def news(self, news: GpuNews) -> None:
        """The sensor has something to tell."""
        index = next((gpu["index"] for gpu in self.gpus if gpu["uuid"] == news.uuid), "?")
        data = {"gpu_uuid": news.uuid, "number": news.number}
        self._journal.add(f"gpu.{news.kind.value}", f"GPU {index} ({news.uuid}): {news.text}", level="warning", data=data)
        if news.kind is GpuNewsKind.PCIE and news.number >= self._lanes.get(news.uuid, news.number):
            return  # it never had more since we look: a slot, no loss
        number = RECOVERY_XID if news.kind is GpuNewsKind.RECOVERY else news.number if news.kind is GpuNewsKind.XID else 0
        self._warned.add(news.uuid)
        notice = m.GpuNotice(uuid=news.uuid, kind=_TROUBLE[news.kind], number=number, text=news.text, since_s=news.at_s)
        for owner in self._workers.values():
            owner.put(m.GpuWarned(notice))

    def readings(self, readings: Sequence[GpuReading]) -> None:
        """Take a round of readings: utilisation for the judging of hangs, and the end of troubles."""
        for reading in readings:
            if reading.pcie_width:
                self._lanes.setdefault(reading.uuid, reading.pcie_width)
            util = None if reading.util is None else reading.util / 100
            for owner in self._workers.values():
                owner.gpu_used(reading.uuid, util)
            if reading.uuid in self._warned and not reading.warnings and not reading.lost:
                self._warned.discard(reading.uuid)
                for owner in self._workers.values():
                    for kind in _PASSING:
                        owner.put(m.GpuCleared(reading.uuid, kind))

    def _show(self) -> None:
        for gpu in self.gpus:
            reasons = self._quarantine.get(gpu["uuid"])
            gpu["state"] = "quarantined" if reasons else "ok"
            if reasons:
                gpu["reason"] = "; ".join(dict.fromkeys(reasons.values()))
            else:
                gpu.pop("reason", None)
