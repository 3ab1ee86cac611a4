"""States over time and recoveries step by step, as rows of characters. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from shadowsup.supervisor.protocol import Event, Recovery
from shadowsup.tui.shapes import Worker
from shadowsup.tui.words import Cell, Part, millis, plural

_GLYPHS: dict[str, tuple[str, str, int]] = {
    "": (" ", "", 0),
    "gone": (" ", "", 1),
    "stopped": ("·", "dim", 1),
    "parked": ("▒", "good", 2),
    "healthy": ("█", "good", 2),
    "active": ("█", "good", 3),
    "spawning": ("░", "warn", 4),
    "starting": ("░", "warn", 4),
    "loading": ("░", "warn", 4),
    "warming": ("░", "warn", 4),
    "draining": ("▚", "warn", 4),
    "stopping": ("▁", "dim", 4),
    "degraded": ("▓", "warn", 5),
    "promoting": ("◆", "accent", 6),
    "recovering": ("▼", "bad", 7),
    "backoff": ("▽", "warn", 7),
    "lost": ("✖", "bad", 8),
    "down": ("✖", "bad", 8),
    "quarantined": ("✖", "bad", 8),
}
"""State → glyph, tone, and how much it is worth seeing: of several states within a column the most notable is drawn."""


@dataclass(frozen=True)
class Lane:
    """States of one thing: (since when, state), ascending."""

    name: str
    states: tuple[tuple[float, str], ...]

    def drawn(self, now: float, window_s: float, width: int) -> Cell:
        """Return ``width`` columns over the last ``window_s`` seconds."""
        step_s = window_s / max(1, width)
        columns: list[str] = []
        at, present = 0, ""
        for column in range(width):
            end = now - window_s + (column + 1) * step_s
            notable = present
            while at < len(self.states) and self.states[at][0] <= end:
                present = self.states[at][1]
                if _GLYPHS.get(present, _GLYPHS[""])[2] >= _GLYPHS.get(notable, _GLYPHS[""])[2]:
                    notable = present
                at += 1
            columns.append(notable)
        return _runs([_GLYPHS.get(state, ("?", "", 0))[:2] for state in columns])


def lanes(worker: Worker, events: Iterable[Event], now: float, window_s: float, most: int = 6) -> list[Lane]:
    """Return the worker's own lane and one for each engine of the window, the newest engine last.

    Args:
        events: of this worker, ascending.
    """
    own: list[tuple[float, str]] = []
    engines: dict[str, list[tuple[float, str]]] = {}
    for event in events:
        state = str(event.data.get("state") or "")
        if event.event == "worker.state":
            own.append((event.ts, state))
        elif event.engine is not None:
            lane = engines.setdefault(event.engine, [])
            if event.event == "engine.state":
                lane.append((event.ts, state))
            elif event.event == "engine.verdict":
                lane.append((event.ts, "lost"))
                lane.append((event.ts + 1e-3, "stopping"))
            elif event.event == "engine.gone":
                lane.append((event.ts, "gone"))
    for engine in worker.engines:
        lane = engines.setdefault(engine.id, [])
        if engine.state and (not lane or lane[-1][1] not in (engine.state, "stopping")):
            lane.append((now - float(engine.since_s or 0.0), engine.state))
            lane.sort(key=lambda entry: entry[0])
    if worker.state and (not own or own[-1][1] != worker.state):
        own.append((now - float(worker.since_s or 0.0), worker.state))
    recent = [name for name, lane in engines.items() if lane and not (lane[-1][1] == "gone" and lane[-1][0] < now - window_s)]
    recent.sort(key=_sequence)
    return [Lane(worker.name, tuple(own)), *(Lane(name, tuple(engines[name])) for name in recent[-most:])]


def _sequence(engine: str) -> int:
    number = engine.rpartition(".")[2]
    return int(number) if number.isdigit() else 0


_LEGEND = (
    ("active", "active"),
    ("parked", "parked"),
    ("loading", "starts"),
    ("promoting", "promoted"),
    ("lost", "lost"),
    ("degraded", "degraded"),
)


def legend() -> Cell:
    shown = (
        ("active", "active"),
        ("parked", "parked"),
        ("loading", "starts"),
        ("promoting", "promoted"),
        ("lost", "lost"),
        ("degraded", "degraded"),
    )
    parts: list[Part] = []
    for state, word in shown:
        glyph, tone, _ = _GLYPHS[state]
        parts += [(glyph, tone), (f" {word}  ", "dim")]
    return tuple(parts)


def _runs(cells: Sequence[tuple[str, str]]) -> Cell:
    parts: list[Part] = []
    for glyph, tone in cells:
        if parts and parts[-1][1] == tone:
            parts[-1] = (parts[-1][0] + glyph, tone)
        else:
            parts.append((glyph, tone))
    return tuple(parts)


STEPS = (
    ("frozen", "freeze_ms", None, "its memory is frozen: nothing of the old tree can write"),
    ("promoted", "promote_ms", "freeze_ms", "the successor owns the memory"),
    ("first token", "first_token_ms", "promote_ms", "clients get tokens again"),
    ("fenced", "fence_ms", "freeze_ms", "no process of the old tree is left: its blocks are free"),
    ("refilled", "refill_ms", "promote_ms", "the next shadow is parked"),
)
"""Name, figure, the figure that it follows, and what it means."""
_NAME = 12
_FIGURE = 9


def waterfall(recovery: Recovery, width: int) -> list[Cell]:
    """Return the steps of a recovery as bars on a logarithmic scale of ``width`` columns in all, a head and a foot."""
    figures = [value for _, name, _, _ in STEPS if (value := getattr(recovery, name)) is not None]
    longest = max([10.0, *figures])
    room = max(10, width - _NAME - _FIGURE - 3)

    def x(value: float) -> int:
        return round(math.log10(1 + value) / math.log10(1 + longest) * room)

    lines: list[Cell] = [
        (
            (f"{recovery.kind}  ", "strong"),
            (f"{recovery.from_engine} → {recovery.to_engine or '?'}", ""),
            (f"  epoch {recovery.epoch}  ", "dim"),
            (recovery.cause, "warn"),
            (f"  {recovery.exit}" if recovery.exit else "", "dim"),
        ),
        ((" " * (_NAME + _FIGURE + 2), ""), (_axis(room, x, longest), "dim")),
        ((f"{'seen':<{_NAME}}", ""), (f"{millis(recovery.detect_ms):>{_FIGURE}}  ", "strong"), ("after its last sign of life", "dim")),
    ]
    for name, figure, after, _ in STEPS:
        value = getattr(recovery, figure)
        if value is None:
            word = "not asked for" if figure == "first_token_ms" and recovery.fence_ms is not None else "…"
            lines.append(((f"{name:<{_NAME}}", "dim"), (f"{'–':>{_FIGURE}}  ", "dim"), (word, "dim")))
            continue
        begin = x(getattr(recovery, after) or 0.0) if after is not None else 0
        end = max(x(value), begin + 1)
        tone = "accent" if figure in ("promote_ms", "first_token_ms") else "good"
        lines.append(
            ((f"{name:<{_NAME}}", ""), (f"{millis(value):>{_FIGURE}}  ", "strong"), (" " * begin, ""), ("█" * (end - begin), tone))
        )
    lines.append(((_kept(recovery), "dim"),))
    return lines + _found(recovery)


_MOST_EVIDENCE = 6
_LONGEST = 160
"""Characters of one piece of evidence."""


def _found(recovery: Recovery) -> list[Cell]:
    """What kind of failure it was, by what evidence, and what was decided."""
    if not recovery.fault:
        return []
    decided = f" → {recovery.decision.replace('_', ' ')}" if recovery.decision else ""
    lines: list[Cell] = [(("failure  ", "dim"), (recovery.fault.replace("_", " "), "warn"), (decided, "strong"))]
    for name, value in list(recovery.evidence.items())[:_MOST_EVIDENCE]:
        text = ", ".join(str(one) for one in value) if isinstance(value, list) else str(value)
        if text:
            lines.append(((f"  {name}: ", "dim"), (text[:_LONGEST], "")))
    return lines


_TICKS = ((1.0, "1 ms"), (10.0, "10 ms"), (100.0, "0.1 s"), (1000.0, "1 s"), (10_000.0, "10 s"), (100_000.0, "100 s"))


def _axis(room: int, x: Callable[[float], int], longest: float) -> str:
    axis = ""
    for value, text in _TICKS:
        at = x(value)
        if value <= longest and at >= len(axis) and at + len(text) < room + 2:
            axis = f"{axis:<{at}}╎{text} "
    return axis


def _kept(recovery: Recovery) -> str:
    parts = []
    if recovery.blocks_kept is not None:
        parts.append(f"{plural(recovery.blocks_kept, 'block')} of KV kept, {recovery.blocks_dropped or 0} dropped")
    if recovery.requests_resumed is not None:
        parts.append(f"{plural(recovery.requests_resumed, 'request')} resumed")
    return " · ".join(parts)


_SIGNALS = {
    1: "SIGHUP",
    2: "SIGINT: somebody pressed Ctrl-C in its terminal, or sent it",
    4: "SIGILL: an instruction that this processor does not have; is the build for another machine?",
    6: "SIGABRT: it gave up by itself, mostly a failed assertion in native code; its output says which",
    7: "SIGBUS: memory behind a mapping went away, or the disk of a mapped file failed",
    8: "SIGFPE: an arithmetic error in native code",
    9: "SIGKILL: killed from outside: a drill, kill -9, or the kernel that ran out of memory (see dmesg)",
    11: "SIGSEGV: a memory error in native code (driver, kernel, extension)",
    15: "SIGTERM: asked to end",
    19: "SIGSTOP",
    31: "SIGSYS: a system call that its sandbox forbids",
}


def explain_exit(exit_text: str) -> str:
    """Return what ``signal 9`` or ``status 1`` means."""
    kind, _, number = exit_text.partition(" ")
    if kind == "signal" and number.isdigit():
        return _SIGNALS.get(int(number), f"signal {number}")
    if kind == "status" and number.isdigit():
        return {
            0: "it ended as asked",
            1: "it failed and said why in its output",
            126: "the command cannot be executed: permissions?",
            127: "there is no such command",
            137: "killed by SIGKILL inside a wrapper (128 + 9), mostly for lack of memory",
            139: "a memory error inside a wrapper (128 + 11)",
        }.get(int(number), "its own error status; its output says why")
    return "how it ended is not known: another process collected its status"


def last_exit(worker: Worker, events: Sequence[Event]) -> list[Cell]:
    """Return the last end of an engine of ``worker``, explained. ``events``: of this worker, ascending."""
    gone = next((event for event in reversed(events) if event.event == "engine.gone"), None)
    if gone is None:
        return [(("no engine has ended since this supervisor started", "dim"),)]
    before = [event for event in events if event.engine == gone.engine and event.n <= gone.n]
    exit_text = str(gone.data.get("exit") or "")
    lines: list[Cell] = [
        ((f"{gone.engine} ", "strong"), (f"ended with {exit_text or 'an unknown status'}", "warn")),
        ((explain_exit(exit_text), ""),),
    ]
    words = {
        "engine.drill": "it was a drill: ",
        "engine.verdict": "what was seen: ",
        "engine.killed": "it did not stop by itself: ",
        "engine.stop_signal": "it was slow to stop: ",
        "worker.hand_over": "planned: ",
        "engine.replaced": "planned: ",
        "engine.quarantined": "it cannot be ended: ",
    }
    lines += [((words[event.event], "dim"), (event.message, "")) for event in before if event.event in words]
    if "\n" in worker.reason or (worker.reason and worker.state in ("down", "backoff", "degraded")):
        lines.append((("", ""),))
        lines += [((line, "" if number else "bad"),) for number, line in enumerate(worker.reason.splitlines())]
    return lines
