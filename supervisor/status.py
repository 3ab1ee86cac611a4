"""What ``status``, ``memory`` and ``recoveries`` say, built from the present state; every function returns at once."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from shadowsup.supervisor import usage
from shadowsup.supervisor.config import WorkerConfig
from shadowsup.supervisor.node_parts import GatewayPart, KeeperPart, NurseryPart, ScribePart
from shadowsup.supervisor.node_sensor import SensorPart, gpu_status
from shadowsup.supervisor.node_worker import WorkerOwner
from shadowsup.supervisor.policy.model import EngineRecord, WorkerState
from shadowsup.supervisor.policy.part import PartState
from shadowsup.supervisor.policy.restart import NextStart
from shadowsup.supervisor.policy.rollout import RollOut
from shadowsup.supervisor.policy.worker import WorkerPolicy
from shadowsup.supervisor.protocol import SCHEMA, Recovery
from shadowsup.supervisor.recovery import RecoveryBook
from shadowsup.wire.engine import KvCounts, Phase

if TYPE_CHECKING:
    from shadowsup.supervisor.node import Node


def status(node: Node) -> dict[str, Any]:
    """Return the answer to ``status`` (interface: status -o json)."""
    now_s = time.monotonic()
    kept = kept_by_device(node.parts.keeper)
    pids = [record.pid for owner in node.workers.values() for record in owner.policy.engines.values() if record.pid is not None]
    workers = [
        worker_status(node.workers[worker.name], node.recoveries, now_s) if worker.name in node.workers else unstarted_status(worker)
        for worker in node.config.workers
    ]
    named = {worker.name for worker in node.config.workers}  # others are just being added
    workers += [worker_status(owner, node.recoveries, now_s) for name, owner in node.workers.items() if name not in named]
    private = sum(engine["memory"] for worker in workers for engine in worker["engines"])
    return {
        "schema": SCHEMA,
        "event": node.journal.last,
        "mono_s": round(now_s, 4),
        "time_s": round(time.time(), 3),
        "node": {
            "name": node.config.node.name,
            "state": node.state.value,
            "pid": os.getpid(),
            "uptime_s": round(now_s - node.began_s, 3),
            "runtime_dir": str(node.paths.runtime),
            "state_dir": str(node.paths.state),
            "config": node.config_path,
            "events_lost": node.journal.lost,
        },
        **node.reloads.status(),
        "memkeeper": keeper_status(node.parts.keeper),
        "nursery": [nursery_status(nursery) for nursery in node.parts.nurseries],
        "sensor": sensor_status(node.parts.sensor, now_s),
        "gateway": gateway_status(node.parts.gateway, node.listen),
        "scribe": scribe_status(node.parts.scribe),
        "workers": workers,
        "gpus": [gpu_status(gpu, node.parts.sensor, kept.get(gpu["uuid"], {}), pids, now_s) for gpu in node.desk.gpus],
        "host": usage.host(kept.get(usage.HOST, {}), private),
    }


def sensor_status(sensor: SensorPart | None, now_s: float) -> dict[str, Any]:
    """Return the sensor; there is none on a node without GPUs. ``age_s``: of its readings."""
    if sensor is None:
        return {"state": PartState.STOPPED.value, "pid": None}
    age_s = sensor.age_s(now_s)
    return {
        "state": sensor.state.value,
        "pid": sensor.pid,
        "age_s": round(age_s, 3) if age_s is not None else None,
        "stale": sensor.stale(now_s),
        "restarts": sensor.policy.restarts,
        "reason": sensor.policy.reason,
    }


def kept_by_device(keeper: KeeperPart | None) -> dict[str, dict[str, int]]:
    """Return device UUID → kind of segment → bytes of kept memory."""
    found: dict[str, dict[str, int]] = {}
    for segment in keeper.segments() if keeper is not None else []:
        kinds = found.setdefault(segment.manifest.device, {})
        kinds[segment.manifest.kind.value] = kinds.get(segment.manifest.kind.value, 0) + segment.manifest.size
    return found


def scribe_status(scribe: ScribePart | None) -> dict[str, Any]:
    if scribe is None:
        return {"state": PartState.STOPPED.value, "pid": None}
    return {"state": scribe.state.value, "pid": scribe.pid, "restarts": scribe.policy.restarts}


def keeper_status(keeper: KeeperPart | None) -> dict[str, Any]:
    if keeper is None:
        return {"state": PartState.STOPPED.value, "pid": None, "backend": "", "segments": 0, "bytes": 0}
    segments = keeper.segments()
    return {
        "state": keeper.state.value,
        "pid": keeper.pid,
        "backend": keeper.vault.backend if keeper.vault is not None else "",
        "segments": len(segments),
        "bytes": sum(segment.manifest.size for segment in segments),
        "restarts": keeper.policy.restarts,
    }


def nursery_status(nursery: NurseryPart) -> dict[str, Any]:
    return {
        "state": nursery.state.value,
        "pid": nursery.pid,
        "engine": nursery.engine,
        "restarts": nursery.policy.restarts,
        "reason": nursery.policy.reason,
    }


def gateway_status(gateway: GatewayPart | None, listen: str) -> dict[str, Any]:
    if gateway is None:
        return {"state": PartState.STOPPED.value, "pid": None, "listen": listen, "streams_held": 0, "requests_total": 0}
    beat = gateway.beat
    figures = {} if beat is None else {name: getattr(beat, name) for name in _GATEWAY_FIGURES}
    base = {"state": gateway.state.value, "pid": gateway.pid, "listen": listen, "streams_held": 0, "requests_total": 0}
    return {**base, **figures, "restarts": gateway.policy.restarts}


_GATEWAY_FIGURES = ("streams_held", "requests_total", "connections", "inflight", "errors_total", "tokens_total", "replays_total")


def worker_status(owner: WorkerOwner, recoveries: RecoveryBook, now_s: float) -> dict[str, Any]:
    """Return one worker with its engines, oldest engine first."""
    policy = owner.policy
    config = owner.recipe.config
    active = policy.active
    kv = active.vitals.beat.kv if active is not None and active.vitals.beat is not None else None
    last = recoveries.last(owner.name)
    beat = active.vitals.beat if active is not None else None
    return {
        "name": owner.name,
        "engine": config.engine.value,
        "model": config.public_name,
        "source": config.model or "",
        "state": policy.state.value,
        "reason": policy.reason,
        "since_s": round(now_s - owner.since.worker_s, 3),
        "epoch": policy.epoch,
        "shadows": policy.settings.shadows,
        "gpus": list(policy.settings.gpus),
        "restarts": max(0, policy.started - 1 - policy.settings.shadows),
        "backoff": backoff_status(policy.backoff, now_s),
        "engines": [engine_status(record, now_s, owner.since.engines_s.get(record.id)) for record in policy.engines.values()],
        "kv": kv_status(kv),
        # Whether a newcomer gets the blocks in use. False for long: the keeper has lost them, and only who holds them goes on with them.
        "kv_given": policy.succession.gives_current if isinstance(policy, WorkerPolicy) else None,
        "tokens_total": beat.tokens_total if beat is not None else 0,
        "queued": beat.queued if beat is not None else 0,
        "last_recovery": None if last is None else recovery_json(last),
        "recoveries": recoveries.counts(owner.name),
        "give_up_after_s": round(policy.give_up_after_s, 3),
        "desired": policy.desired.value,
        "revision": policy.settings.revision,
        "rollout": rollout_status(policy.rollout),
        **({} if isinstance(policy, WorkerPolicy) else {"upstream": policy.upstream}),
    }


def rollout_status(rollout: RollOut | None) -> dict[str, str] | None:
    """Return how far new settings of a worker are; None: none are under way."""
    if rollout is None or not rollout.open:
        return None
    return {"stage": rollout.stage.value, "revision": rollout.target.revision, "reason": rollout.reason}


def unstarted_status(config: WorkerConfig) -> dict[str, Any]:
    """Return a worker whose turn has not come yet: its model is being fetched, or the keeper is coming up."""
    return {
        "name": config.name,
        "engine": config.engine.value,
        "model": config.public_name,
        "source": config.model or "",
        "state": WorkerState.STARTING.value,
        "reason": "",
        "since_s": None,
        "epoch": 0,
        "shadows": config.shadows,
        "gpus": [],
        "restarts": 0,
        "backoff": None,
        "engines": [],
        "kv": kv_status(None),
        "last_recovery": None,
    }


def backoff_status(start: NextStart | None, now_s: float) -> dict[str, Any] | None:
    """Return what is started next, and in how many seconds; None when nothing waits."""
    if start is None:
        return None
    return {"what": start.what, "in_s": round(max(0.0, start.when_s - now_s), 3), "failures": start.failures}


def engine_status(record: EngineRecord, now_s: float, since_s: float | None = None) -> dict[str, Any]:
    """Return one engine. Counters, not rates: ``mono_s`` of the whole says over which span two of them are apart."""
    beat = record.vitals.beat
    return {
        "id": record.id,
        "role": record.role.value,
        "state": record.state.value,
        "pid": record.pid,
        "started_s": round(now_s - record.spawned_s, 3),
        "since_s": round(now_s - since_s, 3) if since_s is not None else None,
        "heartbeat_age_s": round(now_s - record.vitals.seen_s, 3) if beat is not None else None,
        "phase": (beat.phase if beat is not None else Phase.LOADING).value,
        "step": beat.step if beat is not None else 0,
        "inflight": beat.inflight if beat is not None else 0,
        "queued": beat.queued if beat is not None else 0,
        "tokens_total": beat.tokens_total if beat is not None else 0,
        "last_step_age_s": round(now_s - beat.last_step_s, 3) if beat is not None and beat.last_step_s else None,
        "memory": usage.private_bytes(record.pid),
        "revision": record.revision,
        "epoch": record.epoch,
        "how": record.how.value,
        "detail": beat.detail if beat is not None else "",
        "cause": record.cause,
    }


def kv_status(counts: KvCounts | None) -> dict[str, int]:
    if counts is None:
        return {"blocks": 0, "valid": 0, "free": 0, "quarantined": 0, "reserve": 0}
    found: dict[str, int] = msgspec.structs.asdict(counts)
    return found


def recovery_json(recovery: Recovery) -> dict[str, Any]:
    found: dict[str, Any] = msgspec.structs.asdict(recovery)
    return found


def memory(node: Node) -> dict[str, Any]:
    """Return the answer to ``memory``: what the vault holds, oldest first."""
    segments = node.parts.keeper.segments() if node.parts.keeper is not None else []
    return {
        "schema": SCHEMA,
        "segments": [
            {
                **{name: getattr(segment.manifest, name) for name in _MANIFEST},
                "kind": segment.manifest.kind.value,
                "fingerprint": segment.manifest.fingerprint.digest(),
                "meta": dict(segment.manifest.meta),
                "state": segment.state.value,
                "leases": list(segment.leases),
                "created_s": segment.created_s,
            }
            for segment in segments
        ],
        "bytes": sum(segment.manifest.size for segment in segments),
    }


_MANIFEST = ("segment", "set_id", "index", "worker", "device", "size", "generation")


def recoveries(book: RecoveryBook, worker: str | None) -> dict[str, Any]:
    return {"schema": SCHEMA, "recoveries": [recovery_json(recovery) for recovery in book.all(worker)]}


def logs(node: Node, arguments: Mapping[str, Any], workers: Sequence[str]) -> dict[str, Any]:
    """Return where the output of a worker, or of every part, is written."""
    worker = arguments.get("worker")
    names = [worker] if worker else [*workers, "memkeeper", "gateway", *(nursery.name for nursery in node.parts.nurseries), "scribe"]
    return {"schema": SCHEMA, "paths": [str(node.paths.log(name)) for name in names]}
