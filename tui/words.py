"""Figures for people, in few columns. Pure."""

from __future__ import annotations

import re
import time

Part = tuple[str, str]
"""Text and its tone (`tones`)."""
Cell = tuple[Part, ...]


_ESCAPES = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\\\)?|\x1b.")
_CONTROLS = re.compile(r"[\x00-\x08\x0a-\x1f\x7f-\x9f]")


def clean(text: str) -> str:
    """Return ``text`` without what a terminal would obey: an engine's output is not to be trusted with the operator's screen."""
    if text.isprintable():
        return text
    return _CONTROLS.sub("·", _ESCAPES.sub("", text)).expandtabs(4)


def size(value: object) -> str:
    """Return bytes in at most 6 columns: ``412M``, ``1.5G``."""
    if not isinstance(value, int | float):
        return "–"
    number = float(value)
    for unit in ("B", "K", "M", "G"):
        if abs(number) < 1000:
            return f"{number:.0f}{unit}" if unit == "B" or number >= 100 else f"{number:.3g}{unit}"
        number /= 1024
    return f"{number:.3g}T"


def span(value: object) -> str:
    """Return seconds in at most 6 columns: ``0.2s``, ``3m20s``, ``2d4h``."""
    if not isinstance(value, int | float):
        return "–"
    seconds = max(0.0, float(value))
    if seconds < 9.95:
        return f"{seconds:.1f}s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    for large, small, factor, part in (("d", "h", 86400, 3600), ("h", "m", 3600, 60), ("m", "s", 60, 1)):
        if whole >= factor:
            return f"{whole // factor}{large}{whole % factor // part:02d}{small}"
    return f"{whole}s"


def millis(value: object) -> str:
    """Return milliseconds: ``0.4 ms``, ``23 ms``, ``1.25 s``."""
    if not isinstance(value, int | float):
        return "–"
    if value >= 1000:
        return f"{value / 1000:.2f} s" if value < 100_000 else f"{value / 1000:,.0f} s"
    return f"{value:.1f} ms" if value < 10 else f"{value:.0f} ms"


def rate(value: float | None) -> str:
    """Return events a second in at most 6 columns."""
    if value is None:
        return "–"
    if value >= 100_000:
        return f"{value / 1000:.0f}k"
    return f"{value:.0f}" if value >= 10 or value == 0 else f"{value:.1f}"


def percent(value: float | None) -> str:
    """Return a share (0 to 1) as ``37%``."""
    return "–" if value is None else f"{value * 100:.0f}%"


def count(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) else "–"


def plural(number: int, word: str) -> str:
    """Return ``1 stream``, ``2 streams``."""
    return f"{number:,} {word}" if number == 1 else f"{number:,} {word}s"


def clock(ts: float) -> str:
    """Return the local time of day of ``ts`` (seconds since the epoch)."""
    return time.strftime("%H:%M:%S", time.localtime(ts))


def first_line(text: str) -> str:
    return text.splitlines()[0] if text else ""
