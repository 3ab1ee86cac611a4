"""The end of a node: everything taken down in order, or, where an adoption has failed, let go of so that it serves on."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Mapping, Sequence

from shadowsup.supervisor.node_worker import WorkerOwner
from shadowsup.supervisor.part_set import PartSet
from shadowsup.supervisor.policy import messages as m
from shadowsup.supervisor.service import Service

STOP_MARGIN_S = 30.0
"""Beyond a worker's stop timeout: what its engines' ends have bounds for, each. Nothing waits for ever."""


async def take_down(
    parts: PartSet,
    workers: Mapping[str, WorkerOwner],
    sockets: Sequence[socket.socket],
    service: Service,
    report: Callable[[str], None],
    *,
    grace_s: float,
    hurry: asyncio.Event,
) -> None:
    """In order: no new request, then who uses the memory, then who keeps it, then who writes the logs.

    Args:
        sockets: the gateway's, closed here where no gateway has come to own them.
        service: forgets what it has kept, once the memory is free.
        report: told of each step, for people.
        grace_s: how long requests may take to end.
        hurry: set when nobody is to wait for them (any more).
    """
    if parts.gateway is not None:
        await parts.gateway.drain(grace_s, hurry)
        report("gateway has stopped")
        parts.gateway.close_sockets()
    else:
        for sock in sockets:
            sock.close()
    for owner in workers.values():
        owner.put(m.StopWorker(hurry=hurry.is_set()))
    for owner in workers.values():
        await _await_end(owner, parts, report)
    if parts.sensor is not None:
        await parts.sensor.stop()
    for nursery in parts.nurseries:
        await nursery.stop()
    if parts.keeper is not None:
        await parts.keeper.stop()
        await parts.keeper.close_vault()
        report("memkeeper has stopped")
    service.stopped()
    if parts.scribe is not None:
        parts.scribe.retire()
        await parts.host.scribe.close(stop=True)
        await parts.scribe.stop()


async def _await_end(owner: WorkerOwner, parts: PartSet, report: Callable[[str], None]) -> None:
    """Wait for the end of a worker that was told to stop, and say whether it came."""
    policy = owner.policy
    if await owner.until(lambda: policy.settled, policy.settings.stop_timeout_s + STOP_MARGIN_S):
        report(f"worker {owner.name} has stopped")
    else:
        left = ", ".join(policy.engines)
        parts.host.journal.add("worker.stuck", f"{owner.name} did not stop: {left} left", level="error", worker=owner.name)
        report(f"worker {owner.name} did not stop: {left} left")


async def let_go(parts: PartSet, sockets: Sequence[socket.socket]) -> None:
    """Let go of everything and end nothing: the adoption has failed, and what serves shall go on."""
    for part in parts.all:
        part.policy.wanted = False
    if parts.keeper is not None:
        await parts.keeper.close_vault()
    await parts.host.scribe.close()
    for sock in sockets:
        sock.close()
