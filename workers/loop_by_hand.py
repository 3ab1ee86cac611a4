"""A loop of one's own without a supervisor: the same script, run by hand. Nothing is kept, and prompts are lines of the standard input."""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Sequence
from typing import TextIO

from shadowsup.memkeeper.ledger import LedgerWriter
from shadowsup.memkeeper.protocol import Fingerprint
from shadowsup.wire.engine import Phase
from shadowsup.wire.link import Accepted, Rejected, Sampling, Submit, Token
from shadowsup.workers.api import KvGeometry, Served
from shadowsup.workers.arena import KvArena
from shadowsup.workers.leaving import Leave
from shadowsup.workers.loop_blocks import private_ledger

MAX_TOKENS = 64
"""Of an answer; less where half of the context is less."""


class ByHand:
    """Stands in for `shadowsup.workers.life.Life`.

    Args:
        lines: prompts, one a line; its end is the end of the loop.
        out: answers.
    """

    draining = False

    def __init__(self, lines: TextIO | None = None, out: TextIO | None = None) -> None:
        self._lines = lines or sys.stdin
        self._out = out or sys.stdout
        self._numbers = itertools.count(1)
        self._geometry: KvGeometry
        self._engine: Served
        self._writer: LedgerWriter | None = None

    def progress(self, words: str) -> None:
        print(words, file=sys.stderr)

    def hold(self, geometry: KvGeometry, weights: Fingerprint | None) -> None:
        self._geometry = geometry

    def reserve(self) -> KvArena | None:
        return None

    def warmed(self) -> None:
        pass

    def park(self, engine: Served) -> None:
        self._engine = engine

    def wait_for_promotion(self) -> LedgerWriter:
        """There is nobody to wait for."""
        self._writer = private_ledger(self._geometry)
        self._engine.promote(self._writer, fenced=True)
        return self._writer

    def arrivals(self, wait_s: float = math.inf) -> bool:
        """Where nothing is in hand, and unless ``wait_s`` is 0, wait for a line.

        Raises:
            Leave: there are no more.
        """
        if not (self._engine.inflight or self._engine.queued):
            if not wait_s:
                return False
            if self._lines.isatty():
                print("> ", end="", file=sys.stderr, flush=True)
            line = self._lines.readline()
            if not line:
                raise Leave
            sampling = Sampling(max_tokens=min(MAX_TOKENS, self._engine.max_context // 2), temperature=0.0, seed=0)
            self._engine.submit(Submit(rid=str(next(self._numbers)), epoch=1, prompt=line.rstrip("\n"), sampling=sampling))
        return True

    def stepping(self, phase: Phase, tokens: int = 0) -> None:
        pass

    def stepped(
        self, events: Sequence[Accepted | Token | Rejected], phase: Phase, *, progressed: bool = True, next_tokens: int = 0
    ) -> None:
        """Print the answers."""
        for event in events:
            if isinstance(event, Token):
                print(event.text, end="\n" if event.finish_reason is not None else "", file=self._out, flush=True)
            elif isinstance(event, Rejected):
                print(event.message, file=sys.stderr)

    def stalled(self) -> None:
        pass

    def obey(self) -> None:
        pass

    def close(self) -> None:
        """Idempotent."""
        if self._writer is not None:
            self._writer.close()
