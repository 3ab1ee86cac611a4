"""``shadowsup reload``: show what a changed config will do to the running node, have it done, and wait for the outcome."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from shadowsup.supervisor.cli.node import locate
from shadowsup.supervisor.cli.output import dim, echo_json, output_option
from shadowsup.supervisor.cli.waiting import no_wait_option, timeout_option
from shadowsup.supervisor.errors import ExitCode, SupervisorError

if TYPE_CHECKING:
    from shadowsup.supervisor.client import ControlClient

ANSWER_S = 30.0
"""Planning may have to ask NVML how much room the GPUs have."""
_ENDS = ("done", "failed", "superseded")
_MARKS = {"added": "+", "removed": "-", "replaced": "~", "restarted_with_gap": "!", "in_place": "~", "needs_node_restart": "x", "kept": "="}


@click.command()
@click.argument("config", required=False, type=click.Path(path_type=Path))
@click.option("--plan", "only_plan", is_flag=True, help="Show what it would do; change nothing.")
@click.option("--undo", is_flag=True, help="Bring back the config that was in force before this one; once more: redo.")
@click.option("--to", "revision", metavar="REVISION", help="Bring back this revision (r3) of the config; --revisions lists them.")
@click.option("--revisions", "list_them", is_flag=True, help="List the revisions of the config that are kept.")
@no_wait_option
@timeout_option
@output_option
@click.pass_context
def reload(
    ctx: click.Context,
    config: Path | None,
    only_plan: bool,
    undo: bool,
    revision: str | None,
    list_them: bool,
    no_wait: bool,
    timeout: float | None,
    output: str,
) -> int:
    """Apply a changed CONFIG to the running node; without CONFIG, the file that it was started with.

    Only what changed is touched. A changed worker is replaced through a shadow with the new settings, and no client notices. If a new
    engine does not come up, everything is taken back and the old ones serve on. What cannot be changed while the node runs (names,
    directories, the memkeeper) is refused, and then nothing is applied.

    Exit code 1: it failed and was taken back. 2: the config is not valid, or needs a restart of the node.
    """
    from shadowsup.supervisor.client import ControlClient

    if (undo or revision) and config is not None:
        raise click.UsageError("--undo and --to bring back a config that is kept: leave CONFIG out")
    wanted: dict[str, Any] = {"config": str(config.absolute()) if config is not None else None, "to": revision}
    arguments = {name: value for name, value in wanted.items() if value is not None} | ({"undo": True} if undo else {})
    with ControlClient(locate(ctx), ANSWER_S) as client:
        if list_them:
            return _list(client, output)
        before = client.call("status")
        answer = client.call("reload", **arguments, **({"plan": True} if only_plan else {}))
        plan = answer["plan"]
        if output == "table":
            click.echo(render(plan))
        if only_plan or answer["state"] == "nothing":
            if output == "json":
                echo_json(answer)
            if plan["refused"]:
                raise SupervisorError(f"it would be refused: {plan['refused']}", plan["hint"], exit_code=ExitCode.USAGE)
            return ExitCode.DONE
        if no_wait:
            if output == "json":
                echo_json(answer)
            else:
                click.echo(f"reload {answer['n']} is {answer['state']}")
            return ExitCode.DONE
        outcome = _wait(client, int(answer["n"]), int(before.get("event") or 0) + 1, timeout, quiet=output == "json")
    if outcome["state"] == "failed":
        outcome["message"] = f"the reload was taken back, what served serves on: {outcome['message']}"
    if output == "json":
        echo_json({**answer, "state": outcome["state"], "message": outcome["message"], "revision": outcome["revision"]})
    else:
        click.echo(outcome["message"], err=outcome["state"] != "done")
    return ExitCode.DONE if outcome["state"] == "done" else ExitCode.FAILED


def render(plan: dict[str, Any]) -> str:
    """Return a plan for people: a line for each part of the config, and the settings that differ."""
    lines = []
    for change in plan["changes"]:
        lines.append(f"{_MARKS.get(change['change'], '?')} {change['text']}")
        for key in change["keys"]:
            lines.append(dim(f"    {key['key']}: {key['old'] or '-'} → {key['new'] or '-'}"))
    return "\n".join(lines)


def _list(client: ControlClient, output: str) -> int:
    found = client.call("revisions")
    if output == "json":
        echo_json(found)
        return ExitCode.DONE
    for revision in found["revisions"]:
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(revision["ts"]))
        mark = "*" if revision["id"] == found["current"] else " "
        click.echo(f"{mark} {revision['id']:<5} {when}  {revision['origin']:<6}  {revision['path']}")
    return ExitCode.DONE


def _wait(client: ControlClient, n: int, since: int, timeout_s: float | None, *, quiet: bool) -> dict[str, Any]:
    """Wait for the end of reload ``n``, telling events meanwhile. Returns {state, message, revision}.

    Raises:
        SupervisorError: ``timeout_s`` is over; the reload goes on.
        NotRunning: the supervisor ended.
    """
    from shadowsup.supervisor.client import follow_events

    began_s = time.monotonic()
    outcome: dict[str, Any] = {}

    def look() -> bool:
        progress = client.call("status").get("reload") or {}
        if progress.get("n") == n and progress.get("state") in _ENDS:
            outcome.update({name: progress[name] for name in ("state", "message", "revision")})
        if timeout_s is not None and time.monotonic() - began_s > timeout_s:
            words = f"the reload is not done after {timeout_s:g} s ({progress.get('state')} {progress.get('message') or ''})".rstrip()
            raise SupervisorError(words, "it goes on; shadowsup status shows how far it is")
        return bool(outcome)

    try:
        for event in follow_events(client, since, look):
            data = event.get("data") or {}
            name = str(event.get("event"))
            if not quiet and event.get("message") and name not in ("reload.started", "reload.failed", "reload.done"):
                click.echo(f"[{time.monotonic() - began_s:6.2f}] {str(event['message']).splitlines()[0]}", err=True)
            # Another reload may have begun since: then the status tells of that one.
            if name == "reload.done" and data.get("n") == n:
                outcome.setdefault("state", "done")
                outcome.setdefault("revision", data.get("revision", ""))
                outcome.setdefault("message", event["message"])
            elif name in ("reload.failed", "reload.superseded") and data.get("n") == n:
                outcome.setdefault("state", name.partition(".")[2])
                outcome.setdefault("revision", "")
                outcome.setdefault("message", event["message"])
    except KeyboardInterrupt:
        click.echo("the reload goes on; shadowsup status shows how far it is", err=True)
        raise
    return outcome
