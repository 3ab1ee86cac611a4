"""One request, from its arrival to its end, whatever happens to the engines that serve it. Pure: no I/O and no clock.

::

             submit                 accepted
    HELD ─────────────► SUBMITTED ─────────────► RUNNING
     ▲                      │                       │
     └──────────────────────┴───────── hold ────────┘        any of them ──► DONE

A stream is *held* while no engine has it: before its first, and between the death of one and the next. It keeps all that a successor
needs: the prompt's ids (from the first `Accepted`), the ids generated so far, and how many characters of text the client was given. A
token event is applied as a whole or not at all, so ids and characters always describe the same instant, and a replay continues there.

The client is never given a character twice and never misses one: `Stream.token` compares where an event's text starts with where the
client's text ends.
"""

from __future__ import annotations

import enum
from typing import Protocol

from shadowsup.supervisor.gateway.errors import ApiError
from shadowsup.supervisor.gateway.params import Generation
from shadowsup.wire.link import Accepted, Cancel, Replay, Submit, ToEngine, Token

RETRY_FIRST_S = 0.05
RETRY_MOST_S = 1.0
"""Pause before a stream goes again to the engine that refused it for now; doubles from the first to the most."""


class StreamState(enum.Enum):
    HELD = "held"
    SUBMITTED = "submitted"
    RUNNING = "running"
    DONE = "done"


class Misstep(Exception):
    """Raised when an engine's event cannot follow what was delivered: applied, it would leave a hole in the client's text."""


class Outlet(Protocol):
    """The client's side of a stream. Calls must not block and must not call back into the stream."""

    def put(self, text: str) -> None: ...

    def finish(self, reason: str) -> None: ...

    def fail(self, error: ApiError) -> None: ...


