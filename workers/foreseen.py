"""Prompts of streams that run elsewhere and would be replayed here: hashed while the engine is parked, so that a failover need not.

Hashing 64 GB of KV (30,000 blocks) takes 75 ms, which is longer than all the rest of a failover on a GPU.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from shadowsup.memkeeper import hashing

BUDGET_S = 0.005
"""Of one look: an order to be promoted waits no longer than this."""
BLOCKS_AT_ONCE = 256


class ForeseenPrompts:
    """By the name that the gateway staged them under. ``clock``: monotonic seconds."""

    def __init__(self, block_tokens: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._block_tokens = block_tokens
        self._clock = clock
        self._salt = b""
        self._prompts: dict[str, tuple[int, ...]] = {}
        self._hashes: dict[str, list[bytes]] = {}
        self._queue: deque[str] = deque()

    def __len__(self) -> int:
        return len(self._prompts)

    def add(self, rid: str, prompt: tuple[int, ...]) -> None:
        self._prompts[rid] = prompt
        self._hashes[rid] = []
        self._queue.append(rid)

    def forget(self, rid: str) -> None:
        """Unknown ones are ignored."""
        self._prompts.pop(rid, None)
        self._hashes.pop(rid, None)

    def prepare(self, salt: bytes) -> bool:
        """Hash what is not hashed yet, for `BUDGET_S` at most. Another ``salt`` than before makes all of it void.

        Returns whether anything is left to do.
        """
        if salt != self._salt:
            self._salt = salt
            self._hashes = {rid: [] for rid in self._prompts}
            self._queue = deque(self._prompts)
        until_s = self._clock() + BUDGET_S
        while self._queue and self._clock() < until_s:
            rid = self._queue[0]
            prompt = self._prompts.get(rid)
            if prompt is None or not self._some(prompt, self._hashes[rid]):
                self._queue.popleft()
        return bool(self._queue)

    def _some(self, prompt: tuple[int, ...], hashes: list[bytes]) -> bool:
        """Hash some blocks more; returns whether there are others."""
        size = self._block_tokens
        begin, end = len(hashes) * size, (len(hashes) + BLOCKS_AT_ONCE) * size
        hashes += hashing.chain_all(self._salt, prompt[begin:end], size, hashes[-1] if hashes else None)
        return end < len(prompt)

    def take(self, rid: str, salt: bytes) -> list[bytes] | None:
        """Return the hashes of the first full blocks, as far as they are known, and forget the prompt. None: it was not foreseen."""
        hashes = self._hashes.get(rid)
        if hashes is None:
            return None
        self.forget(rid)
        return hashes if salt == self._salt else []
