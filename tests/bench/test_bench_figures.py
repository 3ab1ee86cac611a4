"""What the benches compute from what clients saw."""

from __future__ import annotations

import pytest

from shadowsup.supervisor.bench.client import IN_FLIGHT_S, Stream, longest_gap_s, resumed_after
from shadowsup.supervisor.bench.figures import cached_share, difference, partial_difference, percentiles
from shadowsup.supervisor.bench.gateway_client import stamps
from shadowsup.supervisor.bench.plain import Conversation
from shadowsup.supervisor.bench.throughput import steady_tokens_per_s
from shadowsup.supervisor.errors import SupervisorError


def stream(text: str = "abc", ids: list[int] | None = None, *, done: bool = True, error: str | None = None) -> Stream:
    made = Stream(sent_s=0.0, text=text, token_ids=[1, 2, 3] if ids is None else ids, done=done, error=error)
    made.finish_reason = "length" if done else None
    return made


def timed(arrivals: list[float], counts: list[int] | None = None) -> Stream:
    return Stream(sent_s=0.0, arrivals=arrivals, counts=counts or [1] * len(arrivals))


def test_percentiles_are_values_that_were_measured() -> None:
    assert percentiles([]) is None
    assert percentiles([5.0]) == {"p50": 5.0, "p90": 5.0, "p99": 5.0, "max": 5.0, "n": 1}
    assert percentiles([float(n) for n in range(100, 0, -1)]) == {"p50": 50.0, "p90": 90.0, "p99": 99.0, "max": 100.0, "n": 100}


def test_the_same_stream_twice_is_no_difference() -> None:
    assert difference(stream(), stream()) is None


@pytest.mark.parametrize(
    ("seen", "words"),
    [
        (stream(error="HTTP 503"), "HTTP 503"),
        (stream(done=False), "ended with None"),
        (stream(ids=[1, 9, 3]), "token 1 of 3 differs"),
        (stream(ids=[1, 2]), "2 tokens received, not 3"),
        (stream(ids=[1, 2, 3, 3]), "4 tokens received, not 3"),
        (stream(text="abd"), "same tokens, other text"),
    ],
)
def test_a_difference_is_told_in_words(seen: Stream, words: str) -> None:
    assert words in (difference(stream(), seen) or "")


def test_without_ids_the_text_is_compared() -> None:
    assert difference(stream(ids=[]), stream(ids=[])) is None
    assert difference(stream(ids=[]), stream("abcabc", ids=[])) == "other text"


def test_what_came_before_a_break_must_be_a_beginning() -> None:
    assert partial_difference(stream(), stream("ab", [1, 2], done=False)) is None
    assert partial_difference(stream(), stream("ac", [1, 2], done=False)) == "same tokens, other text"
    assert partial_difference(stream(), stream("ab", [1, 3], done=False)) == "token 1 of 3 differs"
    assert partial_difference(stream(), stream("abc", [1, 2, 3, 4], done=False)) == "4 tokens received, not 3"


def test_the_resumption_is_the_end_of_the_silence_that_the_kill_caused() -> None:
    assert resumed_after([0.0, 0.1, 0.2, 0.9, 1.0], 0.25) == pytest.approx(0.65)


def test_text_that_was_on_its_way_is_not_taken_for_the_resumption() -> None:
    on_its_way = 0.25 + IN_FLIGHT_S / 2
    assert resumed_after([0.0, 0.1, 0.2, on_its_way, 0.9], 0.25) == pytest.approx(0.65)


def test_a_stall_later_on_is_not_taken_for_the_resumption() -> None:
    assert resumed_after([0.0, 0.1, 0.2, 0.6, 0.7, 5.0], 0.25) == pytest.approx(0.35)


def test_nothing_after_the_kill_is_no_resumption() -> None:
    assert resumed_after([0.0, 0.1, 0.2], 0.25) is None
    assert timed([0.1, 0.2]).resumed_after(0.25) is None


def test_a_kill_before_the_first_token_is_counted_from_the_request() -> None:
    assert timed([2.0, 2.1]).resumed_after(0.5) == pytest.approx(1.5)


def test_the_longest_gap_is_between_two_arrivals() -> None:
    assert longest_gap_s([]) == 0.0
    assert longest_gap_s([1.0]) == 0.0
    assert longest_gap_s([1.0, 1.5, 3.0, 3.1]) == pytest.approx(1.5)


def test_cached_tokens_are_measured_against_full_blocks_without_the_last_token() -> None:
    def usage(prompt: int, cached: int) -> dict[str, object]:
        return {"prompt_tokens": prompt, "prompt_tokens_details": {"cached_tokens": cached}}

    assert cached_share(usage(100, 96), 16) == 1.0
    assert cached_share(usage(97, 96), 16) == 1.0
    assert cached_share(usage(96, 80), 16) == 1.0
    assert cached_share(usage(100, 48), 16) == 0.5
    assert cached_share(usage(10, 0), 16) == 1.0
    assert cached_share({"prompt_tokens": 100}, 16) == 0.0
    assert cached_share(None, 16) is None


def test_throughput_counts_while_every_stream_runs() -> None:
    early = timed([0.0, 1.0, 2.0, 3.0])
    late = timed([1.0, 2.0, 3.0, 4.0], [1, 2, 2, 9])
    assert steady_tokens_per_s([early, late]) == pytest.approx((2 + 4) / 2.0)


def test_streams_that_never_ran_together_are_refused() -> None:
    with pytest.raises(SupervisorError, match="same time"):
        steady_tokens_per_s([timed([0.0, 1.0]), timed([2.0, 3.0])])
    with pytest.raises(SupervisorError, match="same time"):
        steady_tokens_per_s([timed([0.0, 1.0]), timed([])])


def test_a_client_has_caught_up_with_the_first_token_that_is_new_to_it() -> None:
    talk = Conversation(first=timed([0.1, 0.2], [1, 2]))
    assert talk.caught_up_s() is None
    talk.second = timed([5.0, 5.1, 5.2], [2, 1, 1])
    assert talk.caught_up_s() == 5.2


def test_merged_tokens_each_have_their_time() -> None:
    event = b'data: {"choices":[{"index":0,"delta":{"content":"%s"},"finish_reason":null}]}'
    assert stamps(event % b"12345           67              ") == [12345, 67]
    assert stamps(b'data: {"choices":[{"delta":{"role":"assistant","content":""}}]}') == []
    assert stamps(b"data: [DONE]") == []
