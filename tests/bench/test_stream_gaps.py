"""Which gaps between tokens count while something happens beside the streams."""

from __future__ import annotations

import pytest
from bench.bench_world import benchmark

from shadowsup.supervisor.bench.client import Stream


def stream(*arrivals: float) -> Stream:
    return Stream(sent_s=0.0, arrivals=list(arrivals), counts=[1] * len(arrivals))


ROUNDS = [
    [stream(1.0, 2.0, 3.0, 7.0), stream(1.5, 2.5, 3.5, 4.5)],  # all run from 1.5 to 4.5
    [stream(10.0, 10.5, 11.0), stream(10.0, 10.25, 12.0)],  # from 10.0 to 11.0
]


def test_only_while_all_of_a_round_run_gaps_count() -> None:
    gaps = benchmark("stream_gaps")
    assert [(first, last) for _, first, last in gaps.windows(ROUNDS)] == [(1.5, 4.5), (10.0, 11.0)]
    found = gaps.pace(ROUNDS)
    # 2.0 and 3.0, three of the second stream; 10.5 and 11.0, and 10.25. The gaps of 4 s and 1.75 s end when not all run any more.
    assert found["gap_ms"]["n"] == 8 and found["gap_ms"]["max"] == 1000.0
    assert found["tokens_s"] == pytest.approx(8 / 4.0)


def test_between_two_moments_the_rest_does_not_count() -> None:
    gaps = benchmark("stream_gaps")
    assert [(first, last) for _, first, last in gaps.windows(ROUNDS, 2.2, 10.4)] == [(2.2, 4.5), (10.0, 10.4)]
    assert gaps.pace(ROUNDS, 2.2, 10.4)["gap_ms"]["n"] == 5
    assert gaps.pace(ROUNDS, 5.0, 9.0)["tokens_s"] is None
    assert gaps.slow(ROUNDS, 1.0, 12.0, 600.0) == [[1.0, 1000.0], [2.0, 1000.0]]
