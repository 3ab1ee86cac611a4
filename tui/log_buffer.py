"""The log lines that are held, and which of them are shown. Pure; the newest `KEEP` lines stay, older ones go."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import NamedTuple

KEEP = 100_000
SPARE = 5_000
"""Lines beyond `KEEP` before the oldest go: to trim one by one would cost a move of the list for each line."""
SLICE = 4_000
"""Lines that are searched at once before the keys get their turn."""
_LINE = re.compile(r"(\d{4}-\d\d-\d\dT[\d:.]+Z|-) (\S+) \| ")
"""What the scribe puts before each line, and `log_tail` before those of who writes without it."""
_LEVEL = re.compile(
    r"\b(?:(?P<bad>CRITICAL|FATAL|ERROR|Traceback|panic)|(?P<warn>WARNING|WARN)|(?P<dim>DEBUG|TRACE))\b|\b\w*(?:Error|Exception)\b:"
)
_LOOK = 120
"""A level stands at the beginning of a line, or nowhere."""


class Line(NamedTuple):
    """``stamp``: as in the file (UTC), empty for a line without; ``source``: an engine or a part; ``text``: what it wrote."""

    stamp: str
    source: str
    text: str


def parse(raw: bytes) -> Line:
    """Take a line of a log file apart."""
    text = raw.decode(errors="replace")
    match = _LINE.match(text)
    return Line(match[1].strip("-"), match[2], text[match.end() :]) if match is not None else Line("", "", text)


def level(line: Line) -> str:
    """Return the tone of a line: ``bad``, ``warn``, ``dim`` or none."""
    match = _LEVEL.search(line.text, 0, _LOOK)
    return (match.lastgroup or "bad") if match is not None else ""


@dataclass(frozen=True)
class Filter:
    """Which lines are shown. ``source``: an engine, or a worker with all its engines; empty: all. ``invert``: those without a match."""

    source: str = ""
    pattern: re.Pattern[str] | None = None
    invert: bool = False

    def __call__(self, line: Line) -> bool:
        if self.source and line.source != self.source and not line.source.startswith(f"{self.source}."):
            return False
        return self.pattern is None or (self.pattern.search(line.text) is None) is self.invert


class LogBuffer:
    """Lines have numbers that never change; ``shown`` are the numbers of those that pass the filter, ascending."""

    def __init__(self, keep: int = KEEP) -> None:
        self.filter = Filter()
        self.shown: list[int] = []
        self.sources: dict[str, int] = {}
        """Source → lines that came from it."""
        self.dropped = 0
        """Lines that are held no more."""
        self._keep = keep
        self._lines: list[Line] = []

    def clear(self) -> None:
        """Hold nothing; numbers go on."""
        self.dropped += len(self._lines)
        self._lines, self.shown = [], []
        self.sources.clear()

    def __len__(self) -> int:
        return len(self._lines)

    def line(self, number: int) -> Line:
        """Raises IndexError: it is not held."""
        at = number - self.dropped
        if at < 0:
            raise IndexError(number)
        return self._lines[at]

    def extend(self, lines: Sequence[Line]) -> tuple[int, int]:
        """Take new lines. Returns how many more are shown, and how many shown ones went at the beginning."""
        wanted, first = self.filter, self.dropped + len(self._lines)
        self._lines += lines
        before = len(self.shown)
        for number, line in enumerate(lines, first):
            self.sources[line.source] = self.sources.get(line.source, 0) + 1
            if wanted(line):
                self.shown.append(number)
        added = len(self.shown) - before
        return added, self._trim()

    def _trim(self) -> int:
        surplus = len(self._lines) - self._keep
        if surplus <= min(SPARE, self._keep // 10):
            return 0
        del self._lines[:surplus]
        self.dropped += surplus
        gone = self.place(self.dropped)
        del self.shown[:gone]
        return gone

    def place(self, number: int) -> int:
        """Return the place in ``shown`` of line ``number``, or of the next one that is shown."""
        from bisect import bisect_left

        return bisect_left(self.shown, number)

    def refilter(self, wanted: Filter) -> Iterator[None]:
        """Show what passes ``wanted``. Yields after each slice; what comes meanwhile is filtered already. Abandoned: nothing is lost but
        the lines that were not searched yet, so begin anew."""
        self.filter = wanted
        self.shown = []
        end = self.dropped + len(self._lines)
        found: list[int] = []
        number = self.dropped
        while number < end:
            number = max(number, self.dropped)
            stop = min(end, number + SLICE)
            found += [n for n in range(number, stop) if wanted(self._lines[n - self.dropped])]
            number = stop
            yield
        self.shown[:0] = [n for n in found if n >= self.dropped]

    def find_before(self, source: str, ts: float) -> int | None:
        """Return the number of the last line of ``source`` that was written until ``ts`` (seconds since the epoch)."""
        limit = datetime.fromtimestamp(ts, UTC).strftime("%Y-%m-%dT%H:%M:%S.%f")[:23] + "Z"
        for at in range(len(self._lines) - 1, -1, -1):
            line = self._lines[at]
            if line.source == source and line.stamp and line.stamp <= limit:
                return at + self.dropped
        return None

    def find_level(self, start: int, step: int) -> int | None:
        """Return the place (in ``shown``) of the next line of level error from place ``start`` on, in direction ``step``."""
        place = start + step
        while 0 <= place < len(self.shown):
            if level(self.line(self.shown[place])) == "bad":
                return place
            place += step
        return None
