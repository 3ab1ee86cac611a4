"""The plan of a node as `shadowsup.supervisor.node_record` keeps it, and the same plan again for a supervisor that adopts the node."""

from __future__ import annotations

import time

import msgspec

from shadowsup.supervisor import node_record
from shadowsup.supervisor.config import NodeConfig
from shadowsup.supervisor.config.model import EngineKind
from shadowsup.supervisor.node_record import NodeRecord, NurseryRecord, WorkerRecord
from shadowsup.supervisor.node_setup import NurseryPlan, Plan, WorkerPlan, nursery_env
from shadowsup.supervisor.paths import NodePaths
from shadowsup.supervisor.recipe import CommandRecipe, KeptRecipe
from shadowsup.supervisor.scribe_client import ScribeClient
from shadowsup.supervisor.vllm_plain import PlainVllmRecipe


def record(config: NodeConfig, plan: Plan, *, instance: str, config_path: str, listen: str) -> NodeRecord:
    """Return what an adopting supervisor needs of ``plan``."""
    workers = {}
    for each in plan.workers:
        workers[each.name] = WorkerRecord(gpus=each.gpus, spares=each.spares, nursery=each.nursery)
        if isinstance(each.recipe, KeptRecipe):
            workers[each.name] = msgspec.structs.replace(workers[each.name], kind=each.recipe.kind, revision=each.recipe.revision)
    return NodeRecord(
        schema=node_record.SCHEMA,
        instance=instance,
        config=node_record.dump(config),
        config_path=config_path,
        listen=listen,
        backend=plan.backend,
        keeper_gpus=plan.keeper_gpus,
        gpus=plan.gpus,
        baselines=plan.baselines,
        overhead_keys=plan.overhead_keys,
        nurseries=[
            NurseryRecord(engine=each.engine, preload=each.preload, python=each.python, number=each.number) for each in plan.nurseries
        ],
        workers=workers,
        began_s=time.time(),
    )


def replan(config: NodeConfig, paths: NodePaths, scribe: ScribeClient, record: NodeRecord) -> Plan:
    """Return the plan of a node that runs: nothing is resolved anew, and nothing is waited for.

    Raises:
        SupervisorError: an interpreter or env_file cannot be used any more.
    """
    made = Plan(
        backend=record.backend,
        keeper_gpus=record.keeper_gpus,
        gpus=list(record.gpus),
        baselines=record.baselines,
        overhead_keys=record.overhead_keys,
    )
    environments: dict[int, dict[str, str]] = {}
    for worker in config.workers:
        was = record.workers[worker.name]
        recipe: KeptRecipe | CommandRecipe
        if worker.engine is EngineKind.COMMAND:
            recipe = CommandRecipe(worker, paths, scribe, was.gpus)
        elif worker.engine is EngineKind.VLLM and not was.kind:
            recipe = PlainVllmRecipe(worker, paths, scribe, was.gpus)
        else:
            node, model = config.node.name, worker.model or ""
            recipe = KeptRecipe(worker, paths, node=node, kind=was.kind, model=model, revision=was.revision, gpus=was.gpus)
            if was.nursery is not None:
                environments.setdefault(was.nursery, nursery_env(worker, recipe))
        made.workers.append(WorkerPlan(config=worker, recipe=recipe, gpus=was.gpus, spares=was.spares, nursery=was.nursery))
    for number, nursery in enumerate(record.nurseries):
        env = environments.get(number, {})
        made.nurseries.append(
            NurseryPlan(engine=nursery.engine, preload=nursery.preload, python=nursery.python, env=env, number=nursery.number)
        )
    return made
