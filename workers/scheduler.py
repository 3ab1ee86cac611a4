"""Continuous batching: which tokens of which requests the next step computes. Pure bookkeeping; no torch, no I/O, no clock.

Each step takes one token of every request that generates, then pieces of prompts (chunked prefill) up to ``max_batch_tokens``, first
come, first served. A pool that runs dry never fails a request: after the fence the newest request is preempted (its full blocks stay
cached, so it loses little), before the fence it waits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from shadowsup.wire.engine import Phase
from shadowsup.wire.link import Accepted, Token
from shadowsup.workers.kv_pool import Filled, KvPool
from shadowsup.workers.requests import Request

Event = Accepted | Token


@dataclass(frozen=True, slots=True)
class Limits:
    """``max_batch``: requests that run at once. ``max_batch_tokens``: tokens of one step."""

    max_batch: int
    max_batch_tokens: int


@dataclass(eq=False, frozen=True, slots=True)
class Chunk:
    """Tokens ``start`` … ``start + count`` of a request. ``samples``: the last one's logits give the next token."""

    request: Request
    start: int
    count: int
    samples: bool


class Scheduler:
    """Requests of one engine in one epoch."""

    def __init__(self, pool: KvPool, limits: Limits, salt: bytes) -> None:
        self.pool = pool
        self._limits = limits
        self._salt = salt
        self._running: list[Request] = []
        self._waiting: deque[Request] = deque()
        self._known: dict[str, Request] = {}
        self._events: list[Event] = []

    def __contains__(self, rid: str) -> bool:
        return rid in self._known

    @property
    def inflight(self) -> int:
        return len(self._running)

    @property
    def queued(self) -> int:
        """Requests that wait, and ended ones whose last event has not been taken yet."""
        return len(self._waiting) + (1 if self._events else 0)

    @property
    def phase(self) -> Phase:
        """What the next step will do: prefill as soon as it has more than one token of some request."""
        if self._waiting or any(request.pending > 1 for request in self._running):
            return Phase.PREFILL
        return Phase.DECODE if self._running else Phase.IDLE

    @property
    def upcoming(self) -> int:
        """Tokens that the next step computes at most: what is kept of prompts that wait is not known yet."""
        wanted = sum(request.pending for request in self._running) + sum(request.total for request in self._waiting)
        return min(wanted, self._limits.max_batch_tokens)

    def lengths(self) -> list[int]:
        """Return the tokens of every request that runs, oldest first."""
        return [request.total for request in self._running]

    def add(self, request: Request) -> None:
        """Queue ``request``. One that is complete already (replayed to its end) only gets its last events."""
        text = request.read(request.output) if request.output else ""
        reason = request.finish_reason()
        if reason is not None:
            self._accept(request)
            self._events.append(self._last(request, (), text, reason))
            return
        request.undelivered = text
        self._known[request.rid] = request
        self._waiting.append(request)

    def cancel(self, rid: str) -> None:
        """Forget a request; unknown ones are ignored. Between steps only."""
        request = self._known.pop(rid, None)
        if request is None:
            return
        if request in self._running:
            self._running.remove(request)
        else:
            self._waiting.remove(request)
        self._release(request)

    def take_events(self) -> list[Event]:
        """Return what has come up since the last call."""
        events, self._events = self._events, []
        return events

    # --- before the step --------------------------------------------------------------------------------------------------------

    def plan(self) -> list[Chunk]:
        """Return the next step's work, with blocks for it; empty when nothing can be done now. Single tokens come first.

        Raises:
            LedgerLost: another engine owns the ledger.
        """
        planned: dict[Request, Chunk] = {}
        budget = self._limits.max_batch_tokens
        # Oldest first, so that the newest is the one to give way; generating before prefilling, so that no prompt stalls a stream.
        for request in sorted(self._running, key=lambda one: one.pending > 1):
            if budget == 0:
                break
            if request not in self._running:  # preempted for one before it
                continue
            chunk = self._chunk(request, budget)
            if self._give_blocks(request, chunk, planned):
                planned[request] = chunk
                budget -= chunk.count
        for chunk in self._admit(budget):
            planned[chunk.request] = chunk
        return sorted(planned.values(), key=lambda chunk: chunk.count > 1)

    def _chunk(self, request: Request, budget: int) -> Chunk:
        count = min(request.pending, budget)
        return Chunk(request, request.computed, count, samples=request.computed + count == request.total)

    def _give_blocks(self, request: Request, chunk: Chunk, planned: dict[Request, Chunk]) -> bool:
        missing = self._blocks_for(chunk.start + chunk.count) - len(request.blocks)
        while True:
            blocks = self.pool.allocate(missing)
            if blocks is not None:
                request.blocks += blocks
                return True
            if not self.pool.fenced:
                return False  # the fence comes soon and frees the rest
            victim = self._running[-1]
            planned.pop(victim, None)
            self._preempt(victim)
            if victim is request:
                return False

    def _admit(self, budget: int) -> Iterator[Chunk]:
        for request in list(self._waiting):
            # Every request needs a new block, if only for its newest token.
            if budget == 0 or len(self._running) >= self._limits.max_batch or self.pool.available == 0:
                return
            hit = self._match(request)
            needed = self._blocks_for(request.total) - len(hit)
            if not self._fits(hit, needed):
                if self.pool.fenced:
                    return  # first come, first served
                continue  # before the fence few blocks are there: whoever fits goes on
            self.pool.acquire(hit)
            request.blocks, request.computed = hit, len(hit) * self.pool.block_tokens
            chunk = self._chunk(request, budget)
            blocks = self.pool.allocate(self._blocks_for(chunk.start + chunk.count) - len(hit))
            assert blocks is not None, "what fits was counted before"
            request.blocks += blocks
            self._waiting.remove(request)
            self._running.append(request)
            budget -= chunk.count
            if not request.accepted:
                request.cached = request.computed
                self._accept(request)
            yield chunk

    def _match(self, request: Request) -> list[int]:
        """Find kept blocks. The newest token is always computed, for its logits, so a block that ends with it is not taken."""
        blocks = (request.total - 1) // self.pool.block_tokens
        guess, request.known_blocks = request.known_blocks, ()  # good for the first time
        return self.pool.match(request.hashes(self._salt, self.pool.block_tokens, blocks), guess)

    def _fits(self, hit: Sequence[int], needed: int) -> bool:
        """Whether all of a request's blocks could be had, with one to spare for every running one, so that admitting it does not soon
        preempt it (it alone is always tried: it fits an empty pool, that was checked when it came)."""
        taken = sum(1 for block in hit if self.pool.refs(block) == 0) if self.pool.fenced else 0
        spare = len(self._running) if self.pool.fenced else 0
        return needed + taken + spare <= self.pool.available

    # --- after the step ---------------------------------------------------------------------------------------------------------

    def commit(self, plan: Sequence[Chunk], sampled: Sequence[int]) -> None:
        """The step of ``plan`` has finished: publish the blocks it filled and take its tokens, one for each chunk that samples.

        Raises:
            LedgerLost: another engine owns the ledger.
        """
        filled: list[Filled] = []
        size = self.pool.block_tokens
        for chunk in plan:
            request = chunk.request
            before, request.computed = request.computed // size, chunk.start + chunk.count
            after = request.computed // size
            hashes = request.hashes(self._salt, size, after)
            filled += [Filled(request.blocks[at], hashes[at]) for at in range(before, after)]
        self.pool.publish(filled)
        tokens = iter(sampled)
        for chunk in plan:
            if chunk.samples:
                self._take(chunk.request, next(tokens))

    def _take(self, request: Request, token: int) -> None:
        request.append(token)
        text = request.undelivered + request.read((token,))
        request.undelivered = ""
        reason = request.finish_reason()
        if reason is None:
            self._events.append(Token(rid=request.rid, epoch=request.epoch, ids=(token,), text=text, chars=request.text.chars))
            return
        self._events.append(self._last(request, (token,), text, reason))
        self._running.remove(request)
        del self._known[request.rid]
        self._release(request)

    def _last(self, request: Request, ids: tuple[int, ...], text: str, reason: str) -> Token:
        text += request.text.flush()
        if request.text.stopped:
            reason = "stop"
        return Token(rid=request.rid, epoch=request.epoch, ids=ids, text=text, chars=request.text.chars, finish_reason=reason)

    def _accept(self, request: Request) -> None:
        request.accepted = True
        ids = () if request.replayed else request.prompt
        self._events.append(Accepted(rid=request.rid, epoch=request.epoch, prompt_ids=ids, cached_tokens=request.cached))

    def _preempt(self, request: Request) -> None:
        self._running.remove(request)
        self._release(request)
        self._waiting.appendleft(request)

    def _release(self, request: Request) -> None:
        self.pool.release(request.blocks)
        request.blocks, request.computed = [], 0

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.pool.block_tokens)
