from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from shadowsup.memkeeper.hashing import chain, chain_all, from_array, from_words, to_array, to_words

SALT = b"s" * 16
tokens = st.lists(st.integers(0, 2**32 - 1), max_size=40)


def test_a_hash_names_its_block_everything_before_it_and_the_salt() -> None:
    root = chain(SALT, None, [1, 2, 3, 4])
    others = [
        chain(SALT, None, [1, 2, 3, 5]),
        chain(SALT, None, [1, 2, 3]),
        chain(SALT, root, [1, 2, 3, 4]),
        chain(SALT, bytes(16), [1, 2, 3, 4]),
        chain(b"t" * 16, None, [1, 2, 3, 4]),
    ]
    assert len({root, *others}) == 6
    assert all(len(one) == 16 for one in others)


def test_a_first_block_is_not_taken_for_a_later_one_whose_parent_looks_like_tokens() -> None:
    parent = chain(SALT, None, [9])
    assert chain(SALT, parent, [1]) != chain(SALT, None, [*np.frombuffer(parent, "<u4").tolist(), 1])


@given(tokens=tokens)
def test_all_blocks_of_a_sequence_are_the_chain_of_its_full_blocks(tokens: list[int]) -> None:
    hashes = chain_all(SALT, tokens, 4)
    assert len(hashes) == len(tokens) // 4
    parent = None
    for number, digest in enumerate(hashes):
        parent = chain(SALT, parent, tokens[4 * number : 4 * number + 4])
        assert digest == parent
    if len(hashes) > 1:
        assert chain_all(SALT, tokens[4:], 4, parent=hashes[0]) == hashes[1:]


@given(digests=st.lists(st.binary(min_size=16, max_size=16), max_size=5))
def test_the_ledgers_words_and_bytes_are_the_same_hash(digests: list[bytes]) -> None:
    array = to_array(digests)
    assert array.shape == (len(digests), 2) and array.dtype == np.uint64
    assert from_array(array) == digests
    for row, digest in zip(array, digests, strict=True):
        assert to_words(digest) == (int(row[0]), int(row[1]))
        assert from_words(*row) == digest


def test_the_hash_is_the_same_in_every_version() -> None:
    """Kept blocks are found by it after an upgrade."""
    assert chain(SALT, None, [1, 2, 3]).hex() == "f3007cf2aba43fbcc61dfda24d070aee"
