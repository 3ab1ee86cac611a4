"""``shadowsup events``."""

from __future__ import annotations

import json
from typing import Any

import click

from shadowsup.supervisor.cli.node import locate
from shadowsup.supervisor.cli.output import colored, echo_json, output_option
from shadowsup.supervisor.cli.recoveries import clock


@click.command()
@click.option("-f", "--follow", is_flag=True, help="Go on as they happen, until Ctrl-C.")
@click.option("--since", type=click.IntRange(min=0), metavar="N", help="From event number N on.")
@click.option("-n", "--last", type=click.IntRange(min=0), metavar="N", help="Only the last N of those that happened so far.")
@output_option
@click.pass_context
def events(ctx: click.Context, follow: bool, since: int | None, last: int | None, output: str) -> None:
    """Show what happened: changes of state, recoveries, warnings. With -f -o json: one JSON object a line."""
    from shadowsup.supervisor.client import ControlClient, follow_events

    with ControlClient(locate(ctx)) as client:
        result = client.call("events", **({} if since is None else {"since": since}))
        found = result.get("events") or []
        if last is not None:
            shown = found[-last:] if last else []
        else:
            shown = found
        if output == "json" and not follow:
            echo_json({**result, "events": shown})
            return
        for event in shown:
            _show(event, output)
        if follow:
            start = int(found[-1]["n"]) + 1 if found else since or 0
            for event in follow_events(client, start):
                _show(event, output)


def _show(event: dict[str, Any], output: str) -> None:
    if output == "json":
        click.echo(json.dumps(event, ensure_ascii=False))
    else:
        click.echo(render(event))


def render(event: dict[str, Any]) -> str:
    """Return an event in one line."""
    who = event.get("engine") or event.get("worker") or ""
    level = str(event.get("level") or "info")
    name = str(event.get("event") or "")
    return f"{clock(event.get('ts'))}  {colored(f'{level:<7}', level)}  {name:<18} {who:<10} {event.get('message') or ''}".rstrip()
