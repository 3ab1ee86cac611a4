"""Which process of a vLLM engine is which, and having `failover` kill one of them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import psutil

from shadowsup.errors import ShadowsupError
from shadowsup.supervisor.bench import failover
from shadowsup.supervisor.bench.node import Node


@contextlib.contextmanager
def victims(which: str, ranks: int = 2) -> Iterator[None]:
    """Have `failover` kill the ``core``, a rank (``rank0``, of ``ranks``) or the ``api`` server of the active engine."""
    before = failover.engine_of

    async def inner(node: Node, role: str, worker: str | None = None) -> dict[str, Any]:
        found = await before(node, role, worker)
        victim = core_of(found["pid"]) if which == "core" else ranks_of(found["pid"], ranks)[int(which.removeprefix("rank"))]
        return {**found, "pid": victim.pid}

    if which != "api":
        failover.engine_of = inner
    try:
        yield
    finally:
        failover.engine_of = before


def core_of(leader: int) -> psutil.Process:
    """Return the EngineCore of the API server ``leader``. Raises as `forked`."""
    (core,) = forked(psutil.Process(leader), 1)
    return core


def ranks_of(leader: int, count: int) -> list[psutil.Process]:
    """Return the ranks of the API server's engine, in order. Raises as `forked`."""
    return forked(core_of(leader), count)


def forked(parent: psutil.Process, count: int) -> list[psutil.Process]:
    """Return what ``parent`` has forked, in order: all of its living children but multiprocessing's own helper.

    Raises:
        ShadowsupError: they are not ``count``.
        psutil.Error: ``parent`` is gone.
    """
    living = [child for child in parent.children() if child.status() != psutil.STATUS_ZOMBIE]
    found = [child for child in living if not any("resource_tracker" in word for word in child.cmdline())]
    if len(found) != count:
        told = "; ".join(f"{child.pid} {' '.join(child.cmdline())[:60]}" for child in living)
        raise ShadowsupError(f"process {parent.pid} has forked {len(found)} instead of {count}: {told}")
    return sorted(found, key=lambda child: child.pid)
