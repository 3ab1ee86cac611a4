"""What Prometheus reads at ``/metrics``. Names say their unit; labels are worker names, endpoints and statuses, all of them few."""

from __future__ import annotations

import asyncio
import platform
from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from shadowsup import __version__
from shadowsup.histogram import cumulative
from shadowsup.supervisor.gateway.engine_metrics import EngineMetrics
from shadowsup.supervisor.gateway.gateway import Gateway, Upstream
from shadowsup.supervisor.gateway.held import HeldWorker
from shadowsup.supervisor.gateway.node_metrics import NodeMetrics
from shadowsup.supervisor.gateway.worker import Worker

CONTENT_TYPE = CONTENT_TYPE_LATEST
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


class Metrics:
    """The gateway's own registry: what is observed as it happens, and what is read from the workers at a scrape."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._engines: EngineMetrics | None = None
        self._names: Callable[[], list[str]] = list
        self.node = NodeMetrics()
        """What the supervisor tells."""
        self._registry.register(self.node)
        build = Gauge("shadowsup_build_info", "Always 1.", ["version", "python"], registry=self._registry)
        build.labels(__version__, platform.python_version()).set(1)
        self._requests = Counter(
            "shadowsup_gateway_requests",
            "Requests that ended, by HTTP status (499: the client left first).",
            ["endpoint", "worker", "status"],
            registry=self._registry,
        )
        self._duration = _histogram("request_seconds", "From a request's arrival to its end.", ["endpoint", "worker"], self._registry)
        self._first_text = _histogram("first_text_seconds", "From a request's arrival to its first text.", ["worker"], self._registry)
        self._pause = _histogram(
            "failover_pause_seconds", "From the loss of a stream's engine to its next token.", ["worker"], self._registry
        )
        self._slow_clients = Counter(
            "shadowsup_gateway_slow_clients", "Clients cut off because they did not read.", ["worker"], registry=self._registry
        )

    def watch(self, gateway: Gateway) -> None:
        """Read ``gateway`` at each scrape, and the servers of workers that have metrics of their own."""
        self._registry.register(_WorkerCollector(gateway))
        self._engines = EngineMetrics(lambda: gateway.workers.values())
        self._names = lambda: [worker.name for worker in list(gateway.workers.values()) if not isinstance(worker, Upstream)]

    def request(self, endpoint: str, worker: str, status: int, seconds: float) -> None:
        self._requests.labels(endpoint, worker, str(status)).inc()
        self._duration.labels(endpoint, worker).observe(seconds)

    def first_text(self, worker: str, seconds: float) -> None:
        self._first_text.labels(worker).observe(seconds)

    def pause(self, worker: str, seconds: float) -> None:
        self._pause.labels(worker).observe(seconds)

    def slow_client(self, worker: str) -> None:
        self._slow_clients.labels(worker).inc()

    def exposition(self) -> bytes:
        """Return what this process knows."""
        # A series that begins with its first event has no increase at that event: all begin at 0.
        for name in self._names():
            for each in (self._first_text, self._pause, self._slow_clients):
                each.labels(name)
        return generate_latest(self._registry)

    async def all(self) -> bytes:
        """Return that, and what engines' own servers say, each asked for a second at most."""
        theirs = await self._engines.exposition() if self._engines is not None else b""
        # With dozens of workers it takes some ten milliseconds, which no stream shall wait for.
        return await asyncio.to_thread(self.exposition) + theirs


def _histogram(name: str, what: str, labels: list[str], registry: CollectorRegistry) -> Histogram:
    return Histogram(f"shadowsup_gateway_{name}", what, labels, buckets=_SECONDS, registry=registry)


_COUNTS = {
    "tokens": "Tokens received from engines.",
    "prompt_tokens": "Tokens of prompts that engines accepted; replays are not counted again.",
    "cached_tokens": "Of the prompt tokens, those found in kept KV.",
    "replays": "Requests given to a successor with what was generated so far.",
    "failovers": "Times that requests lost their engine.",
    "stale_events": "Engine events dropped: of an older epoch, another engine, or a request that ended.",
    "repeated_chars": "Characters an engine sent twice; the client got them once.",
    "missteps": "Engine events that would have left a hole in a client's text; the request was replayed instead.",
    "refusals": "Requests an engine refused for now.",
    "gave_up": "Requests that failed because no engine came in time.",
    "isolated": "Times that a request was run alone, because engines had died of their own making while they had it.",
    "poisoned": "Requests that failed because they end engines, even alone.",
    "begun_anew": "Answers that are not followed (not streamed, mostly) and were begun anew by another engine: work that was lost.",
    "unreplayable": "Answers broken off because no other engine could continue them.",
}


class _WorkerCollector(Collector):
    """Reads from a thread of its own: it takes copies of what the loop may change, each by one call."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    def describe(self) -> Iterable[Metric]:
        return []  # without it the registry would collect once to learn the names

    def collect(self) -> Iterable[Metric]:
        workers = [worker for worker in list(self._gateway.workers.values()) if not isinstance(worker, Upstream)]
        for field, what in _COUNTS.items():
            counter = CounterMetricFamily(f"shadowsup_gateway_{field}", what, labels=["worker"])
            for worker in workers:
                counter.add_metric([worker.name], getattr(worker.counts, field))
            yield counter
        gaps = HistogramMetricFamily(
            "shadowsup_gateway_inter_token_seconds", "Between the tokens of a stream, pauses of a failover included.", labels=["worker"]
        )
        for worker in workers:
            buckets = worker.counts.gaps
            gaps.add_metric([worker.name], cumulative(buckets.bounds, buckets.counts), buckets.sum)
        yield gaps
        held = GaugeMetricFamily("shadowsup_gateway_held", "Requests that wait for an engine.", labels=["worker"])
        inflight = GaugeMetricFamily("shadowsup_gateway_inflight", "Requests that have not ended.", labels=["worker"])
        epoch = GaugeMetricFamily("shadowsup_gateway_epoch", "The newest epoch known.", labels=["worker"])
        serving = GaugeMetricFamily("shadowsup_gateway_serving", "1 while an engine takes requests.", labels=["worker"])
        for each in list(self._gateway.workers.values()):
            inflight.add_metric([each.name], each.inflight)
            serving.add_metric([each.name], float(self._gateway.serves(each)))
            if isinstance(each, Worker | HeldWorker):
                held.add_metric([each.name], each.held)
                epoch.add_metric([each.name], each.epoch)
        yield from (held, inflight, epoch, serving)
