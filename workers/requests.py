"""One request inside an engine: its tokens, its place in the KV cache, its text, and when it is finished."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from shadowsup.memkeeper import hashing
from shadowsup.wire.link import Sampling
from shadowsup.workers.detokenize import Detokenizer


@dataclass(eq=False, slots=True)
class Request:
    """``output`` includes what a predecessor had generated. ``computed``: how many tokens have their KV in ``blocks`` (sequence order)."""

    rid: str
    epoch: int
    prompt: tuple[int, ...]
    output: list[int]
    sampling: Sampling
    text: Detokenizer
    max_total: int
    """Tokens, prompt and output together, at which the request ends with ``length``."""
    eos: Collection[int]
    computed: int = 0
    cached: int = 0
    """Tokens found in kept KV when it was first scheduled."""
    accepted: bool = False
    replayed: bool = False
    """Another engine has accepted it: the gateway knows the prompt's ids."""
    undelivered: str = ""
    """Text of replayed ids that the client has not got; sent with the next token."""
    blocks: list[int] = field(default_factory=list)
    tokens: list[int] = field(init=False)
    known_hashes: list[bytes] = field(default_factory=list)
    """Chained hashes of its first full blocks, as far as they are known."""
    known_blocks: Sequence[int] = ()
    """Where the first of those probably are."""

    def __post_init__(self) -> None:
        self.tokens = [*self.prompt, *self.output]

    @property
    def total(self) -> int:
        """Tokens so far."""
        return len(self.tokens)

    @property
    def pending(self) -> int:
        """Tokens whose KV is not computed yet; never 0 while the request runs, since the newest token has none."""
        return len(self.tokens) - self.computed

    def append(self, token: int) -> None:
        self.tokens.append(token)
        self.output.append(token)

    def hashes(self, salt: bytes, block_tokens: int, blocks: int) -> Sequence[bytes]:
        """Return the chained hashes of the first ``blocks`` full blocks; each is computed once."""
        have = len(self.known_hashes)
        if have < blocks:
            parent = self.known_hashes[-1] if have else None
            self.known_hashes += hashing.chain_all(salt, self.tokens[have * block_tokens : blocks * block_tokens], block_tokens, parent)
        return self.known_hashes[:blocks]

    def read(self, ids: Sequence[int]) -> str:
        """Turn output ids into the text that may be sent now. An end-of-sequence id that ends the request has no text."""
        if ids and self._ends(ids[-1]):
            ids = ids[:-1]
        return self.text.feed(ids) if ids else ""

    def finish_reason(self) -> str | None:
        """Return ``stop`` or ``length`` when the output is complete, else None. Call it after `read`."""
        if self.text.stopped or (self.output and self._ends(self.output[-1])):
            return "stop"
        limit = self.sampling.max_tokens
        if self.total >= self.max_total or (limit is not None and len(self.output) >= limit):
            return "length"
        return None

    def _ends(self, token: int) -> bool:
        return not self.sampling.ignore_eos and token in self.eos
