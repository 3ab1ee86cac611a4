"""The text of the config: highlighted YAML, marks on what is wrong, completion at the cursor."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar

from rich.segment import Segment
from rich.style import Style
from rich.text import Text
from textual import events
from textual.binding import Binding, BindingType
from textual.message import Message
from textual.strip import Strip
from textual.widgets import OptionList, TextArea
from textual.widgets.option_list import Option
from textual.widgets.text_area import LanguageDoesNotExist

from shadowsup.tui import tones
from shadowsup.tui.config_complete import Candidate
from shadowsup.tui.words import clean

MOST = 10
"""Candidates that are shown without being asked for, and lines of the list."""


class ConfigArea(TextArea):
    """Keys of the completion list are ours while it is open; everything else is the text area's.

    Args:
        complete: candidates at (row, column), and how long the word is that they replace.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("ctrl+space,ctrl+@", "complete", "Complete", key_display="^space", tooltip="Keys and values that may stand here"),
        Binding("ctrl+home", "text_start", "First line", show=False),
        Binding("ctrl+end", "text_end", "Last line", show=False),
    ]
    DEFAULT_CSS = """
    ConfigArea { border: none; padding: 0; height: 1fr; }
    ConfigArea:focus { border: none; }
    """

    class Help(Message):
        """What the candidate that is highlighted means."""

        def __init__(self, text: str) -> None:
            super().__init__()
            self.text = text

    def __init__(self, complete: Callable[[Sequence[str], int, int], tuple[list[Candidate], int]], popup: OptionList) -> None:
        # First: the text area's own constructor calls what is ours.
        self._complete = complete
        self._popup = popup
        self._candidates: list[Candidate] = []
        self._replaces = 0
        self._marks: dict[int, list[tuple[int, str]]] = {}
        self.highlighted_by = "plain text"
        super().__init__("", tab_behavior="indent", show_line_numbers=True, soft_wrap=False, max_checkpoints=500, id="text")
        self.indent_width = 2

    def highlight(self) -> None:
        """Use tree-sitter's YAML where it is installed; a text without colours is as good to edit."""
        try:
            self.language = "yaml"
        except (LanguageDoesNotExist, ImportError, OSError):
            self.language = None
        self.highlighted_by = "tree-sitter" if self.is_syntax_aware else "plain text"

    # --- marks ------------------------------------------------------------------------------------------------------------------

    def set_marks(self, marks: Mapping[int, list[tuple[int, str]]]) -> None:
        """Mark problems: line → (column, severity), counted from 0."""
        if dict(marks) != self._marks:
            self._marks = dict(marks)
            self._line_cache.clear()
            self.refresh()

    @property
    def marks(self) -> Mapping[int, list[tuple[int, str]]]:
        return self._marks

    def get_line(self, line_index: int) -> Text:
        line = super().get_line(line_index)
        for column, severity in self._marks.get(line_index, ()):
            end = column
            while end < len(line.plain) and not line.plain[end].isspace():
                end += 1
            line.stylize(Style(underline=True, bold=severity == "error"), column, max(end, column + 1))
        return line

    def render_line(self, y: int) -> Strip:
        strip = super().render_line(y)
        row = y + self.scroll_offset.y
        marks = self._marks.get(row)
        if not marks or not self.show_line_numbers or not strip:
            return strip
        first, *rest = list(strip)
        worst = "error" if any(severity == "error" for _, severity in marks) else "warning"
        sign, tone = ("✖", "bad") if worst == "error" else ("▲", "warn")
        style = (first.style or Style()) + tones.palette(self.app)[tone]
        return Strip([Segment(first.text[:-2] + f"{sign} ", style), *rest], strip.cell_length)

    def action_text_start(self) -> None:
        self.move_cursor(self.document.start)

    def action_text_end(self) -> None:
        self.move_cursor(self.document.end)

    # --- completion -------------------------------------------------------------------------------------------------------------

    @property
    def completing(self) -> bool:
        return bool(self._popup.display)

    def action_complete(self) -> None:
        """Offer everything that may stand at the cursor; the only one there is is taken at once."""
        self._offer(asked=True)

    def _offer(self, *, asked: bool) -> None:
        row, column = self.cursor_location
        if self.read_only or self.selection.start != self.selection.end:
            self.close_popup()
            return
        found, length = self._complete(self.document.lines, row, column)
        word = self.document.get_line(row)[column - length : column]
        if not asked and (not word or len(found) > MOST or any(c.label == word for c in found)):
            found = []
        if not found:
            self.close_popup()
            if asked:
                self.app.notify("nothing to complete here", timeout=2)
            return
        self._candidates, self._replaces = found, length
        if asked and len(found) == 1:
            self._take(found[0])
            return
        wide = max(len(c.label) for c in found)
        self._popup.clear_options()
        self._popup.add_options([Option(Text.assemble(f"{c.label:<{wide}}  ", (clean(c.detail)[:60], "dim"))) for c in found])
        self._popup.highlighted = 0
        width = min(self.screen.size.width - 4, wide + 4 + max(10, min(60, max(len(c.detail) for c in found))))
        high = min(MOST, len(found)) + 2
        offset = self.cursor_screen_offset
        below = offset.y + 1 + high <= self.screen.size.height
        self._popup.styles.width, self._popup.styles.height = width, high
        self._popup.styles.offset = (
            max(0, min(offset.x - length, self.screen.size.width - width - 1)),
            offset.y + 1 if below else max(0, offset.y - high),
        )
        self._popup.display = True
        self.post_message(self.Help(found[0].detail))

    def close_popup(self) -> None:
        if self._popup.display:
            self._popup.display = False
            self.post_message(self.Help(""))

    def _take(self, candidate: Candidate) -> None:
        row, column = self.cursor_location
        self.close_popup()
        line = self.document.get_line(row)
        # What stands behind the cursor may have the colon already.
        insert = (
            candidate.insert.rstrip(": ") if candidate.insert.rstrip().endswith(":") and line[column:].startswith(":") else candidate.insert
        )
        self.replace(insert, (row, column - self._replaces), (row, column), maintain_selection_offset=False)
        self.move_cursor((row, column - self._replaces + len(insert)))

    async def _on_key(self, event: events.Key) -> None:
        """Runs before the text area's own handler, which runs as well unless the default is prevented."""
        if self.completing:
            if event.key in ("up", "down"):
                step = 1 if event.key == "down" else -1
                self._popup.highlighted = ((self._popup.highlighted or 0) + step) % len(self._candidates)
                self.post_message(self.Help(self._candidates[self._popup.highlighted].detail))
                event.stop()
                event.prevent_default()
                return
            if event.key in ("enter", "tab"):
                self._take(self._candidates[self._popup.highlighted or 0])
                event.stop()
                event.prevent_default()
                return
            if event.key == "escape":
                self.close_popup()
                event.stop()
                event.prevent_default()
                return
        if event.key == "escape":
            event.prevent_default()  # not to the next widget: out of the editor, as everywhere
            return
        if event.key == "enter" and not self.read_only and self.selection.start == self.selection.end:
            event.stop()
            event.prevent_default()
            self._new_line()
            return
        before = self.document.get_line(self.cursor_location[0])
        if event.is_printable or event.key == "backspace":
            self.call_after_refresh(self._typed, before)

    def _typed(self, before: str) -> None:
        if self.document.get_line(self.cursor_location[0]) != before:
            self._offer(asked=False)

    def _new_line(self) -> None:
        """A new line begins where this one does, one step deeper behind a key that opens a section."""
        row, column = self.cursor_location
        head = self.document.get_line(row)[:column]
        body = head.lstrip(" ")
        lead = len(head) - len(body)
        while body.startswith("- "):
            body, lead = body[2:], lead + 2
        if body.rstrip().endswith(":") and not body.startswith("#"):
            lead += 2
        self.close_popup()
        self.insert("\n" + " " * min(lead, max(column, lead)))

    def on_blur(self) -> None:
        self.close_popup()

    def _watch_selection(self, previous_selection: object, selection: object) -> None:
        super()._watch_selection(previous_selection, selection)  # type: ignore[arg-type]
        if self.completing:
            row, column = self.cursor_location
            found, length = self._complete(self.document.lines, row, column)
            if length != self._replaces and not found:
                self.close_popup()
