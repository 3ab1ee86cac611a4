"""What verbs print: tables that fit the terminal, colours for states, JSON. Pure but for `echo_json` and the terminal's size."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import click

WIDTH = 80
"""Columns where there is no terminal to ask."""

_COLORS = {
    "green": {"healthy", "active", "parked", "ready", "running", "serving", "sealed", "leased", "info", "ok"},
    "yellow": {
        "starting",
        "degraded",
        "recovering",
        "backoff",
        "spawning",
        "loading",
        "warming",
        "promoting",
        "draining",
        "stopping",
        "writing",
        "frozen",
        "warning",
    },
    "red": {"down", "gone", "quarantined", "error", "failed", "lost"},
}
_COLOR_OF = {state: color for color, states in _COLORS.items() for state in states}

output_option: Callable[[Any], Any] = click.option(
    "-o", "--output", type=click.Choice(["table", "json"]), default="table", help="table for people, json for programs."
)


def echo_json(value: Any) -> None:
    """Print ``value`` as JSON; an object gets ``"schema": 1`` if it has none."""
    if isinstance(value, dict) and "schema" not in value:
        value = {"schema": 1, **value}
    click.echo(json.dumps(value, indent=2, ensure_ascii=False))


def colored(text: str, state: str | None = None) -> str:
    """Return ``text`` in the colour of a state, where colours are wanted (a terminal, no NO_COLOR)."""
    color = _COLOR_OF.get(state if state is not None else text.strip())
    return click.style(text, fg=color) if color and wants_color() else text


_SOURCES = ("cyan", "magenta", "blue", "bright_cyan", "bright_magenta", "bright_blue")
"""Colours that mean no state."""


def source_colored(text: str, source: str) -> str:
    """Return ``text`` in the colour of whoever it comes from: the same name has the same colour."""
    if not source or not wants_color():
        return text
    # A sum over the bytes: str's own hash differs from run to run.
    return click.style(text, fg=_SOURCES[sum(source.encode()) % len(_SOURCES)])


def dim(text: str) -> str:
    return click.style(text, dim=True) if wants_color() else text


def bold(text: str) -> str:
    return click.style(text, bold=True) if wants_color() else text


def wants_color() -> bool:
    """See https://no-color.org."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def width() -> int:
    """Return the columns to use."""
    return max(40, shutil.get_terminal_size((WIDTH, 24)).columns) if sys.stdout.isatty() else WIDTH


@dataclass(frozen=True)
class Column:
    """``shrink``: may be cut when the table is too wide, largest first. ``right``: numbers."""

    title: str
    right: bool = False
    shrink: bool = False


def table(columns: Sequence[Column], rows: Sequence[Sequence[object]], *, indent: str = "", limit: int | None = None) -> str:
    """Return lines of at most ``limit`` columns (default: the terminal's). States get their colour. None is shown as ``-``."""
    cells = [["-" if cell is None or cell == "" else str(cell) for cell in row] for row in rows]
    widths = [max(len(column.title), *(len(row[i]) for row in cells)) if cells else len(column.title) for i, column in enumerate(columns)]
    room = (limit or width()) - len(indent) - 2 * (len(columns) - 1)
    while sum(widths) > room:
        candidates = [i for i, column in enumerate(columns) if column.shrink and widths[i] > 4] or [
            i for i in range(len(columns)) if widths[i] > 4
        ]
        if not candidates:
            break
        widths[max(candidates, key=lambda i: widths[i])] -= 1
    lines = ["  ".join(_fit(column.title, widths[i], column.right) for i, column in enumerate(columns)).rstrip()]
    for row in cells:
        fitted = (_fit(cell, widths[i], columns[i].right) for i, cell in enumerate(row))
        lines.append("  ".join(colored(text, cell) if cell in _COLOR_OF else text for text, cell in zip(fitted, row, strict=True)).rstrip())
    lines[0] = bold(lines[0])
    return "\n".join(indent + line for line in lines)


def cut(text: str, size: int) -> str:
    """Return ``text`` in at most ``size`` columns."""
    return text if len(text) <= size else text[: max(0, size - 1)] + "…"


def _fit(text: str, size: int, right: bool) -> str:
    text = cut(text, size)
    return text.rjust(size) if right else text.ljust(size)


def size(value: object) -> str:
    """Return bytes for people: ``412 MiB``."""
    if not isinstance(value, int | float):
        return "-"
    number = float(value)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if number < 1024:
            return f"{number:.0f} {unit}" if unit == "B" or number >= 100 else f"{number:.1f} {unit}"
        number /= 1024
    return f"{number:.1f} TiB"


def duration(value: object) -> str:
    """Return seconds for people: ``0.2s``, ``3m20s``, ``2d4h``."""
    if not isinstance(value, int | float):
        return "-"
    seconds = float(value)
    if seconds < 60:
        return f"{seconds:.1f}s"
    whole = round(seconds)
    for large, small, factor, part in (("d", "h", 86400, 3600), ("h", "m", 3600, 60), ("m", "s", 60, 1)):
        if whole >= factor:
            return f"{whole // factor}{large}{whole % factor // part}{small}"
    return f"{whole}s"


def milliseconds(value: object) -> str:
    """Return milliseconds for people: ``0.4``, ``23``, ``1,250``."""
    if not isinstance(value, int | float):
        return "-"
    return f"{value:.1f}" if value < 10 else f"{value:,.0f}"


def count(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) else "-"


def plural(number: int, word: str) -> str:
    """Return ``1 worker``, ``2 workers``."""
    return f"{number} {word}" if number == 1 else f"{number} {word}s"
