"""``shadowsup tui``: the dashboard, as a client of a node that runs. Imported when it is used: it is the only verb that needs Textual."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from shadowsup.supervisor.cli.node import locate
from shadowsup.supervisor.errors import ExitCode, SupervisorError

if TYPE_CHECKING:
    from shadowsup.tui.feed import Feed


@click.command()
@click.option("--write", is_flag=True, help="Allow orders, and saving in the config editor.")
@click.option("--record", metavar="FILE", type=click.Path(path_type=Path), help="Keep what is shown, logs included, to be looked at later.")
@click.option("--replay", metavar="FILE", type=click.Path(path_type=Path), help="Show a recording; no node is needed.")
@click.pass_context
def tui(ctx: click.Context, write: bool, record: Path | None, replay: Path | None) -> int:
    """Show the dashboard of a running node. Leaving or killing it changes nothing.

    It only looks, unless --write is given. A recording plays at F5 (pause), F6 and F7 (half a minute back, forward), F10 (faster).
    """
    if replay is not None and (record is not None or write):
        raise SupervisorError("--replay goes with neither --record nor --write", "a recording cannot be changed", exit_code=ExitCode.USAGE)
    need_terminal()
    if replay is not None:
        from shadowsup.tui.recording import Replay

        return _run(Replay(replay))
    from shadowsup.tui.feed import LiveFeed

    feed: Feed = LiveFeed(locate(ctx))
    if record is not None:
        from shadowsup.tui.recording import Recorder

        feed = Recorder(feed, record)
    return _run(feed, write=write)


def show_started(runtime_dir: Path, name: str) -> int:
    """Run the dashboard of a node that was started with it; stop the node if that is wished when it is left. Returns the exit code."""
    from shadowsup.tui.app import STOP_NODE
    from shadowsup.tui.feed import LiveFeed

    code = _run(LiveFeed(runtime_dir), write=True, started=True)
    if code == STOP_NODE:
        from shadowsup.supervisor.cli.stop import stop_node

        stop_node(runtime_dir)
        return ExitCode.DONE
    click.echo(f"node {name} goes on in the background; shadowsup --runtime-dir {runtime_dir} stop ends it", err=True)
    return code


def need_terminal() -> None:
    """Raises SupervisorError: this is no terminal (exit code 2)."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise SupervisorError("the dashboard needs a terminal", "shadowsup status -o json is for programs", exit_code=ExitCode.USAGE)


def _run(feed: Feed, *, write: bool = False, started: bool = False) -> int:
    from shadowsup.tui.app import Dashboard

    return Dashboard(feed, writable=write, started=started).run() or ExitCode.DONE
