"""All streams of one worker and the engines that may serve them: who serves, who is held, what is replayed. Pure: no I/O, no clock.

The core of a failover, in the order in which it happens:

1. `link_lost`, or a route whose epoch has grown: every stream of the former engine is held, its later events are nobody's.
2. `hello` of an active engine with a newer epoch, on a link that was there all along: all held streams go to it in one frame. Nothing is
   asked of the supervisor on the way; its next routing table will say the same.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from shadowsup.histogram import Buckets
from shadowsup.supervisor.gateway.errors import ApiError, unavailable
from shadowsup.supervisor.gateway.stream import Misstep, Stream, StreamState
from shadowsup.supervisor.gateway.suspects import Suspects
from shadowsup.wire.engine import EngineState, WorkerRoute
from shadowsup.wire.link import Accepted, Cancel, FromEngine, Hello, Rejected, Stage, ToEngine, Token, Unstage

log = logging.getLogger(__name__)

Send = Callable[[str, Sequence[ToEngine]], bool]
"""Puts messages for an engine in one frame. False: it has no link (its `link_lost` is on the way), or does not read fast enough to be sent
what can be done without (`Stage`)."""

GAP_S = (0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
"""Upper bounds of the buckets of the time between two tokens, seconds."""

NO_HOPE = frozenset({"down", "stopped"})
"""Worker states in which no engine will come by itself: waiting would only postpone the error."""


@dataclass(slots=True)
class Counts:
    """Totals since the worker appeared in the routing table."""

    tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Of the prompt tokens: found in kept KV."""
    replays: int = 0
    failovers: int = 0
    """Times that streams were held because their engine was lost."""
    stale_events: int = 0
    """Events of older epochs, other engines, or requests that are gone."""
    repeated_chars: int = 0
    """Characters an engine sent again, and the client was not."""
    missteps: int = 0
    refusals: int = 0
    gave_up: int = 0
    gaps: Buckets = field(default_factory=lambda: Buckets(GAP_S))
    """Seconds between the tokens of a stream, pauses of a failover included."""
    isolated: int = 0
    """Times that a request was run alone, because engines had died of their own making while they had it."""
    poisoned: int = 0
    """Requests that failed because they end engines, even alone."""
    begun_anew: int = 0
    """Answers that are not followed and were begun anew by another engine."""
    unreplayable: int = 0
    """Answers broken off because no other engine could continue them."""


