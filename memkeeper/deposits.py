"""What the vault has been sent and not acknowledged, and who waits for it. Pure."""

from __future__ import annotations

Waiter = tuple[str, int, bool]
"""(set id, connection, whether the set was created for it)."""


class Deposits:
    """Nobody is given a set of which a deposit is outstanding."""

    def __init__(self) -> None:
        self._outstanding: dict[int, tuple[str, float]] = {}
        """Number → (set id, when it was sent), oldest first."""
        self._waiters: list[Waiter] = []
        self._number = 0

    @property
    def oldest_s(self) -> float | None:
        """When the oldest outstanding deposit was sent."""
        return next((sent_s for _, sent_s in self._outstanding.values()), None)

    def add(self, set_id: str, now_s: float) -> int:
        """Return the number of a new deposit of (a part of) the set."""
        self._number += 1
        self._outstanding[self._number] = (set_id, now_s)
        return self._number

    def wait(self, set_id: str, connection: int, *, created: bool) -> list[Waiter]:
        """Somebody is to be given the set. Returns who can be given something now."""
        self._waiters.append((set_id, connection, created))
        return self._ready()

    def acknowledged(self, number: int) -> list[Waiter]:
        self._outstanding.pop(number, None)
        return self._ready()

    def freed(self, set_id: str) -> list[Waiter]:
        """Returns who waited for the set and has to be told that it is gone."""
        self._outstanding = {number: (of, at) for number, (of, at) in self._outstanding.items() if of != set_id}
        return self._ready()

    def vault_gone(self) -> list[Waiter]:
        """No vault, no waiting."""
        self._outstanding.clear()
        return self._ready()

    def _ready(self) -> list[Waiter]:
        held_back = {set_id for set_id, _ in self._outstanding.values()}
        ready = [waiter for waiter in self._waiters if waiter[0] not in held_back]
        self._waiters = [waiter for waiter in self._waiters if waiter[0] in held_back]
        return ready
