"""Is this engine making progress? Judged from heartbeats alone; no I/O, no clock of its own.

Liveness is progress of the step loop in the phase that the engine declares (P20), never an HTTP answer: an engine that loads, compiles or
is idle makes no steps and is well; one that says ``decode`` and finishes none is not.

How long is too long follows from what was seen: a window of the gaps between steps (for prefill, of seconds a token) and of those between
beats, taken as normally distributed, and the gap that is exceeded once in 10⁸, as in the φ accrual failure detector (Hayashibara et al.,
SRDS 2004, φ = 8). Its bounds are the config's floor and ceiling. What is found here is a suspicion; `suspicion` says what decides.
"""

from __future__ import annotations

import enum
import math
from collections import deque
from dataclasses import dataclass, field

from shadowsup.wire.engine import Beat, EngineState, Phase

_Z = 5.61
"""Standard deviations at φ = 8: a normal variable lies above with a probability of 10⁻⁸."""
_TAIL = 1.5
"""Steps are no normal variable. A gap of this many times the longest one in the window is believed, too."""
_WINDOW = 128
"""Gaps in a window; one a beat, so some 25 s of work."""
_MIN_SAMPLES = 5
_LEAST_TOKENS = 16
"""A prefill of fewer tokens takes as long as one of so many."""
_UNTRIED = 4.0
"""While no prefill is known, each of its tokens may take so many decode steps."""
_FRESH = 10.0
"""Floors that a step may take while no gaps are known: threads start, pages are touched for the first time."""
_IDLE, _PARKED = 3.0, 5.0
"""Floors of silence from an engine that is idle or parked: nobody waits for it yet."""
LOADING_SILENCE_S = 60.0
"""What loads or compiles holds the GIL for as long as it likes, and then no thread of Python's can beat. Beyond its own bound, the
start-up timeout, only silence for this long (or twice the ceiling) is a sign."""


@dataclass(frozen=True, kw_only=True)
class HangLimits:
    """Seconds. ``floor_s``: no verdict before; ``ceiling_s``: the verdict at the latest, while there is something to do."""

    floor_s: float = 0.8
    ceiling_s: float = 30.0

    def clamp(self, bound_s: float, floors: float = 1.0) -> float:
        return min(max(bound_s, floors * self.floor_s), self.ceiling_s)

    @property
    def loading_s(self) -> float:
        return max(LOADING_SILENCE_S, 2 * self.ceiling_s)


class Gaps:
    """A window of observed gaps, in seconds (or seconds a token)."""

    __slots__ = ("_squares", "_sum", "_values")

    def __init__(self) -> None:
        self._values: deque[float] = deque()
        self._sum = 0.0
        self._squares = 0.0

    def add(self, value: float) -> None:
        self._values.append(value)
        self._sum += value
        self._squares += value * value
        if len(self._values) > _WINDOW:
            old = self._values.popleft()
            self._sum -= old
            self._squares -= old * old

    @property
    def mean(self) -> float | None:
        """The mean; None while too few are known."""
        return self._sum / len(self._values) if len(self._values) >= _MIN_SAMPLES else None

    def bound(self) -> float | None:
        """Return the longest gap that is still plausible; None while too few are known."""
        count = len(self._values)
        if count < _MIN_SAMPLES:
            return None
        mean = self._sum / count
        deviation = math.sqrt(max(0.0, self._squares / count - mean * mean))
        # A window of gaps that are all alike would make the next one that is a little longer impossible.
        return max(mean + _Z * max(deviation, 0.25 * mean), _TAIL * max(self._values))


