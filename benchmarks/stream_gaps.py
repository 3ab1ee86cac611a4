"""Gaps between the tokens of streams that run side by side, for `gpu_vllm.py`."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from shadowsup.supervisor.bench.client import Stream
from shadowsup.supervisor.bench.figures import percentiles

Round = Sequence[Stream]
"""Streams that began together."""


def windows(rounds: Sequence[Round], begin: float = float("-inf"), end: float = float("inf")) -> Iterator[tuple[Round, float, float]]:
    """Yield each round with the time in which all of its streams ran, between two moments: from the last first token to the first end."""
    for streams in rounds:
        first = max(begin, *(stream.arrivals[0] for stream in streams))
        last = min(end, *(stream.arrivals[-1] for stream in streams))
        if first < last:
            yield streams, first, last


def pace(rounds: Sequence[Round], begin: float = float("-inf"), end: float = float("inf")) -> dict[str, Any]:
    """Gaps between the tokens of each stream in ms, and tokens a second, in those `windows`."""
    gaps: list[float] = []
    tokens, seconds = 0, 0.0
    for streams, first, last in windows(rounds, begin, end):
        seconds += last - first
        for stream in streams:
            gaps += [(b - a) * 1e3 for a, b in itertools.pairwise(stream.arrivals) if first < b <= last]
            tokens += sum(count for at, count in zip(stream.arrivals, stream.counts, strict=True) if first < at <= last)
    return {"gap_ms": percentiles(gaps), "tokens_s": round(tokens / seconds, 1) if seconds else None}


def slow(rounds: Sequence[Round], begin: float, end: float, above_ms: float) -> list[list[float]]:
    """The gaps of one stream of each round that are longer than ``above_ms``: [seconds since ``begin``, ms]."""
    found = []
    for streams, first, last in windows(rounds, begin, end):
        gaps = ((b - begin, (b - a) * 1e3) for a, b in itertools.pairwise(streams[0].arrivals) if first < b <= last)
        found += [[round(at, 3), round(gap, 1)] for at, gap in gaps if gap > above_ms]
    return found
