"""A widget of ready lines (cells with tones), as high as they are many; drawn again only when they change."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text
from textual.app import RenderResult
from textual.reactive import reactive
from textual.widget import Widget

from shadowsup.tui import tones
from shadowsup.tui.words import Cell, clean


class Lines(Widget):
    """Shows cells, one a line."""

    DEFAULT_CSS = "Lines { height: auto; width: 1fr; padding: 0 1; }"

    shown: reactive[tuple[Cell, ...]] = reactive((), layout=True)

    def show(self, cells: Sequence[Cell]) -> None:
        self.shown = tuple(cells)

    def on_mount(self) -> None:
        self.app.theme_changed_signal.subscribe(self, lambda _: self.refresh())

    @property
    def text(self) -> str:
        """What is shown, without tones."""
        return "\n".join("".join(part for part, _ in cell).rstrip() for cell in self.shown)

    def render(self) -> RenderResult:
        styles = tones.palette(self.app)
        text = Text(no_wrap=False, end="")
        for number, cell in enumerate(self.shown):
            if number:
                text.append("\n")
            for part, tone in cell:
                text.append(clean(part), styles.get(tone))
        return text
