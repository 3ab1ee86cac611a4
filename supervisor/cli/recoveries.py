"""``shadowsup recoveries``."""

from __future__ import annotations

import time
from typing import Any

import click

from shadowsup.supervisor.cli.complete import worker_argument
from shadowsup.supervisor.cli.node import ask
from shadowsup.supervisor.cli.output import Column, count, echo_json, milliseconds, output_option, plural, table, width


@click.command()
@worker_argument(required=False)
@click.option("-n", "--last", type=click.IntRange(min=1), help="Only the last N.")
@output_option
@click.pass_context
def recoveries(ctx: click.Context, worker: str | None, last: int | None, output: str) -> None:
    """Show each failover, of one WORKER or of all, with its timeline in milliseconds.

    DETECT runs from the last sign of life to the verdict; the other columns run from the verdict. A wide terminal, and -o json, show more.
    """
    found = ask(ctx, "recoveries")
    kept = [recovery for recovery in found.get("recoveries") or [] if worker in (None, recovery.get("worker"))]
    kept = kept[-last:] if last else kept
    if output == "json":
        echo_json({**found, "recoveries": kept})
    else:
        click.echo(render(kept))


_STEPS = {
    "detect": "from the last sign of life to the verdict",
    "freeze": "no process of the old engine can write any more",
    "promote": "the successor owns the memory",
    "first_token": "and has sent its first token",
    "fence": "the old engine is gone",
    "refill": "a new shadow is parked",
}
"""Step → what has happened at its end. All but ``detect`` run from the verdict."""
_WIDE = 110
"""Columns of a terminal that has room for everything."""


def render(found: list[dict[str, Any]]) -> str:
    """Return the recoveries for people, oldest first."""
    if not found:
        return "no recoveries"
    wide = width() >= _WIDE
    steps = [step for step in _STEPS if wide or step != "freeze"]
    columns = [
        Column("AT"),
        Column("WORKER", shrink=True),
        Column("KIND"),
        *((Column("CLASS"),) if wide else ()),
        Column("CAUSE", shrink=True),
        *((Column("DECISION", shrink=True),) if wide else ()),
        *(Column("TOKEN" if step == "first_token" else step.upper(), right=True) for step in steps),
        *((Column("KEPT", right=True), Column("RESUMED", right=True)) if wide else ()),
    ]
    rows = [
        (
            clock(recovery.get("ts")),
            recovery.get("worker"),
            recovery.get("kind"),
            *((recovery.get("fault") or "-",) if wide else ()),
            recovery.get("cause") if wide or not recovery.get("fault") else f"{recovery['fault']}: {recovery.get('cause')}",
            *((recovery.get("decision") or "-",) if wide else ()),
            *(milliseconds(recovery.get(f"{step}_ms")) for step in steps),
            *((count(recovery.get("blocks_kept")), count(recovery.get("requests_resumed"))) if wide else ()),
        )
        for recovery in found
    ]
    return table(columns, rows)


def timeline(recovery: dict[str, Any]) -> str:
    """Return one recovery with its steps below each other: ``promote 8.2 ms``."""
    lines = [f"{recovery.get('worker')}: {recovery.get('from_engine')} → {recovery.get('to_engine') or 'none yet'}, {recovery.get('kind')}"]
    lines[0] += f", epoch {recovery.get('epoch')} ({recovery.get('cause')})"
    if recovery.get("fault"):
        lines.append(f"  {recovery['fault']}: {recovery.get('decision') or 'nothing was decided'}")
    lines += [f"  {name}: {_told(value)}" for name, value in (recovery.get("evidence") or {}).items() if name != "message"]
    for step, meaning in _STEPS.items():
        value = recovery.get(f"{step}_ms")
        if value is not None:
            lines.append(f"  {step.replace('_', ' '):<12}{milliseconds(value):>9} ms  {meaning}")
    kept, dropped, resumed = (recovery.get(name) for name in ("blocks_kept", "blocks_dropped", "requests_resumed"))
    facts = [f"{count(kept)} blocks kept"] if kept is not None else []
    facts += [f"{count(dropped)} dropped"] if dropped else []
    facts += [f"{plural(int(resumed), 'request')} resumed"] if resumed is not None else []
    return "\n".join([*lines, *([f"  {', '.join(facts)}"] if facts else [])])


def _told(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_told(each)}" for name, each in value.items())
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def clock(ts: object) -> str:
    """Return the local time of day; with the date when it is not today's."""
    if not isinstance(ts, int | float):
        return "-"
    then = time.localtime(ts)
    same_day = then[:3] == time.localtime()[:3]
    return time.strftime("%H:%M:%S" if same_day else "%m-%d %H:%M", then)
