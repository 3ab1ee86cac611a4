"""What happened: numbered events in a ring, on the PUB socket and as JSON lines on disk."""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from shadowsup.supervisor.protocol import Event

KEEP_EVENTS = 10_000
"""Events in memory; older ones are in the file."""
BACKLOG = 10_000
"""Lines that wait for the disk at most."""
CLOSE_S = 2.0
MAX_FILE = 16 * 2**20
"""Bytes of ``events.jsonl`` before it becomes ``events.jsonl.1`` (one is kept)."""

log = logging.getLogger("shadowsup.journal")


class LineFile:
    """JSON lines, appended, rotated once, from a thread of its own: a disk that hangs or is full costs lines and nothing else.

    ``lost`` counts the lines that could not be written.
    """

    def __init__(self, path: Path, max_size: int = MAX_FILE, backlog: int = BACKLOG) -> None:
        self.path = path
        self.lost = 0
        self._max = max_size
        self._backlog = backlog
        self._queue: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._fd = -1

    def append(self, line: bytes) -> None:
        """Have one line written. Never waits, never raises."""
        if self._thread is None:
            # A daemon: at the end of the process nobody waits for a disk that hangs.
            self._thread = threading.Thread(target=self._run, name=f"write-{self.path.name}", daemon=True)
            self._thread.start()
        if self._queue.qsize() >= self._backlog:
            self.lost += 1
        else:
            self._queue.put(line)

    def close(self) -> None:
        """Write what is queued, waiting `CLOSE_S` at most. Idempotent."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join(CLOSE_S)
            self._thread = None

    def _run(self) -> None:
        while (line := self._queue.get()) is not None:
            try:
                self._write(line + b"\n")
            except OSError as error:
                self.lost += 1
                if self.lost == 1:
                    log.warning("cannot write %s: %s", self.path, error.strerror)
        self._close_file()

    def _write(self, data: bytes) -> None:
        if self._fd < 0:
            self._fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        if os.fstat(self._fd).st_size + len(data) > self._max:
            self._close_file()
            self.path.replace(self.path.with_name(self.path.name + ".1"))
            self._fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        os.write(self._fd, data)

    def _close_file(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def last_lines(path: Path, limit: int = 2**21) -> list[bytes]:
    """Return the whole lines in the last ``limit`` bytes of a file, oldest first; [] where it cannot be read."""
    try:
        with path.open("rb") as file:
            start = max(0, file.seek(0, os.SEEK_END) - limit)
            file.seek(start)
            lines = file.read().split(b"\n")
    except OSError:
        return []
    return lines[1 if start else 0 : -1]


class Journal:
    """The node's event stream. ``publish`` is given the number and the JSON of each event."""

    def __init__(self, path: Path | None, publish: Callable[[bytes], None] = lambda _: None) -> None:
        self.publish = publish
        self.watch: Callable[[Event], None] = lambda _: None
        """Told of each event before anybody else."""
        self._file = LineFile(path) if path is not None else None
        self._ring: deque[Event] = deque(maxlen=KEEP_EVENTS)
        self._n = 0

    def resume(self, since_s: float) -> None:
        """Go on with the numbers of the supervisor before this one, and show what it has recorded since (seconds since the epoch)."""
        if self._file is None:
            return
        for line in last_lines(self._file.path):
            try:
                event = msgspec.json.decode(line, type=Event)
            except msgspec.MsgspecError:  # cut off by the death of its writer, or another version's
                continue
            if event.ts >= since_s and event.n > self._n:
                self._ring.append(event)
                self._n = event.n

    @property
    def last(self) -> int:
        """Number of the newest event, 0 before the first."""
        return self._n

    @property
    def lost(self) -> int:
        """Events that could not be written to disk."""
        return self._file.lost if self._file is not None else 0

    def add(
        self,
        event: str,
        message: str = "",
        *,
        level: str = "info",
        worker: str | None = None,
        engine: str | None = None,
        pid: int | None = None,
        epoch: int | None = None,
        data: dict[str, Any] | None = None,
        gpu_uuid: str | None = None,
        reason: str | None = None,
    ) -> Event:
        """Record something that happened now. Without ``gpu_uuid`` and ``reason`` those of ``data`` are taken (its ``cause``)."""
        data = data or {}
        self._n += 1
        made = Event(
            n=self._n,
            ts=round(time.time(), 6),
            mono_s=round(time.monotonic(), 6),
            level=level,
            event=event,
            worker=worker,
            engine=engine,
            pid=pid,
            epoch=epoch,
            message=message,
            data=data,
            gpu_uuid=gpu_uuid or data.get("gpu_uuid"),
            reason=reason or data.get("cause") or data.get("reason") or data.get("fault"),
        )
        self._ring.append(made)
        self.watch(made)
        encoded = msgspec.json.encode(made)
        if self._file is not None:
            self._file.append(encoded)
        self.publish(encoded)
        return made

    def since(self, n: int | None, *, worker: str | None = None, limit: int = KEEP_EVENTS) -> list[Event]:
        """Return the events from number ``n`` on that are still in memory (None: all), the newest ``limit`` of them."""
        found = [e for e in self._ring if (n is None or e.n >= n) and (worker is None or e.worker == worker)]
        return found[-limit:]

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
