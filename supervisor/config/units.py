"""Sizes, durations and rates as people write them: ``256MiB``, ``200ms``, ``10 in 10m``. Pure; `ValueError` says what is wrong."""

from __future__ import annotations

import re

_SIZES = {
    "B": 1,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
    "KB": 10**3,
    "kB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
}
_DURATIONS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}

SIZE_PATTERN = r"^\d+(\.\d+)?\s*(B|KiB|MiB|GiB|TiB|kB|KB|MB|GB|TB)$"
DURATION_PATTERN = r"^(\d+(\.\d+)?(ms|s|m|h|d))+$"
RATE_PATTERN = r"^\d+\s+in\s+(\d+(\.\d+)?(ms|s|m|h|d))+$"

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)\Z")
_PART = re.compile(r"(\d+(?:\.\d+)?)([A-Za-z]*)")
_RATE = re.compile(r"(\d+)\s+in\s+(\S+)\Z")


def parse_size(text: str) -> int:
    """Return bytes.

    Raises:
        ValueError: no number, no unit, an unknown unit, or not a whole number of bytes.
    """
    match = _SIZE.match(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not a size; write a number with a unit, like 256MiB")
    number, unit = match.groups()
    if not unit:
        raise ValueError(f"{text!r} has no unit; write {number}MiB, {number}GiB or {number}B")
    factor = _SIZES.get(unit)
    if factor is None:
        near = {"k": "KiB", "m": "MiB", "g": "GiB", "t": "TiB"}.get(unit[0].lower())
        if near is not None and unit.lower() in {near[0].lower(), near.lower(), near[0].lower() + "b", near[:2].lower()}:
            raise ValueError(f"{text!r}: {unit!r} is not a unit of size; write {number}{near} (or {number}{near[0]}B for powers of 1000)")
        raise ValueError(f"{text!r}: {unit!r} is not a unit of size; use B, KiB, MiB, GiB, TiB (or KB, MB, GB, TB)")
    value = float(number) * factor if "." in number else int(number) * factor
    if value != int(value):
        raise ValueError(f"{text!r} is not a whole number of bytes")
    return int(value)


def parse_duration(text: str) -> float:
    """Return seconds; ``1m30s`` adds up.

    Raises:
        ValueError: no number, no unit, or an unknown unit.
    """
    stripped = text.strip()
    total, end = 0.0, 0
    for match in _PART.finditer(stripped):
        if match.start() != end:
            break
        number, unit = match.groups()
        if not unit:
            raise ValueError(f"{text!r} has no unit; write {number}s, {number}ms or {number}m")
        factor = _DURATIONS.get(unit)
        if factor is None:
            near = {"sec": "s", "secs": "s", "second": "s", "seconds": "s", "min": "m", "mins": "m", "minute": "m", "minutes": "m"}
            near |= {"msec": "ms", "hour": "h", "hours": "h", "hr": "h", "day": "d", "days": "d", "S": "s", "M": "m", "H": "h", "MS": "ms"}
            instead = near.get(unit)
            told = f"write {number}{instead}" if instead else "use ms, s, m, h or d"
            raise ValueError(f"{text!r}: {unit!r} is not a unit of time; {told}")
        total += float(number) * factor
        end = match.end()
    if end == 0 or end != len(stripped):
        raise ValueError(f"{text!r} is not a duration; write a number with a unit, like 200ms, 30s or 10m")
    return round(total, 9)


def parse_rate(text: str) -> tuple[int, float]:
    """Return (count, seconds) of ``10 in 10m``.

    Raises:
        ValueError: another form, a count of 0, or a window of 0.
    """
    match = _RATE.match(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not a limit; write it as COUNT in DURATION, like 10 in 10m")
    count, window_s = int(match.group(1)), parse_duration(match.group(2))
    if count < 1 or window_s <= 0:
        raise ValueError(f"{text!r}: count and duration must be above 0")
    return count, window_s


def format_size(size: int) -> str:
    """Return the shortest exact form: ``256MiB``, ``1000B``."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if size and size % _SIZES[unit] == 0:
            return f"{size // _SIZES[unit]}{unit}"
    return f"{size}B"


def format_duration(seconds: float) -> str:
    """Return one number with one unit: ``200ms``, ``90s``, ``10m``. Exact to the microsecond."""
    if seconds == 0:
        return "0s"
    milliseconds = round(seconds * 1000, 3)
    if milliseconds % 1000:
        return f"{milliseconds:.3f}".rstrip("0").rstrip(".") + "ms"
    whole = round(seconds)
    for unit, factor in (("d", 86400), ("h", 3600), ("m", 60)):
        if whole % factor == 0:
            return f"{whole // factor}{unit}"
    return f"{whole}s"
