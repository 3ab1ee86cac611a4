"""Who may own the KV memory of a worker, and when: epochs, former owners, kept or dropped KV.

Invariant 1 of the architecture lives here: a successor is named only when every former owner of the KV set it will map is frozen; where
one cannot be frozen in time, the successor takes a fresh set that no former owner has mapped.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from shadowsup.supervisor.policy.model import FREEZE_BOUND_S, FREEZE_MOST_S, EngineRecord
from shadowsup.wire.engine import EngineState

FRESH_S = 1.0
"""A shadow whose last beat is older is chosen only where all others are as silent."""


@dataclass(frozen=True, kw_only=True)
class Promotion:
    engine: str
    epoch: int
    keep_kv: bool
    fenced: bool
    why: str = ""
    """Why the KV is given up, if it is."""


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
        self._newest_set = 0
        self._distrusted = False
        self._names: dict[int, str] = {}
        """The keeper's ids of sets, as their owners and parked engines with other settings tell them."""
        self._sound: set[int] = set()
        """Sets beside the one in use that are as good: nobody has written them yet, or their owner handed over."""

    def resume(self, active: str | None, epoch: int, *, kv_set: int, kv_known: bool, name: str = "") -> None:
        """Go on where another supervisor has left off. ``name``: the keeper's id of the set; empty: not known."""
        self.active = active
        self.epoch = self._claimed = epoch
        self._kv_set, self._kv_known = kv_set, kv_known
        self._newest_set = max(self._newest_set, kv_set)
        self._names = {kv_set: name} if name else {}

    def vacate(self) -> None:
        """The active engine was condemned: open the next epoch, so that no event of the old one counts any more."""
        self.active = None
        if self._claimed == self.epoch:
            self.epoch += 1

    def leave(self) -> None:
        """The active engine was stopped by order; there is no failover."""
        self.active = None

    def distrust(self) -> None:
        """What is in the set in use may be wrong: the next owner takes a fresh one."""
        self._distrusted = True

    @property
    def distrusted(self) -> bool:
        return self._distrusted

    def kv_set_of_newcomer(self) -> int:
        return self._kv_set if self._kv_known else -1

    @property
    def gives_current(self) -> bool:
        """Whether a newcomer gets the set in use from the keeper."""
        return self._kv_known

    def abandon_memory(self) -> None:
        """The worker's memory was freed, or is left: what comes next has a set of its own."""
        self._distrusted = False
        self._fresh_set()
        self._kv_known = True

    def name(self, engine: EngineRecord, kv_set: str) -> None:
        """The active engine says which set it serves from."""
        if kv_set and engine.kv_set == self._kv_set:
            self._names[self._kv_set] = kv_set

    def identify(self, engine: EngineRecord, kv_set: str, engines: Iterable[EngineRecord], *, alike: bool) -> None:
        """A parked engine says which set it holds. ``alike``: it has the settings of the one that serves, so it should be the same.

        One with other settings may hold the same set all the same (its KV is laid out alike), or one of its own.
        """
        in_use = self._names.get(self._kv_set)
        if kv_set and kv_set == in_use:
            engine.kv_set = self._kv_set
            self._kv_known = self._kv_known or alike
            return
        if alike and (not kv_set or in_use is None):
            return
        if alike and kv_set:
            # What it asked for is what is in use, and it was given another: a keeper that lost all it had is not the keeper of this set.
            self._kv_known = False
        known = next((number for number, name in self._names.items() if name == kv_set), None)
        # Of those that another supervisor has promoted it may not be known what they write.
        owned = {e.vitals.beat.kv_set if e.vitals.beat is not None else "" for e in engines if e.epoch > 0}
        if not kv_set or in_use is None or alike or (known is None and not owned.isdisjoint(("", kv_set))):
            engine.kv_set = -1
        elif known is not None:
            engine.kv_set = known
        else:
            self._newest_set += 1
            engine.kv_set = self._newest_set
            self._names[engine.kv_set] = kv_set
            self._sound.add(engine.kv_set)

    @property
    def set_in_use(self) -> str:
        """The keeper's id of the set in use; empty when it is not known."""
        return self._names.get(self._kv_set, "")

    def forget_others(self) -> None:
        """Nobody holds any other set than the one in use."""
        self._sound.clear()
        self._names = {number: name for number, name in self._names.items() if number == self._kv_set}

    def _fresh_set(self) -> None:
        """What comes next has a set that nobody has mapped. The keeper gives out no other set of the worker any more."""
        self._newest_set += 1
        self._kv_set = self._newest_set
        self._sound.clear()
        self._names.clear()

    def confirm(self, engine: EngineRecord) -> None:
        """The owner of this epoch serves, from memory that it has mapped."""
        if engine.kv_set == self._kv_set:
            self._kv_known = True

    def is_stale(self, engine: EngineRecord) -> bool:
        """Say whether a parked engine holds another KV set than the one in use."""
        return engine.kv_set != self._kv_set

    def usable(self, engine: EngineRecord) -> bool:
        """Say whether a parked engine holds a set that it may serve from: the one in use, or one as good beside it."""
        return engine.kv_set == self._kv_set or engine.kv_set in self._sound

    def former_owners(self, engines: Iterable[EngineRecord]) -> list[EngineRecord]:
        """Return the engines of earlier epochs that have mapped the current KV set and still have a process."""
        return [e for e in engines if e.epoch > 0 and e.kv_set == self._kv_set and e.id != self.active]

    def decide(self, engines: list[EngineRecord], now_s: float, revision: str = "") -> Promotion | float | None:
        """Return the promotion to order now, or when to ask again, or None when no engine is fit.

        ``revision``: of the settings in force; engines with others come last.

        One successor an epoch (P35): after the order ``active`` is set, and only `vacate` or `leave` clears it.
        """
        parked = [e for e in engines if e.parked]
        if self.active is not None or not parked:
            return None
        # Of equals, one that was heard of lately: a shadow may have been stopped unseen.
        candidate = min(
            parked, key=lambda e: (e.revision != revision, not self.usable(e), e.stale, now_s - e.vitals.last_sign_s() > FRESH_S, e.seq)
        )
        kv_set = candidate.kv_set if self.usable(candidate) else self._kv_set
        former = [e for e in engines if e.epoch > 0 and e.kv_set == kv_set]
        # One that is stuck in the kernel may be so with its device's work unfinished, and is never fenced.
        unfrozen = [e for e in former if e.frozen_s is None or e.state is EngineState.QUARANTINED]
        if unfrozen:
            # An engine that is being stopped by order has no verdict yet: its memory is not anybody else's before it is dead.
            if any(e.verdict_s is None for e in unfrozen):
                return float("inf")
            give_up_s = max((e.verdict_s or 0.0) + (FREEZE_BOUND_S if e.stuck else FREEZE_MOST_S) for e in unfrozen)
            if now_s < give_up_s:
                return give_up_s
        keep = not unfrozen and candidate.kv_set == kv_set and not self._distrusted
        self._distrusted = False
        if self._claimed == self.epoch:
            self.epoch += 1
        self._claimed = self.epoch
        self.active = candidate.id
        if not keep:
            self._fresh_set()
            self._kv_known = False
            candidate.kv_set = self._kv_set
        elif kv_set != self._kv_set:
            self._sound.discard(kv_set)
            self._sound.add(self._kv_set)
            self._kv_set, self._kv_known = kv_set, True
        why = "a former owner could not be frozen in time" if unfrozen else "the keeper has lost it, and its successor holds other blocks"
        return Promotion(engine=candidate.id, epoch=self.epoch, keep_kv=keep, fenced=not keep or not former, why="" if keep else why)
