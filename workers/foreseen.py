"""Prompts of streams that run elsewhere and would be replayed here: hashed, and their blocks looked up, while the engine is parked, so that
a failover need not.

For 64 GB of KV (30,000 blocks) hashing takes 75 ms and looking up 10, which together is longer than all the rest of a failover on a GPU.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from shadowsup.memkeeper import hashing

BUDGET_S = 0.005
"""Of one look: an order to be promoted waits no longer than this."""
BLOCKS_AT_ONCE = 256

Find = Callable[[bytes], int | None]
"""Returns the block that holds the content of a hash, as far as a parked engine knows."""


@dataclass(slots=True)
class Foreseen:
    """``hashes``: of the first full blocks, as far as they are known. ``blocks``: where the first of those were last seen; a guess."""

    prompt: tuple[int, ...]
    hashes: list[bytes] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)


class ForeseenPrompts:
    """By the name that the gateway staged them under. ``clock``: monotonic seconds."""

    def __init__(self, block_tokens: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._block_tokens = block_tokens
        self._clock = clock
        self._salt = b""
        self._known: dict[str, Foreseen] = {}
        self._queue: deque[str] = deque()

    def __len__(self) -> int:
        return len(self._known)

    def add(self, rid: str, prompt: tuple[int, ...]) -> None:
        self._known[rid] = Foreseen(prompt)
        self._queue.append(rid)

    def forget(self, rid: str) -> None:
        """Unknown ones are ignored."""
        self._known.pop(rid, None)

    def prepare(self, salt: bytes, find: Find) -> bool:
        """Hash what is not hashed yet, then look blocks up that were not found yet, for `BUDGET_S` at most.

        Another ``salt`` than before makes all of it void. Returns whether there is anything left to hash.
        """
        if salt != self._salt:
            self._salt = salt
            self._known = {rid: Foreseen(known.prompt) for rid, known in self._known.items()}
            self._queue = deque(self._known)
        until_s = self._clock() + BUDGET_S
        while self._queue and self._clock() < until_s:
            known = self._known.get(self._queue[0])
            if known is None or not self._some(known):
                self._queue.popleft()
        for known in self._known.values():
            if self._clock() >= until_s:
                break
            self._look_up(known, find)
        return bool(self._queue)

    def _some(self, known: Foreseen) -> bool:
        """Hash some blocks more; returns whether there are others."""
        size, hashes = self._block_tokens, known.hashes
        begin, end = len(hashes) * size, (len(hashes) + BLOCKS_AT_ONCE) * size
        hashes += hashing.chain_all(self._salt, known.prompt[begin:end], size, hashes[-1] if hashes else None)
        return end < len(known.prompt)

    def _look_up(self, known: Foreseen, find: Find) -> None:
        """Find some blocks more. A running stream's blocks stay where they are, so what was found once is not looked up again."""
        for digest in known.hashes[len(known.blocks) : len(known.blocks) + BLOCKS_AT_ONCE]:
            block = find(digest)
            if block is None:
                return  # its engine has not computed it yet
            known.blocks.append(block)

    def take(self, rid: str, salt: bytes) -> Foreseen | None:
        """Return what is known of a prompt, and forget it. None: it was not foreseen."""
        known = self._known.pop(rid, None)
        return known if known is None or salt == self._salt else Foreseen(known.prompt)
