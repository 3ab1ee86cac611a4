"""What each order would do, before it is given: which processes, which streams, how much memory. Pure: a story in, a question out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from shadowsup.tui.dialogs import Choice, Question
from shadowsup.tui.errors import TuiError
from shadowsup.tui.shapes import Engine, Worker
from shadowsup.tui.story import Story
from shadowsup.tui.words import millis, plural, size

SIGNALS = (("KILL", "Kill"), ("TERM", "Term"), ("STOP", "Stop (hang)"))
"""Of a drill: death, a polite end, and what looks like a hang."""


def failover(story: Story, worker: Worker) -> Question:
    """Planned: the shadow takes over.

    Raises:
        TuiError: there is nobody to hand over from or to.
    """
    active = _active(worker)
    shadow = _successor(worker)
    if shadow is None:
        raise TuiError(f"{worker.name} has no parked shadow to hand over to", "wait until it is healthy, or restart it")
    return Question(
        title=f"Hand {worker.name} over from {active.id} to {shadow.id}?",
        verb="failover",
        facts=(
            ("ends", _who([active])),
            ("takes over", _who([shadow])),
            ("streams", f"{plural(worker.inflight, 'request')} held {_about(story, worker)}, then going on"),
            ("memory", f"none is freed: {plural(worker.kv.valid, 'block')} of KV stay"),
            ("afterwards", "a new shadow is started in the background"),
        ),
        choices=(Choice("Hand over", {"worker": worker.name}),),
    )


def drain(story: Story, worker: Worker, memory: Mapping[str, Any]) -> Question:
    """Finish what is in flight, then stop. Raises TuiError: it does not serve."""
    _active(worker)
    return Question(
        title=f"Drain {worker.name}?",
        verb="drain",
        facts=(
            ("streams", f"{plural(worker.inflight, 'request')} in flight may finish; new ones are refused"),
            ("then ends", _who(worker.engines)),
            ("memory", _freed(worker, memory)),
            ("afterwards", f"{worker.name} stays stopped until it is restarted"),
        ),
        choices=(Choice("Drain", {"worker": worker.name}, danger=True),),
        warning=_only(story, worker),
    )


def restart(story: Story, worker: Worker) -> Question:
    """Replace every engine."""
    serves = worker.active is not None
    shadow = _successor(worker)
    if serves and shadow is not None:
        streams = f"{plural(worker.inflight, 'request')} held {_about(story, worker)}: the engines are replaced through their shadows"
    elif serves:
        streams = f"{plural(worker.inflight, 'request')} held until a new engine has started"
    else:
        streams = "none: it does not serve now"
    return Question(
        title=f"Restart {worker.name}?",
        verb="restart",
        facts=(
            ("replaces", _who(worker.engines) if worker.engines else "nothing runs: engines are started"),
            ("streams", streams),
            ("memory", "none is freed: weights and KV stay"),
            ("also", "failures are forgotten: pauses and limits begin anew"),
        ),
        choices=(Choice("Restart", {"worker": worker.name}),),
    )


def stop(story: Story, worker: Worker, memory: Mapping[str, Any]) -> Question:
    """Nothing of the worker runs any more."""
    return Question(
        title=f"Stop {worker.name}?",
        verb="stop",
        facts=(
            ("ends", _who(worker.engines) if worker.engines else "nothing of it runs"),
            ("streams", f"{plural(worker.inflight, 'request')} in flight end with an error"),
            ("memory", _freed(worker, memory)),
            ("afterwards", f"requests for {worker.model or worker.name} are refused until it is restarted"),
        ),
        choices=(Choice("Stop", {"worker": worker.name}, danger=True),),
        warning=_only(story, worker),
    )


def stop_node(story: Story, memory: Mapping[str, Any]) -> Question:
    """The whole node ends, this dashboard's data with it."""
    status = story.status
    engines = [engine for worker in status.workers for engine in worker.engines]
    inflight = max(status.gateway.inflight, sum(worker.inflight for worker in status.workers))
    parts = 3 + len(status.nursery)
    return Question(
        title=f"Stop node {status.node.name}, with everything on it?",
        verb="stop",
        facts=(
            ("ends", f"{plural(len(engines), 'engine')} and {parts} other processes, supervisor pid {status.node.pid}"),
            ("streams", f"{plural(inflight, 'request')} may finish within the stop timeout; new ones are refused"),
            ("memory", f"all that is kept is freed: {size(sum(int(s.get('size') or 0) for s in memory.get('segments') or []))}"),
            ("afterwards", "shadowsup start brings it back, with a cold start"),
        ),
        choices=(Choice("Stop the node", {}, danger=True),),
    )


