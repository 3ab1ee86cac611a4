"""A histogram that costs a bisection: prometheus_client's own costs more than the token that it is told of."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence


class Buckets:
    """Counts by upper bound. ``counts`` has one entry more than ``bounds``, for what lies above all of them; not cumulative."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count ``value``, which occurred so many times. A value on a bound is below it."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times


def cumulative(bounds: Sequence[float], counts: Sequence[int]) -> list[tuple[str, float]]:
    """Return (bound as text, count of all up to it), as Prometheus wants them; the last bound is ``+Inf``."""
    total, found = 0, []
    for bound, count in zip((*bounds, float("inf")), counts, strict=True):
        total += count
        found.append(("+Inf" if bound == float("inf") else repr(float(bound)), float(total)))
    return found
