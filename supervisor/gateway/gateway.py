"""The shell around the workers: keeps an engine link for each row of the routing table, runs their timers, counts for the beats."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from shadowsup.supervisor.gateway.errors import ApiError, model_not_found
from shadowsup.supervisor.gateway.held import HeldWorker
from shadowsup.supervisor.gateway.link import EngineLink
from shadowsup.supervisor.gateway.stream import Stream
from shadowsup.supervisor.gateway.worker import NO_HOPE, Worker
from shadowsup.wire.engine import GatewayBeat, Routes, WorkerRoute
from shadowsup.wire.link import FromEngine, ToEngine

log = logging.getLogger(__name__)

SERVES = frozenset({"healthy", "degraded", "recovering"})
"""Worker states in which a request is answered, if after a pause."""


@dataclass(slots=True)
class Upstream:
    """A worker that has an HTTP server of its own (``engine: command``)."""

    route: WorkerRoute
    inflight: int = 0

    @property
    def name(self) -> str:
        return self.route.worker


AnyWorker = Worker | HeldWorker | Upstream
_CLASSES: dict[str, type[AnyWorker]] = {"link": Worker, "held": HeldWorker, "http": Upstream}
"""By the kind of a worker's row."""


@dataclass(slots=True)
class Totals:
    """What the beats report beyond the workers' own counts."""

    requests: int = 0
    errors: int = 0
    inflight: int = 0
    tokens: int = 0
    """Of workers that left the routing table."""
    replays: int = 0


