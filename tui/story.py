"""What the dashboard knows: the last status, rates, histories, events, recoveries. Observations in, figures out; no I/O, no clock."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

import msgspec

from shadowsup.supervisor.protocol import Event, Recovery
from shadowsup.tui.shapes import Engine, Status, Worker, read_status
from shadowsup.tui.spark import History

KEEP_EVENTS = 10_000
KEEP_RECOVERIES = 1_000
RATE_S = 2.0
"""Rates are over the last so many seconds: at 2 looks a second a shorter span would show the rounding of beats, not the engine."""


@dataclass(frozen=True)
class Observation:
    """One look at the node. ``fresh``: the supervisor is another one than before, or the first; ``ts``: wall time of the look."""

    status: dict[str, Any]
    events: tuple[dict[str, Any], ...] = ()
    recoveries: tuple[dict[str, Any], ...] = ()
    fresh: bool = False
    ts: float = 0.0
    rewound: bool = False
    """What was before this look is to be forgotten: it is of another time of a recording."""


@dataclass
class Meter:
    """The rate of counters that only grow. ``points``: (monotonic seconds, counters)."""

    points: deque[tuple[float, tuple[int, ...]]] = field(default_factory=deque)

    def note(self, mono_s: float, *counters: int) -> None:
        if self.points and (mono_s <= self.points[-1][0] or any(new < old for new, old in zip(counters, self.points[-1][1], strict=True))):
            self.points.clear()  # counts anew: another process
        self.points.append((mono_s, counters))
        while len(self.points) > 2 and self.points[1][0] <= mono_s - RATE_S:
            self.points.popleft()

    def rate(self, which: int = 0) -> float | None:
        """Return counts a second, None before there are two looks."""
        if len(self.points) < 2:
            return None
        (first_s, first), (last_s, last) = self.points[0], self.points[-1]
        return (last[which] - first[which]) / (last_s - first_s)


class Story:
    """Take observations in order with `take`; read everything else."""

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        """Know nothing."""
        self.status = Status()
        self.seen = False
        """Whether there was an observation at all."""
        self.events: deque[Event] = deque(maxlen=KEEP_EVENTS)
        self.recoveries: dict[int, Recovery] = {}
        self.tokens = History()
        self.worker_tokens: dict[str, History] = {}
        self.gpu_util: dict[str, History] = {}
        self.gpu_memory: dict[str, History] = {}
        self.cpu = History()
        self.host_memory = History()
        self._engines: dict[str, Meter] = {}
        self._gateway = Meter()
        self._cpu = Meter()

    def take(self, observation: Observation) -> None:
        """Account for one look.

        Raises:
            msgspec.ValidationError: the status is of another protocol; nothing has changed.
        """
        status = read_status(observation.status)
        if observation.rewound:
            self._begin()
        elif observation.fresh:
            self._forget_run()
        self.status, self.seen = status, True
        for found in observation.events:
            event = msgspec.convert(found, Event)
            if not self.events or event.n > self.events[-1].n:
                self.events.append(event)
        for found in observation.recoveries:
            self._note_recovery(found)
        for worker in status.workers:
            if worker.last_recovery is not None:
                self._note_recovery(worker.last_recovery)
        self._measure(status)

    def _forget_run(self) -> None:
        """Another supervisor numbers anew; what was measured of the machine still holds."""
        self.events.clear()
        self.recoveries.clear()
        self._engines.clear()
        self._gateway, self._cpu = Meter(), Meter()

    def _note_recovery(self, found: dict[str, Any]) -> None:
        recovery = msgspec.convert(found, Recovery)
        self.recoveries[recovery.n] = recovery
        while len(self.recoveries) > KEEP_RECOVERIES:
            del self.recoveries[min(self.recoveries)]

    def _measure(self, status: Status) -> None:
        now_s, ts = status.mono_s, status.time_s
        known = {engine.id for worker in status.workers for engine in worker.engines}
        for gone in self._engines.keys() - known:
            del self._engines[gone]
        for worker in status.workers:
            for engine in worker.engines:
                self._engines.setdefault(engine.id, Meter()).note(now_s, engine.step, engine.tokens_total)
            self.worker_tokens.setdefault(worker.name, History()).add(ts, self.worker_rate(worker) or 0.0)
        self._gateway.note(now_s, status.gateway.tokens_total, status.gateway.requests_total)
        rate = self._gateway.rate()
        if rate is not None:
            self.tokens.add(ts, rate)
        for gpu in status.gpus:
            if gpu.util is not None and not gpu.stale:
                self.gpu_util.setdefault(gpu.uuid, History()).add(ts, gpu.util / 100)
            if gpu.memory_used is not None and gpu.memory_total:
                self.gpu_memory.setdefault(gpu.uuid, History()).add(ts, gpu.memory_used / gpu.memory_total)
        if (host := status.host) is not None:
            # Hundredths of a second: a meter counts whole numbers.
            self._cpu.note(now_s, round(host.cpu_busy_s * 100), round(host.cpu_all_s * 100))
            busy, everything = self._cpu.rate(0), self._cpu.rate(1)
            if busy is not None and everything:
                self.cpu.add(ts, busy / everything)
            if host.memory_total:
                self.host_memory.add(ts, host.memory_used / host.memory_total)

    # --- rates ------------------------------------------------------------------------------------------------------------------

    def step_rate(self, engine: Engine) -> float | None:
        meter = self._engines.get(engine.id)
        return meter.rate(0) if meter is not None else None

    def token_rate(self, engine: Engine) -> float | None:
        meter = self._engines.get(engine.id)
        return meter.rate(1) if meter is not None else None

    def worker_rate(self, worker: Worker) -> float | None:
        rates = [rate for engine in worker.engines if (rate := self.token_rate(engine)) is not None]
        return sum(rates) if rates else None

    @property
    def throughput(self) -> float | None:
        """Tokens a second that the gateway delivers."""
        return self._gateway.rate(0)

    @property
    def request_rate(self) -> float | None:
        return self._gateway.rate(1)

    # --- recoveries and failures ------------------------------------------------------------------------------------------------

    def recoveries_of(self, worker: str | None = None) -> list[Recovery]:
        """Return the recoveries (of one worker), newest first."""
        found = [recovery for recovery in self.recoveries.values() if worker is None or recovery.worker == worker]
        return sorted(found, key=lambda recovery: recovery.n, reverse=True)

    def marks(self, worker: str | None = None) -> list[float]:
        """Return when recoveries were (wall time)."""
        return [recovery.ts for recovery in self.recoveries.values() if worker is None or recovery.worker == worker]

    def worker_events(self, worker: str) -> list[Event]:
        return [event for event in self.events if event.worker == worker]

    def failures(self, of: str = "") -> list[Event]:
        """Return the events that say that an engine (of a worker, or one engine) failed by itself or by a drill, newest first."""
        return [
            event for event in reversed(self.events) if event.event in _FAILURES and (not of or event.worker == of or event.engine == of)
        ]


_FAILURES = ("engine.verdict", "engine.spawn_failed", "engine.killed", "engine.quarantined")
