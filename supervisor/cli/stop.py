"""``shadowsup stop``."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from shadowsup.supervisor.cli.complete import worker_argument
from shadowsup.supervisor.cli.node import locate
from shadowsup.supervisor.errors import ExitCode, NoAnswer, NotRunning, SupervisorError

if TYPE_CHECKING:
    from shadowsup.supervisor.client import ControlClient

_LOOK_S = 0.2
_ANSWER_S = 10.0


@click.command()
@worker_argument(required=False)
@click.option(
    "--timeout", metavar="SECONDS", type=click.FloatRange(min=0), help="Give up waiting after this long; the node goes on stopping."
)
@click.pass_context
def stop(ctx: click.Context, worker: str | None, timeout: float | None) -> None:
    """Stop the node in order (gateway, engines, memkeeper), or only WORKER; wait until it is done.

    When the supervisor is gone but other parts of the node are left, these are ended and the runtime directory is cleaned.
    """
    path = locate(ctx)
    deadline = None if timeout is None else time.monotonic() + timeout
    if worker is not None:
        _stop_worker(path, worker, deadline)
        return
    stop_node(path, deadline)


def stop_node(path: Path, deadline: float | None = None) -> None:
    """Stop the node that ``path`` belongs to, whatever is left of it, and wait until it is done.

    Raises:
        SupervisorError: as `stop`; NotRunning: there is nothing to stop.
    """
    stopped = _stop_supervisor(path, deadline)
    from shadowsup.supervisor.cli.leftovers import end_leftovers

    ended = end_leftovers(path, lambda text: click.echo(text, err=True))
    if stopped:
        click.echo("stopped" if not ended else f"stopped; the supervisor had left {', '.join(ended)}: ended")
    elif ended is None:
        raise NotRunning(f"no supervisor is running in {path}, and nothing is left of one", "shadowsup start CONFIG starts a node")
    else:
        click.echo(f"no supervisor was running; ended what it had left: {', '.join(ended) or 'files only'}")


def _stop_supervisor(path: Path, deadline: float | None) -> bool:
    """Order the supervisor to stop and wait until its process is gone. Return False when there is none."""
    from shadowsup.supervisor.client import ControlClient, open_process, peer_pid, wait_gone

    try:
        pid = peer_pid(path)
    except NotRunning:
        return False
    pidfd = open_process(pid) if pid else None
    try:
        try:
            with ControlClient(path, _ANSWER_S) as client:
                _order(client)
                shown: dict[str, str] = {}
                while pidfd is not None and not wait_gone(pidfd, _LOOK_S):
                    _progress(client, shown)
                    if deadline is not None and time.monotonic() > deadline:
                        raise SupervisorError(f"the supervisor (pid {pid}) is still stopping", "run stop again to go on waiting")
        except NotRunning:
            pass  # it ended between two looks
        except NoAnswer as error:
            raise NoAnswer(error.message, f"kill -9 {pid or 'PID'}, then shadowsup stop again: it ends what is left") from None
        if pidfd is not None:
            wait_gone(pidfd, None)
    finally:
        if pidfd is not None:
            os.close(pidfd)
    return True


def _order(client: ControlClient) -> None:
    """Order the stop. A supervisor that answers other requests has heard it, also when it answers this one late.

    Raises:
        NoAnswer: it answers nothing.
    """
    try:
        client.call("stop")
    except NoAnswer:
        client.call("status")


def _progress(client: ControlClient, shown: dict[str, str]) -> None:
    """Tell on stderr which parts changed their state; a supervisor that is past answering is no error here."""
    try:
        found: dict[str, Any] = client.call("status", 1.0)
    except SupervisorError:
        return
    states = {"gateway": str((found.get("gateway") or {}).get("state"))}
    states |= {str(engine["id"]): str(engine["state"]) for worker in found.get("workers") or [] for engine in worker.get("engines") or []}
    states["memkeeper"] = str((found.get("memkeeper") or {}).get("state"))
    for name, state in states.items():
        if shown.get(name) != state:
            click.echo(f"{name}: {state}", err=True)
            shown[name] = state


def _stop_worker(path: Path, worker: str, deadline: float | None) -> None:
    from shadowsup.supervisor.client import ControlClient

    with ControlClient(path, _ANSWER_S) as client:
        _tell_what_is_hit(client, worker)
        client.call("stop", worker=worker)
        last = ""
        while True:
            workers: list[dict[str, Any]] = client.call("status").get("workers") or []
            found = next((entry for entry in workers if entry.get("name") == worker), {})
            state = str(found.get("state"))
            alive = [engine for engine in found.get("engines") or [] if engine.get("state") != "gone"]
            if state == "stopped" and not alive:
                click.echo(f"{worker}: stopped")
                return
            text = f"{worker}: {state}, {', '.join(str(engine.get('id')) for engine in alive) or 'no engine'} left"
            if text != last:
                click.echo(text, err=True)
                last = text
            if deadline is not None and time.monotonic() > deadline:
                raise SupervisorError(f"{worker} is still stopping", "run stop again to go on waiting", exit_code=ExitCode.FAILED)
            time.sleep(_LOOK_S)


def _tell_what_is_hit(client: ControlClient, worker: str) -> None:
    from shadowsup.supervisor.cli.output import plural
    from shadowsup.supervisor.cli.waiting import engine_ids, find_worker

    found = find_worker(client.call("status"), worker)
    inflight = sum(int(engine.get("inflight") or 0) for engine in found.get("engines") or [])
    if engine_ids(found):
        engines, requests = plural(len(engine_ids(found)), "engine"), plural(inflight, "request")
        click.echo(f"{worker} has {engines} and {requests} in flight; shadowsup drain {worker} would let them finish", err=True)
