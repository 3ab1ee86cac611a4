"""The node's figures for the gateway, which Prometheus asks: built from the present state, at a low rate, in well under a millisecond."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING

from shadowsup.errors import ShadowsupError
from shadowsup.supervisor.beats import GATEWAY
from shadowsup.supervisor.node_sensor import gpu_status
from shadowsup.supervisor.node_worker import WorkerOwner
from shadowsup.supervisor.policy.model import WorkerState
from shadowsup.supervisor.policy.part import PartState
from shadowsup.supervisor.status import kept_by_device
from shadowsup.supervisor.tally import Tally, WorkerTally, XidTally
from shadowsup.wire import figures as wire
from shadowsup.wire.engine import NodeFigures

if TYPE_CHECKING:
    from shadowsup.supervisor.node import Node

log = logging.getLogger("shadowsup.figures")

LOGS_EVERY = 5
"""The scribe is asked what it dropped each time that so many figures were sent."""
_ASK_S = 1.0


async def publish(node: Node, tally: Tally) -> None:
    """Send figures to the gateway for as long as the node runs."""
    turn = 0
    while True:
        if turn % LOGS_EVERY == 0:
            await _ask_scribe(node, tally)
        send(node, tally)
        turn += 1
        await asyncio.sleep(wire.INTERVAL_S)


def send(node: Node, tally: Tally) -> None:
    """Send the figures of this instant, if there is a gateway to take them. A defect here costs figures and nothing else."""
    if node.parts.gateway is None or node.parts.gateway.beat is None:
        return
    try:
        encoded = wire.encode(figures(node, tally))
    except Exception:
        log.exception("the node's figures could not be made")
    else:
        node.beats.send(GATEWAY, NodeFigures(data=encoded))


async def _ask_scribe(node: Node, tally: Tally) -> None:
    try:
        async with asyncio.timeout(_ASK_S):
            stats = await node.host.scribe.stats()
    except (TimeoutError, ShadowsupError):
        return  # it is being replaced; what it dropped is told by its successor
    tally.dropped((each.stream, each.dropped) for each in stats)


def figures(node: Node, tally: Tally) -> wire.Figures:
    """Return the figures of this instant."""
    now_s = time.monotonic()
    return wire.Figures(
        sent_s=now_s,
        start_time=round(time.time() - (now_s - node.began_s), 3),
        state=node.state.value,
        workers=tuple(
            _worker(node.workers[config.name], tally.worker(config.name))
            if config.name in node.workers
            else wire.WorkerFigures(name=config.name, state=WorkerState.STARTING.value, epoch=0, shadows=config.shadows)
            for config in node.config.workers
        ),
        parts=_parts(node),
        kept=_kept(node),
        gpus=_gpus(node, tally, now_s),
        events_lost=node.journal.lost,
    )


def _worker(owner: WorkerOwner, tally: WorkerTally) -> wire.WorkerFigures:
    policy = owner.policy
    active = policy.active
    beat = active.vitals.beat if active is not None else None
    return wire.WorkerFigures(
        name=owner.name,
        state=policy.state.value,
        epoch=policy.epoch,
        shadows=policy.settings.shadows,
        engines=tuple(
            wire.EngineFigures(
                record.role,
                record.state,
                record.vitals.seen_s if record.vitals.beat is not None else 0.0,
                record.vitals.beat.inflight if record.vitals.beat is not None else 0,
                record.vitals.beat.queued if record.vitals.beat is not None else 0,
            )
            for record in policy.engines.values()
        ),
        kv=beat.kv if beat is not None else None,
        restarts=dict(tally.restarts),
        faults=dict(tally.faults),
        failovers=dict(tally.failovers),
        steps={step: wire.Histogram(tuple(buckets.counts), buckets.sum) for step, buckets in tally.steps.items()},
        blocks_kept=tally.blocks_kept,
        blocks_dropped=tally.blocks_dropped,
        resumed=tally.resumed,
        log_dropped=tally.log_dropped,
    )


def _parts(node: Node) -> tuple[wire.PartFigures, ...]:
    there = node.parts
    named = (("scribe", there.scribe), ("memkeeper", there.keeper), ("gateway", there.gateway), ("sensor", there.sensor))
    parts = [(name, part) for name, part in named if part is not None] + [(part.name, part) for part in there.nurseries]
    return tuple(wire.PartFigures(name, part.state is PartState.RUNNING, part.policy.restarts) for name, part in parts)


def _kept(node: Node) -> tuple[wire.KeptFigures, ...]:
    sums: dict[tuple[str, str], list[int]] = {}
    for segment in node.parts.keeper.segments() if node.parts.keeper is not None else []:
        found = sums.setdefault((segment.manifest.device, segment.manifest.kind.value), [0, 0, 0])
        for index, value in enumerate((segment.manifest.size, 1, len(segment.leases))):
            found[index] += value
    return tuple(wire.KeptFigures(device, kind, *values) for (device, kind), values in sums.items())


def _gpus(node: Node, tally: Tally, now_s: float) -> tuple[wire.GpuFigures, ...]:
    if not node.desk.gpus:
        return ()
    kept = kept_by_device(node.parts.keeper)
    pids = [record.pid for owner in node.workers.values() for record in owner.policy.engines.values() if record.pid is not None]
    found = []
    for gpu in node.desk.gpus:
        shown = gpu_status(gpu, node.parts.sensor, kept.get(gpu["uuid"], {}), pids, now_s)
        xids = tally.xids.get(gpu["uuid"], XidTally())
        found.append(
            wire.GpuFigures(
                uuid=gpu["uuid"],
                index=gpu["index"],
                name=gpu["name"],
                quarantined=gpu["state"] == "quarantined",
                state=shown["state"],
                memory={purpose: size for purpose, size in shown["memory"].items() if size is not None},
                xids=dict(xids.counts),
                xid_time=xids.last_time,
                **{name: shown.get(name) for name in _GPU_FIGURES},
            )
        )
    return tuple(found)


_GPU_FIGURES = ("memory_total", "memory_used", "util", "power_w", "temperature_c", "ecc_uncorrected", "age_s")
