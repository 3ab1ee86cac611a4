"""What a dead supervisor left: ended by identity (pid, start time, boot), in order, never a stranger that got the pid."""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from shadowsup.supervisor import identity as ids
from shadowsup.supervisor.errors import SupervisorError
from shadowsup.supervisor.registry import Entry, Registry
from shadowsup.supervisor.runtime_dir import MARKS, PROCESSES, clean, serving
from shadowsup.supervisor.tree import Tree

_ORDER = ("gateway", "engine", "nursery", "keeper", "memkeeper", "sensor", "scribe")
"""Who goes first: no new request, then who uses the memory, then who keeps it, and who writes the logs last."""

GRACE_S = 10.0
"""After SIGTERM, before SIGKILL."""
KILL_S = 10.0
"""After SIGKILL. Who is there after that cannot be killed (D state)."""


def end_leftovers(runtime_dir: Path, say: Callable[[str], None], *, grace_s: float = GRACE_S) -> list[str] | None:
    """End every process in ``processes.json`` that still runs and remove the node's files. Returns who that was.

    None: there is no trace of a node. An empty list: only files were left.

    Raises:
        SupervisorError: a supervisor came up meanwhile, or a process cannot be killed.
    """
    if serving(runtime_dir):
        raise SupervisorError(f"a supervisor was started in {runtime_dir} meanwhile", "it has adopted what was left; stop it")
    if not any((runtime_dir / mark).exists() for mark in MARKS):
        return None
    entries = Registry(runtime_dir / PROCESSES).leftovers()
    ended: list[str] = []
    for what in [*_ORDER, *sorted({entry.what for entry in entries} - set(_ORDER))]:
        group = [entry for entry in entries if entry.what == what]
        if group:
            _end(group, entries, say, grace_s)
            ended += [_named(entry) for entry in group]
    clean(runtime_dir)
    return ended


def _named(entry: Entry) -> str:
    return f"{entry.what} {entry.engine}".strip() + f" (pid {entry.identity.pid})"


def _end(group: Sequence[Entry], everyone: Sequence[Entry], say: Callable[[str], None], grace_s: float) -> None:
    """TERM to each leader, then KILL to what is left of each tree; wait for both.

    Raises:
        SupervisorError: something survives SIGKILL.
    """
    leaders = {entry.identity.pid: pidfd for entry in group if (pidfd := ids.open_identity(entry.identity)) is not None}
    try:
        # Members are looked for while the leader lives: afterwards a detached helper could no longer be told from a stranger.
        others = [entry.identity for entry in everyone]
        trees = []
        for entry in group:
            spare = [other for other in others if other != entry.identity]
            tree = Tree(tag=entry.tag, leader=entry.identity, pgid=entry.pgid, spare=spare, cgroup=entry.cgroup)
            tree.observe()
            trees.append(tree)
        for entry in group:
            say(f"stopping {_named(entry)}")
            _signal(leaders.get(entry.identity.pid), signal.SIGTERM)
        _wait(list(leaders.values()), grace_s)
        for entry, tree in zip(group, trees, strict=True):
            killed = tree.kill()
            try:
                left = _wait([member.pidfd for member in killed.members], KILL_S)
                stuck = [str(member) for member in killed.members if member.pidfd in left]
            finally:
                killed.close()
            if not stuck and tree.cgroup is not None:
                tree.cgroup.remove()
            if stuck:
                raise SupervisorError(
                    f"{_named(entry)} cannot be killed: {', '.join(stuck)}",
                    "a process in state D waits for the kernel or a driver; a GPU it holds stays in use until it ends",
                )
    finally:
        for pidfd in leaders.values():
            os.close(pidfd)


def _signal(pidfd: int | None, number: signal.Signals) -> None:
    if pidfd is not None:
        try:
            signal.pidfd_send_signal(pidfd, number)
        except ProcessLookupError:
            pass


def _wait(pidfds: Sequence[int], timeout_s: float) -> set[int]:
    """Wait until all are gone; return those that are not after ``timeout_s``."""
    poller = select.poll()
    left = set(pidfds)
    for pidfd in left:
        poller.register(pidfd, select.POLLIN)
    deadline = time.monotonic() + timeout_s
    while left:
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            break
        for pidfd, _event in poller.poll(remaining * 1000):
            poller.unregister(pidfd)
            left.discard(pidfd)
    return left
