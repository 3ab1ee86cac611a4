"""What the dashboard reads of ``status``, typed. Every field has a default: an older or newer supervisor says less or more."""

from __future__ import annotations

from typing import Any

import msgspec

Number = int | float | None


class Part(msgspec.Struct, frozen=True):
    """Any process that is not an engine."""

    state: str = "stopped"
    pid: int | None = None
    restarts: int = 0
    reason: str = ""
    engine: str = ""
    backend: str = ""
    segments: int = 0
    bytes: int = 0


class Gateway(msgspec.Struct, frozen=True):
    state: str = "stopped"
    pid: int | None = None
    listen: str = ""
    restarts: int = 0
    streams_held: int = 0
    requests_total: int = 0
    connections: int = 0
    inflight: int = 0
    errors_total: int = 0
    tokens_total: int = 0
    replays_total: int = 0


class Engine(msgspec.Struct, frozen=True):
    id: str = "?"
    role: str = ""
    state: str = ""
    pid: int | None = None
    started_s: Number = None
    since_s: Number = None
    heartbeat_age_s: Number = None
    phase: str = ""
    step: int = 0
    inflight: int = 0
    queued: int = 0
    tokens_total: int = 0
    last_step_age_s: Number = None
    memory: int = 0
    epoch: int = 0
    how: str = ""
    detail: str = ""
    cause: str = ""


class Kv(msgspec.Struct, frozen=True):
    blocks: int = 0
    valid: int = 0
    free: int = 0
    quarantined: int = 0
    reserve: int = 0

    @property
    def used(self) -> float | None:
        """Share of the blocks that are not free, 0 to 1; None: there are no blocks."""
        return 1 - (self.free + self.reserve) / self.blocks if self.blocks else None


class Backoff(msgspec.Struct, frozen=True):
    what: str = ""
    in_s: float = 0.0
    failures: int = 0


class Worker(msgspec.Struct, frozen=True):
    name: str = "?"
    engine: str = ""
    model: str = ""
    source: str = ""
    state: str = ""
    reason: str = ""
    since_s: Number = None
    epoch: int = 0
    shadows: int = 0
    restarts: int = 0
    backoff: Backoff | None = None
    engines: tuple[Engine, ...] = ()
    kv: Kv = Kv()
    queued: int = 0
    tokens_total: int = 0
    gpus: tuple[str, ...] = ()
    last_recovery: dict[str, Any] | None = None
    recoveries: dict[str, int] = {}
    revision: str = ""
    rollout: dict[str, Any] | None = None

    @property
    def active(self) -> Engine | None:
        return next((engine for engine in reversed(self.engines) if engine.role == "active"), None)

    @property
    def inflight(self) -> int:
        return sum(engine.inflight for engine in self.engines)


class Gpu(msgspec.Struct, frozen=True):
    uuid: str = ""
    index: int | None = None
    name: str = ""
    state: str = ""
    memory_used: Number = None
    memory_total: Number = None
    util: Number = None
    power_w: Number = None
    power_limit_w: Number = None
    temperature_c: Number = None
    clock_sm_mhz: Number = None
    ecc_corrected: Number = None
    ecc_uncorrected: Number = None
    throttled: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    memory: dict[str, int | None] = {}
    stale: bool = False
    age_s: Number = None


class Host(msgspec.Struct, frozen=True):
    memory_total: int = 0
    memory_used: int = 0
    cpus: int = 1
    cpu_busy_s: float = 0.0
    cpu_all_s: float = 0.0
    load: float = 0.0
    memory: dict[str, int | None] = {}


class Node(msgspec.Struct, frozen=True):
    name: str = "?"
    state: str = ""
    pid: int | None = None
    uptime_s: float = 0.0
    runtime_dir: str = ""
    state_dir: str = ""
    config: str = ""
    events_lost: int = 0


class Status(msgspec.Struct, frozen=True):
    event: int = 0
    mono_s: float = 0.0
    time_s: float = 0.0
    node: Node = Node()
    memkeeper: Part = Part()
    nursery: tuple[Part, ...] = ()
    sensor: Part = Part()
    scribe: Part = Part()
    gateway: Gateway = Gateway()
    workers: tuple[Worker, ...] = ()
    gpus: tuple[Gpu, ...] = ()
    host: Host | None = None
    config: dict[str, Any] | None = None
    reload: dict[str, Any] | None = None

    def worker(self, name: str) -> Worker | None:
        return next((worker for worker in self.workers if worker.name == name), None)


def read_status(found: Any) -> Status:
    """Return a status as it came.

    Raises:
        msgspec.ValidationError: it is of another protocol.
    """
    return msgspec.convert(found, Status)
