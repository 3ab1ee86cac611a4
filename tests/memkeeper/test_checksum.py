from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shadowsup.memkeeper.checksum import checksum, sample_checksum

SIZE = 300_003
"""Bytes: several chunks, and a tail that is no whole word."""
DATA = np.random.default_rng(0).integers(0, 256, SIZE, dtype=np.uint8)


@settings(deadline=None)
@given(at=st.integers(0, SIZE - 1), bit=st.integers(0, 7))
def test_every_bit_counts(at: int, bit: int) -> None:
    changed = DATA.copy()
    changed[at] ^= 1 << bit
    assert checksum(changed) != checksum(DATA)


@settings(deadline=None)
@given(first=st.integers(0, SIZE // 8 - 1), second=st.integers(0, SIZE // 8 - 1), top_bit_only=st.booleans())
def test_order_counts(first: int, second: int, top_bit_only: bool) -> None:
    """Also where two words differ in their top bit only, which sums of plain products do not see."""
    words = DATA[: SIZE // 8 * 8].copy().view(np.uint64)
    if top_bit_only:
        words[second] = words[first] ^ np.uint64(1 << 63)
    swapped = words.copy()
    swapped[[first, second]] = words[[second, first]]
    assert (checksum(swapped) == checksum(words)) == (words[first] == words[second])


def test_exchanged_chunks_are_noticed() -> None:
    chunk = 8192 * 8
    exchanged = np.concatenate([DATA[chunk : 2 * chunk], DATA[:chunk], DATA[2 * chunk :]])
    assert checksum(exchanged) != checksum(DATA)


def test_zeros_of_another_length_are_another_content() -> None:
    assert len({checksum(bytes(size)) for size in range(40)}) == 40


def test_the_value_is_the_same_everywhere() -> None:
    """A change of this value makes every kept weights set look damaged after an upgrade."""
    assert checksum(b"") == "c804ce198ec337e3dc762bdd1a09aece"
    assert checksum(bytes(range(256)) * 1000) == "6db3760e42439f569bcedcc7c85c393e"


def test_it_does_not_depend_on_alignment_or_kind_of_buffer() -> None:
    shifted = np.empty(SIZE + 3, np.uint8)
    shifted[3:] = DATA
    assert checksum(shifted[3:]) == checksum(DATA) == checksum(DATA.tobytes()) == checksum(memoryview(DATA))
    assert checksum(DATA[: SIZE // 8 * 8].view(np.float64)) == checksum(DATA[: SIZE // 8 * 8])
    with pytest.raises(ValueError, match="contiguous"):
        checksum(DATA[::2])


def test_a_sample_sees_its_pages_and_the_length() -> None:
    data = np.zeros(4096 * 1000 + 5, np.uint8)
    plain = sample_checksum(data, pages=10)
    for at in (0, 4095, len(data) - 1):
        changed = data.copy()
        changed[at] = 1
        assert sample_checksum(changed, pages=10) != plain
    assert sample_checksum(data[:-1], pages=10) != plain
    changed = data.copy()
    changed[4096] = 1  # the second page is not among ten of a thousand
    assert sample_checksum(changed, pages=10) == plain
    assert sample_checksum(b"") != sample_checksum(b"\0")


def test_a_gigabyte_a_second_on_one_core() -> None:
    data = np.ones(64 * 1024 * 1024, np.uint8)
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        checksum(data)
        best = min(best, time.perf_counter() - start)
    assert len(data) / best >= 1e9
