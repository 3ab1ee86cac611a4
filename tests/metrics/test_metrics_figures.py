"""The supervisor's figures: counted, sent, shown."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from shadowsup.histogram import Buckets, cumulative
from shadowsup.supervisor.figures import send
from shadowsup.supervisor.gateway.node_metrics import SILENT_S, NodeMetrics
from shadowsup.supervisor.policy.model import WorkerState
from shadowsup.supervisor.protocol import Event, Recovery
from shadowsup.supervisor.tally import REASONS, Tally, reason_of
from shadowsup.wire import figures as wire
from shadowsup.wire.engine import EngineState, KvCounts, Role

GPU = wire.GpuFigures(
    uuid="GPU-1",
    index=0,
    name="NVIDIA H200",
    quarantined=True,
    state="quarantined",
    memory_total=100,
    memory_used=60,
    memory={"weights": 30, "kv": 20, "engines": 10},
    util=50.0,
    power_w=300.0,
    temperature_c=40.0,
    ecc_uncorrected=0,
    age_s=0.5,
    xids={79: 1},
    xid_time=1.7e9,
)
WORKER = wire.WorkerFigures(
    name="chat",
    state="recovering",
    epoch=3,
    shadows=1,
    engines=(
        wire.EngineFigures(Role.ACTIVE, EngineState.ACTIVE, 99.0, 2, 1),
        wire.EngineFigures(Role.SHADOW, EngineState.LOADING, 0.0, 0, 0),
    ),
    kv=KvCounts(blocks=100, valid=40, free=50, quarantined=4, reserve=6),
    restarts={"died": 2},
    failovers={"shadow": 1},
    steps={"promote": wire.Histogram((0, 0, 0, 0, 1, *[0] * 13), 0.006)},
    blocks_kept=40,
)
FIGURES = wire.Figures(
    sent_s=99.5,
    start_time=1.7e9,
    state="running",
    workers=(WORKER,),
    parts=(wire.PartFigures("memkeeper", True, 1),),
    kept=(wire.KeptFigures("GPU-1", "kv", 20, 1, 2),),
    gpus=(GPU,),
)


def shown(metrics: NodeMetrics) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Return the samples by name and labels, as Prometheus would read them."""
    registry = CollectorRegistry()
    registry.register(metrics)
    text = generate_latest(registry).decode()
    return {(s.name, tuple(sorted(s.labels.items()))): s.value for f in text_string_to_metric_families(text) for s in f.samples}


def value(found: dict[Any, float], name: str, **labels: str) -> float:
    return found[f"shadowsup_{name}", tuple(sorted(labels.items()))]


@pytest.fixture
def metrics() -> NodeMetrics:
    metrics = NodeMetrics(lambda: 100.0)
    metrics.take(wire.encode(FIGURES))
    return metrics


def test_a_worker_is_in_one_state_of_all_there_are(metrics: NodeMetrics) -> None:
    found = shown(metrics)
    states = {state.value: value(found, "worker_state", worker="chat", state=state.value) for state in WorkerState}
    assert [state for state, is_it in states.items() if is_it] == ["recovering"]
    assert value(found, "worker_epoch", worker="chat") == 3
    assert value(found, "worker_engines", worker="chat", role="shadow", state="loading") == 1
    assert value(found, "engine_heartbeat_age_seconds", worker="chat", role="active") == 0.5
    assert ("shadowsup_engine_heartbeat_age_seconds", (("role", "shadow"), ("worker", "chat"))) not in found  # it never beat
    assert value(found, "kv_blocks", worker="chat", state="quarantined") == 4


def test_counters_and_steps_have_every_label_from_the_start(metrics: NodeMetrics) -> None:
    found = shown(metrics)
    assert [value(found, "engine_restarts_total", worker="chat", reason=reason) for reason in REASONS] == [2, *[0] * (len(REASONS) - 1)]
    assert value(found, "failovers_total", worker="chat", kind="cold") == 0
    assert value(found, "failover_duration_seconds_bucket", worker="chat", step="promote", le="0.005") == 0
    assert value(found, "failover_duration_seconds_bucket", worker="chat", step="promote", le="0.01") == 1
    assert value(found, "failover_duration_seconds_count", worker="chat", step="fence") == 0


def test_gpus_are_told_in_base_units(metrics: NodeMetrics) -> None:
    found, gpu = shown(metrics), {"gpu": "0", "uuid": "GPU-1"}
    assert value(found, "gpu_utilization_ratio", **gpu) == 0.5
    assert value(found, "gpu_memory_bytes", purpose="kv", **gpu) == 20
    assert value(found, "gpu_quarantined", **gpu) == 1
    assert value(found, "gpu_xid_errors_total", xid="79", **gpu) == 1
    assert value(found, "gpu_xid_last_time_seconds", **gpu) == 1.7e9
    assert value(found, "gpu_reading_age_seconds", **gpu) == 1.0
    assert value(found, "kept_memory_leases", device="GPU-1", kind="kv") == 2


