"""``shadowsup events``."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import click

from shadowsup.supervisor.cli.complete import workers_argument
from shadowsup.supervisor.cli.filters import Grep, filter_options
from shadowsup.supervisor.cli.node import locate
from shadowsup.supervisor.cli.output import colored, echo_json, output_option, source_colored
from shadowsup.supervisor.cli.recoveries import clock

Event = dict[str, Any]


@click.command()
@workers_argument()
@click.option("-f", "--follow", is_flag=True, help="Go on as they happen, until Ctrl-C.")
@click.option("-n", "--last", type=click.IntRange(min=0), metavar="N", help="Only the last N of those that happened so far.")
@filter_options(numbers=True)
@output_option
@click.pass_context
def events(
    ctx: click.Context,
    workers: tuple[str, ...],
    follow: bool,
    last: int | None,
    since: float | None,
    grep: Any,
    invert: bool,
    output: str,
) -> None:
    """Show what happened to the node, or to each WORKER: changes of state, recoveries, warnings.

    With -f -o json: one JSON object a line. --grep looks at the name of the event, the worker or engine, and the message.
    """
    from shadowsup.supervisor.client import ControlClient, follow_events

    number = since if isinstance(since, int) else None
    wanted = _wanted(workers, None if number is not None else since, Grep(grep, invert))
    with ControlClient(locate(ctx)) as client:
        result = client.call("events", **({} if number is None else {"since": number}))
        found = result.get("events") or []
        shown = [event for event in found if wanted(event)]
        if last is not None:
            shown = shown[-last:] if last else []
        if output == "json" and not follow:
            echo_json({**result, "events": shown})
            return
        for event in shown:
            _show(event, output)
        if follow:
            start = int(found[-1]["n"]) + 1 if found else number or 0
            for event in follow_events(client, start):
                if wanted(event):
                    _show(event, output)


def _wanted(workers: tuple[str, ...], since_s: float | None, grep: Grep) -> Callable[[Event], bool]:
    def wanted(event: Event) -> bool:
        if workers and event.get("worker") not in workers:
            return False
        if since_s is not None and float(event.get("ts") or 0.0) < since_s:
            return False
        return grep(" ".join((str(event.get("event") or ""), _who(event), str(event.get("message") or ""))).encode(errors="replace"))

    return wanted


def _show(event: Event, output: str) -> None:
    if output == "json":
        click.echo(json.dumps(event, ensure_ascii=False))
    else:
        click.echo(render(event))


def render(event: Event) -> str:
    """Return an event in one line."""
    level = str(event.get("level") or "info")
    name = str(event.get("event") or "")
    who = source_colored(f"{_who(event):<10}", _who(event))
    message = str(event.get("message") or "").replace("\n", "\n    ")
    return f"{clock(event.get('ts'))}  {colored(f'{level:<7}', level)}  {name:<18} {who} {message}".rstrip()


def _who(event: Event) -> str:
    return str(event.get("engine") or event.get("worker") or "")
