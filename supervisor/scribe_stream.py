"""One stream of output on its way from pipe to file: lines, their marks, the last ones kept, the one that is waited for."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from shadowsup.supervisor.scribe_file import stamp

LINE_MAX = 16 * 1024
"""Bytes of an unfinished line; then it is ended by force."""

TAIL_LINE_MAX = 2 * 1024
"""Bytes of a line that the tail keeps."""


def _visible(line: bytes) -> bytes:
    """Return what is left to be seen of a line: a progress bar draws over what it drew before each carriage return."""
    return line.rstrip(b"\r").rpartition(b"\r")[2]


@dataclass(frozen=True)
class _Watch:
    pattern: re.Pattern[bytes]
    found: Callable[[str], None]


class Lines:
    """Takes chunks of any size, gives whole lines, each marked ``TIME SOURCE | ``. No I/O, no clock."""

    def __init__(self, source: str, tail_lines: int, earlier: Iterable[bytes] = ()) -> None:
        """``earlier``: lines of the stream's former pipe, to go on from."""
        self._mark = b" " + source.encode() + b" | "
        self._pending = b""
        self._tail: deque[bytes] = deque(earlier, maxlen=max(tail_lines, 1))
        self._watches: dict[int, _Watch] = {}

    def feed(self, chunk: bytes, now_s: float) -> bytes:
        """Return what ``chunk`` completes, marked; ``now_s``: seconds since the epoch."""
        data = self._pending + chunk if self._pending else chunk
        end = data.rfind(b"\n") + 1
        lines, self._pending = data[:end], data[end:]
        if b"\r" in self._pending[:-1]:  # the last byte may be half of \r\n
            self._pending = self._pending[self._pending.rfind(b"\r", 0, -1) + 1 :]
        if len(self._pending) >= LINE_MAX:
            lines, self._pending = lines + self._pending + b"\n", b""
        return self._take(lines, now_s) if lines else b""

    def finish(self, now_s: float) -> bytes:
        """Return the last line if the process ended without finishing it."""
        return self.feed(b"\n", now_s) if self._pending else b""

    def tail(self, count: int) -> list[str]:
        """Return the last ``count`` lines kept, without marks; an unfinished one counts."""
        lines = list(self._tail)
        if self._pending:
            lines.append(_visible(self._pending)[:TAIL_LINE_MAX])
        return [line.decode(errors="replace") for line in lines[-count:]] if count > 0 else []

    @property
    def kept(self) -> tuple[bytes, ...]:
        return tuple(self._tail)

    def watch(self, key: int, pattern: re.Pattern[bytes], found: Callable[[str], None]) -> None:
        """Call ``found`` once with the first line that has ``pattern`` (MULTILINE), one of the lines kept or a later one."""
        watch = _Watch(pattern, found)
        for line in self._tail:
            if watch.pattern.search(line):
                found(line.decode(errors="replace"))
                return
        self._watches[key] = watch

    def unwatch(self, key: int) -> None:
        """Forget a watch; unknown keys are ignored."""
        self._watches.pop(key, None)

    @property
    def watched(self) -> tuple[int, ...]:
        return tuple(self._watches)

    def _take(self, lines: bytes, now_s: float) -> bytes:
        body = lines[:-1].replace(b"\r\n", b"\n")
        if b"\r" in body:
            body = b"\n".join(_visible(line) for line in body.split(b"\n"))
        for line in body.rsplit(b"\n", self._tail.maxlen or 1)[-(self._tail.maxlen or 1) :]:
            self._tail.append(line[:TAIL_LINE_MAX])
        for key, watch in list(self._watches.items()):
            self._look(key, watch, body)
        # One mark for all lines of a chunk, put in by replace: a flood of short lines costs no Python a line.
        mark = stamp(now_s) + self._mark
        return mark + body.replace(b"\n", b"\n" + mark) + b"\n"

    def _look(self, key: int, watch: _Watch, body: bytes) -> None:
        # The whole chunk at once first; what it finds may span lines (\s matches a newline), so the lines have the last word.
        if not watch.pattern.search(body):
            return
        for line in body.split(b"\n"):
            if watch.pattern.search(line):
                self.unwatch(key)
                watch.found(line[:TAIL_LINE_MAX].decode(errors="replace"))
                return
