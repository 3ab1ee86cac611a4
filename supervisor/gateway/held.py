"""A worker whose engines have an HTTP server of their own and can continue what another has begun (``engine: vllm``).

There is no link to such an engine: the routing table says who serves (`HeldWorker.target`), a cut connection that it is gone. Each
request is a coroutine of its own (`shadowsup.supervisor.gateway.held_http`); what it must know and decide is here, without I/O: which
engine to ask now, until when to wait for one, when to give up.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import NamedTuple, Protocol

from shadowsup.supervisor.gateway.errors import ApiError, unavailable
from shadowsup.supervisor.gateway.held_turn import Line, Turn
from shadowsup.supervisor.gateway.stream import RETRY_FIRST_S, RETRY_MOST_S
from shadowsup.supervisor.gateway.worker import NO_HOPE, Counts
from shadowsup.wire.engine import WorkerRoute

SUSPECT_S = 2.0
"""An engine that answers with a server error may be dying: so long the routing table may say so before the client gets the error. (vLLM's
server lives on for 4 s after its core has died; the supervisor ends it as soon as it sees the core's death.)"""
MOST_FAILURES = 1
"""So often an engine is asked again after a failure of its own making that did not turn out to be its death."""


class Target(NamedTuple):
    """The engine that serves, as far as the routing table knows."""

    upstream: str
    """``unix:/path`` of its server."""
    epoch: int


class Try(Protocol):
    """One request at one engine."""

    target: Target

    def drop(self) -> None:
        """That engine does not serve any more: read no further."""


class Stagings(Protocol):
    """What one stream has waiting at engines that do not serve yet."""

    def look(self) -> None:
        """The worker's row of the routing table has changed."""


class HeldWorker:
    """The worker as the gateway sees it.

    Args:
        route: its row of the routing table.
        resumed: told, for each stream that lost its engine, of the seconds until its next token.
    """

    def __init__(self, route: WorkerRoute, resumed: Callable[[float], None] | None = None) -> None:
        self.route = route
        self.counts = Counts()
        self.resumed = resumed
        self.inflight = 0
        self.held = 0
        """Requests that wait for an engine."""
        self.ended: ApiError | None = None
        """Why no request of this worker will be answered any more."""
        self.line = Line(self.counts, self._tell)
        """Of requests that engines may have died of."""
        self.stagings: set[Stagings] = set()
        self._tries: set[Try] = set()
        self._changed = asyncio.Event()
        self._lost: Target | None = None
        self._broke: tuple[Target | None, float] = (None, 0.0)
        self.line.learn(route.epoch, route.deaths)

    @property
    def name(self) -> str:
        return self.route.worker

    @property
    def epoch(self) -> int:
        return self.route.epoch

    @property
    def target(self) -> Target | None:
        """The engine to ask; None while there is none."""
        return Target(self.route.upstream, self.route.epoch) if self.route.upstream else None

    @property
    def serving(self) -> str | None:
        return self.route.upstream or None

    @property
    def live_epoch(self) -> int:
        return self.route.epoch if self.route.upstream else 0

    # What the supervisor says

    def rerouted(self, route: WorkerRoute) -> None:
        """Take the worker's new row of the routing table. What an engine of another epoch still says is nobody's."""
        self.route = route
        self.line.learn(route.epoch, route.deaths)
        target = self.target
        for each in [each for each in self._tries if each.target != target]:
            each.drop()
        self._tell()
        for staging in list(self.stagings):
            staging.look()

    def removed(self) -> None:
        """The worker left the routing table."""
        self.abandon(unavailable(f"The worker {self.name} was removed"))

    def abandon(self, error: ApiError) -> None:
        """End all requests with ``error``."""
        self.ended = error
        for each in list(self._tries):
            each.drop()
        self._tell()

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    # What the requests say

    def began(self, each: Try) -> None:
        self._tries.add(each)

    def over(self, each: Try) -> None:
        self._tries.discard(each)

    def broke(self, target: Target, sent_s: float, now: float) -> bool:
        """Whether a request that was sent to ``target`` at ``sent_s`` was in it when it broke: what comes after that finds it dead."""
        if self._broke[0] != target:
            self._broke = (target, now)
        return sent_s <= self._broke[1]

    def lost(self, target: Target) -> None:
        """A request lost ``target`` in mid-answer."""
        if self._lost != target:
            self._lost = target
            self.counts.failovers += 1

    def change(self) -> asyncio.Event:
        """Return what is set at the next change of the routing table."""
        return self._changed

    def unavailable(self, *, waited: bool = False, last_refusal: str = "") -> ApiError:
        """Return what a client is told that gets no engine."""
        state = self.route.state
        why = self.route.reason or last_refusal or (f"it is {state}" if state else "it has no engine")
        after = f" after {self.route.give_up_after_s:g} s of waiting" if waited else ""
        return unavailable(f"The worker {self.name} cannot serve this request{after}: {why}")


class Patience:
    """How long one request waits for which engine.

    Args:
        now: seconds, of the clock that every later ``now`` is from.
    """

    def __init__(self, now: float) -> None:
        self._since_s = now
        self._tried: Target | None = None
        self._retry_at_s = 0.0
        self._refusals = 0
        self._failures = 0
        self.last_refusal = ""

    def progress(self, now: float) -> None:
        """A token came. Until then a request that ends every engine it reaches comes ever closer to its end, too."""
        self._since_s = now
        self._refusals = self._failures = 0
        self.last_refusal = ""

    def tried(self, target: Target) -> None:
        if target != self._tried:
            self._failures = 0
        self._tried = target

    def refused(self, why: str, now: float) -> None:
        """The engine was not there, broke off, or has no room: ask the next one at once, the same a little later."""
        self.last_refusal = why
        self._retry_at_s = now + min(RETRY_MOST_S, RETRY_FIRST_S * 2**self._refusals)
        self._refusals = min(self._refusals + 1, 16)

    def failed(self, why: str, now: float) -> float | None:
        """The engine says that it failed, which may be its death, or this request's own fault.

        Returns:
            Until when the routing table may still say that it was its death; None: it has said so twice and lives, believe it.
        """
        self.last_refusal = why
        self._retry_at_s = now
        self._failures += 1
        return now + SUSPECT_S if self._failures <= MOST_FAILURES else None

    def may_try(self, worker: HeldWorker, now: float) -> Target | None:
        """Return the engine to ask now; None: wait.

        Raises:
            ApiError: there is no hope, or it has waited too long.
        """
        if worker.ended is not None:
            raise worker.ended
        target = worker.target
        if target is None and worker.route.state in NO_HOPE:
            raise worker.unavailable(last_refusal=self.last_refusal)
        if self._held_back(worker):
            return None
        if now >= self.gives_up_at_s(worker):
            worker.counts.gave_up += 1
            raise worker.unavailable(waited=True, last_refusal=self.last_refusal)
        return target if target != self._tried or now >= self._retry_at_s else None

    def _held_back(self, worker: HeldWorker) -> bool:
        """Say whether an engine serves, but no new ones are admitted now: it is to hand over. No reason to give up, that is soon."""
        return self._tried is None and worker.target is not None and not worker.route.admits

    def gives_up_at_s(self, worker: HeldWorker) -> float:
        return self._since_s + worker.route.give_up_after_s

    def may_go(self, worker: HeldWorker, turn: Turn, now: float) -> Target | None:
        """Return the engine that the request with ``turn`` is to be sent to now; None: wait.

        Raises:
            ApiError: there is no hope, it has waited too long, or it ends engines.
        """
        if worker.ended is None and worker.target is not None and worker.line.holds(turn, now):
            return None  # by our own doing: no reason to give up
        target = self.may_try(worker, now)
        if target is not None:
            worker.line.goes(turn, target.epoch, now)
        return target

    def look_again_at_s(self, worker: HeldWorker, turn: Turn, now: float) -> float:
        """When `may_go` may say something else without a change of the routing table."""
        if worker.target is not None and worker.line.holds(turn, now):
            return worker.line.look_again_at_s(now)
        if self._held_back(worker):
            return float("inf")
        at = self.gives_up_at_s(worker)
        return min(at, self._retry_at_s) if worker.target is not None else at
