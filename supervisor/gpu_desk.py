"""Which GPUs of a node are out of use, and why; which spares are taken."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from shadowsup.supervisor.journal import Journal
from shadowsup.supervisor.policy import messages as m
from shadowsup.wire.sensor import GpuReading

if TYPE_CHECKING:
    from shadowsup.supervisor.node_worker import WorkerOwner


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
        for by in {by for reasons in self._quarantine.values() for by in reasons} - self._holders():
            self.release(by)

    def held(self) -> tuple[tuple[str, str], ...]:
        """Return (GPU, why) of those that a process keeps out of use which cannot be ended."""
        holders, found = self._holders(), []
        for uuid, reasons in self._quarantine.items():
            if mine := [why for by, why in reasons.items() if by in holders]:
                found.append((uuid, "; ".join(mine)))
        return tuple(found)

    def _holders(self) -> set[str]:
        return {engine for owner in self._workers.values() for engine in owner.policy.engines}

    def saw(self, readings: Sequence[GpuReading]) -> None:
        """Remember what each device had when it was seen first."""
        for reading in readings:
            if reading.pcie_width:
                self._lanes.setdefault(reading.uuid, reading.pcie_width)

    def is_loss(self, notice: m.GpuNotice) -> bool:
        """Say whether a notice is of something that was different before: a slot of eight lanes has lost none."""
        return notice.kind is not m.GpuTrouble.PCIE or notice.number < self._lanes.get(notice.uuid, 1 << 30)

    def _show(self) -> None:
        for gpu in self.gpus:
            reasons = self._quarantine.get(gpu["uuid"])
            gpu["state"] = "quarantined" if reasons else "ok"
            if reasons:
                gpu["reason"] = "; ".join(dict.fromkeys(reasons.values()))
            else:
                gpu.pop("reason", None)
