"""Supervisor → gateway: the figures that Prometheus reads at the gateway's ``/metrics``, every `INTERVAL_S` over the beat socket.

Counters count from the start of the supervisor. Times are CLOCK_MONOTONIC seconds but where a name says ``time``. Whatever becomes a label
has few values: engines are told by role and state, never by their ids, which are never used again.
"""

from __future__ import annotations

import msgspec

from shadowsup.wire.engine import EngineState, KvCounts, Role

INTERVAL_S = 2.0
STEPS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
"""Upper bounds of the buckets of a failover's steps, seconds: a death is seen in under a millisecond, a cold start takes minutes."""


class Histogram(msgspec.Struct, frozen=True, array_like=True):
    """``counts``: of each bucket by itself, one more than there are bounds. ``sum``: of all that was observed."""

    counts: tuple[int, ...]
    sum: float


class EngineFigures(msgspec.Struct, frozen=True, array_like=True):
    """``seen_s``: when its last beat came; 0.0: none has."""

    role: Role
    state: EngineState
    seen_s: float
    inflight: int
    queued: int


class WorkerFigures(msgspec.Struct, frozen=True, kw_only=True):
    """``restarts``: why engines had to be replaced → how often. ``failovers``: kind → how many are complete. ``steps``: of those."""

    name: str
    state: str
    epoch: int
    shadows: int
    engines: tuple[EngineFigures, ...] = ()
    kv: KvCounts | None = None
    restarts: dict[str, int] = {}
    faults: dict[str, int] = {}
    """Class of failure → how many engines have ended so."""
    failovers: dict[str, int] = {}
    steps: dict[str, Histogram] = {}
    blocks_kept: int = 0
    blocks_dropped: int = 0
    resumed: int = 0
    log_dropped: int = 0
    """Bytes of engine output that were not written."""


class PartFigures(msgspec.Struct, frozen=True, array_like=True):
    name: str
    up: bool
    restarts: int


class KeptFigures(msgspec.Struct, frozen=True, array_like=True):
    """Kept memory of one kind on one device."""

    device: str
    kind: str
    size: int
    segments: int
    leases: int


class GpuFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes; ``memory``: purpose → bytes. ``util`` in percent. None: it does not say. ``xids``: number → how often."""

    uuid: str
    index: int
    name: str
    quarantined: bool
    state: str
    memory_total: int | None = None
    memory_used: int | None = None
    memory: dict[str, int] = {}
    util: float | None = None
    power_w: float | None = None
    temperature_c: float | None = None
    ecc_uncorrected: int | None = None
    age_s: float | None = None
    """Of the readings when this was sent."""
    xids: dict[int, int] = {}
    xid_time: float = 0.0
    """When the last one came, seconds since the epoch; 0.0: none has."""


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """``start_time``: of the supervisor, seconds since the epoch."""

    sent_s: float
    start_time: float
    state: str
    workers: tuple[WorkerFigures, ...]
    parts: tuple[PartFigures, ...]
    kept: tuple[KeptFigures, ...] = ()
    gpus: tuple[GpuFigures, ...] = ()
    events_lost: int = 0


_decoder = msgspec.msgpack.Decoder(Figures)


def encode(figures: Figures) -> bytes:
    return msgspec.msgpack.encode(figures)


def decode(data: bytes) -> Figures:
    """Raises msgspec.MsgspecError when ``data`` are no figures."""
    return _decoder.decode(data)
