"""A table that costs what changed: rows are compared, and only lines that are seen and differ are drawn again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from rich.cells import cell_len, set_cell_size
from rich.segment import Segment
from rich.style import Style
from textual import events
from textual.binding import Binding, BindingType
from textual.geometry import Region, Size
from textual.message import Message
from textual.reactive import reactive
from textual.scroll_view import ScrollView
from textual.strip import Strip

from shadowsup.tui import tones
from shadowsup.tui.words import Cell, clean

GAP = 1


@dataclass(frozen=True)
class Column:
    """``width``: columns, 0 = as wide as the widest cell (at most ``limit``). ``grow``: takes what is left, in shares. ``rank``: of the
    columns that do not fit, the highest rank goes first; 0 never goes."""

    key: str
    title: str
    width: int = 0
    right: bool = False
    grow: int = 0
    rank: int = 0
    limit: int = 28
    least: int = 4
    """What a column that grows is left with before others go."""


@dataclass(frozen=True)
class Row:
    """``key``: what stays selected when rows move. ``copy``: what is copied, by default the cells."""

    key: str
    cells: tuple[Cell, ...]
    copy: str = field(default="", compare=False)

    @property
    def text(self) -> str:
        return self.copy or "  ".join("".join(text for text, _ in cell).strip() for cell in self.cells).strip()


class Grid(ScrollView, can_focus=True):
    """Rows with a cursor. ``draw``: given the width that a growing column has got, cells that depend on it."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up", "move(-1)", "Up", show=False),
        Binding("down", "move(1)", "Down", show=False),
        Binding("pageup", "page(-1)", "Page up", show=False),
        Binding("pagedown", "page(1)", "Page down", show=False),
        Binding("home", "end(-1)", "First", show=False),
        Binding("end", "end(1)", "Last", show=False),
        Binding("enter", "choose", "Open", show=False),
        Binding("y", "copy", "Copy line", show=False),
    ]
    COMPONENT_CLASSES: ClassVar[set[str]] = {"grid--head", "grid--cursor", "grid--cursor-away"}
    DEFAULT_CSS = """
    Grid { height: 1fr; overflow-x: hidden; scrollbar-size-vertical: 1; }
    Grid > .grid--head { text-style: bold; color: $text-muted; background: $panel; }
    Grid > .grid--cursor { background: $block-cursor-blurred-background; text-style: bold; }
    Grid:focus > .grid--cursor { background: $primary 40%; }
    """

    cursor: reactive[int] = reactive(0)

    class Moved(Message):
        """The cursor is on another row."""

        def __init__(self, grid: Grid, key: str) -> None:
            super().__init__()
            self.grid = grid
            self.key = key

        @property
        def control(self) -> Grid:
            return self.grid

    class Chosen(Moved):
        """Enter, or a double click."""

    class HeadClicked(Message):
        def __init__(self, grid: Grid, column: str) -> None:
            super().__init__()
            self.grid = grid
            self.column = column

        @property
        def control(self) -> Grid:
            return self.grid

    def __init__(self, columns: Sequence[Column], *, id: str | None = None, header: bool = True, empty: str = "nothing here") -> None:
        super().__init__(id=id)
        self._columns = tuple(columns)
        self._rows: list[Row] = []
        self._header = header
        self._empty = empty
        self._layout: list[tuple[int, int]] = []
        self._natural: tuple[int, ...] = tuple(len(column.title) for column in columns)
        self._strips: dict[int, Strip] = {}
        self._tones: dict[str, Style] = {}
        self.sorted_by = ""
        self.grown: Callable[[dict[str, int]], None] | None = None

    # --- rows -------------------------------------------------------------------------------------------------------------------

    @property
    def rows(self) -> Sequence[Row]:
        return self._rows

    @property
    def selected(self) -> Row | None:
        return self._rows[self.cursor] if 0 <= self.cursor < len(self._rows) else None

    def width_of(self, key: str) -> int:
        """Return the columns that a column has now, 0 when it is left out."""
        return next((width for index, width in self._layout if self._columns[index].key == key), 0)

    def set_rows(self, rows: Sequence[Row], *, follow: bool = False) -> None:
        """Show ``rows``. The cursor stays on the row it is on; ``follow``: it goes to the last one."""
        old, self._rows = self._rows, list(rows)
        key = old[self.cursor].key if self.cursor < len(old) else None
        natural = tuple(
            max([len(column.title) + 1, *(_cells(row.cells[i]) for row in rows)]) if not column.width and not column.grow else 0
            for i, column in enumerate(self._columns)
        )
        if natural != self._natural:
            self._natural = natural
            self._lay_out()
        at = next((i for i, row in enumerate(rows) if row.key == key), None)
        target = len(rows) - 1 if follow else at if at is not None else min(self.cursor, max(0, len(rows) - 1))
        if len(old) != len(rows):
            self.virtual_size = Size(self.size.width, len(rows) + self._header)
            self._strips.clear()
            self.refresh()
        else:
            for index, (before, after) in enumerate(zip(old, rows, strict=True)):
                if before != after:
                    self._strips.pop(index, None)
                    self._refresh_row(index)
        if target != self.cursor:
            self.cursor = max(0, target)
        if follow:
            self._show_cursor()

    def select(self, key: str) -> bool:
        """Put the cursor on a row; False when it is not there."""
        for index, row in enumerate(self._rows):
            if row.key == key:
                self.cursor = index
                self._show_cursor()
                return True
        return False

    def forget_styles(self) -> None:
        """The theme has changed."""
        self._tones = {}
        self._strips.clear()
        self.refresh()

    # --- drawing ----------------------------------------------------------------------------------------------------------------

    def on_mount(self) -> None:
        self.virtual_size = Size(self.size.width, len(self._rows) + self._header)
        self.app.theme_changed_signal.subscribe(self, lambda _: self.forget_styles())

    def on_resize(self) -> None:
        self._lay_out()
        self.virtual_size = Size(self.size.width, len(self._rows) + self._header)

    def _lay_out(self) -> None:
        self._strips.clear()
        room = self.scrollable_content_region.width or self.size.width
        chosen = list(range(len(self._columns)))
        widths = {i: c.width or min(max(self._natural[i], 1), c.limit) for i, c in enumerate(self._columns) if not c.grow}

        def need() -> int:
            return sum(widths.get(i, self._columns[i].least) for i in chosen) + GAP * (len(chosen) - 1)

        while need() > room:
            worst = max(chosen, key=lambda i: (self._columns[i].rank, i))
            if self._columns[worst].rank == 0:
                break
            chosen.remove(worst)
        left = room - need()
        shares = sum(self._columns[i].grow for i in chosen)
        layout = []
        for i in chosen:
            column = self._columns[i]
            if column.grow:
                part = left * column.grow // shares if shares else 0
                left, shares = left - part, shares - column.grow
                layout.append((i, max(1, column.least + part)))
            else:
                layout.append((i, widths[i]))
        self._layout = layout
        if self.grown is not None:
            self.grown({self._columns[i].key: width for i, width in layout})
        self.refresh()

    def render_line(self, y: int) -> Strip:
        width = self.size.width
        if self._header and y == 0:
            return self._head(width)
        index = y - self._header + self.scroll_offset.y
        if not self._rows and index == 0:
            text = f"  {self._empty}"
            return Strip([Segment(text, self.rich_style + Style(dim=True))]).adjust_cell_length(width, self.rich_style)
        if not 0 <= index < len(self._rows):
            return Strip.blank(width, self.rich_style)
        strip = self._strips.get(index)
        if strip is None:
            base = self.rich_style
            if index == self.cursor:
                base += self.get_component_rich_style("grid--cursor", partial=True)
            strip = self._strips[index] = self._draw(self._rows[index].cells, width, base)
        return strip

    def _head(self, width: int) -> Strip:
        base = self.rich_style + self.get_component_rich_style("grid--head")
        cells = tuple(((column.title + ("▾" if column.key == self.sorted_by else ""), ""),) for column in self._columns)
        return self._draw(cells, width, base)

    def _draw(self, cells: tuple[Cell, ...], width: int, base: Style) -> Strip:
        if not self._tones:
            self._tones = tones.palette(self.app)
        segments: list[Segment] = []
        for place, (index, size) in enumerate(self._layout):
            if place:
                segments.append(Segment(" " * GAP, base))
            cell = cells[index]
            length = _cells(cell)
            if self._columns[index].right and length < size:
                segments.append(Segment(" " * (size - length), base))
            left = size
            for text, tone in cell:
                if left <= 0:
                    break
                text = clean(text)
                used = cell_len(text)
                if used > left:
                    text, used = set_cell_size(text, max(0, left - 1)) + "…", left
                segments.append(Segment(text, base + self._tones.get(tone, _NOTHING)))
                left -= used
            if not self._columns[index].right and left > 0:
                segments.append(Segment(" " * left, base))
        return Strip(segments).adjust_cell_length(width, base)

    def _refresh_row(self, index: int) -> None:
        y = index + self._header - self.scroll_offset.y
        if self._header <= y < self.size.height:
            self.refresh(Region(0, y, self.size.width, 1))

    def watch_has_focus(self, has_focus: bool) -> None:
        super().watch_has_focus(has_focus)
        self._strips.pop(self.cursor, None)
        self._refresh_row(self.cursor)

    def watch_cursor(self, old: int, new: int) -> None:
        for index in (old, new):
            self._strips.pop(index, None)
            self._refresh_row(index)
        row = self.selected
        if row is not None:
            self.post_message(self.Moved(self, row.key))

    # --- moving -----------------------------------------------------------------------------------------------------------------

    def _show_cursor(self) -> None:
        height = self.size.height - self._header
        if height <= 0:
            return
        top = round(self.scroll_offset.y)
        if self.cursor < top:
            self.scroll_to(y=self.cursor, animate=False)
        elif self.cursor >= top + height:
            self.scroll_to(y=self.cursor - height + 1, animate=False)

    def action_move(self, step: int) -> None:
        self.cursor = max(0, min(len(self._rows) - 1, self.cursor + step)) if self._rows else 0
        self._show_cursor()

    def action_page(self, step: int) -> None:
        self.action_move(step * max(1, self.size.height - self._header - 1))

    def action_end(self, step: int) -> None:
        self.action_move(step * len(self._rows))

    def action_choose(self) -> None:
        if self.selected is not None:
            self.post_message(self.Chosen(self, self.selected.key))

    def action_copy(self) -> None:
        if self.selected is not None:
            self.app.copy_to_clipboard(self.selected.text)
            self.app.notify("copied", timeout=2)

    def on_click(self, event: events.Click) -> None:
        if self._header and event.y == 0:
            at = 0
            for index, size in self._layout:
                if at <= event.x < at + size + GAP:
                    self.post_message(self.HeadClicked(self, self._columns[index].key))
                at += size + GAP
            return
        index = event.y - self._header + round(self.scroll_offset.y)
        if 0 <= index < len(self._rows):
            self.cursor = index
            if event.chain == 2:
                self.action_choose()


_NOTHING = Style()


def _cells(cell: Cell) -> int:
    return sum(cell_len(clean(text)) for text, _ in cell)
