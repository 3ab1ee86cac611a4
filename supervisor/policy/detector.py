"""Is this engine making progress? Verdicts from heartbeats alone; no I/O, no clock of its own.

Liveness is progress of the step loop in the phase that the engine declares (P20), never an HTTP answer: an engine that loads, compiles or
is idle makes no steps and is well; one that says ``decode`` and finishes none is not.
"""

from __future__ import annotations

from dataclasses import dataclass

from shadowsup.wire.engine import Beat, Phase


@dataclass(frozen=True, kw_only=True)
class HangLimits:
    """Seconds. ``ceiling_s``: the longest silence that is believed; ``floor_s``: the shortest that may be judged."""

    floor_s: float = 0.8
    ceiling_s: float = 30.0


@dataclass(kw_only=True)
class Vitals:
    """The last signs of life of one engine. Times are monotonic seconds; 0.0 = never."""

    beat: Beat | None = None
    seen_s: float = 0.0
    """When the last beat arrived."""
    progress_s: float = 0.0
    """When steps last advanced, or when the engine last had nothing to do."""

    def note(self, beat: Beat, now_s: float) -> None:
        """Take a beat. Cheap: it is called for each beat of each engine."""
        last = self.beat
        busy = beat.phase in (Phase.PREFILL, Phase.DECODE) and beat.inflight > 0
        if last is None or not busy or beat.step != last.step or last.phase is not beat.phase:
            self.progress_s = now_s
        self.beat = beat
        self.seen_s = now_s

    def last_sign_s(self) -> float:
        """Return when the engine last showed life, by its own clock (the same clock); 0.0 = never."""
        return self.beat.sent_s if self.beat is not None else 0.0


def due_s(vitals: Vitals, limits: HangLimits) -> float | None:
    """Return when `judge` may first find a hang if nothing more is heard; None before the first beat."""
    if vitals.beat is None:
        return None
    due = vitals.seen_s + limits.ceiling_s
    if _busy(vitals.beat):
        due = min(due, vitals.progress_s + limits.ceiling_s)
    return due


def judge(vitals: Vitals, limits: HangLimits, now_s: float) -> str | None:
    """Return what is wrong, for people, or None. Before the first beat only the start-up timeout judges."""
    beat = vitals.beat
    if beat is None:
        return None
    silent_s = now_s - vitals.seen_s
    if silent_s >= limits.ceiling_s:
        return f"hang: no heartbeat for {silent_s:.1f} s"
    stuck_s = now_s - vitals.progress_s
    if _busy(beat) and stuck_s >= limits.ceiling_s:
        return f"hang: no step finished for {stuck_s:.1f} s in phase {beat.phase.value} with {beat.inflight} requests in flight"
    return None


def _busy(beat: Beat) -> bool:
    return beat.phase in (Phase.PREFILL, Phase.DECODE) and beat.inflight > 0
