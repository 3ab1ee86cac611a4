"""Which GPUs of a node are out of use, and why; which spares are taken."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from shadowsup.supervisor.journal import Journal
from shadowsup.supervisor.policy import messages as m
from shadowsup.supervisor.registry import OutOfUse, Registry
from shadowsup.wire.sensor import GpuReading

if TYPE_CHECKING:
    from shadowsup.supervisor.node_worker import WorkerOwner
    from shadowsup.supervisor.policy.command import CommandPolicy
    from shadowsup.supervisor.policy.worker import WorkerPolicy


class GpuDesk:
    """One for a node.

    Args:
        gpus: as `status` shows them; their ``state`` is kept here.
        workers: by name; may grow.
        registry: where it is recorded for another supervisor.

    Attributes:
        spares: spare → the worker that is on it; shared by all policies, so that no two choose the same.
    """

    def __init__(self, gpus: Sequence[dict[str, Any]], workers: Mapping[str, WorkerOwner], journal: Journal, registry: Registry) -> None:
        self.gpus = gpus
        self.spares: dict[str, str] = {}
        self._workers = workers
        self._journal = journal
        self._registry = registry
        self._quarantine: dict[str, dict[str, str]] = {}
        """GPU → by whom → why."""
        self._processes: set[str] = set()
        """Of those reasons the ones that are engines which cannot be ended."""
        self._lanes: dict[str, int] = {}

    def resume(self, engines: Collection[str]) -> None:
        """Go on with what another supervisor has recorded. ``engines``: those of which something may be left; nobody else holds a GPU."""
        for reason in self._registry.out_of_use:
            if not reason.process or reason.by in engines:
                self._quarantine.setdefault(reason.gpu, {})[reason.by] = reason.why
                self._processes |= {reason.by} if reason.process else set()
        self._show()

    def introduce(self, policy: WorkerPolicy | CommandPolicy) -> None:
        """Tell the policy of a worker that is new here what is out of use, and what other workers are on."""
        policy.quarantined_why = {uuid: "; ".join(dict.fromkeys(reasons.values())) for uuid, reasons in self._quarantine.items()}
        policy.quarantined = set(policy.quarantined_why)
        policy.spares_taken = self.spares

    def quarantine(self, gpus: tuple[str, ...], by: str, why: str) -> None:
        """Keep every worker off these."""
        fresh = [uuid for uuid in gpus if by not in self._quarantine.get(uuid, {})]
        for uuid in fresh:
            self._quarantine.setdefault(uuid, {})[by] = why
        self._show()
        if fresh:
            self._processes |= {by} & self._holders()
            self._record()
            for owner in self._workers.values():
                owner.put(m.GpusQuarantined(frozenset(gpus), why))

    def release(self, by: str) -> None:
        """What kept some of them out of use is over."""
        if not any(by in reasons for reasons in self._quarantine.values()):
            return
        freed = set()
        for uuid, reasons in list(self._quarantine.items()):
            if reasons.pop(by, None) is not None and not reasons:
                del self._quarantine[uuid]
                freed.add(uuid)
        self._processes.discard(by)
        self._show()
        self._record()
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

    def _record(self) -> None:
        self._registry.set_out_of_use(
            tuple(
                OutOfUse(gpu=uuid, by=by, why=why, process=by in self._processes)
                for uuid, reasons in self._quarantine.items()
                for by, why in reasons.items()
            )
        )
