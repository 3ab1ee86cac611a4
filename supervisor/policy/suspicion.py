"""What decides about an engine that looks hung: two looks at its process, a little apart.

Silence has three innocent causes: this supervisor did not run, the engine gets no processor, or something in it holds the GIL. The first
shows in ticks that come late, the others in what the kernel counts for the engine's threads: time that they ran, time that they were ready
to run and were not let. A process that was stopped, or sleeps, does neither.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from shadowsup.supervisor.policy.detector import Finding, Kind

CONFIRM_S = 0.2
"""Between the two looks. The first comes so much before a verdict is due."""
UNANSWERED_S = 1.0
"""A look that has not come by then says nothing: what the beats say decides."""
LATE_TICK_S = 0.1
"""A tick this late means that the supervisor did not run for a while: what came meanwhile is to be read first."""
MOST_DOUBTS = 5
"""On a machine where every tick is late somebody must be right in the end."""

_BUSY = 0.5
"""Of the time between two looks: ran or waited for a processor that much."""
_FAIR_SHARE = 0.25
"""Of the processor time it wanted: who got more was slow for a reason of its own."""
_GIL_BOUNDS = 4.0
"""A silent process that computes holds the GIL: it is given so many times what is plausible."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Look:
    """An engine's process at an instant, by the kernel's account. Times in seconds: ``at_s`` monotonic, the others summed over its threads.

    ``stopped``: by a signal or a debugger. ``ran_s``: on a processor; ``waited_s``: ready to run, and not let.
    """

    at_s: float
    stopped: bool
    ran_s: float
    waited_s: float


class Explanation(enum.Enum):
    """What the looks make of a finding."""

    STOPPED = "the process is stopped"
    """From outside: a hang, but not of the engine's own making."""
    ASLEEP = "its threads do nothing"
    RUNNING = "its threads compute"
    STARVED = "it gets no processor"
    UNKNOWN = ""


@dataclass(slots=True)
class Suspicion:
    """Of one engine. ``asked_s``: when the look that is awaited was asked for; None: none is."""

    since_s: float
    kind: Kind
    asked_s: float | None
    first: Look | None = None
    second: Look | None = None
    blind: bool = False
    """It cannot be looked at."""

    def take(self, look: Look | None) -> None:
        """Take the look that was asked for; None: the process cannot be looked at."""
        self.asked_s = None
        self.blind = look is None
        if look is not None:
            self.first, self.second = (self.second or self.first), look

    @property
    def looked(self) -> bool:
        """Whether there is nothing more to see now."""
        return self.blind or self.looked_twice

    @property
    def looked_twice(self) -> bool:
        return self.first is not None and self.second is not None

    @property
    def ready_s(self) -> float:
        """When the next look is due."""
        last = self.second or self.first
        return (last.at_s if last is not None else self.since_s) + CONFIRM_S

    def explain(self) -> Explanation:
        """Say what the last two looks show."""
        first, second = self.first, self.second
        if self.blind:
            return Explanation.UNKNOWN
        if first is None or second is None or second.at_s <= first.at_s:
            return Explanation.STOPPED if second is not None and second.stopped else Explanation.UNKNOWN
        if first.stopped and second.stopped:
            return Explanation.STOPPED
        span_s = second.at_s - first.at_s
        ran_s, waited_s = second.ran_s - first.ran_s, second.waited_s - first.waited_s
        if waited_s >= _BUSY * span_s and ran_s < _FAIR_SHARE * (ran_s + waited_s):
            return Explanation.STARVED
        return Explanation.RUNNING if ran_s + waited_s >= _BUSY * span_s else Explanation.ASLEEP


def patience_s(finding: Finding, why: Explanation, ceiling_s: float) -> float:
    """Return how long a finding may last, in the light of the looks, before it is a verdict."""
    if why is Explanation.STARVED:
        return max(ceiling_s, finding.bound_s)
    if why is Explanation.RUNNING and finding.kind is Kind.FRONT:
        return max(ceiling_s, finding.bound_s)  # a template, a tokenizer: nothing says how long one prompt takes
    if why is Explanation.RUNNING and finding.kind is Kind.SILENT:
        return max(min(_GIL_BOUNDS * finding.bound_s, ceiling_s), finding.bound_s)
    return finding.bound_s
