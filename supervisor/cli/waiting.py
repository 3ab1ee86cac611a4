"""Wait for what an order brings about: every event is told as it comes, and what decides is the node's status."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from shadowsup.supervisor.errors import SupervisorError

if TYPE_CHECKING:
    from shadowsup.supervisor.client import ControlClient

Status = dict[str, Any]
Condition = Callable[[Status], bool]

TAKEN_S = 1.0
"""An order is taken by then: a worker that is still down has not just been down before it."""

no_wait_option: Callable[[Any], Any] = click.option("--no-wait", is_flag=True, help="Return when the order is taken, not when it is done.")
timeout_option: Callable[[Any], Any] = click.option(
    "--timeout", metavar="SECONDS", type=click.FloatRange(min=0), help="Give up waiting after this long; the order stands."
)


def find_worker(status: Status, name: str) -> dict[str, Any]:
    """Return a worker of a status, {} when it is not there."""
    return next((worker for worker in status.get("workers") or [] if worker.get("name") == name), {})


def find_engine(status: Status, engine: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return (worker, engine) of a status; {} for what is not there."""
    for worker in status.get("workers") or []:
        for found in worker.get("engines") or []:
            if found.get("id") == engine:
                return worker, found
    return {}, {}


def engine_ids(worker: dict[str, Any]) -> set[str]:
    """Return the engines of a worker that have a process."""
    return {str(engine["id"]) for engine in worker.get("engines") or [] if engine.get("state") != "gone"}


class Progress:
    """Tells the events of one worker on stderr, each with the seconds since the order."""

    def __init__(self, worker: str) -> None:
        self._worker = worker
        self._began_s = time.monotonic()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began_s

    def __call__(self, event: dict[str, Any]) -> None:
        if event.get("worker") == self._worker and event.get("message"):
            text = str(event["message"]).splitlines()[0]
            click.echo(f"[{self.seconds:6.2f}] {text}", err=True)


def wait_until(client: ControlClient, done: Condition, *, since: int, worker: str, order: str, timeout_s: float | None) -> Progress:
    """Wait until ``done`` says so of a status, telling the events from number ``since`` on.

    Args:
        order: what was ordered, for messages: ``restart``.

    Raises:
        SupervisorError: the worker is down, which no waiting mends; or ``timeout_s`` is over.
        NotRunning: the supervisor ended.
    """
    from shadowsup.supervisor.client import follow_events

    progress = Progress(worker)

    def look() -> bool:
        status = client.call("status")
        if done(status):
            return True
        found = find_worker(status, worker)
        if found.get("state") == "down" and progress.seconds > TAKEN_S:
            raise SupervisorError(f"{worker} is down: {found.get('reason') or 'no reason given'}", f"see shadowsup logs {worker}")
        if timeout_s is not None and progress.seconds > timeout_s:
            raise SupervisorError(
                f"the {order} of {worker} is not done after {timeout_s:g} s (it is {found.get('state')})",
                "the order stands; shadowsup status shows how far it is",
            )
        return False

    try:
        for event in follow_events(client, since, look):
            progress(event)
    except KeyboardInterrupt:
        click.echo(f"the {order} of {worker} goes on; shadowsup status shows how far it is", err=True)
        raise
    return progress
