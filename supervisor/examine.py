"""A look at a process by the kernel's account of it (proc(5)): is it stopped, what did its threads run, what did they wait for."""

from __future__ import annotations

import time
from collections.abc import Collection
from pathlib import Path

from shadowsup.supervisor.identity import Identity, read_stat
from shadowsup.supervisor.policy.suspicion import Look

_STOPPED = frozenset("Tt")


def look(pid: int, proc: Path = Path("/proc"), *, others: Collection[Identity] = ()) -> Look | None:
    """Look at a process; None when it is gone or cannot be read. Some 10 µs a thread; it never waits for the process.

    ``others``: of its tree. A step that waits for one that is stopped stands still for no reason of its own.
    """
    folder = proc / str(pid)
    at_s = time.monotonic()
    try:
        # The name, in parentheses, may hold anything; the state follows its last one.
        state = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()[0]
        ran = waited = 0
        for task in (folder / "task").iterdir():
            try:
                on_cpu, on_queue, _ = (task / "schedstat").read_text().split()
            except (FileNotFoundError, ProcessLookupError):  # that thread has ended
                continue
            ran += int(on_cpu)
            waited += int(on_queue)
    except (OSError, ValueError, IndexError):
        return None
    stopped = state in _STOPPED or any(_stopped(other) for other in others)
    return Look(at_s=at_s, stopped=stopped, ran_s=ran / 1e9, waited_s=waited / 1e9)


def _stopped(process: Identity) -> bool:
    try:
        stat = read_stat(process.pid)
    except OSError:
        return False
    return stat is not None and stat.start_time == process.start_time and stat.state in _STOPPED
