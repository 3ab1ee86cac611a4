"""``bench failover``: the same plan for each way of coming back, one after the other, in one run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from shadowsup.supervisor.bench import failover, machine, plain
from shadowsup.supervisor.bench.failover import Plan, Progress
from shadowsup.supervisor.bench.node import START, running
from shadowsup.supervisor.bench.setting import Mode, choose, for_mode
from shadowsup.supervisor.errors import SupervisorError

_KINDS = {Mode.SHADOW: ["shadow"], Mode.RESPAWN: ["respawn"], Mode.COLD: ["cold"], Mode.PLAIN: ["restart"]}


async def measure(
    content: dict[str, Any],
    plan: Plan,
    modes: Sequence[Mode],
    progress: Progress = lambda _: None,
    keep: Callable[[dict[str, Any]], None] = lambda _: None,
    *,
    start: Sequence[str] = START,
    adapters: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Run ``plan`` in every one of ``modes``; return the document.

    Args:
        keep: given the document so far after each mode: a later one may fail after hours.
        content: of the config (`setting.content_of`); a node is started for each mode, with the one worker of the plan.
        start, adapters: how to start a node, and what stands for its engines (tests).

    Raises:
        SupervisorError: a node or server does not come up or back.
    """
    load = machine.load()
    if not load["quiet"]:
        progress(f"warning: this machine is busy (load average {load['1m']}): the figures will be of a busy machine")
    worker = choose(content, plan.worker)
    plan = replace(plan, worker=worker.name, model=worker.public_name, block_tokens=worker.kv.block_tokens)
    found: dict[str, Any] = {}
    document: dict[str, Any] = {}
    for mode in modes:
        changed = for_mode(content, worker.name, mode)

        def tell(text: str, mode: Mode = mode) -> None:
            progress(f"{mode.value}: {text}")

        tell("starting")
        if mode is Mode.PLAIN:
            async with plain.running(changed, worker.name, adapters) as server:
                result = await plain.measure(server, plan, tell)
        else:
            async with running(changed, start=start, environment=mode.environment) as node:
                result = await failover.measure(node, plan, tell)
        if plan.kills and result["kinds"] != _KINDS[mode]:
            raise SupervisorError(f"{mode.value} was to be measured, but the engines came back by {', '.join(result['kinds'])}")
        found[mode.value] = result
        document = machine.document("failover", load, {"plan": plan.as_dict(), "engine": describe(content, worker.name), "modes": found})
        keep(document)
    return document


def describe(content: dict[str, Any], name: str) -> dict[str, Any]:
    """Return what ran, for JSON: the model without its path."""
    worker = choose(content, name)
    model = (worker.model or "").rsplit("/", 1)[-1]
    threads = worker.env.get("OMP_NUM_THREADS")
    return {"engine": worker.engine.value, "model": model, "dtype": worker.dtype.value, "threads": threads, "gpus": len(worker.gpus)}
