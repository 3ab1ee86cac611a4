"""Since when a worker and its engines are in the state they are in: what tells a shadow that has just parked from one that is stuck."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from shadowsup.supervisor.policy.model import EngineRecord, WorkerState


class _Policy(Protocol):
    state: WorkerState
    engines: dict[str, EngineRecord]


class Since:
    """Times are monotonic seconds; what was never noted began at ``began_s``."""

    def __init__(self, began_s: float) -> None:
        self._worker: tuple[str, float] = ("", began_s)
        self._engines: dict[str, tuple[str, float]] = {}

    def note(self, policy: _Policy, now_s: float) -> None:
        """Look at the states after an event. Engines that are gone are forgotten."""
        if policy.state.value != self._worker[0]:
            self._worker = (policy.state.value, now_s)
        self._engines = {record.id: self._kept(record, now_s) for record in policy.engines.values()}

    def _kept(self, record: EngineRecord, now_s: float) -> tuple[str, float]:
        known = self._engines.get(record.id)
        return known if known is not None and known[0] == record.state.value else (record.state.value, now_s)

    @property
    def worker_s(self) -> float:
        return self._worker[1]

    @property
    def engines_s(self) -> Mapping[str, float]:
        """Engine id → when it came into its state."""
        return {engine: when for engine, (_, when) in self._engines.items()}
