"""Before a config is saved: what changes in the file, and what that does to the node."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Button, Label

from shadowsup.tui.lines import Lines
from shadowsup.tui.words import Cell

_TONES = {"+": "good", "-": "bad", "@": "accent"}


def diff(before: str, after: str) -> list[Cell]:
    """Return a unified diff for people, without the two lines of file names."""
    lines = list(difflib.unified_diff(before.splitlines(), after.splitlines(), lineterm="", n=2))[2:]
    return [((line or " ", _TONES.get(line[:1], "dim")),) for line in lines]


class SaveDialog(ModalScreen[str | None]):
    """Answers ``apply``, ``save`` or None. ``apply`` False: the node cannot take it, or nobody can say; ``why`` says it."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "dismiss_none", "Cancel"),
        Binding("left", "app.focus_previous", "Previous", show=False),
        Binding("right", "app.focus_next", "Next", show=False),
    ]
    DEFAULT_CSS = """
    SaveDialog { align: center middle; }
    SaveDialog > Vertical { width: 110; max-width: 96%; height: auto; max-height: 92%; padding: 1 2; }
    SaveDialog > Vertical { background: $surface; border: thick $primary; }
    SaveDialog .title { text-style: bold; margin-bottom: 1; width: 1fr; }
    SaveDialog #diff { height: auto; max-height: 16; border: round $panel; }
    SaveDialog #consequences { margin-top: 1; }
    SaveDialog .why { color: $text-error; width: 1fr; margin-top: 1; }
    SaveDialog Horizontal { height: auto; margin-top: 1; align-horizontal: right; }
    SaveDialog Button { margin-left: 1; min-width: 10; }
    """

    def __init__(
        self, title: str, changes: Sequence[Cell], consequences: Sequence[Cell], *, apply: bool, save: bool, why: str = ""
    ) -> None:
        super().__init__()
        self._title, self._changes, self._consequences = title, changes, consequences
        self._apply, self._save, self._why = apply, save, why

    def compose(self) -> ComposeResult:
        with Vertical():
            yield Label(Text(self._title), classes="title")
            with VerticalScroll(id="diff", can_focus=True):
                yield Lines(id="changes")
            yield Lines(id="consequences")
            if self._why:
                yield Label(Text(self._why), classes="why")
            with Horizontal():
                yield Button("Cancel", id="cancel")
                if self._save:
                    yield Button("Save only", id="save", variant="primary")
                if self._apply:
                    yield Button("Apply", id="apply", variant="warning")

    def on_mount(self) -> None:
        self.query_one("#changes", Lines).show(self._changes or [(("the file stays as it is", "dim"),)])
        self.query_one("#consequences", Lines).show(self._consequences)
        self.query_one("#cancel", Button).focus()

    def on_button_pressed(self, event: Button.Pressed) -> None:
        self.dismiss(event.button.id if event.button.id in ("save", "apply") else None)

    def action_dismiss_none(self) -> None:
        self.dismiss(None)
