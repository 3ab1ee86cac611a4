"""Whether the kernel's OOM killer struck: counters of control groups (cgroup v2, memory.events), read before and after."""

from __future__ import annotations

from pathlib import Path

ROOT = Path("/sys/fs/cgroup")


class OomCounter:
    """Attributes each OOM kill of a control group to one death. Without cgroup v2 there are none.

    Args:
        root: where cgroup v2 is mounted. ``proc``: of procfs.
    """

    def __init__(self, root: Path = ROOT, proc: Path = Path("/proc")) -> None:
        self._root = root
        self._proc = proc
        self._seen: dict[Path, int] = {}

    def watch(self, pid: int) -> Path | None:
        """Remember how many kills the control group of a process has had by now; None: it cannot be told."""
        try:
            lines = (self._proc / str(pid) / "cgroup").read_text().splitlines()
        except OSError:
            return None
        name = next((line[3:] for line in lines if line.startswith("0::")), None)
        if name is None:
            return None
        events = self._root / name.lstrip("/") / "memory.events"
        count = _kills(events)
        if count is None:
            return None
        self._seen.setdefault(events, count)
        return events

    def struck(self, events: Path | None) -> bool:
        """Say whether there was a kill in the group that `watch` returned which no other death has been blamed on."""
        if events is None:
            return False
        count = _kills(events)
        if count is None or count <= self._seen.get(events, count):
            return False
        self._seen[events] += 1
        return True


def _kills(events: Path) -> int | None:
    # Of the group alone where the kernel tells it apart: a neighbour below must not be taken for the engine.
    for path in (events.with_name("memory.events.local"), events):
        try:
            words = dict(line.split() for line in path.read_text().splitlines())
            return int(words["oom_kill"])
        except (OSError, KeyError, ValueError):
            continue
    return None
