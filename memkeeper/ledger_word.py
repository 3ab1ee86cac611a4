"""The one word of a ledger's header that says who owns it, for processes that want to know no more (and have no use for numpy).

Where it lies and what it means is explained in `shadowsup.memkeeper.ledger_layout`.
"""

from __future__ import annotations

import os

WORD_AT = 64
MAX_OWNER = 2**31 - 1


def pack_word(epoch: int, bank: int, owner: int) -> int:
    return epoch << 32 | bank << 31 | owner


def unpack_word(word: int) -> tuple[int, int, int]:
    """Return (epoch, bank, owner)."""
    return word >> 32, word >> 31 & 1, word & MAX_OWNER


def read_owner(fd: int) -> tuple[int, int]:
    """Return (epoch, owner) that the header names now, without mapping the ledger; (0, 0) where it is not initialised."""
    word = os.pread(fd, 8, WORD_AT)
    if len(word) < 8:
        return 0, 0
    epoch, _, owner = unpack_word(int.from_bytes(word, "little"))
    return epoch, owner