@dataclass(slots=True)
class History:
    """What is known of a worker's steps, whichever of its engines made them: a successor is judged by what its predecessor showed."""

    decode: Gaps = field(default_factory=Gaps)
    prefill: Gaps = field(default_factory=Gaps)
    """Seconds a token."""
    beats: Gaps = field(default_factory=Gaps)
    """Between two beats of an engine that has work."""
    front: Gaps = field(default_factory=Gaps)
    """Between two turns that were told of the loop of the server in front."""

    def note(self, beat: Beat, before: Beat | None) -> None:
        """Take what a beat adds."""
        if beat.gap_s > 0.0 and beat.gap_tokens >= 0:
            if beat.gap_phase is Phase.DECODE:
                self.decode.add(beat.gap_s)
            elif beat.gap_phase is Phase.PREFILL:
                self.prefill.add(beat.gap_s / max(beat.gap_tokens, _LEAST_TOKENS))
        if before is not None and works(before) and works(beat):
            self.beats.add(beat.sent_s - before.sent_s)
        if before is not None and 0.0 < before.front_s < beat.front_s and front_works(before) and front_works(beat):
            self.front.add(beat.front_s - before.front_s)

    def step_bound_s(self, beat: Beat, limits: HangLimits, util: float | None) -> float:
        """Return how long the step under way may take. ``util``: of the busiest GPU, 0.0 to 1.0; None: not known."""
        if beat.phase in _COMPILING:
            return limits.loading_s
        if beat.step_tokens < 0:
            return limits.ceiling_s
        decode_s = self.decode.bound()
        if decode_s is None:
            decode_s = _FRESH * limits.floor_s
        if beat.phase is Phase.PREFILL:
            a_token_s = self.prefill.bound()
            if a_token_s is None and self.decode.mean is not None:
                a_token_s = _UNTRIED * self.decode.mean  # a step for each token would take longer
            if a_token_s is None or not beat.step_tokens:
                return limits.ceiling_s
            decode_s += a_token_s * max(beat.step_tokens, _LEAST_TOKENS)
        # A device that computes is more likely slow than stuck: up to twice the time.
        return limits.clamp(max(decode_s, limits.floor_s) * (1.0 + (util or 0.0)))

    def silence_bound_s(self, beat: Beat, limits: HangLimits, *, hurry: bool = False) -> float:
        """Return how long no beat need have come. ``hurry``: it was ordered to serve, whatever it last said that it was."""
        if hurry:
            return limits.clamp(self.beats.bound() or 0.0)
        if may_be_silent(beat):
            return limits.loading_s
        if works(beat):
            return limits.clamp(self.beats.bound() or 0.0)
        return limits.clamp(0.0, _PARKED if beat.state is EngineState.PARKED else _IDLE)

    def front_bound_s(self, beat: Beat, limits: HangLimits, *, hurry: bool = False) -> float:
        """Return how long the loop of the server in front need not have turned; ``inf``: there is none, or it is not up yet."""
        if not beat.front_s or beat.state in _STARTING:
            return math.inf
        if hurry or front_works(beat):
            return limits.clamp(self.front.bound() or 0.0)
        return limits.clamp(0.0, _PARKED if beat.state is EngineState.PARKED else _IDLE)


class Kind(enum.Enum):
    """SILENT: no beat comes. STUCK: beats come, and all of them tell of the same step. FRONT: beats come, and say that the loop
    of the server in front does not turn."""

    SILENT = "silent"
    STUCK = "stuck"
    FRONT = "front"


@dataclass(frozen=True, slots=True)
class Finding:
    """What looks wrong: for ``for_s`` seconds, where ``bound_s`` would have been plausible."""

    kind: Kind
    for_s: float
    bound_s: float

    def text(self, beat: Beat) -> str:
        """Say it for people."""
        if self.kind is Kind.SILENT:
            return f"hang: no heartbeat for {self.for_s:.2f} s in phase {beat.phase.value} ({self.bound_s:.2f} s are plausible)"
        if self.kind is Kind.FRONT:
            plausible = f"{self.bound_s:.2f} s are plausible"
            return (
                f"hang: its API server has not turned its event loop for {self.for_s:.2f} s with {beat.front_open} requests ({plausible})"
            )
        work = f"{beat.inflight + beat.queued} requests in flight"
        return f"hang: no step finished for {self.for_s:.2f} s in phase {beat.phase.value} with {work} ({self.bound_s:.2f} s are plausible)"


