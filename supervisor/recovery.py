"""The recoveries of a node: numbered, kept in memory, appended to ``recoveries.jsonl`` when they are complete."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

import msgspec

from shadowsup.supervisor.journal import LineFile, last_lines
from shadowsup.supervisor.paths import write_private
from shadowsup.supervisor.protocol import Recovery

KEEP = 1_000


class RecoveryBook:
    """Recoveries of all workers, oldest first. A record is shared with the policy that fills it in, so reading shows the present.

    Args:
        path: for those that are complete; None: they are not kept.
        open_path: for those that are not, should this supervisor die; None: they would be lost.
    """

    def __init__(self, path: Path | None, open_path: Path | None = None) -> None:
        self.on_done: Callable[[Recovery], None] = lambda _: None
        """Told of each recovery once, when it is complete."""
        self._file = LineFile(path) if path is not None else None
        self._kept: deque[Recovery] = deque(maxlen=KEEP)
        self._last: dict[str, Recovery] = {}
        self._counts: dict[tuple[str, str], int] = {}
        self._written: set[int] = set()
        self._n = 0
        self._open_path = open_path
        self._saving = False
        self._orphans: list[Recovery] = []
        """Not complete when their supervisor died, and not gone on with yet."""

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
        if self._open_path is not None:
            try:
                found = msgspec.json.decode(self._open_path.read_bytes(), type=list[Recovery])
            except (OSError, msgspec.MsgspecError):
                return
            self._orphans = [recovery for recovery in found if recovery.n not in self._written]
            self._n = max([self._n, *(recovery.n for recovery in self._orphans)])

    def settle(self) -> None:
        """What another supervisor had begun and nobody has gone on with is as complete as it will be."""
        orphans, self._orphans = self._orphans, []
        for recovery in orphans:
            self._keep(recovery)
            self.note(recovery, done=True)

    def _keep(self, recovery: Recovery) -> None:
        self._kept.append(recovery)
        self._last[recovery.worker] = recovery

    def _go_on_with(self, recovery: Recovery) -> bool:
        """Make ``recovery``, which is new, the rest of one that another supervisor had begun. Returns whether it is that."""
        begun = next((one for one in self._orphans if (one.worker, one.epoch) == (recovery.worker, recovery.epoch)), None)
        if begun is None:
            return False
        self._orphans.remove(begun)
        recovery.n, recovery.ts, recovery.cause = begun.n, begun.ts, begun.cause
        for name in recovery.__struct_fields__:
            # What was measured then was measured from the verdict; what is measured now is not.
            if getattr(begun, name) not in (None, "", {}):
                setattr(recovery, name, getattr(begun, name))
        self._keep(recovery)
        return True

    def _save_soon(self) -> None:
        """Leave on disk what is not complete, after what the loop is just doing: a promotion may be next."""
        if self._open_path is None or self._saving:
            return
        with contextlib.suppress(RuntimeError):  # no loop: nothing goes on
            asyncio.get_running_loop().call_soon(self._save)
            self._saving = True

    def _save(self) -> None:
        self._saving = False
        if self._open_path is not None:
            unfinished = [recovery for recovery in self._kept if recovery.n not in self._written]
            with contextlib.suppress(OSError):
                write_private(self._open_path, msgspec.json.encode(unfinished))

    def note(self, recovery: Recovery, *, done: bool = False) -> bool:
        """Take a record, number it when it is new, write it when it is ``done``. Returns whether it was new."""
        fresh = recovery.n == 0 and not self._go_on_with(recovery)
        if fresh:
            self._n += 1
            recovery.n = self._n
            recovery.ts = round(time.time(), 6)
            self._keep(recovery)
        self._save_soon()
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
