"""Sensor → supervisor: what NVML says of each GPU, over the same ZeroMQ socket as the engines' beats (`shadowsup.wire.engine`).

The sensor dials under the routing id ``sensor`` and sends a `SensorBeat` about once a second, and at once when there is news.
"""

from __future__ import annotations

import enum

import msgspec

SENSOR = "sensor"
"""Routing id."""


class GpuNewsKind(str, enum.Enum):
    """``ecc``: uncorrected errors; ``pcie``: the link has lost lanes; ``recovery``: the driver asks for one."""

    XID = "xid"
    ECC = "ecc"
    PCIE = "pcie"
    LOST = "lost"
    RECOVERY = "recovery"


class GpuNews(msgspec.Struct, frozen=True, kw_only=True):
    """Something happened on a GPU. ``number``: the Xid, how many errors, lanes left, or the recovery action; ``at_s``: monotonic."""

    uuid: str
    kind: GpuNewsKind
    number: int
    text: str
    at_s: float


class GpuReading(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU or MIG instance. None: it does not say. Sizes in bytes, ``util`` and ``util_memory`` in percent."""

    uuid: str
    memory_used: int | None = None
    memory_total: int | None = None
    util: int | None = None
    util_memory: int | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    temperature_c: int | None = None
    clock_sm_mhz: int | None = None
    clock_memory_mhz: int | None = None
    ecc_corrected: int | None = None
    ecc_uncorrected: int | None = None
    """Since the driver was loaded."""
    ecc_rose: int = 0
    """By how much that rose, in the last minute."""
    pcie_width: int | None = None
    pcie_width_max: int | None = None
    recovery_action: int | None = None
    """0: none is needed. NVML_GPU_RECOVERY_ACTION_*."""
    throttled: tuple[str, ...] = ()
    """Why clocks are held down beyond being idle or capped by power."""
    processes: dict[int, int] | None = None
    """Process → device memory. Of another PID namespace they are not ours to recognise."""
    warnings: tuple[str, ...] = ()
    """What is wrong with it now, for people: lanes lost, errors that rise, a recovery that is asked for."""
    lost: bool = False
    """It has fallen off the bus: it answers nothing."""


class SensorBeat(msgspec.Struct, frozen=True, kw_only=True, tag="sensor_beat"):
    """``sent_s``: monotonic. ``interval_s``: until the next one, if nothing happens."""

    pid: int
    sent_s: float
    interval_s: float
    gpus: tuple[GpuReading, ...]
    news: tuple[GpuNews, ...] = ()
