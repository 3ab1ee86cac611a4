"""Who may own the KV memory of a worker, and when: epochs, former owners, kept or dropped KV.

Invariant 1 of the architecture lives here: a successor is named only when every former owner of the KV set it will map is frozen; where
one cannot be frozen in time, the successor takes a fresh set that no former owner has mapped.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from shadowsup.supervisor.policy.model import FREEZE_BOUND_S, EngineRecord
from shadowsup.wire.engine import EngineState


@dataclass(frozen=True, kw_only=True)
class Promotion:
    engine: str
    epoch: int
    keep_kv: bool
    fenced: bool


class Succession:
    """Epochs of one worker."""

    def __init__(self) -> None:
        self.epoch = 0
        """The newest epoch that was ordered, or will be by the pending failover. Never goes back."""
        self.active: str | None = None
        self._claimed = 0
        self._kv_set = 0
        self._kv_known = True
        """False from the order to take a fresh set until it was confirmed: the keeper may still hand out the old one."""

    def resume(self, active: str | None, epoch: int, *, kv_set: int, kv_known: bool) -> None:
        """Go on where another supervisor has left off."""
        self.active = active
        self.epoch = self._claimed = epoch
        self._kv_set, self._kv_known = kv_set, kv_known

    def vacate(self) -> None:
        """The active engine was condemned: open the next epoch, so that no event of the old one counts any more."""
        self.active = None
        if self._claimed == self.epoch:
            self.epoch += 1

    def leave(self) -> None:
        """The active engine was stopped by order; there is no failover."""
        self.active = None

    def kv_set_of_newcomer(self) -> int:
        return self._kv_set if self._kv_known else -1

    @property
    def gives_current(self) -> bool:
        """Whether a newcomer gets the set in use from the keeper."""
        return self._kv_known

    def abandon_memory(self) -> None:
        """The worker's memory was freed: what comes next has a set of its own."""
        self._kv_set += 1
        self._kv_known = True

    def confirm(self, engine: EngineRecord) -> None:
        """The owner of this epoch serves, from memory that it has mapped."""
        if engine.kv_set == self._kv_set:
            self._kv_known = True

    def is_stale(self, engine: EngineRecord) -> bool:
        """Say whether a parked engine holds another KV set than the one in use."""
        return engine.kv_set != self._kv_set

    def former_owners(self, engines: Iterable[EngineRecord]) -> list[EngineRecord]:
        """Return the engines of earlier epochs that have mapped the current KV set and still have a process."""
        return [e for e in engines if e.epoch > 0 and e.kv_set == self._kv_set and e.id != self.active]

    def decide(self, engines: list[EngineRecord], now_s: float) -> Promotion | float | None:
        """Return the promotion to order now, or when to ask again, or None when no engine is fit.

        One successor an epoch (P35): after the order ``active`` is set, and only `vacate` or `leave` clears it.
        """
        parked = [e for e in engines if e.parked]
        if self.active is not None or not parked:
            return None
        candidate = min(parked, key=lambda e: (self.is_stale(e), e.stale, e.seq))
        former = self.former_owners(engines)
        # One that is stuck in the kernel may be so with its device's work unfinished, and is never fenced.
        unfrozen = [e for e in former if e.frozen_s is None or e.state is EngineState.QUARANTINED]
        if unfrozen:
            # An engine that is being stopped by order has no verdict yet: its memory is not anybody else's before it is dead.
            if any(e.verdict_s is None for e in unfrozen):
                return float("inf")
            give_up_s = max(e.verdict_s or 0.0 for e in unfrozen) + FREEZE_BOUND_S
            if now_s < give_up_s:
                return give_up_s
        keep = not unfrozen and not self.is_stale(candidate)
        if self._claimed == self.epoch:
            self.epoch += 1
        self._claimed = self.epoch
        self.active = candidate.id
        if not keep:
            self._kv_set += 1
            self._kv_known = False
            candidate.kv_set = self._kv_set
        return Promotion(engine=candidate.id, epoch=self.epoch, keep_kv=keep, fenced=not keep or not former)
