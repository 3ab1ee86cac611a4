"""The policy of every process that is not an engine: scribe, keeper, nursery, gateway. A dead part is replaced; the desired state wins."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from shadowsup.supervisor.policy.restart import RestartBook


class PartState(str, enum.Enum):
    STARTING = "starting"
    RUNNING = "running"
    BACKOFF = "backoff"
    STOPPING = "stopping"
    STOPPED = "stopped"


@dataclass(frozen=True, kw_only=True)
class PartSettings:
    """``ready_s``: how long it may take to become ready; ``backoff_s``: before the 1st, 2nd, … replacement in a row."""

    name: str
    ready_s: float = 20.0
    healthy_after_s: float = 5.0
    backoff_s: tuple[float, ...] = (0.0, 0.2, 1.0, 2.0, 5.0, 15.0)


class Do(enum.Enum):
    """Actions of a part. SPAWN starts a process, KILL ends it at once; what happens to it comes back as an event."""

    SPAWN = "spawn"
    KILL = "kill"


class PartPolicy:
    """One part. Every method is an event: it takes the time and returns what to do.

    There is no limit of restarts: engines and clients live on without this part for a while, so trying on at the longest pause is
    always better than to give up.
    """

    def __init__(self, settings: PartSettings) -> None:
        self.settings = settings
        self.state = PartState.STOPPED
        self.wanted = False
        self.reason = ""
        self.restarts = 0
        self.deadline_s = float("inf")
        self._process = False
        self._since_s = 0.0
        self._book = RestartBook(settings.backoff_s, max_failures=2**31, window_s=1.0)

    def want(self, now_s: float) -> list[Do]:
        """It shall run."""
        self.wanted = True
        self._book.reset()
        return self._reconcile(now_s)

    def adopt(self, now_s: float) -> list[Do]:
        """It runs already and shall go on; it has yet to be brought into use."""
        self.wanted = self._process = True
        self.state, self._since_s = PartState.STARTING, now_s
        return self._reconcile(now_s)

    def release(self, now_s: float) -> list[Do]:
        """It shall stop. How it is asked to (order, signal, time) is its owner's business; nothing starts it again."""
        self.wanted = False
        return self._reconcile(now_s)

    def ready(self, now_s: float) -> list[Do]:
        if self._process and self.state is PartState.STARTING:
            self.state, self._since_s, self.reason = PartState.RUNNING, now_s, ""
        return self._reconcile(now_s)

    def ended(self, now_s: float, why: str) -> list[Do]:
        """The process is gone, or never came up; ``why`` is for people."""
        if self.state is PartState.RUNNING and now_s - self._since_s >= self.settings.healthy_after_s:
            self._book.reset()
        self._process = False
        self.reason = why
        self.state = PartState.STOPPED
        if self.wanted:
            self._book.failed(now_s)
        return self._reconcile(now_s)

    def tick(self, now_s: float) -> list[Do]:
        return self._reconcile(now_s)

    def _reconcile(self, now_s: float) -> list[Do]:
        self.deadline_s = float("inf")
        if not self.wanted:
            self.state = PartState.STOPPING if self._process else PartState.STOPPED
            return []
        if not self._process:
            if now_s < self._book.not_before_s:
                self.state, self.deadline_s = PartState.BACKOFF, self._book.not_before_s
                return []
            self.restarts += self._book.in_a_row > 0
            self._process, self.state, self._since_s = True, PartState.STARTING, now_s
            self.deadline_s = now_s + self.settings.ready_s
            return [Do.SPAWN]
        if self.state is PartState.STOPPING:  # wanted again before it was gone
            return [Do.KILL]
        if self.state is PartState.STARTING:
            self.deadline_s = self._since_s + self.settings.ready_s
            if now_s >= self.deadline_s:
                self.reason = f"not ready after {self.settings.ready_s:g} s"
                self.deadline_s = now_s + self.settings.ready_s
                return [Do.KILL]
        return []
