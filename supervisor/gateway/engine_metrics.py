"""Asks the engines' own servers for their metrics when Prometheus asks the gateway, and passes them on with a ``worker`` label.

A server that does not answer in time, or says too much, is left out and its ``shadowsup_worker_metrics_up`` is 0: nothing old is ever
shown as new.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from typing import Protocol

import aiohttp

from shadowsup.supervisor.gateway import exposition
from shadowsup.wire.engine import WorkerRoute

log = logging.getLogger(__name__)

TIMEOUT_S = 1.0
"""Well below the 10 s that Prometheus gives a scrape."""
MOST_BYTES = 4 * 2**20
"""vLLM exposes some 200 KiB."""
_UP = "shadowsup_worker_metrics_up"
_ACCEPT = {"Accept": "text/plain;version=0.0.4"}


class Scraped(Protocol):
    """A worker as far as its server's address is concerned."""

    @property
    def route(self) -> WorkerRoute: ...


def address(worker: Scraped) -> str:
    """Return where its server is now: ``http://…``, ``unix:/path``; empty while it has none.

    A worker whose engines have a socket each is asked at the one that serves.
    """
    if worker.route.upstream:
        return worker.route.upstream
    serving = getattr(worker, "serving", None)
    return next((f"unix:{engine.socket}" for engine in worker.route.engines if engine.engine == serving), "")


class EngineMetrics:
    """Args: workers: returns those of the routing table."""

    def __init__(self, workers: Callable[[], Iterable[Scraped]]) -> None:
        self._workers = workers

    async def exposition(self) -> bytes:
        """Return the metrics of every worker that has some; waits `TIMEOUT_S` at most."""
        asked = [worker for worker in self._workers() if worker.route.metrics]
        if not asked:
            return b""
        texts = await asyncio.gather(*(self._ask(worker) for worker in asked))
        lines = [f"# HELP {_UP} 1 if the engine's own server told its metrics.", f"# TYPE {_UP} gauge"]
        lines += [f'{_UP}{{worker="{worker.route.worker}"}} {float(text is not None)}' for worker, text in zip(asked, texts, strict=True)]
        told = [(worker.route.worker, text) for worker, text in zip(asked, texts, strict=True) if text is not None]
        return ("\n".join([*lines, *exposition.merge(told)]) + "\n").encode()

    async def _ask(self, worker: Scraped) -> str | None:
        base = address(worker)
        if not base:
            return None
        path = base.removeprefix("unix:")
        unix = path != base
        # A connection of its own each time: one that is kept would outlive its engine, and scrapes are seconds apart.
        connector: aiohttp.BaseConnector = aiohttp.UnixConnector(path) if unix else aiohttp.TCPConnector()
        timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
        try:
            async with (
                aiohttp.ClientSession(connector=connector, timeout=timeout, cookie_jar=aiohttp.DummyCookieJar()) as session,
                session.get(("http://localhost" if unix else base.rstrip("/")) + worker.route.metrics, headers=_ACCEPT) as answer,
            ):
                if answer.status != 200:
                    return None
                body = bytearray()
                async for chunk in answer.content.iter_any():
                    body += chunk
                    if len(body) > MOST_BYTES:
                        log.warning("the metrics of worker %s have more than %d bytes: left out", worker.route.worker, MOST_BYTES)
                        return None
                return body.decode(errors="replace")
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError):
            return None
