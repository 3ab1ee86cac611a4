"""The lines of a `LogBuffer` on the screen. It follows until somebody looks further up, and then really stands still."""

from __future__ import annotations

from datetime import datetime
from typing import ClassVar

from rich.cells import cell_len
from rich.segment import Segment
from rich.style import Style
from textual import events
from textual.binding import Binding, BindingType
from textual.geometry import Size
from textual.message import Message
from textual.reactive import reactive
from textual.scroll_view import ScrollView
from textual.strip import Strip

from shadowsup.tui import tones
from shadowsup.tui.log_buffer import Line, LogBuffer, level
from shadowsup.tui.words import clean

SOURCE = 12
SIDE = 12
"""Columns of a step to the side."""
_KEPT_STRIPS = 500
_SOURCES = 5


def local_time(stamp: str) -> str:
    """Return the time of day of a stamp (UTC, as in the files) where the operator is, as everything else on the screen."""
    try:
        return datetime.fromisoformat(stamp).astimezone().strftime("%H:%M:%S.%f")[:12]
    except ValueError:
        return ""


class LogPane(ScrollView, can_focus=True):
    """Line API: only what is seen is ever drawn."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up", "by(-1)", "Up", show=False),
        Binding("down", "by(1)", "Down", show=False),
        Binding("pageup", "page(-1)", "Page up", show=False),
        Binding("pagedown,space", "page(1)", "Page down", show=False),
        Binding("home,g", "top", "Oldest", show=False),
        Binding("end,G,F", "follow", "Follow", key_display="End", tooltip="Go to the end and follow what comes"),
        Binding("left", "side(-1)", "Left", show=False),
        Binding("right", "side(1)", "Right", show=False),
        Binding("y", "copy", "Copy", tooltip="Copy the marked line, or what is seen", show=False),
    ]
    COMPONENT_CLASSES: ClassVar[set[str]] = {"log--mark", "log--match"}
    DEFAULT_CSS = """
    LogPane { height: 1fr; scrollbar-size-vertical: 1; overflow-x: hidden; overflow-y: scroll; }
    LogPane > .log--mark { background: $primary 40%; }
    LogPane > .log--match { background: $warning 50%; text-style: bold; }
    """

    following: reactive[bool] = reactive(True)
    waiting: reactive[int] = reactive(0)
    """Lines that came since it stopped following."""
    mark: reactive[int] = reactive(-1)
    """Number of the line that was jumped to or clicked."""

    class Changed(Message):
        """It follows, or does not; or more lines wait."""

    def __init__(self, buffer: LogBuffer, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self.buffer = buffer
        self._strips: dict[int, Strip] = {}
        self._tones: dict[str, Style] = {}
        self._widest = 0
        self._moving = False

    # --- lines ------------------------------------------------------------------------------------------------------------------

    def grew(self, added: int, gone: int) -> None:
        """The buffer has ``added`` more lines to show at its end, and ``gone`` fewer at its beginning."""
        if not added and not gone:
            return
        self._resize()
        if self.following:
            self._go(len(self.buffer.shown))
        else:
            self.waiting += added
            if gone:
                # The lines that are looked at stay where they are, as long as they are held.
                self._go(round(self.scroll_offset.y) - gone)
        self.refresh()

    def refiltered(self) -> None:
        """Other lines are shown. The marked one is kept in sight, else the end."""
        self._strips.clear()
        self._widest = 0
        self.waiting = 0
        self._resize()
        place = self.buffer.place(self.mark)
        if self.mark >= 0 and place < len(self.buffer.shown) and not self.following:
            self._go(place - self.size.height // 2)
        else:
            self.following = True
            self._go(len(self.buffer.shown))
        self.refresh()

    def jump(self, number: int) -> None:
        """Mark a line and bring it to the middle; it does not follow then."""
        self.following = False
        self.mark = number
        self._go(self.buffer.place(number) - self.size.height // 2)
        self.refresh()

    def _resize(self) -> None:
        self.virtual_size = Size(max(self._widest, self.scrollable_content_region.width), len(self.buffer.shown))

    def _go(self, top: int) -> None:
        self._moving = True
        try:
            self.scroll_to(y=max(0, min(top, self.max_scroll_y)), animate=False, immediate=True, force=True)
        finally:
            self._moving = False

    def watch_scroll_y(self, old_value: float, new_value: float) -> None:
        super().watch_scroll_y(old_value, new_value)
        if self._moving:
            return
        # Somebody scrolled: at the end it follows, anywhere else it does not.
        self.following = new_value >= self.max_scroll_y

    def watch_following(self, following: bool) -> None:
        if following:
            self.waiting = 0
        self.post_message(self.Changed())

    def watch_waiting(self) -> None:
        self.post_message(self.Changed())

    # --- drawing ----------------------------------------------------------------------------------------------------------------

    def on_mount(self) -> None:
        self.app.theme_changed_signal.subscribe(self, lambda _: self._forget())
        self._resize()
        self._go(len(self.buffer.shown))

    def _forget(self) -> None:
        self._tones = {}
        self._strips.clear()
        self.refresh()

    def on_resize(self) -> None:
        self._resize()
        if self.following:
            self._go(len(self.buffer.shown))

    def render_line(self, y: int) -> Strip:
        scroll_x, scroll_y = self.scroll_offset
        place, width = y + scroll_y, self.size.width
        if place >= len(self.buffer.shown):
            return Strip.blank(width, self.rich_style)
        number = self.buffer.shown[place]
        strip = self._strips.get(number)
        if strip is None:
            if len(self._strips) > _KEPT_STRIPS:
                self._strips.clear()
            strip = self._strips[number] = self._draw(self.buffer.line(number))
            if strip.cell_length > self._widest:
                self._widest = strip.cell_length
                self.call_next(self._resize)
        strip = strip.crop_extend(scroll_x, scroll_x + width, self.rich_style)
        if number == self.mark:
            strip = strip.apply_style(self.get_component_rich_style("log--mark", partial=True))
        return strip

    def _draw(self, line: Line) -> Strip:
        if not self._tones:
            self._tones = tones.palette(self.app)
        base = self.rich_style
        tone = level(line)
        text = clean(line.text)
        style = base + self._tones.get(tone, Style())
        source = clean(line.source)
        segments = [
            Segment(f"{local_time(line.stamp):<12} ", base + self._tones["dim"]),
            Segment(f"{source:<{SOURCE}} ", base + self._tones[f"source{sum(source.encode()) % _SOURCES}"]),
        ]
        wanted = self.buffer.filter
        if wanted.pattern is None or wanted.invert:
            segments.append(Segment(text, style))
        else:
            found = self.get_component_rich_style("log--match", partial=True)
            at = 0
            for match in wanted.pattern.finditer(text):
                if match.end() > match.start():
                    segments += [Segment(text[at : match.start()], style), Segment(match[0], style + found)]
                    at = match.end()
            segments.append(Segment(text[at:], style))
        return Strip(segments, sum(cell_len(segment.text) for segment in segments))

    # --- keys and mouse ---------------------------------------------------------------------------------------------------------

    def action_by(self, lines: int) -> None:
        self.scroll_to(y=self.scroll_offset.y + lines, animate=False, immediate=True)

    def action_page(self, step: int) -> None:
        self.action_by(step * max(1, self.size.height - 2))

    def action_top(self) -> None:
        self.scroll_to(y=0, animate=False, immediate=True)

    def action_follow(self) -> None:
        self.mark = -1
        self.following = True
        self._go(len(self.buffer.shown))
        self.refresh()

    def action_side(self, step: int) -> None:
        furthest = max(0, self._widest - self.scrollable_content_region.width)
        self.scroll_to(x=max(0, min(furthest, self.scroll_offset.x + step * SIDE)), animate=False, immediate=True, force=True)

    def action_copy(self) -> None:
        held = self.buffer.shown
        if self.mark >= 0 and self.buffer.place(self.mark) < len(held) and self.mark >= self.buffer.dropped:
            numbers = [self.mark]
        else:
            top = round(self.scroll_offset.y)
            numbers = held[top : top + self.size.height]
        lines = [self.buffer.line(number) for number in numbers]
        self.app.copy_to_clipboard("\n".join(f"{line.stamp} {line.source} | {clean(line.text)}" for line in lines))
        self.app.notify(f"copied {len(lines)} line{'s' if len(lines) != 1 else ''}", timeout=2)

    def on_click(self, event: events.Click) -> None:
        place = event.y + round(self.scroll_offset.y)
        if place < len(self.buffer.shown):
            self.mark = self.buffer.shown[place]
            self.refresh()
