"""``shadowsup status``."""

from __future__ import annotations

from typing import Any

import click

from shadowsup.supervisor.cli.node import ask
from shadowsup.supervisor.cli.output import (
    Column,
    bold,
    colored,
    count,
    cut,
    duration,
    echo_json,
    milliseconds,
    output_option,
    plural,
    size,
    table,
    width,
)


@click.command()
@output_option
@click.pass_context
def status(ctx: click.Context, output: str) -> None:
    """Show the node: its parts, each worker with its engines, the KV cache and the last recovery."""
    found = ask(ctx, "status")
    if output == "json":
        echo_json(found)
    else:
        click.echo(render(found))


def render(found: dict[str, Any]) -> str:
    """Return the status for people."""
    node = found.get("node") or {}
    lines = [
        f"{bold('node')} {node.get('name', '?')}  {_state(node)}  pid {node.get('pid') or '-'}  up {duration(node.get('uptime_s'))}",
        "",
    ]
    lines.append(table((Column("PART"), Column("STATE"), Column("PID", right=True), Column("", shrink=True)), _parts(found)))
    for worker in found.get("workers") or []:
        lines += ["", *_worker(worker)]
    gpus = found.get("gpus") or []
    if gpus:
        columns = (Column("GPU", right=True), Column("NAME", shrink=True), Column("STATE"), Column("MEMORY"), Column("UTIL", right=True))
        rows = [
            (
                gpu.get("index"),
                gpu.get("name"),
                gpu.get("state"),
                f"{size(gpu.get('memory_used'))} / {size(gpu.get('memory_total'))}",
                _percent(gpu),
            )
            for gpu in gpus
        ]
        lines += ["", table(columns, rows)]
    return "\n".join(lines)


def _state(part: dict[str, Any]) -> str:
    return colored(str(part.get("state") or "-"))


def _percent(gpu: dict[str, Any]) -> str | None:
    return f"{gpu['util']}%" if gpu.get("util") is not None else None


def _parts(found: dict[str, Any]) -> list[tuple[object, ...]]:
    keeper, gateway, sensor = found.get("memkeeper") or {}, found.get("gateway") or {}, found.get("sensor") or {}
    kept = (
        ""
        if not keeper.get("backend")
        else f"{keeper['backend']}, {plural(keeper.get('segments') or 0, 'segment')}, {size(keeper.get('bytes') or 0)}"
    )
    served = (
        f"{gateway.get('listen') or '-'}, {count(gateway.get('requests_total') or 0)} requests, {gateway.get('streams_held') or 0} held"
    )
    rows: list[tuple[object, ...]] = [
        ("memkeeper", keeper.get("state"), keeper.get("pid"), kept),
        ("gateway", gateway.get("state"), gateway.get("pid"), served),
    ]
    rows += [("nursery", nursery.get("state"), nursery.get("pid"), nursery.get("engine")) for nursery in found.get("nursery") or []]
    if sensor.get("state"):
        rows.append(("sensor", sensor.get("state"), sensor.get("pid"), ""))
    return rows


_ENGINE_COLUMNS = (
    Column("ENGINE", shrink=True),
    Column("ROLE"),
    Column("STATE"),
    Column("PID", right=True),
    Column("PHASE"),
    Column("STEP", right=True),
    Column("INFLIGHT", right=True),
    Column("BEAT", right=True),
)


def _worker(worker: dict[str, Any]) -> list[str]:
    state = str(worker.get("state"))
    what = f"{worker.get('engine')}  {worker.get('model') or ''}"
    head = f"worker {worker.get('name')}  {state}  epoch {worker.get('epoch')}  {what}"
    lines = [cut(head.rstrip(), width()).replace("worker", bold("worker"), 1).replace(f"  {state}  ", f"  {colored(state)}  ", 1)]
    if worker.get("reason"):
        lines.append(f"  {cut(str(worker['reason']), width() - 2)}")
    engines = worker.get("engines") or []
    if engines:
        rows = [
            (
                engine.get("id"),
                engine.get("role"),
                engine.get("state"),
                engine.get("pid"),
                engine.get("phase"),
                engine.get("step"),
                engine.get("inflight"),
                None if engine.get("heartbeat_age_s") is None else duration(engine["heartbeat_age_s"]),
            )
            for engine in engines
        ]
        lines.append(table(_ENGINE_COLUMNS, rows, indent="  "))
    kv = worker.get("kv")
    if kv and kv.get("blocks"):
        parts = (f"{count(kv.get('blocks'))} blocks", *(f"{count(kv.get(key))} {key}" for key in ("valid", "quarantined", "reserve")))
        lines.append(f"  kv: {', '.join(parts)}")
    if worker.get("kv_given") is False and str(worker.get("state")) in ("healthy", "degraded"):
        words = "kv: the keeper does not have the blocks in use: engines that come later start with fresh ones"
        lines.append(f"  {cut(words, width() - 2)}")
    recovery = worker.get("last_recovery")
    if recovery:
        lines += [f"  {line}" for line in recovery_lines(recovery)]
    return lines


def recovery_lines(recovery: dict[str, Any]) -> list[str]:
    """Return a recovery in two lines."""
    steps = ("detect", "freeze", "promote", "first_token", "fence", "refill")
    times = ", ".join(
        f"{step.replace('_', ' ')} {milliseconds(recovery.get(f'{step}_ms'))}" for step in steps if recovery.get(f"{step}_ms") is not None
    )
    first = f"last recovery: {recovery.get('kind')}, {recovery.get('cause')}; {count(recovery.get('blocks_kept'))} blocks kept"
    if recovery.get("requests_resumed") is not None:
        first += f", {plural(int(recovery['requests_resumed']), 'request')} resumed"
    return [cut(first, width() - 2), cut(f"  ms: {times}", width() - 2)] if times else [cut(first, width() - 2)]
