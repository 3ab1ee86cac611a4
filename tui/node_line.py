"""The head of every screen: the node and its parts in two lines, and the banner that says how old the data is."""

from __future__ import annotations

from rich.text import Text
from textual.app import RenderResult
from textual.reactive import reactive
from textual.widget import Widget

from shadowsup.tui import tones
from shadowsup.tui.shapes import Part, Status
from shadowsup.tui.spark import line, marked
from shadowsup.tui.story import Story
from shadowsup.tui.words import Cell, count, plural, rate, span

STEP_S = 5.0
"""Of a column of the sparkline."""


_OVER = ("done", "failed", "superseded", None)
"""States of a reload that has ended."""


class NodeLine(Widget):
    """Two lines. ``told`` grows with each observation."""

    DEFAULT_CSS = "NodeLine { height: 2; background: $panel; padding: 0 1; }"

    told: reactive[int] = reactive(0)

    def __init__(self) -> None:
        super().__init__()
        self._lines: tuple[Cell, Cell] = ((), ())
        self.note = ""

    def show(self, story: Story, note: str) -> None:
        """Show what is known; ``note``: at the end of the first line."""
        lines = (_node(story.status, note), _traffic(story, max(10, min(60, self.size.width - 62))))
        if lines != self._lines:
            self._lines = lines
            self.told += 1

    def render(self) -> RenderResult:
        styles = tones.palette(self.app)
        text = Text(no_wrap=True, overflow="ellipsis", end="")
        for number, cells in enumerate(self._lines):
            if number:
                text.append("\n")
            for part, tone in cells:
                text.append(part, styles.get(tone))
        return text


def _node(status: Status, note: str) -> Cell:
    node = status.node
    sign, tone = tones.of_state(node.state)
    parts: list[tuple[str, str]] = [(f"{node.name} ", "strong"), (f"{sign} {node.state}", tone), (f" {span(node.uptime_s)}", "dim")]
    named: list[tuple[str, Part]] = [
        ("gateway", Part(status.gateway.state, status.gateway.pid, status.gateway.restarts)),
        ("keeper", status.memkeeper),
        ("scribe", status.scribe),
        *(("nursery", nursery) for nursery in status.nursery),
    ]
    if status.sensor.state != "stopped":
        named.append(("sensor", status.sensor))
    for name, part in named:
        sign, tone = tones.of_state(part.state)
        parts += [("  ", ""), (sign, tone), (f" {name}", "" if tone == tones.GOOD else tone)]
        if tone != tones.GOOD:
            parts.append((f" {part.state}", tone))
        if part.restarts:
            parts.append((f" ↻{part.restarts}", "warn"))
    if (reload := status.reload) is not None and reload.get("state") not in _OVER:
        parts.append((f"  reload {reload.get('n')} {str(reload.get('state')).replace('_', ' ')}", "warn"))
    if node.events_lost:
        parts.append((f"  {plural(node.events_lost, 'event')} not written", "bad"))
    if note:
        parts.append((f"  {note}", "inverse"))
    return tuple(parts)


def _traffic(story: Story, width: int) -> Cell:
    gateway = story.status.gateway
    now = story.status.time_s
    top = line(story.tokens.columns(now, width, STEP_S))
    held = (f"{gateway.streams_held} held", "warn" if gateway.streams_held else "dim")
    errors = (f"{count(gateway.errors_total)} err", "bad" if gateway.errors_total else "dim")
    return (
        (f"{rate(story.throughput):>5} tok/s ", "strong"),
        *marked(top, now, STEP_S, story.marks(), "accent", "bad"),
        (f"  {gateway.inflight} in flight  ", ""),
        held,
        (f"  {count(gateway.requests_total)} req  ", "dim"),
        errors,
        (f"  {gateway.listen}", "dim"),
    )


class Banner(Widget):
    """Says that the node does not answer, and how old what is shown is; or that a recording is played."""

    DEFAULT_CSS = """
    Banner { height: auto; display: none; padding: 0 1; background: $error; color: $text; text-style: bold; }
    Banner.-shown { display: block; }
    """

    text: reactive[str] = reactive("", layout=True)

    def render(self) -> RenderResult:
        return Text(self.text)

    def watch_text(self, text: str) -> None:
        self.set_class(bool(text), "-shown")