def test_silence_of_the_supervisor_is_told() -> None:
    now = [100.0]
    metrics = NodeMetrics(lambda: now[0])
    assert shown(metrics) == {("shadowsup_supervisor_up", ()): 0.0}
    metrics.take(wire.encode(FIGURES))
    assert value(shown(metrics), "supervisor_up") == 1
    now[0] += SILENT_S + 1
    found = shown(metrics)
    assert value(found, "supervisor_up") == 0
    assert value(found, "supervisor_figures_age_seconds") == SILENT_S + 1.5
    assert value(found, "worker_epoch", worker="chat") == 3  # the last that is known
    metrics.take(b"nonsense")
    assert shown(metrics) == {("shadowsup_supervisor_up", ()): 0.0}


def event(name: str, ts: float = 1.0, worker: str | None = "chat", **data: Any) -> Event:
    return Event(n=1, ts=ts, mono_s=1.0, level="info", event=name, worker=worker, data=data)


@pytest.mark.parametrize(
    ("name", "cause", "reason"),
    [
        ("engine.verdict", "engine process died", "died"),
        ("engine.verdict", "hang: no heartbeat for 31.0 s", "hang"),
        ("engine.verdict", "failed to step: out of memory", "failed"),
        ("engine.verdict", "no sign of life 10 s after the fork", "startup"),
        ("engine.verdict", "start-up took longer than 600 s (it was loading)", "startup"),
        ("engine.verdict", "promotion did not finish within 10 s", "startup"),
        ("engine.verdict", "serves without an order", "other"),
        ("engine.spawn_failed", "", "spawn"),
        ("worker.hand_over", "", "handover"),
        ("engine.replaced", "", "replaced"),
        ("worker.state", "", None),
        ("engine.gone", "", None),
    ],
)
def test_why_an_engine_is_replaced(name: str, cause: str, reason: str | None) -> None:
    assert reason_of(name, cause) == reason
    assert reason is None or reason in REASONS


def test_what_happens_is_counted() -> None:
    tally = Tally()
    for _ in range(2):
        tally.event(event("engine.verdict", cause="engine process died"))
    tally.event(event("engine.gone", fault="segfault"))
    tally.event(event("engine.gone", fault="something new"))
    tally.event(event("engine.gone"))
    tally.event(event("gpu.xid", 5.0, None, gpu_uuid="GPU-1", number=79))
    tally.event(event("gpu.xid", 6.0, None, gpu_uuid="GPU-1", number=79))
    recovery = Recovery(n=1, worker="chat", kind="shadow", cause="x", ts=1.0, epoch=2, from_engine="chat.1", promote_ms=7.0, blocks_kept=5)
    tally.recovery(recovery)
    chat = tally.worker("chat")
    assert (chat.restarts["died"], chat.failovers["shadow"], chat.blocks_kept) == (2, 1, 5)
    assert chat.faults == {"segfault": 1, "unknown": 2}
    assert (set(chat.steps), chat.steps["promote"].sum) == ({"promote"}, 0.007)
    assert (tally.xids["GPU-1"].counts[79], tally.xids["GPU-1"].last_time) == (2, 6.0)


def test_dropped_output_never_counts_backwards() -> None:
    tally = Tally()
    tally.dropped([("chat.1", 10), ("gateway", 1)])
    tally.dropped([("chat.1", 15), ("chat.2", 5)])
    tally.dropped([("chat.2", 5)])  # chat.1 is forgotten
    assert tally.worker("chat").log_dropped == 20
    tally.dropped([("chat.2", 3)])  # another scribe, which counts anew
    assert tally.worker("chat").log_dropped == 23
    assert tally.worker("gateway").log_dropped == 1


def test_a_histogram_counts_values_by_their_bounds() -> None:
    buckets = Buckets((0.1, 1.0))
    for seconds, times in ((0.05, 1), (0.1, 2), (0.5, 1), (7.0, 3)):
        buckets.observe(seconds, times)
    assert buckets.counts == [3, 1, 3]
    assert cumulative(buckets.bounds, buckets.counts) == [("0.1", 3.0), ("1.0", 4.0), ("+Inf", 7.0)]
    assert buckets.sum == pytest.approx(21.75)


def test_figures_that_cannot_be_made_cost_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    class Broken:
        """A node whose gateway is up, and of which nothing else can be asked."""

        parts = SimpleNamespace(gateway=SimpleNamespace(beat=object()))

    send(Broken(), Tally())  # type: ignore[arg-type]
    assert "could not be made" in caplog.text
    send(SimpleNamespace(parts=SimpleNamespace(gateway=None)), Tally())  # type: ignore[arg-type]
