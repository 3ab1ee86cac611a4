"""The verbs of the control socket. Reading verbs answer at once; orders are taken and carried out by their worker's owner."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from shadowsup.supervisor import inspection, status
from shadowsup.supervisor.control import Verb
from shadowsup.supervisor.errors import ExitCode, SupervisorError
from shadowsup.supervisor.node_worker import WorkerOwner
from shadowsup.supervisor.policy import messages as m
from shadowsup.supervisor.protocol import SCHEMA

if TYPE_CHECKING:
    from shadowsup.supervisor.node import Node


def table(node: Node) -> dict[str, Verb]:
    """Return every verb that ``node`` answers."""

    def stop(arguments: Mapping[str, Any]) -> dict[str, Any]:
        if arguments.get("worker"):
            owner = worker_of(node, arguments)
            owner.wish(m.StopWorker(hurry=bool(arguments.get("hurry"))))
            return _taken(owner, "is stopping")
        node.request_stop("ordered by a client")
        return {"schema": SCHEMA, "message": f"node {node.config.node.name} is stopping"}

    def restart(arguments: Mapping[str, Any]) -> dict[str, Any]:
        owner = worker_of(node, arguments)
        if node.stopping:
            raise SupervisorError(f"node {node.config.node.name} is stopping", "start it again when it has stopped")
        node.desk.forgive()  # the operator says that what failed is well again
        owner.wish(m.RestartWorker(held=node.desk.held()))
        return _taken(owner, "is being restarted: every engine is replaced")

    def drain(arguments: Mapping[str, Any]) -> dict[str, Any]:
        owner = worker_of(node, arguments)
        owner.wish(m.DrainWorker())
        return _taken(owner, "is draining: it finishes what it has and then stops")

    def failover(arguments: Mapping[str, Any]) -> dict[str, Any]:
        owner = worker_of(node, arguments)
        active = owner.policy.active
        owner.wish(m.FailOver())
        return _taken(owner, f"hands over from {active.id if active is not None else '?'} to its shadow")

    def kill(arguments: Mapping[str, Any]) -> dict[str, Any]:
        engine = str(arguments.get("engine") or "")
        number = signal_number(arguments.get("signal", "KILL"))
        owner = node.workers.get(engine.rpartition(".")[0])
        if owner is None:
            raise SupervisorError(f"no running engine {engine or '(none named)'}", "see shadowsup status", exit_code=ExitCode.USAGE)
        owner.wish(m.Drill(engine, number))
        node.journal.add("engine.drill", f"{number.name} to {engine}, as a drill", level="warning", worker=owner.name, engine=engine)
        return {"schema": SCHEMA, "message": f"{engine}: sent {number.name}"}

    def events(arguments: Mapping[str, Any]) -> dict[str, Any]:
        since, limit = arguments.get("since"), arguments.get("limit")
        found = node.journal.since(None if since is None else int(since), worker=arguments.get("worker"))
        chosen = found[-int(limit) :] if limit else found
        return {"schema": SCHEMA, "last": node.journal.last, "events": [msgspec.structs.asdict(event) for event in chosen]}

    def node_reload(arguments: Mapping[str, Any]) -> Any:
        return node.reloads.request(arguments)

    def blocks(arguments: Mapping[str, Any]) -> dict[str, Any]:
        from shadowsup.supervisor import block_map  # numpy, which nothing else here needs: a tenth of the time of a start

        return block_map.blocks(node, worker_of(node, arguments), int(arguments.get("cells") or block_map.CELLS))

    return {
        "status": lambda _: status.status(node),
        "memory": lambda _: status.memory(node),
        "recoveries": lambda arguments: status.recoveries(node.recoveries, arguments.get("worker")),
        "logs": lambda arguments: status.logs(node, _known(node, arguments), list(node.workers)),
        "blocks": blocks,
        "inspect": lambda arguments: inspection.inspect(worker_of(node, arguments)),
        "ping": lambda _: {"schema": SCHEMA, "pid": os.getpid()},
        "events": events,
        "reload": node_reload,
        "revisions": lambda _: node.reloads.history(),
        "stop": stop,
        "restart": restart,
        "drain": drain,
        "failover": failover,
        "kill": kill,
    }


def worker_of(node: Node, arguments: Mapping[str, Any]) -> WorkerOwner:
    """Return the worker that a request names.

    Raises:
        SupervisorError: it names none that there is (exit code 2).
    """
    import difflib

    name = str(arguments.get("worker") or "")
    owner = node.workers.get(name)
    if owner is not None:
        return owner
    near = difflib.get_close_matches(name, list(node.workers), n=1)
    meant = f"; did you mean {near[0]}?" if near else ""
    raise SupervisorError(f"no worker {name!r}{meant}", f"there are: {', '.join(node.workers)}", exit_code=ExitCode.USAGE)


def signal_number(text: object) -> signal.Signals:
    """Return the signal named ``KILL``, ``SIGKILL`` or ``9``.

    Raises:
        SupervisorError: there is none (exit code 2).
    """
    name = str(text).upper().removeprefix("SIG")
    try:
        return signal.Signals(int(name)) if name.isdigit() else signal.Signals[f"SIG{name}"]
    except (KeyError, ValueError):
        raise SupervisorError(f"no signal {text!r}", "KILL, TERM, STOP, CONT, …", exit_code=ExitCode.USAGE) from None


def _known(node: Node, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
    if arguments.get("worker"):
        worker_of(node, arguments)
    return arguments


def _taken(owner: WorkerOwner, what: str) -> dict[str, Any]:
    return {"schema": SCHEMA, "worker": owner.name, "message": f"{owner.name} {what}"}
