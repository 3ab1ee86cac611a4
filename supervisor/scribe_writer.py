"""The scribe's disk side: a thread of its own, so that a disk that hangs holds up no pipe."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

from shadowsup.supervisor.scribe_file import LogFile

QUEUE_MAX = 4 * 1024 * 1024
"""Bytes of one file that may wait for the disk; one chunk more at most, because a chunk is queued while there is room at all."""

STALL_S = 0.5
"""A file that took nothing for this long holds its processes up no longer: what they write is dropped and counted until it does."""

MAINTAIN_S = 1.0


@dataclass
class Counter:
    """What one stream has lost, bytes. Written by the disk thread and by the pipe loop: an int each."""

    not_written: int = 0
    """The file refused it."""
    not_queued: int = 0
    """The file took nothing for `STALL_S`."""


@dataclass
class _Queue:
    file: LogFile
    chunks: deque[tuple[bytes, Counter]] = field(default_factory=deque)
    size: int = 0
    skipped: int = 0
    progressed_s: float = 0.0
    awaited: bool = False
    users: int = 0


class Writer:
    """Files by path, each with a bounded queue. All methods are for one other thread, the pipe loop.

    ``wake_fd`` is an eventfd: readable when a queue that was full has room again.
    """

    def __init__(self) -> None:
        self.wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._queues: dict[Path, _Queue] = {}
        self._changed = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="disk", daemon=True)
        self._thread.start()

    def use(self, path: Path, *, max_size: int, keep: int) -> None:
        """Begin to write ``path``. The newest limits hold for everyone who writes it. Each `use` needs a `release`."""
        with self._changed:
            queue = self._queues.setdefault(path, _Queue(LogFile(path, max_size=max_size, keep=keep), progressed_s=time.monotonic()))
            queue.file.max_size, queue.file.keep = max_size, keep
            queue.users += 1
            self._changed.notify_all()

    def release(self, path: Path) -> None:
        """End one `use`; with the last one the file is closed, after what waits for it was written."""
        with self._changed:
            self._queues[path].users -= 1
            self._changed.notify_all()

    def room(self, path: Path) -> bool:
        """Return whether `put` would take a chunk now. If not, `wake_fd` tells when it does."""
        with self._changed:
            queue = self._queues[path]
            queue.awaited = queue.size >= QUEUE_MAX
            return not queue.awaited

    def stalled(self, path: Path) -> bool:
        """Return whether the file has a full queue and took nothing for `STALL_S`."""
        with self._changed:
            return self._stalled(self._queues[path])

    def wait_room(self, path: Path) -> None:
        """Wait until `put` would take a chunk or the file is stalled."""
        with self._changed:
            queue = self._queues[path]
            self._changed.wait_for(lambda: queue.size < QUEUE_MAX or self._stalled(queue), STALL_S)

    @staticmethod
    def _stalled(queue: _Queue) -> bool:
        return queue.size >= QUEUE_MAX and time.monotonic() - queue.progressed_s > STALL_S

    def put(self, path: Path, data: bytes, counter: Counter) -> None:
        """Queue ``data`` (whole lines); without room it is dropped and counted."""
        with self._changed:
            queue = self._queues[path]
            if queue.size >= QUEUE_MAX:
                counter.not_queued += len(data)
                queue.skipped += len(data)
                return
            if not queue.chunks:
                queue.progressed_s = time.monotonic()  # idle until now is not stalled
            queue.chunks.append((data, counter))
            queue.size += len(data)
            self._changed.notify_all()

    def errors(self) -> dict[str, str]:
        """Return path → reason for each file that cannot be written just now."""
        with self._changed:
            now = time.monotonic()
            found = {str(path): queue.file.error for path, queue in self._queues.items() if queue.file.error}
            for path, queue in self._queues.items():
                if queue.chunks and now - queue.progressed_s > STALL_S:
                    found[str(path)] = f"the disk has taken nothing for {now - queue.progressed_s:.0f} s"
            return found

    def close(self, timeout_s: float = 5.0) -> None:
        """Write what waits, for at most ``timeout_s``, and end. A hung disk keeps its thread (a daemon), not us."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(timeout_s)
        if not self._thread.is_alive():
            os.close(self.wake_fd)

    def _run(self) -> None:
        maintain_s = 0.0
        while True:
            with self._changed:
                if not any(queue.chunks for queue in self._queues.values()):
                    if self._closing:
                        break
                    self._changed.wait(MAINTAIN_S)
                work = [(queue, queue.chunks.popleft()) for queue in self._queues.values() if queue.chunks]
                unused = [path for path, queue in self._queues.items() if not queue.users and not queue.chunks]
                for path in unused:
                    # A chunk of it may be in ``work``: the file opens again for it below, and is closed after it.
                    if not any(queue.file.path == path for queue, _ in work):
                        self._queues.pop(path).file.close()
                idle = list(self._queues.values()) if time.monotonic() - maintain_s >= MAINTAIN_S else []
            for queue, (data, counter) in work:
                self._write(queue, data, counter)
            if idle:
                maintain_s = time.monotonic()
                for queue in idle:
                    queue.file.maintain()
        for queue in self._queues.values():
            queue.file.close()

    def _write(self, queue: _Queue, data: bytes, counter: Counter) -> None:
        with self._changed:
            skipped, queue.skipped = queue.skipped, 0
        if skipped:
            queue.file.drop(skipped)
        counter.not_written += queue.file.write(data)
        with self._changed:
            queue.size -= len(data)
            queue.progressed_s = time.monotonic()
            if queue.awaited and queue.size < QUEUE_MAX:
                queue.awaited = False
                os.eventfd_write(self.wake_fd, 1)
            self._changed.notify_all()
