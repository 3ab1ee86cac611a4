"""Requests that engines die of. Pure: no I/O and no clock.

A request that makes its engine crash is replayed to the next one, and the next. So the supervisor says of each death whether it was of
the engine's own making (`shadowsup.supervisor.policy.severity`), and who was in flight at two of those is *tried*: run alone in the
engine, one after the other, while everybody else waits. Only one whose engine dies again is failed. One that gets beyond where it was at
the deaths is acquitted and goes on with the others; should an engine die of its own making under it once more, it is tried to its end.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from shadowsup.supervisor.gateway.errors import ApiError
from shadowsup.wire.engine import Death

DEATHS = 2
"""Of the engine's own making, with the same request in flight."""
BEYOND_TOKENS = 3
"""So many more than at the deaths, alone, acquit: the step that killed has been passed."""
UNKNOWN_S = 2.0
"""The cause of a death is known when the process is gone. One that is not known by then counts as nobody's fault."""


class Suspect(Protocol):
    """A request, as far as it matters here. ``epoch``: of the engine that it was given to last."""

    rid: str
    epoch: int

    @property
    def output_tokens(self) -> int: ...


S = TypeVar("S", bound=Suspect)


@dataclass(frozen=True, slots=True)
class _Loss:
    """A stream lost its engine of ``epoch``. ``tokens``: of its output by then; ``alone``: it was being tried."""

    epoch: int
    tokens: int
    at_s: float
    alone: bool


@dataclass(slots=True)
class Sorted(Generic[S]):
    """What may be done with held streams. ``until_s``: a cause is awaited that long, and everybody with it; None: nothing is."""

    go: list[S] = field(default_factory=list)
    alone: S | None = None
    convicted: list[S] = field(default_factory=list)
    until_s: float | None = None


class Suspects(Generic[S]):
    """Of one worker. ``trial``: request id of the stream that has the engine for itself."""

    def __init__(self) -> None:
        self.trial: str | None = None
        self._deaths: dict[int, Death] = {}
        self._told_epoch = 0
        self._losses: dict[str, list[_Loss]] = {}
        self._acquitted: dict[str, int] = {}
        """Request → how many deaths of engines' own making it was acquitted of."""

    def learn(self, epoch: int, deaths: Sequence[Death]) -> None:
        """Take what the supervisor says. ``epoch``: the newest it has opened; earlier ones that it names no death of ended as planned."""
        self._told_epoch = epoch
        self._deaths = {death.epoch: death for death in deaths}

    @property
    def harmless(self) -> bool:
        """Whether no death that is known was of an engine's own making: then nobody is suspected, and nobody waits."""
        return not any(death.own for death in self._deaths.values())

    def lost(self, stream: S, now: float) -> None:
        """The engine of a stream that it had is gone."""
        alone = self.trial == stream.rid
        if alone:
            self.trial = None
        losses = self._losses.setdefault(stream.rid, [])
        if all(loss.epoch != stream.epoch for loss in losses):
            losses.append(_Loss(stream.epoch, stream.output_tokens, now, alone))

    def submitted(self, stream: S, epoch: int) -> None:
        """A stream goes to the engine of ``epoch``: if it had lost just that one, only a link had broken."""
        if losses := self._losses.get(stream.rid):
            losses[:] = [loss for loss in losses if loss.epoch != epoch]

    def forget(self, stream: S) -> None:
        """It has ended, in whatever way."""
        self._losses.pop(stream.rid, None)
        self._acquitted.pop(stream.rid, None)
        if self.trial == stream.rid:
            self.trial = None

    def acquits(self, stream: S, now: float) -> bool:
        """A token of the stream that is tried has come. Returns whether its trial is over."""
        if self.trial != stream.rid or stream.rid in self._acquitted:
            return False  # once acquitted wrongly, it is tried to its end
        if stream.output_tokens < max((loss.tokens for loss in self._losses.get(stream.rid, ())), default=0) + BEYOND_TOKENS:
            return False
        self.acquit(stream, now)
        return True

    def acquit(self, stream: S, now: float) -> None:
        """The one that is tried has shown that it ends no engine."""
        self.trial = None
        self._acquitted[stream.rid] = self._own(stream, now)

    def suspected(self, streams: Iterable[S], now: float) -> bool:
        """Say whether one of ``streams`` is to be tried."""
        return any(self._to_be_tried(stream, now) for stream in streams)

    def sort(self, held: Iterable[S], now: float) -> Sorted[S]:
        """Say who of those that wait for an engine may go to the one that serves."""
        found: Sorted[S] = Sorted()
        accused: list[S] = []
        for stream in held:
            losses = self._losses.get(stream.rid)
            if losses is None:
                found.go.append(stream)
                continue
            causes = [self._cause(loss, now) for loss in losses]
            own, unknown = causes.count(True), causes.count(None)
            if any(loss.alone and cause for loss, cause in zip(losses, causes, strict=True)):
                found.convicted.append(stream)
            elif unknown and own and own + unknown >= DEATHS:
                awaited_s = min(loss.at_s + UNKNOWN_S for loss, cause in zip(losses, causes, strict=True) if cause is None)
                found.until_s = awaited_s if found.until_s is None else min(found.until_s, awaited_s)
            elif self._to_be_tried(stream, now):
                accused.append(stream)
            else:
                found.go.append(stream)
        if self.trial is not None or found.until_s is not None:
            found.go.clear()
        elif accused:
            found.alone = accused[0]
            found.go.clear()
        return found

    def error(self, stream: S) -> ApiError:
        """Return what the client of a convicted request is told."""
        losses = self._losses.get(stream.rid, ())
        died = [(self._deaths[loss.epoch], loss.alone) for loss in losses if loss.epoch in self._deaths]
        together = ", ".join(f"{death.engine} ({death.fault})" for death, alone in died if not alone)
        by_itself = ", ".join(f"{death.engine} ({death.fault})" for death, alone in died if alone)
        return ApiError(
            500,
            f"The request {stream.rid} ends the engines that run it: {together or 'several'} while it ran beside others, and "
            f"{by_itself or 'another one'} while it ran alone. It is not tried again",
            code="request_ends_engines",
        )

    def _cause(self, loss: _Loss, now: float) -> bool | None:
        """Return whether a death was of the engine's own making; None: not known yet."""
        death = self._deaths.get(loss.epoch)
        own = death.own if death is not None else (False if loss.epoch < self._told_epoch else None)
        return False if own is None and now >= loss.at_s + UNKNOWN_S else own

    def _own(self, stream: S, now: float) -> int:
        return sum(1 for loss in self._losses.get(stream.rid, ()) if self._cause(loss, now))

    def _to_be_tried(self, stream: S, now: float) -> bool:
        if stream.rid not in self._losses:
            return False
        own = self._own(stream, now)
        return own >= DEATHS and own > self._acquitted.get(stream.rid, 0)
