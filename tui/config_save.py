"""Before a config is saved: what changes in the file, and what that does to the node."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Button, Label

from shadowsup.tui import orders
from shadowsup.tui.config_file import ConfigFile
from shadowsup.tui.errors import TuiError
from shadowsup.tui.lines import Lines
from shadowsup.tui.words import Cell

_TONES = {"+": "good", "-": "bad", "@": "accent"}


def diff(before: str, after: str) -> list[Cell]:
    """Return a unified diff for people, without the two lines of file names."""
    lines = list(difflib.unified_diff(before.splitlines(), after.splitlines(), lineterm="", n=2))[2:]
    return [((line or " ", _TONES.get(line[:1], "dim")),) for line in lines]


def reload_lines(reload: Mapping[str, Any], in_force: str, backup: str) -> list[Cell]:
    """Return how far a reload is. ``in_force``: the revision that goes on when it failed; ``backup``: where the old text is then."""
    state = str(reload.get("state") or "")
    tone = {"done": "good", "failed": "bad", "taking_back": "bad"}.get(state, "warn")
    workers = "  ".join(f"{name}: {stage}" for name, stage in (reload.get("workers") or {}).items())
    first, *rest = str(reload.get("message") or reload.get("summary") or "").splitlines() or [""]
    lines: list[Cell] = [((f"reload {reload.get('n')} {state.replace('_', ' ')}  ", tone), (first, ""), (f"  {workers}", "dim"))]
    if state == "failed":
        lines += [((line, "dim"),) for line in rest[-2:]]  # an engine's last words
        lines.append(((f"{in_force} goes on. The file keeps what you wrote; what was there before is {backup}.", "dim"),))
    return lines


def save_dialog(file: ConfigFile, data: bytes, plan: Mapping[str, Any] | None, why: str) -> SaveDialog:
    """Return the question before ``data`` is saved.

    Args:
        plan: the answer to ``reload`` with ``plan``; None: nobody could say, for the reason ``why``.

    Raises:
        TuiError: there is nothing to save and nothing to apply.
    """
    changed = data != file.data
    found = (plan or {}).get("plan") or {}
    nothing = plan is not None and plan.get("state") == "nothing"
    if nothing and not changed:
        raise TuiError("nothing has changed", "the file says so already, and the node runs it")
    several = len(found.get("changes") or []) > 1
    consequences: list[Cell] = [(("Consequences", "strong"), (f"   {found.get('summary') or ''}" if several else "", ""))]
    if nothing:
        consequences.append((("  none: the node runs these settings already", "dim"),))
    elif plan is not None:
        consequences += [((f"  {who:<14} ", "dim"), (text, "")) for who, text in orders.consequences(found)]
    refused = str(found.get("refused") or "")
    if refused:
        why = f"A running node cannot take it: {refused} {found.get('hint') or ''}".strip()
    changes = diff(file.text, data.decode()) if changed else []
    apply = plan is not None and not refused and not nothing
    return SaveDialog(f"Save {file.path}?", changes, consequences, apply=apply, save=changed, why=why)


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
