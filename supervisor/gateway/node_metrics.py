"""The supervisor's figures in Prometheus' terms, decoded when somebody asks.

The last ones stay when the supervisor falls silent; ``shadowsup_supervisor_up`` and their age say so.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator

import msgspec
from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from shadowsup.histogram import cumulative
from shadowsup.supervisor.policy.model import RecoveryKind, WorkerState
from shadowsup.supervisor.tally import FAULTS, REASONS, STEPS
from shadowsup.wire import figures as wire
from shadowsup.wire.engine import EngineState, Role

log = logging.getLogger(__name__)

SILENT_S = 5 * wire.INTERVAL_S
_NO_TIME = wire.Histogram((0,) * (len(wire.STEPS_S) + 1), 0.0)

Samples = list[tuple[list[str], float]]


class NodeMetrics(Collector):
    """Args: clock: seconds, CLOCK_MONOTONIC, which is the supervisor's, too."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._data = b""

    def take(self, data: bytes) -> None:
        """Take new figures, encoded."""
        self._data = data

    def describe(self) -> Iterable[Metric]:
        return []

    def collect(self) -> Iterable[Metric]:
        now_s = self._clock()
        figures = self._decoded()
        age_s = now_s - figures.sent_s if figures is not None else None
        yield _gauge("supervisor_up", "1 if the supervisor has told its figures lately.", [([], float(_fresh(age_s)))])
        if figures is None or age_s is None:
            return
        yield _gauge("supervisor_figures_age_seconds", "Age of all figures that come from the supervisor.", [([], age_s)])
        yield _gauge("supervisor_start_time_seconds", "When the supervisor started, since the epoch.", [([], figures.start_time)])
        yield _counter("events_lost", "Events that could not be written to disk.", [], [([], figures.events_lost)])
        yield from _parts(figures.parts)
        yield from _workers(figures.workers, figures.sent_s)
        yield from _failovers(figures.workers)
        yield from _kept(figures.kept)
        yield from _gpus(figures.gpus, age_s)

    def _decoded(self) -> wire.Figures | None:
        if not self._data:
            return None
        try:
            return wire.decode(self._data)
        except msgspec.MsgspecError as error:
            log.error("the supervisor's figures are not understood: %s", error)
            return None


def _fresh(age_s: float | None) -> bool:
    return age_s is not None and age_s <= SILENT_S


def _gauge(name: str, what: str, samples: Samples, labels: Iterable[str] = ()) -> GaugeMetricFamily:
    family = GaugeMetricFamily(f"shadowsup_{name}", what, labels=list(labels))
    for values, value in samples:
        family.add_metric(values, value)
    return family


def _counter(name: str, what: str, labels: Iterable[str], samples: Samples) -> CounterMetricFamily:
    family = CounterMetricFamily(f"shadowsup_{name}", what, labels=list(labels))
    for values, value in samples:
        family.add_metric(values, value)
    return family


def _parts(parts: Iterable[wire.PartFigures]) -> Iterator[Metric]:
    parts = list(parts)
    yield _gauge("part_up", "1 while a part of the node runs.", [([part.name], float(part.up)) for part in parts], ["part"])
    restarts: Samples = [([part.name], part.restarts) for part in parts]
    yield _counter("part_restarts", "Times that a part of the node was replaced.", ["part"], restarts)


def _workers(workers: Iterable[wire.WorkerFigures], sent_s: float) -> Iterator[Metric]:
    workers = list(workers)
    states = [state.value for state in WorkerState]
    yield _gauge(
        "worker_state",
        "1 for the state that the worker is in.",
        [([worker.name, state], float(worker.state == state)) for worker in workers for state in states],
        ["worker", "state"],
    )
    yield _gauge("worker_epoch", "How many times the active engine has changed.", [([w.name], w.epoch) for w in workers], ["worker"])
    yield _gauge("worker_shadows_wanted", "Shadows that the config asks for.", [([w.name], w.shadows) for w in workers], ["worker"])
    yield _gauge(
        "worker_engines",
        "Engines, by role and state.",
        [
            ([w.name, role.value, state.value], sum(e.role is role and e.state is state for e in w.engines))
            for w in workers
            for role, state in _ROLE_STATES
        ],
        ["worker", "role", "state"],
    )
    ages: Samples = []
    for worker in workers:
        for role in (Role.ACTIVE, Role.SHADOW):
            seen = [engine.seen_s for engine in worker.engines if engine.role is role and engine.seen_s]
            if seen:
                ages.append(([worker.name, role.value], max(0.0, sent_s - min(seen))))
    yield _gauge(
        "engine_heartbeat_age_seconds", "From the last heartbeat of the most silent engine to these figures.", ages, ["worker", "role"]
    )
    for field, what in (("inflight", "Requests that engines work on."), ("queued", "Requests that wait in engines.")):
        count: Samples = [([w.name], sum(getattr(engine, field) for engine in w.engines)) for w in workers]
        yield _gauge(f"engine_{field}_requests", what, count, ["worker"])
    blocks: Samples = [
        ([w.name, state], getattr(w.kv, state))
        for w in workers
        if w.kv is not None
        for state in ("valid", "free", "quarantined", "reserve")
    ]
    yield _gauge("kv_blocks", "KV blocks of the active engine, by what may be done with them.", blocks, ["worker", "state"])
    whole: Samples = [([w.name], w.kv.blocks) for w in workers if w.kv is not None]
    yield _gauge("kv_blocks_capacity", "KV blocks there are.", whole, ["worker"])
    dropped: Samples = [([w.name], w.log_dropped) for w in workers]
    yield _counter("log_dropped_bytes", "Engine output that was read and could not be written.", ["worker"], dropped)