@dataclass(kw_only=True, slots=True)
class Vitals:
    """The last signs of life of one engine. Times are monotonic seconds; 0.0 = never."""

    beat: Beat | None = None
    seen_s: float = 0.0
    """When the last beat arrived."""
    progress_s: float = 0.0
    """When a step last ended, or when the engine last had nothing to do."""

    def note(self, beat: Beat, now_s: float) -> None:
        """Take a beat. Cheap: it is called for each beat of each engine."""
        last = self.beat
        if not works(beat):
            self.progress_s = now_s
        elif beat.since_s:
            self.progress_s = min(beat.since_s, now_s)
        elif last is None or not works(last) or beat.step != last.step or last.phase is not beat.phase:
            self.progress_s = min(beat.sent_s, now_s)  # an engine that does not say since when
        self.beat = beat
        self.seen_s = now_s

    def last_sign_s(self) -> float:
        """Return when the engine last showed life, by its own clock (the same clock); 0.0 = never."""
        return min(self.beat.sent_s, self.seen_s) if self.beat is not None else 0.0

    def due_s(self, history: History, limits: HangLimits, util: float | None, early_s: float, *, hurry: bool = False) -> float:
        """Return when `find` may first find something if nothing more is heard; ``inf`` before the first beat."""
        beat = self.beat
        if beat is None:
            return math.inf
        due_s = self.last_sign_s() + history.silence_bound_s(beat, limits, hurry=hurry) - early_s
        if works(beat):
            due_s = min(due_s, self.progress_s + history.step_bound_s(beat, limits, util) - early_s)
        return min(due_s, beat.front_s + history.front_bound_s(beat, limits, hurry=hurry) - early_s)

    def find(
        self, history: History, limits: HangLimits, util: float | None, now_s: float, early_s: float, *, hurry: bool = False
    ) -> Finding | None:
        """Return what is wrong, ``early_s`` seconds before that is certain; None: nothing, or there was no beat yet."""
        beat = self.beat
        if beat is None:
            return None
        sign_s, bound_s = self.last_sign_s(), history.silence_bound_s(beat, limits, hurry=hurry)
        if now_s >= sign_s + bound_s - early_s:  # the sums of `due_s`: at the instant it names there is something to find
            return Finding(Kind.SILENT, now_s - sign_s, bound_s)
        if works(beat):
            bound_s = history.step_bound_s(beat, limits, util)
            if now_s >= self.progress_s + bound_s - early_s:
                return Finding(Kind.STUCK, now_s - self.progress_s, bound_s)
        # As the beat saw it: what is silent says nothing of its server.
        front_s, bound_s = beat.sent_s - beat.front_s, history.front_bound_s(beat, limits, hurry=hurry)
        return Finding(Kind.FRONT, front_s, bound_s) if front_s >= bound_s - early_s else None


def works(beat: Beat) -> bool:
    """Say whether an engine that serves has something to do."""
    return beat.inflight + beat.queued > 0 and beat.phase in _WORKING and beat.state in _SERVING


def front_works(beat: Beat) -> bool:
    """Say whether somebody waits for the server in front."""
    return works(beat) or beat.front_open > 0


def may_be_silent(beat: Beat) -> bool:
    """Say whether it loads or compiles, and so may hold the GIL for as long as it likes."""
    return beat.state in _STARTING or beat.phase in _COMPILING


def hurries(beat: Beat) -> bool:
    """Say whether silence or a pause counts at once: there is work, and it does not compile."""
    return front_works(beat) and beat.phase not in _COMPILING


_WORKING = (Phase.PREFILL, Phase.DECODE, Phase.WARMING)
_COMPILING = (Phase.LOADING, Phase.WARMING)
_STARTING = (EngineState.SPAWNING, EngineState.LOADING, EngineState.WARMING)
_SERVING = (EngineState.ACTIVE, EngineState.DRAINING)