def kill(story: Story, worker: Worker, engine: Engine) -> Question:
    """A drill. Raises TuiError: the engine has no process."""
    if engine.pid is None:
        raise TuiError(f"{engine.id} has no process", "it is being started, or gone")
    active = worker.active
    if active is not None and engine.id == active.id:
        shadow = _successor(worker)
        after = f"{shadow.id} takes over" if shadow is not None else "no shadow is parked: a new engine takes over, which takes longer"
        streams = f"{plural(worker.inflight, 'request')} held {_about(story, worker) if shadow is not None else 'until it serves'}"
    else:
        after, streams = "it is replaced in the background", "none: it does not serve"
    return Question(
        title=f"Kill {engine.id}, as a drill?",
        verb="kill",
        facts=(
            ("signal to", _who([engine])),
            ("role", f"{engine.role}, {engine.state}"),
            ("streams", streams),
            ("memory", "none is freed: weights and KV outlive it"),
            ("afterwards", after),
        ),
        choices=tuple(Choice(label, {"engine": engine.id, "signal": name}, danger=True) for name, label in SIGNALS),
    )


def reload(plan: Mapping[str, Any]) -> Question:
    """Apply the config file as it is on disk. ``plan``: the answer to ``reload`` with ``plan``.

    Raises:
        TuiError: a running node cannot take it, or there is nothing to do.
    """
    found = plan.get("plan") or {}
    if found.get("refused"):
        raise TuiError(str(found["refused"]), str(found.get("hint") or ""))
    if plan.get("state") == "nothing":
        raise TuiError(str(plan.get("message") or "nothing has changed"), "the node runs what the file says")
    return Question(
        title="Apply the config to the running node?",
        verb="reload",
        facts=tuple(consequences(found)),
        choices=(Choice("Apply", {"expect": found.get("current")} if found.get("current") else {}),),
    )


def consequences(plan: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return (who, what happens to it) of a `ReloadPlan`."""
    lines = []
    for change in plan.get("changes") or []:
        gap = change.get("gap_s")
        text = str(change.get("text") or change.get("change") or "")
        if change.get("change") == "restarted_with_gap":
            text += f" (a gap of about {gap:.0f} s)" if isinstance(gap, int | float) else " (with a gap)"
        lines.append((str(change.get("name") or change.get("section") or ""), text))
    return lines or [("", str(plan.get("summary") or "nothing changes"))]


def _active(worker: Worker) -> Engine:
    active = worker.active
    if active is None:
        raise TuiError(f"{worker.name} has no active engine", f"its state is {worker.state}")
    return active


def _successor(worker: Worker) -> Engine | None:
    return next((engine for engine in worker.engines if engine.state == "parked"), None)


def _who(engines: Sequence[Engine]) -> str:
    return ", ".join(f"{engine.id} (pid {engine.pid})" if engine.pid else engine.id for engine in engines)


def _about(story: Story, worker: Worker) -> str:
    """How long, by what was measured last."""
    for recovery in story.recoveries_of(worker.name):
        measured = recovery.first_token_ms or recovery.promote_ms
        if recovery.kind == "shadow" and measured is not None:
            return f"for about {millis(measured)} (the last time)"
    return "for a moment"


def _freed(worker: Worker, memory: Mapping[str, Any]) -> str:
    total = 0
    for segment in memory.get("segments") or []:
        # Weights have no owner: they go with the last worker that uses them.
        users = {str(lease).rpartition(".")[0] for lease in segment.get("leases") or ()}
        if segment.get("worker") == worker.name or (not segment.get("worker") and users == {worker.name}):
            total += int(segment.get("size") or 0)
    return f"{size(total)} of kept memory is freed: the KV cache is lost" if total else "nothing is kept"


def _only(story: Story, worker: Worker) -> str:
    serving = [other.name for other in story.status.workers if other.active is not None]
    return f"{worker.name} is the only worker that serves." if serving == [worker.name] else ""
