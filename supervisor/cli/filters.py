"""``--since``, ``--grep`` and ``--invert``: which lines and events are shown. Pure, but for the clock that "10m ago" counts from."""

from __future__ import annotations

import datetime
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    _ParamType = click.ParamType[Any]
else:
    _ParamType = click.ParamType  # no generic in every click that will do

_AGO = re.compile(r"(\d+(?:\.\d+)?(?:ms|s|m|h|d))+")
_PART = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)")
_UNITS_S = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_TIME_OF_DAY = re.compile(r"\d\d:\d\d(:\d\d(\.\d+)?)?")


class Since(_ParamType):
    """A moment: so long ago (``10m``, ``1h30m``), a local time of today (``14:05``), or ISO 8601 (local without a zone).

    The value is in seconds since the epoch; where ``numbers`` is set, a whole number stays an int (the number of an event).
    """

    name = "when"

    def __init__(self, *, numbers: bool = False) -> None:
        self._numbers = numbers

    def get_metavar(self, param: click.Parameter, ctx: click.Context | None = None) -> str:
        return "N|AGO|TIME" if self._numbers else "AGO|TIME"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | float:
        if isinstance(value, int | float):
            return value
        text = str(value).strip()
        if self._numbers and text.isdigit():
            return int(text)
        if _AGO.fullmatch(text):
            return time.time() - sum(float(number) * _UNITS_S[unit] for number, unit in _PART.findall(text))
        try:
            if _TIME_OF_DAY.fullmatch(text):
                text = f"{datetime.date.today().isoformat()}T{text}"
            return datetime.datetime.fromisoformat(text).timestamp()
        except ValueError:
            self.fail(f"{value!r} is no moment; write 10m, 1h30m, 14:05 or 2026-01-31T14:05:00", param, ctx)


class Pattern(_ParamType):
    """A regular expression, compiled for bytes."""

    name = "regex"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> re.Pattern[bytes]:
        try:
            return re.compile(value.encode(errors="surrogateescape"))
        except re.error as error:
            self.fail(f"{value!r} is no regular expression: {error}", param, ctx)


@dataclass(frozen=True)
class Grep:
    """Which texts are shown: those in which ``pattern`` is found, or (``invert``) not. No pattern: all."""

    pattern: re.Pattern[bytes] | None = None
    invert: bool = False

    def __call__(self, text: bytes) -> bool:
        return self.pattern is None or (self.pattern.search(text) is None) is self.invert


def filter_options(*, numbers: bool = False) -> Callable[[Any], Any]:
    """Return the decorator of ``--since``, ``--grep``, ``--invert``. ``numbers``: ``--since`` takes the number of an event, too."""

    def decorate(command: Any) -> Any:
        since = f"From then on: 10m ago, 14:05, an ISO time{', or event number N' if numbers else ''}."
        command = click.option("--invert", is_flag=True, help="With --grep: only what does not match.")(command)
        command = click.option("--grep", metavar="REGEX", type=Pattern(), help="Only what matches.")(command)
        return click.option("--since", type=Since(numbers=numbers), help=since)(command)

    return decorate
