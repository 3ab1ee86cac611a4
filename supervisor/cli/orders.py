"""Verbs that pass an order to the supervisor and show its answer: ``restart``, ``drain``, ``failover``, ``kill``."""

from __future__ import annotations

from typing import Any

import click

from shadowsup.supervisor.cli.node import ask


def _answer(result: Any, otherwise: str) -> None:
    message = result.get("message") if isinstance(result, dict) else None
    click.echo(str(message) if message else otherwise)


@click.command()
@click.argument("worker")
@click.pass_context
def restart(ctx: click.Context, worker: str) -> None:
    """Replace the engines of WORKER by new ones; also brings a worker back that is down or stopped."""
    _answer(ask(ctx, "restart", worker=worker), f"{worker}: restart ordered")


@click.command()
@click.argument("worker")
@click.pass_context
def drain(ctx: click.Context, worker: str) -> None:
    """Let WORKER finish the requests it has and take no new ones."""
    _answer(ask(ctx, "drain", worker=worker), f"{worker}: draining")


@click.command()
@click.argument("worker")
@click.pass_context
def failover(ctx: click.Context, worker: str) -> None:
    """Switch WORKER to its shadow, as planned: the active engine hands over and ends; no request is lost."""
    _answer(ask(ctx, "failover", worker=worker), f"{worker}: failover ordered")


@click.command()
@click.argument("engine")
@click.option("--signal", "-s", "name", default="KILL", show_default=True, help="Name or number: KILL, TERM, STOP, 9, …")
@click.pass_context
def kill(ctx: click.Context, engine: str, name: str) -> None:
    """Send ENGINE (an id like chat.1) a signal, as a drill. What follows is shown by shadowsup recoveries."""
    number = _signal(name)
    _answer(ask(ctx, "kill", engine=engine, signal=number), f"{engine}: sent {number}")


def _signal(text: str) -> str:
    """Return the usual name of a signal, without SIG.

    Raises:
        click.BadParameter: there is no such signal.
    """
    import difflib
    import signal

    names = {member.name.removeprefix("SIG"): member for member in signal.Signals}
    wanted = text.upper().removeprefix("SIG")
    if wanted.isdigit():
        for name, member in names.items():
            if member.value == int(wanted):
                return name
    if wanted in names:
        return wanted
    near = difflib.get_close_matches(wanted, names, n=1)
    raise click.BadParameter(f"no signal {text!r}" + (f"; did you mean {near[0]}?" if near else ""))
