"""``shadowsup start``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

from shadowsup.supervisor import runtime_dir as runtime_dirs
from shadowsup.supervisor.errors import AlreadyRunning, ExitCode

if TYPE_CHECKING:
    from shadowsup.supervisor.config import LoadedConfig


@click.command()
@click.argument("config", type=click.Path(path_type=Path))
@click.option("-d", "--detach", is_flag=True, help="Run in the background; return when the supervisor is up.")
@click.option("--wait", is_flag=True, help="With -d: return when every worker is healthy, or one cannot be.")
@click.option("--tui", is_flag=True, help="Show the dashboard; when it is left, it asks whether the node shall stop.")
@click.option(
    "--log-format",
    type=click.Choice(["human", "json"]),
    default="human",
    show_default=True,
    help="json: events, steps and warnings as one JSON object a line.",
)
@click.pass_context
def start(ctx: click.Context, config: Path, detach: bool, wait: bool, tui: bool, log_format: str) -> int:
    """Run the node that CONFIG describes, in the foreground: a line a step, and a last line when it serves.

    Ctrl-C and SIGTERM let running requests finish, then stop everything. If parts of this node are alive, they are adopted.

    Exit code 100: this node is supervised already.
    """
    if tui:
        from shadowsup.supervisor.cli.tui import need_terminal

        need_terminal()
    loaded = _load(config)
    path = runtime_dirs.for_start(
        loaded.config.node.name,
        explicit=ctx.find_root().obj,
        configured=loaded.config.node.runtime_dir,
        environ=os.environ,
    )
    refuse_second(path)
    path = runtime_dirs.create(path, longest_name=max(len(worker.name) for worker in loaded.config.workers))
    if detach or tui:
        from shadowsup.supervisor.cli.detach import start_detached

        code = start_detached(loaded, path, wait=wait, json_log=log_format == "json")
        if not tui or code != ExitCode.DONE:
            return code
        from shadowsup.supervisor.cli.tui import show_started

        return show_started(path, loaded.config.node.name)
    from shadowsup.supervisor import node_run
    from shadowsup.supervisor.cli.reporter import JsonLines, Lines

    return int(node_run.run(loaded, path, reporter=JsonLines() if log_format == "json" else Lines()))


def _load(config: Path) -> LoadedConfig:
    from shadowsup.supervisor.config import load

    loaded = load(config)
    for warning in loaded.warnings:
        click.echo(f"warning: {warning}", err=True)
    return loaded


def refuse_second(path: Path) -> None:
    """Raise AlreadyRunning when a supervisor serves ``path``."""
    if not runtime_dirs.serving(path):
        return
    from shadowsup.supervisor.client import peer_pid

    pid = peer_pid(path)
    raise AlreadyRunning(
        f"this node is supervised already{f' by pid {pid}' if pid else ''}, in {path}",
        f"shadowsup --runtime-dir {path} status; or stop it first",
    )
