"""Verbs that pass an order to the supervisor and wait until it is done: ``restart``, ``drain``, ``failover``, ``kill``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from shadowsup.supervisor.cli.complete import engine_argument, worker_argument
from shadowsup.supervisor.cli.node import locate
from shadowsup.supervisor.cli.output import plural
from shadowsup.supervisor.cli.recoveries import timeline
from shadowsup.supervisor.cli.waiting import engine_ids, find_engine, find_worker, no_wait_option, timeout_option, wait_until
from shadowsup.supervisor.errors import SupervisorError

if TYPE_CHECKING:
    from shadowsup.supervisor.client import ControlClient

ANSWER_S = 10.0


@click.command()
@worker_argument()
@no_wait_option
@timeout_option
@click.pass_context
def restart(ctx: click.Context, worker: str, no_wait: bool, timeout: float | None) -> None:
    """Replace the engines of WORKER by new ones; also brings a worker back that is down or stopped.

    With shadows no request notices: each shadow is replaced, then the active engine hands over. Done when every engine is a new one
    and the worker is healthy.
    """
    with _client(ctx) as client:
        before = client.call("status")
        old = engine_ids(find_worker(before, worker))
        _order(client, "restart", worker=worker)
        if no_wait:
            return

        def done(status: dict[str, Any]) -> bool:
            found = find_worker(status, worker)
            return found.get("state") == "healthy" and not old & engine_ids(found)

        progress = wait_until(client, done, since=_next(before), worker=worker, order="restart", timeout_s=timeout)
        click.echo(f"{worker}: restarted in {progress.seconds:.1f} s")


@click.command()
@worker_argument()
@no_wait_option
@timeout_option
@click.pass_context
def drain(ctx: click.Context, worker: str, no_wait: bool, timeout: float | None) -> None:
    """Let WORKER finish the requests it has and take no new ones, then stop it. Done when no engine of it is left."""
    with _client(ctx) as client:
        before = client.call("status")
        _order(client, "drain", worker=worker)
        if no_wait:
            return

        def done(status: dict[str, Any]) -> bool:
            found = find_worker(status, worker)
            return found.get("state") == "stopped" and not engine_ids(found)

        progress = wait_until(client, done, since=_next(before), worker=worker, order="drain", timeout_s=timeout)
        click.echo(f"{worker}: drained and stopped in {progress.seconds:.1f} s; shadowsup restart {worker} brings it back")


@click.command()
@worker_argument()
@no_wait_option
@timeout_option
@click.pass_context
def failover(ctx: click.Context, worker: str, no_wait: bool, timeout: float | None) -> None:
    """Switch WORKER to its shadow, as planned: the active engine hands over and ends; no request is lost.

    Done when the old engine is gone and a new shadow is parked; then the timeline is shown.
    """
    with _client(ctx) as client:
        before = client.call("status")
        _order(client, "failover", worker=worker)
        if not no_wait:
            _recovered(client, before, worker, order="failover", timeout_s=timeout)


@click.command()
@engine_argument()
@click.option("--signal", "-s", "name", default="KILL", show_default=True, help="Name or number: KILL, TERM, STOP, 9, …")
@no_wait_option
@timeout_option
@click.pass_context
def kill(ctx: click.Context, engine: str, name: str, no_wait: bool, timeout: float | None) -> None:
    """Send ENGINE (an id like chat.1) a signal, as a drill.

    After KILL it is done when the worker is healthy again, and the timeline is shown. What an engine makes of another signal is its
    own affair: shadowsup events -f shows what follows.
    """
    number = _signal(name)
    with _client(ctx) as client:
        before = client.call("status")
        worker, found = find_engine(before, engine)
        if found:
            click.echo(blast_radius(worker, found), err=True)
        _order(client, "kill", f"{engine}: sent {number}", engine=engine, signal=number)
        if no_wait or number != "KILL" or not worker:
            return
        named = str(worker["name"])
        if found.get("role") == "active" and worker.get("engine") != "command":
            _recovered(client, before, named, order="recovery", timeout_s=timeout)
            return

        def done(status: dict[str, Any]) -> bool:
            now = find_worker(status, named)
            return now.get("state") == "healthy" and engine not in engine_ids(now)

        progress = wait_until(client, done, since=_next(before), worker=named, order="recovery", timeout_s=timeout)
        click.echo(f"{named}: healthy again after {progress.seconds:.1f} s")


def blast_radius(worker: dict[str, Any], engine: dict[str, Any]) -> str:
    """Return in one line what the loss of an engine means."""
    name = worker.get("name")
    if engine.get("role") != "active":
        return f"{engine['id']} is a {engine.get('role')} engine of {name} ({engine.get('state')}): no request is on it"
    held = plural(int(engine.get("inflight") or 0), "request")
    others = worker.get("engines") or []
    parked = [str(other["id"]) for other in others if other.get("role") == "shadow" and other.get("state") == "parked"]
    if worker.get("engine") == "command":
        return f"{engine['id']} is the engine of {name}: it keeps no memory, its requests fail until a new one serves"
    then = f"{parked[0]} takes them over" if parked else "they are held until a new engine serves: no shadow is parked"
    return f"{engine['id']} is the active engine of {name}, with {held}: {then}"


def _client(ctx: click.Context) -> ControlClient:
    from shadowsup.supervisor.client import ControlClient

    return ControlClient(locate(ctx), ANSWER_S)


def _order(client: ControlClient, verb: str, otherwise: str = "", /, **args: Any) -> None:
    """Give an order and show the answer. Raises SupervisorError: it is refused; the words are the supervisor's."""
    result = client.call(verb, **args)
    message = result.get("message") if isinstance(result, dict) else None
    click.echo(str(message) if message else otherwise or f"{verb} ordered")


def _next(status: dict[str, Any]) -> int:
    return int(status.get("event") or 0) + 1


def _recovered(client: ControlClient, before: dict[str, Any], worker: str, *, order: str, timeout_s: float | None) -> None:
    """Wait for a recovery later than ``before`` to be complete and show it."""
    known = _number(find_worker(before, worker))

    def done(status: dict[str, Any]) -> bool:
        found = find_worker(status, worker)
        recovery = found.get("last_recovery") or {}
        gone = recovery.get("from_engine") not in engine_ids(found)
        return _number(found) > known and gone and found.get("state") == "healthy"

    wait_until(client, done, since=_next(before), worker=worker, order=order, timeout_s=timeout_s)
    recoveries = client.call("recoveries", worker=worker).get("recoveries") or []
    fresh = [recovery for recovery in recoveries if recovery["n"] > known]
    if not fresh:
        raise SupervisorError(f"{worker} is healthy, but no recovery was recorded", "see shadowsup events")
    for recovery in fresh:
        click.echo(timeline(recovery))


def _number(worker: dict[str, Any]) -> int:
    return int((worker.get("last_recovery") or {}).get("n") or 0)


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
