"""Restart accounting: how long to wait before the next start, and when to give up."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import msgspec


class NextStart(NamedTuple):
    """A start that waits. ``what``: for people; ``when_s``: monotonic, may be past; ``failures``: in a row, that it waits for."""

    what: str
    when_s: float
    failures: int


class BookState(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a `RestartBook` has counted. Times are monotonic."""

    failures: tuple[float, ...] = ()
    in_a_row: int = 0
    not_before_s: float = 0.0


class RestartBook:
    """Counts failed starts in a sliding window.

    Args:
        backoff_s: seconds to wait after the 1st, 2nd, … failure in a row; the last value repeats.
        max_failures: restarts granted within ``window_s``; the failure after that is one too many.
    """

    def __init__(self, backoff_s: Sequence[float], max_failures: int, window_s: float) -> None:
        self._backoff_s = tuple(backoff_s) or (0.0,)
        self._max = max_failures
        self._window_s = window_s
        self._failures: deque[float] = deque()
        self._in_a_row = 0
        self.not_before_s = 0.0
        """No start before this (monotonic)."""

    def configure(self, backoff_s: Sequence[float], max_failures: int, window_s: float) -> None:
        """Take other limits; what was counted stays counted."""
        self._backoff_s = tuple(backoff_s) or (0.0,)
        self._max = max_failures
        self._window_s = window_s

    @property
    def state(self) -> BookState:
        """What was counted; empty once everything was forgotten."""
        return BookState(tuple(self._failures), self._in_a_row, self.not_before_s) if self._in_a_row or self._failures else BookState()

    def resume(self, state: BookState) -> None:
        """Go on where another has counted."""
        self._failures = deque(state.failures)
        self._in_a_row, self.not_before_s = state.in_a_row, state.not_before_s

    @property
    def in_a_row(self) -> int:
        """Failures since the last success."""
        return self._in_a_row

    def failed(self, now_s: float) -> None:
        self._failures.append(now_s)
        self._in_a_row += 1
        self.not_before_s = now_s + self._backoff_s[min(self._in_a_row, len(self._backoff_s)) - 1]

    def exhausted(self, now_s: float) -> bool:
        """Say whether the restarts granted within the window are used up."""
        while self._failures and self._failures[0] < now_s - self._window_s:
            self._failures.popleft()
        return len(self._failures) > self._max

    def reset(self) -> None:
        """It works, or the operator asked for a new start: forget every failure."""
        self._failures.clear()
        self._in_a_row = 0
        self.not_before_s = 0.0
