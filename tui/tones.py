"""Tones: what a text means, not its colour. A theme turns tones into colours; each state has a sign too, for those who see none."""

from __future__ import annotations

from collections.abc import Mapping

from rich.color import Color
from rich.style import Style
from textual.app import App

GOOD, WARN, BAD, DIM, STRONG, ACCENT, PLAIN, MARK = "good", "warn", "bad", "dim", "strong", "accent", "", "mark"

_STATES: dict[str, tuple[str, str]] = {
    "healthy": ("●", GOOD),
    "running": ("●", GOOD),
    "ready": ("●", GOOD),
    "active": ("●", GOOD),
    "parked": ("◍", GOOD),
    "ok": ("●", GOOD),
    "starting": ("◌", WARN),
    "spawning": ("◌", WARN),
    "loading": ("◌", WARN),
    "warming": ("◌", WARN),
    "promoting": ("◒", WARN),
    "recovering": ("◒", WARN),
    "degraded": ("◐", WARN),
    "backoff": ("◔", WARN),
    "draining": ("◓", WARN),
    "stopping": ("◓", WARN),
    "warning": ("▲", WARN),
    "stopped": ("○", DIM),
    "gone": ("○", DIM),
    "down": ("✖", BAD),
    "quarantined": ("✖", BAD),
    "lost": ("✖", BAD),
    "error": ("✖", BAD),
}
_WORST = ("down", "quarantined", "recovering", "backoff", "degraded", "draining", "stopping", "starting", "stopped", "healthy")


def of_state(state: str) -> tuple[str, str]:
    """Return the sign and the tone of a state."""
    return _STATES.get(state, ("·", PLAIN))


def badness(state: str) -> int:
    """Return how far down a list by health a worker's state goes; 0 is the worst."""
    return _WORST.index(state) if state in _WORST else len(_WORST)


def palette(app: App[object]) -> dict[str, Style]:
    """Return the styles of the present theme. Cheap: a theme's variables are worked out once."""
    found = _palettes.get(app.theme)
    if found is None:
        found = _palettes[app.theme] = _made(app.theme_variables)
    return found


_palettes: dict[str, dict[str, Style]] = {}


def _made(theme: Mapping[str, str]) -> dict[str, Style]:

    def of(name: str, *, bold: bool | None = None, dim: bool | None = None) -> Style:
        return Style(color=_rich(theme.get(name, "")), bold=bold, dim=dim)

    return {
        PLAIN: Style(),
        GOOD: of("text-success"),
        WARN: of("text-warning", bold=True),
        BAD: of("text-error", bold=True),
        DIM: Style(dim=True),
        STRONG: Style(bold=True),
        ACCENT: of("text-accent"),
        MARK: Style(reverse=True),
        "weights": of("primary"),
        "kv": of("success"),
        "engines": of("accent"),
        "foreign": of("error"),
        "other": of("warning"),
        "key": of("text-accent", bold=True),
        "inverse": Style(reverse=True, bold=True),
        **{f"heat{n}": of(name, dim=n > 2 or None) for n, name in enumerate(("success", "success", "primary", "primary", "secondary"))},
        **{f"source{n}": of(name) for n, name in enumerate(("primary", "accent", "secondary", "success", "warning"))},
    }


def _rich(value: str) -> Color | None:
    """Parse a theme's colour; those that are computed from their background (``auto 87%``) are the terminal's own."""
    from textual.color import Color as ThemeColor
    from textual.color import ColorParseError

    try:
        parsed = ThemeColor.parse(value.split()[0]) if value else None
    except ColorParseError:
        return None
    if parsed is None or parsed.ansi is not None or value.startswith("auto"):
        return None
    return Color.from_rgb(parsed.r, parsed.g, parsed.b)


__all__ = ["ACCENT", "BAD", "DIM", "GOOD", "MARK", "PLAIN", "STRONG", "WARN", "badness", "of_state", "palette"]
