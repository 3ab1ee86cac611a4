"""``shadowsup tui``: the dashboard, as a client of a node that runs. Imported when it is used: it is the only verb that needs Textual."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from shadowsup.supervisor.cli.node import locate
from shadowsup.supervisor.errors import ExitCode, SupervisorError


@click.command()
@click.option("--write", is_flag=True, help="Allow orders, and saving in the config editor.")
@click.pass_context
def tui(ctx: click.Context, write: bool) -> int:
    """Show the dashboard of a running node. Leaving or killing it changes nothing.

    It only looks, unless --write is given.
    """
    return show(locate(ctx), write=write)


def show(runtime_dir: Path, *, write: bool) -> int:
    """Run the dashboard until the user leaves; return its exit code.

    Raises:
        SupervisorError: this is no terminal.
    """
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise SupervisorError("the dashboard needs a terminal", "shadowsup status -o json is for programs", exit_code=ExitCode.USAGE)
    from shadowsup.tui.app import Dashboard
    from shadowsup.tui.feed import LiveFeed

    return Dashboard(LiveFeed(runtime_dir), writable=write).run() or ExitCode.DONE