class Gateway:
    """Routing table, links and timers.

    Args:
        max_inflight: requests admitted at once.
        resumed: told (worker, seconds) of each pause that a failover made in a stream.
    """

    def __init__(self, max_inflight: int, resumed: Callable[[str, float], None] | None = None) -> None:
        self.workers: dict[str, AnyWorker] = {}
        self.totals = Totals()
        self.routed = asyncio.Event()
        """Set once any routing table has come."""
        self.idle = asyncio.Event()
        """Set while no request is in flight."""
        self.idle.set()
        self.draining = False
        self.created = int(time.time())
        self._version = 0
        self.max_inflight = max_inflight
        self._resumed = resumed
        self._loop = asyncio.get_running_loop()
        self._links: dict[str, EngineLink] = {}
        self._owners: dict[str, Worker] = {}
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._closing: set[asyncio.Task[None]] = set()

    # The routing table

    def apply(self, routes: Routes) -> None:
        """Take a whole routing table."""
        self.routed.set()
        self._version = routes.version
        now = self._loop.time()
        rows = {row.worker: row for row in routes.workers}
        for name, known in list(self.workers.items()):
            if name not in rows or not isinstance(known, _CLASSES[rows[name].kind]):
                self._remove(known)
        for name, row in rows.items():
            known_or_new = self.workers.get(name) or self._new(row)
            if isinstance(known_or_new, Upstream):
                known_or_new.route = row
                continue
            if isinstance(known_or_new, HeldWorker):
                known_or_new.rerouted(row)
                continue
            known_or_new.rerouted(row, now)
            self._relink(known_or_new, now)
            self._rearm(known_or_new)

    def _new(self, row: WorkerRoute) -> AnyWorker:
        new: AnyWorker
        name, told = row.worker, self._resumed
        resumed = None if told is None else lambda seconds: told(name, seconds)
        if row.kind == "http":
            new = Upstream(row)
        elif row.kind == "held":
            new = HeldWorker(row, resumed)
        else:
            new = Worker(row, self._send, resumed)
        self.workers[row.worker] = new
        return new

    def _remove(self, worker: AnyWorker) -> None:
        del self.workers[worker.name]
        if isinstance(worker, HeldWorker):
            worker.removed()
            self._keep_totals(worker)
        if isinstance(worker, Worker):
            for engine in [engine for engine, owner in self._owners.items() if owner is worker]:
                self._unlink(engine)
            worker.removed()
            self._keep_totals(worker)
            self._rearm(worker)

    def _keep_totals(self, worker: Worker | HeldWorker) -> None:
        self.totals.tokens += worker.counts.tokens
        self.totals.replays += worker.counts.replays

    def _relink(self, worker: Worker, now: float) -> None:
        """Dial the engines that are new in the worker's row, hang up on those that left it."""
        rows = {row.engine: row for row in worker.route.engines}
        for engine in [engine for engine, owner in self._owners.items() if owner is worker]:
            if rows.get(engine) != self._links[engine].route:
                self._unlink(engine)
                worker.link_lost(engine, now)
        for engine, row in rows.items():
            if engine not in self._links:
                self._owners[engine] = worker
                self._links[engine] = EngineLink(row, self)

    def _unlink(self, engine: str) -> None:
        del self._owners[engine]
        task = self._loop.create_task(self._links.pop(engine).close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    # The links

    def link_events(self, engine: str, events: list[FromEngine]) -> None:
        worker = self._owners.get(engine)
        if worker is None:
            return  # it has just left the routing table, and its link is being closed
        worker.events(engine, events, self._loop.time())
        self._rearm(worker)

    def link_lost(self, engine: str) -> None:
        worker = self._owners.get(engine)
        if worker is None:
            return
        worker.link_lost(engine, self._loop.time())
        self._rearm(worker)

    def _send(self, engine: str, messages: Sequence[ToEngine]) -> bool:
        link = self._links.get(engine)
        return link is not None and link.send(messages)

    # The clients

    def pick(self, model: str) -> AnyWorker:
        """Return the worker for a new request: of those that serve ``model``, a serving one with the fewest requests.

        Raises:
            ApiError: 404 when no worker has that served name or name.
        """
        candidates = [worker for worker in self.workers.values() if worker.route.served_name == model]
        if not candidates and model in self.workers:
            candidates = [self.workers[model]]
        if not candidates:
            raise model_not_found(model, self.models())
        return min(candidates, key=lambda worker: (not self.serves(worker), worker.route.state in NO_HOPE, worker.inflight))

    def serves(self, worker: AnyWorker) -> bool:
        """Whether the worker answers at once."""
        return bool(worker.route.upstream) if isinstance(worker, Upstream) else worker.serving is not None

    def models(self) -> list[str]:
        """Return the served names, each once."""
        return list(dict.fromkeys(worker.route.served_name for worker in self.workers.values()))

    def ready(self) -> bool:
        """Whether a request for some model would be answered."""
        return not self.draining and any(self.serves(worker) or worker.route.state in SERVES for worker in self.workers.values())

    @contextlib.contextmanager
    def admitted(self) -> Iterator[None]:
        """Count a request as in flight.

        Raises:
            ApiError: 429 when there are too many, 503 while draining.
        """
        if self.draining:
            raise ApiError(503, "This gateway is shutting down; the next connection reaches its successor", retry_after_s=1.0)
        if self.totals.inflight >= self.max_inflight:
            message = f"{self.totals.inflight} requests are in flight, as many as this gateway admits"
            raise ApiError(429, message, code="rate_limit_exceeded", retry_after_s=1.0)
        self.totals.inflight += 1
        self.idle.clear()
        try:
            yield
        finally:
            self.totals.inflight -= 1
            if not self.totals.inflight:
                self.idle.set()

    def open(self, worker: Worker, stream: Stream) -> None:
        """Hand a new stream to its worker; what becomes of it comes through its outlet."""
        worker.add(stream, self._loop.time())
        self._rearm(worker)

    def cancel(self, worker: Worker, stream: Stream) -> None:
        worker.cancel(stream)
        self._rearm(worker)

    def abandon(self, error: ApiError) -> None:
        """End every stream with ``error``."""
        for worker in self.workers.values():
            if isinstance(worker, Worker):
                worker.abandon(error)
                self._rearm(worker)
            elif isinstance(worker, HeldWorker):
                worker.abandon(error)

    # Time

    def _rearm(self, worker: Worker) -> None:
        timer = self._timers.pop(worker.name, None)
        if timer is not None:
            timer.cancel()
        if worker.held and (at := worker.deadline_s()) is not None:
            self._timers[worker.name] = self._loop.call_at(at, self._expire, worker)

    def _expire(self, worker: Worker) -> None:
        worker.expire(self._loop.time())
        self._rearm(worker)

    # The supervisor

    def beat(self, connections: int) -> GatewayBeat:
        """Return the beat of this instant."""
        workers = [worker for worker in self.workers.values() if isinstance(worker, Worker | HeldWorker)]
        return GatewayBeat(
            pid=os.getpid(),
            sent_s=time.monotonic(),
            ready=self.routed.is_set() and not self.draining,
            connections=connections,
            streams_held=sum(worker.held for worker in workers),
            inflight=self.totals.inflight,
            requests_total=self.totals.requests,
            errors_total=self.totals.errors,
            tokens_total=self.totals.tokens + sum(worker.counts.tokens for worker in workers),
            replays_total=self.totals.replays + sum(worker.counts.replays for worker in workers),
            epochs={worker.name: worker.live_epoch for worker in workers if worker.live_epoch},
            routes_version=self._version,
        )

    async def close(self) -> None:
        """Hang up on every engine."""
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
        for engine in list(self._links):
            self._unlink(engine)
        if self._closing:
            await asyncio.wait(self._closing)
