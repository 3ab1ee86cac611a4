"""New settings for a command worker: the old process ends, one with the new settings starts, and back when that is never ready.

It has no shadow, and its port and memory belong to the old process until that is gone: there is a gap.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from shadowsup.supervisor.policy import messages as m
from shadowsup.supervisor.policy.model import Desired, EngineRecord, NurseryState, WorkerSettings
from shadowsup.supervisor.policy.restart import RestartBook
from shadowsup.supervisor.policy.rollout import RollOut, Stage, Way


class CommandRolling(ABC):
    """What a roll-out adds to the policy of a command worker."""

    settings: WorkerSettings
    engines: dict[str, EngineRecord]
    desired: Desired
    down_reason: str
    rollout: RollOut | None
    _book: RestartBook
    _restart: bool
    _actions: list[m.WorkerAction]

    @abstractmethod
    def _forgive(self) -> None: ...

    def _take_rollout_order(self, event: m.RollOutOrder) -> None:
        rollout = self.rollout
        match event:
            case m.Reconfigure(settings=settings):
                self._reconfigure(settings)
            case m.RollOut(settings=settings):
                none = NurseryState.NONE
                self.rollout = RollOut(
                    target=settings,
                    origin=self.settings,
                    nursery=none,
                    origin_nursery=none,
                    way=Way.GAP if self.engines and not self.down_reason else Way.FRESH,
                    origin_down=self.down_reason,
                )
                self._enter(Stage.READY)
            case m.CommitRollOut() if rollout is not None and rollout.stage is Stage.READY:
                self._switch(rollout.target)
                self._enter(Stage.HANDING_OVER if self.desired is Desired.RUN else Stage.PROVEN)
            case m.FinishRollOut() if rollout is not None and rollout.stage is Stage.PROVEN:
                self._enter(Stage.DONE)
            case m.TakeBack(reason=reason) if rollout is not None and rollout.open:
                self._fail(reason)

    def _reconfigure(self, settings: WorkerSettings) -> None:
        self.settings = settings
        self._book.configure(settings.backoff_s, settings.max_failures, settings.window_s)

    def _switch(self, settings: WorkerSettings) -> None:
        self._reconfigure(settings)
        self._forgive()
        self._restart = bool(self.engines)

    def _fail(self, reason: str) -> None:
        rollout = self.rollout
        assert rollout is not None
        if rollout.stage is Stage.TAKING_BACK:
            return
        rollout.reason = reason
        committed = rollout.stage.committed
        self._enter(Stage.TAKING_BACK if committed else Stage.FAILED)
        if committed:
            self._switch(rollout.origin)
            self.down_reason = rollout.origin_down

    def _roll_out(self) -> None:
        """See how far it is."""
        rollout = self.rollout
        if rollout is None or rollout.stage not in (Stage.HANDING_OVER, Stage.TAKING_BACK):
            return
        ready = any(e.live and e.promoted_s is not None and e.revision == self.settings.revision for e in self.engines.values())
        idle = self.desired is not Desired.RUN
        if rollout.stage is Stage.HANDING_OVER:
            if ready or idle:
                self._enter(Stage.PROVEN)
            elif self.down_reason:
                self._fail(self.down_reason)
        elif any(engine in self.engines for engine in rollout.blamed):
            return  # its last words are still to come
        elif ready or idle or self.down_reason or rollout.way is Way.FRESH:
            self._enter(Stage.FAILED)

    def _blame(self, engine: EngineRecord, cause: str) -> bool:
        """Count the end of ``engine`` against the roll-out, if it was on trial. Returns whether it was."""
        rollout = self.rollout
        if rollout is None or rollout.stage is not Stage.HANDING_OVER or engine.revision != rollout.target.revision:
            return False
        rollout.blamed.append(engine.id)
        self._fail(cause)
        return True

    def _enter(self, stage: Stage) -> None:
        rollout = self.rollout
        assert rollout is not None
        was, rollout.stage = rollout.stage, stage
        text = f"{self.settings.name}: new settings: {stage.value.replace('_', ' ')}"
        if rollout.reason:
            text += f": {rollout.reason}"
        data = {"stage": stage.value, "was": was.value, "revision": rollout.target.revision}
        level = "warning" if stage in (Stage.TAKING_BACK, Stage.FAILED) else "info"
        self._actions.append(m.Announce("rollout.state", text, level, data=data))
