"""Log files as the scribe writes and rotates them: their last lines, their lines from a moment on, and what is appended to them."""

from __future__ import annotations

import contextlib
import heapq
import os
import re
import time
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO

from shadowsup.supervisor.cli.filters import Grep

_CHUNK = 64 * 1024
_STAMP = re.compile(rb"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d")


class Follower:
    """Reads what is appended to a file, over rotation and removal."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: IO[bytes] | None = None
        self._rest = b""

    def seek_end(self) -> int:
        """Go to the end and return it (bytes)."""
        self._open()
        return self._file.seek(0, os.SEEK_END) if self._file is not None else 0

    def read(self) -> list[bytes]:
        """Return the whole lines that are new. A file that took the place of this one is read from its start, after the rest of this."""
        if self._file is None and not self._open():
            return []
        lines: list[bytes] = []
        while self._file is not None:
            lines += self._lines(self._file)
            if not self._replaced(self._file):
                break
            lines += self._lines(self._file)  # what was written between the read and the rotation
            if self._rest:
                lines.append(self._rest + b"\n")
                self._rest = b""
            self.close()
            self._open()
        return lines

    def close(self) -> None:
        """Close the file. Idempotent."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _open(self) -> bool:
        with contextlib.suppress(OSError):
            self._file = self._path.open("rb")
            return True
        return False

    def _replaced(self, file: IO[bytes]) -> bool:
        there = os.fstat(file.fileno())
        try:
            now = self._path.stat()
        except OSError:
            return False  # between the two renames of a rotation, or removed: the next look tells
        if (there.st_dev, there.st_ino) != (now.st_dev, now.st_ino):
            return True
        if now.st_size < file.tell():
            file.seek(0)  # truncated
        return False

    def _lines(self, file: IO[bytes]) -> list[bytes]:
        data = self._rest + file.read()
        *whole, self._rest = data.split(b"\n")
        return [line + b"\n" for line in whole]


def last_lines(ends: Mapping[Path, int], count: int) -> list[bytes]:
    """Return the last ``count`` lines of all files together, by their time stamps; ``ends``: how far each file is read (bytes)."""
    if count == 0:
        return []
    tails = []
    for path, end in ends.items():
        lines = _tail(path, end, count)
        number = 1
        while len(lines) < count:
            older = path.with_name(f"{path.name}.{number}")
            try:
                lines = _tail(older, older.stat().st_size, count - len(lines)) + lines
            except OSError:
                break
            number += 1
        tails.append(lines)
    merged = list(heapq.merge(*tails, key=stamp_of))
    return merged[-count:]


def chosen_lines(ends: Mapping[Path, int], chosen: Grep, since_s: float | None, count: int | None) -> Iterator[bytes]:
    """Yield the lines of all files together, rotated ones too, that were written from ``since_s`` on (seconds since the epoch) and are
    ``chosen``; only the last ``count`` of them, unless that is None. ``ends`` as for `last_lines`."""
    first = b"" if since_s is None else _as_stamp(since_s)
    merged = heapq.merge(*(_chosen(path, end, chosen, first) for path, end in ends.items()), key=stamp_of)
    return merged if count is None else iter(deque(merged, maxlen=count))


def _chosen(path: Path, end: int, chosen: Grep, first: bytes) -> Iterator[bytes]:
    recent = not first
    for line in _all_lines(path, end):
        # Lines are in order, and one without a stamp belongs to the one before it.
        recent = recent or stamp_of(line) >= first
        if recent and chosen(line.rstrip(b"\n")):
            yield line


def _all_lines(path: Path, end: int) -> Iterator[bytes]:
    older: list[Path] = []
    while (rotated := path.with_name(f"{path.name}.{len(older) + 1}")).exists():
        older.append(rotated)
    for each in [*reversed(older), path]:
        with contextlib.suppress(OSError), each.open("rb") as file:
            left = end if each == path else each.stat().st_size
            for line in file:
                left -= len(line)
                if left < 0:
                    break
                yield line if line.endswith(b"\n") else line + b"\n"


def _as_stamp(since_s: float) -> bytes:
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(since_s))}.{int(since_s * 1000) % 1000:03d}Z".encode()


def _tail(path: Path, end: int, count: int) -> list[bytes]:
    try:
        with path.open("rb") as file:
            data, start = b"", end
            while start > 0 and data.count(b"\n") <= count:
                step = min(_CHUNK, start)
                start -= step
                file.seek(start)
                data = file.read(step) + data
    except OSError:
        return []
    lines = data.splitlines(keepends=True)
    if start > 0:
        lines = lines[1:]
    if lines and not lines[-1].endswith(b"\n"):
        lines[-1] += b"\n"
    return lines[-count:]


def stamp_of(line: bytes) -> bytes:
    """Return the time a line begins with, to sort by; a line without one sorts first, which keeps it next to its neighbours."""
    return line[:24] if _STAMP.match(line) else b""
