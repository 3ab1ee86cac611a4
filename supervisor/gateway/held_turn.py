"""Requests of a `HeldWorker` that may be what ends engines: whose turn it is. Pure: no I/O and no clock.

An engine's death takes all its requests with it, and all of them go to its successor at once. If one of them is the reason (a combination
of parameters that vLLM does not survive), it would end every engine that there is. Who is suspected, tried, acquitted and convicted is
decided by `shadowsup.supervisor.gateway.suspects`, as for every engine; a kill from outside is nobody's fault. Here that is put in terms of
requests that are coroutines and ask by themselves whether they may go.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from shadowsup.supervisor.gateway.suspects import Suspects
from shadowsup.supervisor.gateway.worker import Counts
from shadowsup.wire.engine import Death

LONG_ENOUGH_S = 5.0
"""A request whose tokens are not seen, and under which an engine lived alone for so long, did not end the others."""

log = logging.getLogger(__name__)


class Turn:
    """One request's place.

    Args:
        rid: its id.
    """

    def __init__(self, rid: str) -> None:
        self.rid = rid
        self.epoch = 0
        """Of the engine that it was sent to last."""
        self.sent_s = 0.0
        self.output_tokens = 0


class Line:
    """The requests of one worker.

    Args:
        counts: of the worker.
        changed: told when somebody who waits may go now.
    """

    def __init__(self, counts: Counts, changed: Callable[[], None]) -> None:
        self._suspects: Suspects[Turn] = Suspects()
        self._counts = counts
        self._changed = changed
        self._running: dict[str, Turn] = {}
        self._lost: dict[str, Turn] = {}
        """They lost an engine and wait for another one."""
        self._alone = False
        """The one that is tried had no company when its trial began. (Nobody joins it.)"""

    @property
    def trial(self) -> str | None:
        """Id of the request that has the engine for itself."""
        return self._suspects.trial

    def learn(self, epoch: int, deaths: Sequence[Death]) -> None:
        """Take what the supervisor says of engines that died."""
        self._suspects.learn(epoch, deaths)

    def holds(self, turn: Turn, now: float) -> bool:
        """Say whether a request has to wait though an engine serves, for the trial of another or for what is to be known before one.

        Raises:
            ApiError: it has been tried, and ends engines.
        """
        if self._suspects.trial is not None:
            return self._suspects.trial != turn.rid
        if not self._lost or self._suspects.harmless:
            return False
        found = self._suspects.sort(self._lost.values(), now)
        if turn in found.convicted:
            self._counts.poisoned += 1
            error = self._suspects.error(turn)
            log.warning("%s", error.message)
            self.left(turn)
            raise error
        if found.until_s is not None:
            return True
        return found.alone is not None and found.alone is not turn

    def look_again_at_s(self, now: float) -> float:
        """When `holds` may say something else though nobody tells."""
        if self._suspects.trial is not None or not self._lost:
            return float("inf")
        until_s = self._suspects.sort(self._lost.values(), now).until_s
        return float("inf") if until_s is None else until_s

    def goes(self, turn: Turn, epoch: int, now: float) -> None:
        """A request that is not held goes to the engine of ``epoch``."""
        accused = self._lost.pop(turn.rid, None) is not None and self._suspects.suspected([turn], now)
        if accused and self._suspects.trial is None:
            self._suspects.trial = turn.rid
            self._alone = not self._running
            self._counts.isolated += 1
            log.warning("request %s is run alone: engines died while they had it", turn.rid)
        self._suspects.submitted(turn, epoch)
        turn.epoch, turn.sent_s = epoch, now
        self._running[turn.rid] = turn

    def lost(self, turn: Turn, now: float) -> None:
        """Its engine is gone, or what it said was its last."""
        self._running.pop(turn.rid, None)
        tried = self._suspects.trial == turn.rid
        if tried and not self._alone:
            self._suspects.trial = None  # somebody who ran beside it may have been the reason
        self._lost[turn.rid] = turn
        self._suspects.lost(turn, now)
        if tried:
            self._changed()

    def returned(self, turn: Turn) -> None:
        """The engine did not take it."""
        self._running.pop(turn.rid, None)
        self._lost[turn.rid] = turn
        if self._suspects.trial == turn.rid:
            self._suspects.trial = None
            self._changed()

    def progress(self, turn: Turn, tokens: int, now: float) -> None:
        """Tokens came."""
        turn.output_tokens += tokens
        if self._suspects.trial == turn.rid and self._suspects.acquits(turn, now):
            self._changed()

    def lived(self, turn: Turn, now: float) -> None:
        """The engine has lived with it for `LONG_ENOUGH_S`."""
        if self._suspects.trial == turn.rid:
            self._suspects.acquit(turn, now)
            self._changed()

    def left(self, turn: Turn) -> None:
        """It has its answer, its error, or no client any more. Idempotent."""
        awaited = self._suspects.trial == turn.rid or (turn.rid in self._lost and not self._suspects.harmless)
        self._running.pop(turn.rid, None)
        self._lost.pop(turn.rid, None)
        self._suspects.forget(turn)
        if awaited:
            self._changed()
