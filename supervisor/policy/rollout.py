"""The roll-out of new settings over one worker: how far it is, and what is remembered for taking it back.

Who decides what follows: `rolling` for workers with kept memory, `command` for the others.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from shadowsup.supervisor.policy.model import NurseryState, WorkerSettings


class Stage(str, enum.Enum):
    """How far a roll-out is. The last two are its ends."""

    WAITING = "waiting"
    """For a recovery or a start that is under way."""
    STARTING = "starting"
    """An engine with the new settings comes up beside those that serve."""
    READY = "ready"
    """It is parked, or there is nothing to prepare. Nothing that serves was touched."""
    HANDING_OVER = "handing_over"
    PROVING = "proving"
    """It serves, and has not shown yet that it can."""
    PROVEN = "proven"
    """It can; the engines with the old settings are still there, should another worker's roll-out fail."""
    TAKING_BACK = "taking_back"
    DONE = "done"
    FAILED = "failed"

    @property
    def ended(self) -> bool:
        return self in (Stage.DONE, Stage.FAILED)

    @property
    def committed(self) -> bool:
        """The new settings are in force, if on trial."""
        return self in (Stage.HANDING_OVER, Stage.PROVING, Stage.PROVEN)


class Way(enum.Enum):
    """How the new engines come in."""

    SURGE = "surge"
    """One more engine than usual comes up beside those that serve."""
    GAP = "gap"
    """There is no room for one more: the old ones go first."""
    FRESH = "fresh"
    """Nobody serves and nobody is about to: the next start has the new settings."""


@dataclass(kw_only=True)
class RollOut:
    """``target``: the settings that come; ``origin``: those in force when it began; each with the state of its nursery."""

    target: WorkerSettings
    origin: WorkerSettings
    nursery: NurseryState
    origin_nursery: NurseryState
    way: Way
    stage: Stage = Stage.WAITING
    reason: str = ""
    """Why it failed or is being taken back; what it waits for."""
    origin_down: str = ""
    """Why the worker was down when it began."""
    returns: bool = False
    """It is taken back from engines that serve, or were to: an engine with the old settings must serve again."""
    blamed: list[str] = field(default_factory=list)
    """Engines with the new settings that failed, by id."""

    @property
    def open(self) -> bool:
        return not self.stage.ended

    def of(self, revision: str) -> WorkerSettings | None:
        """Return the settings with this revision, if it is one of the two."""
        if revision == self.target.revision:
            return self.target
        return self.origin if revision == self.origin.revision else None
