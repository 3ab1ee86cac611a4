"""Prompts of a given length that share no block, and the requests that are made of them."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from shadowsup.supervisor.errors import SupervisorError

Chat = list[dict[str, str]]
CountTokens = Callable[[Chat], Awaitable[int]]

_FILLER = """
harbour winter engine copper garden letter river signal mountain paper silver window bridge morning market thunder
lantern orchard compass violin feather tunnel island granite harvest mirror station velvet canyon beacon cradle meadow
"""
_WORDS = _FILLER.split()


def chats(streams: int, words: int, seed: int) -> list[Chat]:
    """Return one chat for each stream: different from the first words on, so that no two share a block."""
    rng = random.Random(seed)
    made = []
    for number in range(streams):
        filler = " ".join(rng.choice(_WORDS) for _ in range(words))
        made.append([{"role": "user", "content": f"Story {number}: {filler}. Continue this story in your own words, at length."}])
    return made


async def sized_chats(streams: int, tokens: int, seed: int, count: CountTokens) -> list[Chat]:
    """Return chats of ``tokens`` tokens or a few more each; ``count`` asks the engine for the tokens of one.

    Raises:
        SupervisorError: ``tokens`` are fewer than the words around the filler take.
    """
    bare = await count(chats(1, 0, seed)[0])
    if bare > tokens:
        raise SupervisorError(f"a prompt takes {bare} tokens at least, not {tokens}", f"--prompt-tokens {bare}, or more")
    a_word = (await count(chats(1, 100, seed)[0]) - bare) / 100
    words = int((tokens - bare) / a_word)
    while True:
        made = chats(streams, words, seed)
        shortest = min([await count(chat) for chat in made])
        if shortest >= tokens:
            return made
        words += max(1, int((tokens - shortest) / a_word))


def payload(model: str, chat: Sequence[dict[str, str]], max_tokens: int) -> dict[str, Any]:
    """Return a request that is answered the same each time: greedy, and of exactly ``max_tokens`` tokens."""
    return {"model": model, "messages": list(chat), "temperature": 0, "max_tokens": max_tokens, "ignore_eos": True}