class Worker:
    """One worker as the gateway sees it.

    Args:
        route: its row of the routing table.
        send: the port to the engines' links.
        resumed: told, for each stream that lost its engine, of the seconds until its next token.
    """

    def __init__(self, route: WorkerRoute, send: Send, resumed: Callable[[float], None] | None = None) -> None:
        self.route = route
        self.counts = Counts()
        self.epoch = route.epoch
        """The newest epoch known, from the routes or from an engine. Events of older ones are dropped."""
        self.serving: str | None = None
        """The engine that takes requests now."""
        self._send = send
        self._resumed = resumed
        self._epoch_from: str | None = None
        self._engines: dict[str, Hello] = {}
        self._streams: dict[str, Stream] = {}
        """By wire id, in order of arrival: the streams an engine has."""
        self._held: dict[str, Stream] = {}
        """By request id, in the order in which they go to the next engine."""
        self._suspects: Suspects[Stream] = Suspects()
        self._now_s = 0.0
        """When anything was last told."""
        self._staged: dict[str, set[str]] = {}
        """By engine: the request ids whose prompts it knows before it is given them."""

    @property
    def name(self) -> str:
        return self.route.worker

    @property
    def inflight(self) -> int:
        return len(self._streams) + len(self._held)

    @property
    def held(self) -> int:
        return len(self._held)

    @property
    def live_epoch(self) -> int:
        """The newest epoch of a live link; 0 when there is none."""
        return max((hello.epoch for hello in self._engines.values()), default=0)

    # What the supervisor says

    def rerouted(self, route: WorkerRoute, now: float) -> None:
        """Take the worker's new row of the routing table."""
        self.route = route
        self._suspects.learn(route.epoch, route.deaths)
        if route.epoch > self.epoch:
            self._new_epoch(route.epoch, None, now)
        elif route.epoch < self.epoch and self._epoch_from not in {engine.engine for engine in route.engines}:
            # Not a table from before the promotion (that one lists the promoted engine): the worker counts anew, with a new ledger.
            self._new_epoch(route.epoch, None, now)
        if self._suspects.trial is None and self._suspects.suspected(self._streams.values(), now):
            self._recall(now)  # the causes became known late: they, and everybody, run already
        self._elect(now)
        self._fail_the_hopeless()

    def removed(self) -> None:
        """The worker left the routing table: nobody will serve its streams."""
        self._fail(list(self._streams.values()) + list(self._held.values()), unavailable(f"The worker {self.name} was removed"))

    # What the engines say

    def hello(self, engine: str, hello: Hello, now: float) -> None:
        """An engine said in which state and epoch it is."""
        self._engines[engine] = hello
        if hello.state is EngineState.PARKED and engine not in self._staged:
            self._staged[engine] = set()
            self._stage(engine, [*self._streams.values(), *self._held.values()])
        if hello.state is EngineState.ACTIVE and hello.epoch > self.epoch:
            self._new_epoch(hello.epoch, engine, now)
        elif hello.epoch == self.epoch and self._epoch_from is None:
            self._epoch_from = engine
        self._elect(now)

    def link_lost(self, engine: str, now: float) -> None:
        """The link to an engine broke, or the engine left the routing table."""
        self._engines.pop(engine, None)
        self._staged.pop(engine, None)
        lost = [stream for stream in self._streams.values() if stream.engine == engine]
        self.counts.failovers += bool(lost)
        self._hold(lost, now)
        self._elect(now)
        self._fail_the_hopeless()

    def events(self, engine: str, events: Iterable[FromEngine], now: float) -> None:
        """Apply one frame of an engine."""
        streams = self._streams
        counts = self.counts
        for event in events:
            if isinstance(event, Hello):
                self.hello(engine, event, now)
                continue
            stream = streams.get(event.rid)
            if stream is None or stream.engine != engine or stream.epoch != event.epoch:
                counts.stale_events += 1
            elif isinstance(event, Token):
                self._token(stream, event, now)
            elif isinstance(event, Accepted):
                known = stream.prompt_ids is not None
                stream.accepted(event)
                if not known:
                    counts.prompt_tokens += stream.prompt_tokens
                    counts.cached_tokens += stream.cached_tokens
                    for other in self._staged:
                        if self._engines[other].state is EngineState.PARKED:
                            self._stage(other, [stream])
            else:
                self._rejected(stream, event, now)

    # What the clients say

    def add(self, stream: Stream, now: float) -> None:
        """A new request."""
        self._now_s = now
        if self.serving is not None and self.route.admits and self._suspects.trial is None and not self._held_back(now):
            self._submit(self.serving, [stream], now)
        elif self.route.state in NO_HOPE:
            self._fail([stream], self._unavailable(stream))
        else:
            self._held[stream.rid] = stream

    def cancel(self, stream: Stream) -> None:
        """The client is gone. What is held is not replayed."""
        engine = stream.engine
        awaited = self._suspects.trial == stream.rid or self._held_back(self._now_s)  # others may wait for what becomes of it
        self._forget(stream)
        if engine is not None:
            self._send(engine, [Cancel(rid=stream.wire_rid)])
        if awaited:
            self._elect(self._now_s)

    def abandon(self, error: ApiError) -> None:
        """End all streams with ``error`` (the gateway goes away)."""
        for stream in list(self._streams.values()):
            if stream.engine is not None:
                self._send(stream.engine, [Cancel(rid=stream.wire_rid)])
        self._fail(list(self._streams.values()) + list(self._held.values()), error)

    # What the clock says

    def deadline_s(self) -> float | None:
        """When `expire` has something to do; None while nothing is waited for."""
        times = []
        kept_back_until_s = self._suspects.sort(self._held.values(), self._now_s).until_s if self.serving is not None else None
        for stream in self._held.values():
            if not self._kept_waiting(stream):
                times.append(stream.gives_up_at_s(self.route.give_up_after_s))
            if self.serving is not None and self._suspects.trial is None and kept_back_until_s is None:
                times.append(stream.retry_at_s)  # else nobody is asked again before that is over, which is an event of its own
        times.append(kept_back_until_s)
        return min((time for time in times if time is not None), default=None)

    def expire(self, now: float) -> None:
        """Give up on streams that waited too long; ask again where an engine said "not now"."""
        self._now_s = now
        for stream in [stream for stream in self._held.values() if not self._kept_waiting(stream)]:
            gives_up_at_s = stream.gives_up_at_s(self.route.give_up_after_s)
            if gives_up_at_s is not None and gives_up_at_s <= now:
                self.counts.gave_up += 1
                self._fail([stream], self._unavailable(stream, waited=True))
        if self.serving is not None:
            self._release(self.serving, now, due=True)

    # Inside

    def _new_epoch(self, epoch: int, engine: str | None, now: float) -> None:
        self.epoch, self._epoch_from = epoch, engine
        older = [stream for stream in self._streams.values() if stream.epoch != epoch]
        self.counts.failovers += bool(older)
        self._hold(older, now)

    def _elect(self, now: float) -> None:
        """Find the engine that takes requests: active, of the newest epoch. The ledger has one owner for each epoch, so there is one."""
        self._now_s = now
        may_serve = [e for e, hello in self._engines.items() if hello.state is EngineState.ACTIVE and hello.epoch == self.epoch]
        if self.serving not in may_serve:
            self.serving = may_serve[0] if may_serve else None
        if self.serving is not None and self._held:
            self._release(self.serving, now)

    def _release(self, engine: str, now: float, *, due: bool = False) -> None:
        """Give ``engine`` what waits for it, as far as it may go: all at once, or one that is suspected alone.

        ``due``: not those that it has refused, and whose time has not come.
        """
        found = self._suspects.sort(self._held.values(), now)
        for stream in found.convicted:
            self.counts.poisoned += 1
            error = self._suspects.error(stream)
            log.warning("%s", error.message)
            self._fail([stream], error)
        if found.alone is not None:
            if self._streams:
                self._recall(now)
            self._suspects.trial = found.alone.rid
            self.counts.isolated += 1
            log.warning("request %s is run alone: engines died while they had it", found.alone.rid)
            self._submit(engine, [found.alone], now)
            return
        ready = [stream for stream in found.go if self.route.admits or not stream.fresh]
        if due:
            ready = [stream for stream in ready if stream.retry_at_s is None or stream.retry_at_s <= now]
        self._submit(engine, ready, now)

    def _recall(self, now: float) -> None:
        """Take back everything from the engine: somebody is to have it for himself."""
        running = list(self._streams.values())
        for stream in running:
            if stream.engine is not None:
                self._send(stream.engine, [Cancel(rid=stream.wire_rid)])
            del self._streams[stream.wire_rid]
            stream.hold(now)
            self._held[stream.rid] = stream

    def _held_back(self, now: float) -> bool:
        """Say whether those that are held wait for a trial, or for what is to be known before one."""
        if not self._held:
            return False
        found = self._suspects.sort(self._held.values(), now)
        return found.alone is not None or found.until_s is not None

    def _kept_waiting(self, stream: Stream) -> bool:
        """Say whether a stream waits by our own doing, though an engine serves: that is no reason to give up."""
        return self.serving is not None and (stream.retry_at_s is None or self._suspects.trial is not None)

    def _submit(self, engine: str, streams: list[Stream], now: float) -> None:
        """Send ``streams`` to ``engine``, all in one frame."""
        frame: list[ToEngine] = []
        for stream in streams:
            replays = stream.replays
            staged = stream.rid in self._staged.get(engine, ())
            if staged:
                self._staged[engine].remove(stream.rid)
            self._suspects.submitted(stream, self.epoch)
            frame += stream.submit(engine, self.epoch, now, staged=staged)
            self.counts.replays += stream.replays - replays
            self._held.pop(stream.rid, None)
            self._streams[stream.wire_rid] = stream
        if frame:
            self._send(engine, frame)

    def _stage(self, engine: str, streams: Sequence[Stream]) -> None:
        """Tell a parked engine the prompts of streams that may be replayed to it."""
        known = [stream for stream in streams if stream.prompt_ids is not None]
        frame = [Stage(rid=stream.rid, prompt_ids=stream.prompt_ids) for stream in known if stream.prompt_ids is not None]
        if frame and self._send(engine, frame):
            self._staged[engine].update(stream.rid for stream in known)

    def _unstage(self, stream: Stream) -> None:
        for engine, staged in self._staged.items():
            if stream.rid in staged:
                staged.remove(stream.rid)
                self._send(engine, [Unstage(rids=(stream.rid,))])

    def _token(self, stream: Stream, event: Token, now: float) -> None:
        before = len(stream.output_ids)
        try:
            text = stream.token(event)
        except Misstep as misstep:
            # What was delivered is right and complete; let an engine go on from there.
            self.counts.missteps += 1
            self._refused(stream, f"engine {stream.engine} sent {misstep}", now)
            return
        new = len(stream.output_ids) - before
        self.counts.tokens += new
        if new:
            if stream.last_token_s is not None:
                self.counts.gaps.observe((now - stream.last_token_s) / new, new)
            stream.last_token_s = now
        self.counts.repeated_chars += len(event.text) - len(text)
        if stream.interrupted_at_s is not None:
            if self._resumed is not None:
                self._resumed(now - stream.interrupted_at_s)
            stream.interrupted_at_s = None
        if text:
            stream.outlet.put(text)
        if event.finish_reason is not None:
            del self._streams[stream.wire_rid]
            self._unstage(stream)
            tried = self._suspects.trial == stream.rid
            self._suspects.forget(stream)
            stream.outlet.finish(event.finish_reason)
            if tried:
                self._elect(now)
        elif self._suspects.trial is not None and self._suspects.acquits(stream, now):
            self._elect(now)

    def _rejected(self, stream: Stream, event: Rejected, now: float) -> None:
        if event.retryable:
            self.counts.refusals += 1
            self._refused(stream, event.message, now)
        else:
            status = event.status if 400 <= event.status < 600 else 500
            tried = self._suspects.trial == stream.rid
            self._fail([stream], ApiError(status, event.message, param=event.param))
            if tried:
                self._elect(now)

    def _refused(self, stream: Stream, why: str, now: float) -> None:
        del self._streams[stream.wire_rid]
        if self._suspects.trial == stream.rid:
            self._suspects.trial = None
        stream.refused(why, now)
        self._held[stream.rid] = stream
        self._fail_the_hopeless()

    def _hold(self, streams: list[Stream], now: float) -> None:
        for stream in streams:
            del self._streams[stream.wire_rid]
            self._suspects.lost(stream, now)
            stream.hold(now)
            self._held[stream.rid] = stream

    def _fail_the_hopeless(self) -> None:
        if self.serving is None and self.route.state in NO_HOPE:
            for stream in list(self._held.values()):
                self._fail([stream], self._unavailable(stream))

    def _unavailable(self, stream: Stream, *, waited: bool = False) -> ApiError:
        state = self.route.state
        why = self.route.reason or stream.last_refusal or (f"it is {state}" if state else "it has no engine")
        after = f" after {self.route.give_up_after_s:g} s of waiting" if waited else ""
        return unavailable(f"The worker {self.name} cannot serve this request{after}: {why}")

    def _fail(self, streams: list[Stream], error: ApiError) -> None:
        for stream in streams:
            self._forget(stream)
            stream.outlet.fail(error)

    def _forget(self, stream: Stream) -> None:
        if self._streams.get(stream.wire_rid) is stream:
            del self._streams[stream.wire_rid]
        self._held.pop(stream.rid, None)
        self._unstage(stream)
        self._suspects.forget(stream)
        stream.close()


def validate(worker: Worker) -> None:
    """Check what must always hold; raises AssertionError. For tests: call it after every event."""
    for wire_rid, stream in worker._streams.items():
        assert stream.state in (StreamState.SUBMITTED, StreamState.RUNNING), stream.state
        assert stream.wire_rid == wire_rid
        assert stream.engine is not None and stream.epoch == worker.epoch
        assert stream.state is StreamState.SUBMITTED or stream.prompt_ids is not None
    for rid, stream in worker._held.items():
        assert stream.state is StreamState.HELD and stream.rid == rid
        assert stream.engine is None and stream.held_since_s is not None
    if worker.serving is None:
        assert not worker._held or worker.route.state not in NO_HOPE
    else:
        assert worker._engines[worker.serving].epoch == worker.epoch
        isolating = worker._suspects.trial is not None or worker._held_back(worker._now_s)
        if not isolating:
            assert all(stream.retry_at_s is not None or (stream.fresh and not worker.route.admits) for stream in worker._held.values())
        if worker._suspects.trial is not None:
            assert [stream.rid for stream in worker._streams.values()] == [worker._suspects.trial], "not alone"
