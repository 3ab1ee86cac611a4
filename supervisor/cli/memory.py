"""``shadowsup memory``."""

from __future__ import annotations

from typing import Any

import click

from shadowsup.supervisor.cli.node import ask
from shadowsup.supervisor.cli.output import Column, echo_json, output_option, plural, size, table


@click.command()
@output_option
@click.pass_context
def memory(ctx: click.Context, output: str) -> None:
    """Show kept memory: every segment, its state, and which engines hold a lease on it."""
    found = ask(ctx, "memory")
    if output == "json":
        echo_json(found)
    else:
        click.echo(render(found))


_COLUMNS = (
    Column("SEGMENT", shrink=True),
    Column("KIND"),
    Column("WORKER", shrink=True),
    Column("DEVICE", shrink=True),
    Column("SIZE", right=True),
    Column("STATE"),
    Column("LEASES", shrink=True),
)


def render(found: dict[str, Any]) -> str:
    """Return the segments for people."""
    segments = [_flat(segment) for segment in found.get("segments") or []]
    total = sum(int(segment.get("size") or 0) for segment in segments)
    last = f"{plural(len(segments), 'segment')}, {size(total)}"
    if not segments:
        return last
    rows = [
        (
            segment.get("segment"),
            segment.get("kind"),
            segment.get("worker"),
            segment.get("device"),
            size(segment.get("size")),
            segment.get("state"),
            " ".join(segment.get("leases") or ()) or "none",
        )
        for segment in segments
    ]
    return f"{table(_COLUMNS, rows)}\n\n{last}"


def _flat(segment: dict[str, Any]) -> dict[str, Any]:
    """Accept a segment as the keeper describes it: the manifest inside."""
    return {**(segment.get("manifest") or {}), **{key: value for key, value in segment.items() if key != "manifest"}}
