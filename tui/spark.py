"""Histories and bars, as characters. Pure."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence

from shadowsup.tui.words import Cell, Part

_LEVELS = "▁▂▃▄▅▆▇█"
_EIGHTHS = " ▏▎▍▌▋▊▉█"
GAP = " "
MARK = "╿"
"""Where a failover was, in a column without a figure."""


class History:
    """The last figures of something, by wall time. ``keep_s``: how far back (seconds)."""

    def __init__(self, keep_s: float = 900.0) -> None:
        self._keep_s = keep_s
        self._points: deque[tuple[float, float]] = deque()

    def add(self, ts: float, value: float) -> None:
        self._points.append((ts, value))
        while self._points and self._points[0][0] < ts - self._keep_s:
            self._points.popleft()

    @property
    def last(self) -> float | None:
        return self._points[-1][1] if self._points else None

    def columns(self, now: float, width: int, step_s: float) -> list[float | None]:
        """Return ``width`` means over ``step_s`` seconds each, the newest last. Columns begin at multiples of the step, so that a
        figure stays in its column while the line moves on."""
        newest = math.floor(now / step_s)
        sums: list[float] = [0.0] * width
        counts = [0] * width
        for ts, value in reversed(self._points):
            column = width - 1 - (newest - math.floor(ts / step_s))
            if column < 0:
                break
            if column < width:
                sums[column] += value
                counts[column] += 1
        return [total / n if n else None for total, n in zip(sums, counts, strict=True)]


def line(values: Sequence[float | None], top: float | None = None) -> str:
    """Return a sparkline: one character a value, ``top`` (default: the largest) as the full height."""
    high = top if top is not None else max((v for v in values if v is not None), default=0.0)
    return "".join(_level(value, high) for value in values)


def _level(value: float | None, high: float) -> str:
    if value is None:
        return GAP
    if high <= 0 or value <= 0:
        return _LEVELS[0]
    return _LEVELS[min(len(_LEVELS) - 1, int(value / high * len(_LEVELS)))]


def marked(text: str, now: float, step_s: float, marks: Iterable[float], tone: str, mark_tone: str) -> Cell:
    """Return a sparkline with the columns of ``marks`` (wall times) set apart."""
    newest = math.floor(now / step_s)
    places = {len(text) - 1 - (newest - math.floor(ts / step_s)) for ts in marks}
    parts: list[Part] = []
    run = ""
    for at, char in enumerate(text):
        if at in places:
            if run:
                parts.append((run, tone))
            parts.append((MARK if char == GAP else char, mark_tone))
            run = ""
        else:
            run += char
    if run:
        parts.append((run, tone))
    return tuple(parts)


FILLS = {"weights": "█", "kv": "▓", "engines": "▒", "other": "▒", "foreign": "░"}
"""Purposes differ by their pattern too, not by colour alone."""


def stacked(shares: Mapping[str, float | None], total: float, width: int) -> Cell:
    """Return a bar of ``width`` columns whose parts are ``shares`` of ``total``; each that is there at all gets a column, if it fits."""
    if width <= 0:
        return ()
    parts: list[Part] = []
    taken, done = 0, 0.0
    for name, value in shares.items():
        if not value or total <= 0:
            continue
        done += value
        end = min(width, max(taken + 1, round(done / total * width)))
        if end > taken:
            parts.append((FILLS.get(name, "▒") * (end - taken), name))
            taken = end
    parts.append(("·" * (width - taken), "dim"))
    return tuple(parts)


def bar(share: float, width: int, tone: str) -> Cell:
    """Return a bar of ``share`` (0 to 1) in eighths of a column."""
    eighths = round(max(0.0, min(1.0, share)) * width * 8)
    full, rest = divmod(eighths, 8)
    text = "█" * full + (_EIGHTHS[rest] if rest else "")
    return ((text, tone), (" " * (width - len(text)), ""))
