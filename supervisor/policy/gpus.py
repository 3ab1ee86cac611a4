"""What a worker's policy knows of its GPUs from the sensor. What is stale is not known, and nothing is judged by it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

STALE_S = 3.0
"""A utilisation older than this is no longer known (P30: a sensor may hang)."""


@dataclass(slots=True)
class _Load:
    util: float
    at_s: float
    zero_since_s: float | None


class GpuLoads:
    """Utilisation by UUID. All times are monotonic seconds."""

    def __init__(self) -> None:
        self._loads: dict[str, _Load] = {}

    def note(self, uuid: str, util: float | None, now_s: float) -> bool:
        """Take a reading, 0.0 to 1.0; None: the sensor does not know. Returns whether the device has just run out of work."""
        if util is None:
            self._loads.pop(uuid, None)
            return False
        before = self._loads.get(uuid)
        since_s = None
        if util <= 0.0:
            # Readings with a hole between them say nothing of the time between.
            unbroken = before is not None and before.zero_since_s is not None and now_s - before.at_s <= STALE_S
            since_s = before.zero_since_s if before is not None and unbroken else now_s
        self._loads[uuid] = _Load(util, now_s, since_s)
        return since_s == now_s

    def util(self, uuids: Iterable[str], now_s: float) -> float | None:
        """Return the highest utilisation of ``uuids``; None when it is not known of one of them, or there are none."""
        found = [self._fresh(uuid, now_s) for uuid in uuids]
        known = [load.util for load in found if load is not None]
        return max(known) if known and len(known) == len(found) else None

    def idle_s(self, uuids: Iterable[str], now_s: float) -> float:
        """Return for how long all of ``uuids`` have had nothing to do; 0.0 when one works or is not known."""
        since = []
        for uuid in uuids:
            load = self._fresh(uuid, now_s)
            if load is None or load.zero_since_s is None:
                return 0.0
            since.append(load.zero_since_s)
        return now_s - max(since) if since else 0.0

    def _fresh(self, uuid: str, now_s: float) -> _Load | None:
        load = self._loads.get(uuid)
        return load if load is not None and now_s - load.at_s <= STALE_S else None