_ROLE_STATES = [
    *((Role.ACTIVE, state) for state in (EngineState.PROMOTING, EngineState.ACTIVE, EngineState.DRAINING)),
    *((Role.SHADOW, state) for state in (EngineState.SPAWNING, EngineState.LOADING, EngineState.WARMING, EngineState.PARKED)),
    *((Role.RETIRING, state) for state in (EngineState.STOPPING, EngineState.QUARANTINED)),
]


def _failovers(workers: Iterable[wire.WorkerFigures]) -> Iterator[Metric]:
    workers = list(workers)
    reasons: Samples = [([w.name, reason], w.restarts.get(reason, 0)) for w in workers for reason in REASONS]
    yield _counter("engine_restarts", "Engines that had to be replaced, by reason.", ["worker", "reason"], reasons)
    faults: Samples = [([w.name, fault], w.faults.get(fault, 0)) for w in workers for fault in FAULTS]
    yield _counter("engine_ends", "Engines that ended, by class of failure (planned: they were asked to).", ["worker", "fault"], faults)
    kinds: Samples = [([w.name, kind.value], w.failovers.get(kind.value, 0)) for w in workers for kind in RecoveryKind]
    yield _counter("failovers", "Failovers that are complete, by what took over.", ["worker", "kind"], kinds)
    duration = HistogramMetricFamily(
        "shadowsup_failover_duration_seconds",
        "From the verdict to the end of each step of a failover; detect: from the last sign of life to the verdict.",
        labels=["worker", "step"],
    )
    for worker in workers:
        for step in STEPS:
            found = worker.steps.get(step, _NO_TIME)
            duration.add_metric([worker.name, step], cumulative(wire.STEPS_S, found.counts), found.sum)
    yield duration
    for field, name, what in (
        ("blocks_kept", "failover_blocks_kept", "KV blocks that successors found and kept."),
        ("blocks_dropped", "failover_blocks_dropped", "KV blocks that successors could not trust."),
        ("resumed", "failover_requests_resumed", "Requests that successors continued."),
    ):
        counts: Samples = [([w.name], getattr(w, field)) for w in workers]
        yield _counter(name, what, ["worker"], counts)


def _kept(kept: Iterable[wire.KeptFigures]) -> Iterator[Metric]:
    kept = list(kept)
    labels = ["device", "kind"]
    for field, name, what in (
        ("size", "kept_memory_bytes", "Memory that outlives engines."),
        ("segments", "kept_memory_segments", "Segments of kept memory."),
        ("leases", "kept_memory_leases", "Leases on segments: who may use them now."),
    ):
        yield _gauge(name, what, [([each.device, each.kind], getattr(each, field)) for each in kept], labels)


def _gpus(gpus: Iterable[wire.GpuFigures], age_s: float) -> Iterator[Metric]:
    gpus = list(gpus)
    names = ["gpu", "uuid"]

    def of(gpu: wire.GpuFigures) -> list[str]:
        return [str(gpu.index), gpu.uuid]

    yield _gauge("gpu_info", "Always 1.", [([*of(gpu), gpu.name], 1.0) for gpu in gpus], [*names, "name"])
    yield _gauge(
        "gpu_memory_bytes",
        "Device memory in use, by purpose.",
        [([*of(gpu), purpose], size) for gpu in gpus for purpose, size in sorted(gpu.memory.items())],
        [*names, "purpose"],
    )
    for field, name, scale, what in (
        ("memory_total", "gpu_memory_total_bytes", 1.0, "Device memory there is."),
        ("memory_used", "gpu_memory_used_bytes", 1.0, "Device memory in use."),
        ("util", "gpu_utilization_ratio", 0.01, "Share of time that a kernel ran."),
        ("power_w", "gpu_power_watts", 1.0, "Power drawn."),
        ("temperature_c", "gpu_temperature_celsius", 1.0, "Temperature of the chip."),
    ):
        yield _gauge(name, what, [(of(gpu), scale * value) for gpu in gpus if (value := getattr(gpu, field)) is not None], names)
    ages: Samples = [(of(gpu), gpu.age_s + age_s) for gpu in gpus if gpu.age_s is not None]
    yield _gauge("gpu_reading_age_seconds", "Age of what NVML said.", ages, names)
    yield _gauge("gpu_quarantined", "1 while nothing is started on this GPU.", [(of(gpu), float(gpu.quarantined)) for gpu in gpus], names)
    lost: Samples = [(of(gpu), float(gpu.state == "lost")) for gpu in gpus]
    yield _gauge("gpu_lost", "1 when the GPU has fallen off the bus.", lost, names)
    ecc: Samples = [(of(gpu), gpu.ecc_uncorrected) for gpu in gpus if gpu.ecc_uncorrected is not None]
    yield _counter("gpu_ecc_uncorrected_errors", "Uncorrected memory errors since the driver was loaded.", names, ecc)
    xids: Samples = [([*of(gpu), str(number)], count) for gpu in gpus for number, count in sorted(gpu.xids.items())]
    yield _counter("gpu_xid_errors", "Xid errors since the supervisor started, by number.", [*names, "xid"], xids)
    last: Samples = [(of(gpu), gpu.xid_time) for gpu in gpus if gpu.xid_time]
    yield _gauge("gpu_xid_last_time_seconds", "When the last Xid error came, since the epoch.", last, names)