class Stream:
    """The state of one request.

    Args:
        rid: id of the request, unique in this gateway.
        generation: the validated request.
        outlet: where its text goes.
        now: seconds, of the clock that every later ``now`` is from.
    """

    __slots__ = (
        "_last_epoch",
        "_refusals",
        "_resubmissions",
        "cached_tokens",
        "delivered_chars",
        "engine",
        "epoch",
        "generation",
        "held_since_s",
        "interrupted_at_s",
        "last_refusal",
        "last_token_s",
        "outlet",
        "output_ids",
        "prompt_ids",
        "replays",
        "retry_at_s",
        "rid",
        "state",
        "waited_s",
        "wire_rid",
    )

    def __init__(self, rid: str, generation: Generation, outlet: Outlet, now: float) -> None:
        self.rid = rid
        self.generation = generation
        self.outlet = outlet
        self.state = StreamState.HELD
        self.engine: str | None = None
        self.epoch = 0
        self.wire_rid = rid
        """The id the serving engine knows this stream by; see `submit`."""
        self.prompt_ids: tuple[int, ...] | None = None
        self.output_ids: list[int] = []
        self.delivered_chars = 0
        self.cached_tokens = 0
        """Of the first `Accepted`: what the client's own prompt found in kept KV."""
        self.replays = 0
        self.held_since_s: float | None = now
        """Since when it waits for an engine; None while one has it."""
        self.waited_s = 0.0
        """Seconds it was held before, since its last token: a request that kills every engine it reaches gives up, too."""
        self.interrupted_at_s: float | None = None
        """When it lost its engine; until the next token, which ends the pause that the client sees."""
        self.retry_at_s: float | None = None
        """Set when the engine said "not now": when to ask it again, if no other event brings that about before."""
        self.last_refusal = ""
        self.last_token_s: float | None = None
        """When the last token came, from whichever engine."""
        self._last_epoch = 0
        self._resubmissions = 0
        self._refusals = 0

    def submit(self, engine: str, epoch: int, now: float, *, staged: bool = False) -> list[ToEngine]:
        """Give the stream to ``engine``, which owns ``epoch``; return the messages that do so.

        An engine rejects a (request, epoch) that it has seen. When the same epoch gets the stream again (its link broke, or it had no
        room), the stream goes under another id, after a `Cancel` of the former: events still under way for that one are nobody's then.

        Args:
            staged: the engine knows the prompt already, by this stream's ``rid``.
        """
        assert self.state is StreamState.HELD and self.held_since_s is not None
        self.waited_s += now - self.held_since_s
        self.held_since_s = None
        messages: list[ToEngine] = []
        if self._last_epoch == epoch:
            messages.append(Cancel(rid=self.wire_rid))
            self._resubmissions += 1
            self.wire_rid = f"{self.rid}~{self._resubmissions}"
        self.state = StreamState.SUBMITTED
        self.engine, self.epoch, self._last_epoch = engine, epoch, epoch
        self.retry_at_s = None
        replay = None
        if self.prompt_ids is not None:
            self.replays += 1
            replay = Replay(
                prompt_ids=() if staged else self.prompt_ids,
                output_ids=tuple(self.output_ids),
                delivered_chars=self.delivered_chars,
                staged=self.rid if staged else "",
            )
        given = self.generation
        messages.append(
            Submit(
                rid=self.wire_rid,
                epoch=epoch,
                messages=given.messages if replay is None else None,
                prompt=given.prompt if replay is None else None,
                prompt_ids=given.prompt_ids if replay is None else None if staged else self.prompt_ids,
                sampling=given.sampling,
                replay=replay,
            )
        )
        return messages

    def accepted(self, event: Accepted) -> None:
        """The engine has the request and knows the ids of its prompt."""
        if self.state is not StreamState.SUBMITTED:
            return
        self.state = StreamState.RUNNING
        if self.prompt_ids is None:
            self.prompt_ids = event.prompt_ids
            self.cached_tokens = min(event.cached_tokens, len(event.prompt_ids))

    def token(self, event: Token) -> str:
        """Apply one event and return the text that is new to the client (empty when all of it is held back or known).

        Raises:
            Misstep: text is missing before this event, or the engine has not accepted the request; nothing was applied.
        """
        if self.state is not StreamState.RUNNING:
            raise Misstep("a token before the request was accepted")
        text = event.text
        known = self.delivered_chars - (event.chars - len(text))
        if known:
            if known < 0:
                raise Misstep(f"{-known} characters are missing before character {self.delivered_chars}")
            if text and known >= len(text) and event.finish_reason is None:
                return ""  # a repeated event: its ids are known too
            text = text[known:]
        self.output_ids += event.ids
        self.delivered_chars += len(text)
        self.waited_s = 0.0
        if self._refusals:
            self._refusals = 0
            self.last_refusal = ""
        if event.finish_reason is not None:
            self.close()
        return text

    def hold(self, now: float) -> None:
        """Its engine is gone, or another epoch began: wait for the next."""
        if self.state is StreamState.DONE:
            return
        if self.state is not StreamState.HELD and self.interrupted_at_s is None:
            self.interrupted_at_s = now
        self.state = StreamState.HELD
        self.engine = None
        self.retry_at_s = None
        if self.held_since_s is None:
            self.held_since_s = now

    def gives_up_at_s(self, patience_s: float) -> float | None:
        """When a held stream has waited ``patience_s`` in all without a token; None while an engine has it."""
        return None if self.held_since_s is None else self.held_since_s - self.waited_s + patience_s

    def refused(self, why: str, now: float) -> None:
        """The engine cannot take it now: wait for the next one, or for the same a little later."""
        self.hold(now)
        self.last_refusal = why
        self.retry_at_s = now + min(RETRY_MOST_S, RETRY_FIRST_S * 2**self._refusals)
        self._refusals = min(self._refusals + 1, 16)

    def close(self) -> None:
        """Finished, failed, or its client left."""
        self.state = StreamState.DONE
        self.engine = None
        self.held_since_s = None
        self.retry_at_s = None

    @property
    def fresh(self) -> bool:
        """Whether no engine has had it yet."""
        return self._last_epoch == 0

    @property
    def prompt_tokens(self) -> int:
        return len(self.prompt_ids or ())

    @property
    def output_tokens(self) -> int:
        return len(self.output_ids)
