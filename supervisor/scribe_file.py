"""A log file that rotates by size, comes back when it is removed, and counts what could not be written."""

from __future__ import annotations

import os
import stat
import time
from pathlib import Path

_SHARED = stat.S_ISGID | stat.S_IRGRP
"""Of a folder: its group may read what is in it, and files that are made there are the group's (`paths.NodePaths.prepare`)."""


def stamp(now_s: float) -> bytes:
    """Return ``now_s`` (seconds since the epoch) as UTC with milliseconds: ``2026-01-31T23:59:59.123Z``."""
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(now_s))}.{int(now_s * 1000) % 1000:03d}Z".encode()


class LogFile:
    """``path``, and ``path.1`` (newest) to ``path.KEEP``. One thread at a time.

    Args:
        max_size: bytes before the file is rotated; lines are not cut for it, so one longer line may exceed it.
        keep: rotated files that are kept; 0: the file starts anew.
    """

    def __init__(self, path: Path, *, max_size: int, keep: int) -> None:
        self.path = path
        self.max_size = max_size
        self.keep = keep
        self.written = 0
        self.error = ""
        """Why the last write failed; empty when it did not."""
        self._fd = -1
        self._size = 0
        self._missing = 0
        self._line_open = False

    def write(self, data: bytes) -> int:
        """Append ``data`` (whole lines). Returns the bytes that could not be written; their number is noted in the file when it can be."""
        view = memoryview(data)
        start = 0
        try:
            self._open()
            self._note_missing()
            while start < len(data):
                end = self._fitting(data, start)
                if end == start:
                    self._rotate()
                while start < end:
                    start += self._append(view[start:end])
        except OSError as error:
            self.error = error.strerror or str(error)
            self.drop(len(data) - start)
            return len(data) - start
        self.error = ""
        return 0

    def _fitting(self, data: bytes, start: int) -> int:
        """Return the end of the whole lines from ``start`` on that fit into this file; ``start`` where it has to be rotated first."""
        room = max(self.max_size - self._size, 0)
        if len(data) - start <= room:
            return len(data)
        end = data.rfind(b"\n", start, start + room) + 1
        if end > start:
            return end
        if self._size:
            return start
        return data.find(b"\n", start) + 1 or len(data)

    def drop(self, size: int) -> None:
        """Note in the file, when it can be written again, that ``size`` bytes are missing here."""
        self._missing += size

    def maintain(self) -> None:
        """Make the file again if it was removed, and note what is missing as soon as there is room; call about once a second."""
        try:
            self._open()
            self._note_missing()
            self.error = ""
        except OSError as error:
            self.error = error.strerror or str(error)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _open(self) -> None:
        """Open the file unless ``path`` still is the file that is open: it may have been removed, or renamed by logrotate."""
        if self._fd >= 0:
            opened = os.fstat(self._fd)
            try:
                there = self.path.stat()
            except FileNotFoundError:
                there = None
            if there is not None and (there.st_dev, there.st_ino) == (opened.st_dev, opened.st_ino):
                # Its real size: somebody may have truncated it (copytruncate).
                self._size = there.st_size
                return
            self.close()
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._fd = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        if self.path.parent.stat().st_mode & _SHARED == _SHARED:
            os.fchmod(self._fd, 0o640)  # not at the creation: the umask would take it away
        self._size = os.fstat(self._fd).st_size
        self._line_open = False

    def _rotate(self) -> None:
        self.close()
        if self.keep == 0:
            self.path.unlink(missing_ok=True)
        for number in range(self.keep, 0, -1):
            newer = self.path if number == 1 else self._rotated(number - 1)
            try:
                newer.rename(self._rotated(number))
            except FileNotFoundError:
                continue
        self._open()

    def _rotated(self, number: int) -> Path:
        return self.path.with_name(f"{self.path.name}.{number}")

    def _append(self, data: memoryview | bytes) -> int:
        done = os.write(self._fd, data)
        self._size += done
        self.written += done
        if done:
            self._line_open = data[done - 1] != 10
        return done

    def _note_missing(self) -> None:
        if not self._missing:
            return
        reason = f" ({self.error})" if self.error else ""
        note = stamp(time.time()) + f" scribe | dropped {self._missing} bytes{reason}\n".encode()
        # A full disk takes half a line; the note must start on its own.
        if self._line_open:
            note = b"\n" + note
        while note:
            note = note[self._append(note) :]
        self._missing = 0
