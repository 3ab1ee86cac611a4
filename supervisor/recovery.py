"""The recoveries of a node: numbered, kept in memory, appended to ``recoveries.jsonl`` when they are complete."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

import msgspec

from shadowsup.supervisor.journal import LineFile, last_lines
from shadowsup.supervisor.protocol import Recovery

KEEP = 1_000


class RecoveryBook:
    """Recoveries of all workers, oldest first. A record is shared with the policy that fills it in, so reading shows the present."""

    def __init__(self, path: Path | None) -> None:
        self.on_done: Callable[[Recovery], None] = lambda _: None
        """Told of each recovery once, when it is complete."""
        self._file = LineFile(path) if path is not None else None
        self._kept: deque[Recovery] = deque(maxlen=KEEP)
        self._last: dict[str, Recovery] = {}
        self._counts: dict[tuple[str, str], int] = {}
        self._written: set[int] = set()
        self._n = 0

    def resume(self, since_s: float) -> None:
        """Go on with the numbers of the supervisor before this one, and show what it has recorded since (seconds since the epoch)."""
        if self._file is None:
            return
        for line in last_lines(self._file.path):
            try:
                recovery = msgspec.json.decode(line, type=Recovery)
            except msgspec.MsgspecError:
                continue
            if recovery.ts >= since_s and recovery.n > self._n:
                self._n = recovery.n
                self._kept.append(recovery)
                self._last[recovery.worker] = recovery
                self._written.add(recovery.n)
                key = (recovery.worker, recovery.kind)
                self._counts[key] = self._counts.get(key, 0) + 1

    def note(self, recovery: Recovery, *, done: bool = False) -> bool:
        """Take a record, number it when it is new, write it when it is ``done``. Returns whether it was new."""
        fresh = recovery.n == 0
        if fresh:
            self._n += 1
            recovery.n = self._n
            recovery.ts = round(time.time(), 6)
            self._kept.append(recovery)
            self._last[recovery.worker] = recovery
        if done and recovery.n not in self._written:
            self._written.add(recovery.n)
            key = (recovery.worker, recovery.kind)
            self._counts[key] = self._counts.get(key, 0) + 1
            self.on_done(recovery)
            if self._file is not None:
                self._file.append(msgspec.json.encode(recovery))
        return fresh

    def last(self, worker: str) -> Recovery | None:
        return self._last.get(worker)

    def all(self, worker: str | None = None) -> list[Recovery]:
        return [r for r in self._kept if worker is None or r.worker == worker]

    def counts(self, worker: str) -> dict[str, int]:
        """Return how many recoveries of each kind the worker has completed."""
        return {kind: count for (name, kind), count in self._counts.items() if name == worker}

    def close(self) -> None:
        """Write what is not complete and close the file: a node that stops keeps its history."""
        for recovery in self._kept:
            self.note(recovery, done=True)
        if self._file is not None:
            self._file.close()
