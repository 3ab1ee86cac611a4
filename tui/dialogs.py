"""Questions that cover the screen for a moment: an order with its consequences, a menu, a line of text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Button, Input, Label, OptionList, Static
from textual.widgets.option_list import Option


@dataclass(frozen=True)
class Choice:
    """One way to say yes. ``args``: of the verb."""

    label: str
    args: dict[str, Any] = field(default_factory=dict)
    danger: bool = False


@dataclass(frozen=True)
class Question:
    """An order that is not given yet. ``facts``: its blast radius, (what, how much) for people."""

    title: str
    verb: str
    facts: tuple[tuple[str, str], ...]
    choices: tuple[Choice, ...]
    warning: str = ""


class Confirm(ModalScreen[Choice | None]):
    """Shows a question; the focus is on Cancel, and only a second, deliberate move says yes."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "dismiss_none", "Cancel"),
        Binding("left", "app.focus_previous", "Previous", show=False),
        Binding("right", "app.focus_next", "Next", show=False),
    ]
    DEFAULT_CSS = """
    Confirm { align: center middle; }
    Confirm > Vertical { width: 76; max-width: 96%; height: auto; max-height: 90%; padding: 1 2; }
    Confirm > Vertical { background: $surface; border: thick $warning; }
    Confirm .title { text-style: bold; width: 1fr; margin-bottom: 1; }
    Confirm VerticalScroll { height: auto; max-height: 14; }
    Confirm .fact { width: 1fr; }
    Confirm .warning { color: $text-error; text-style: bold; margin-top: 1; width: 1fr; }
    Confirm Horizontal { height: auto; margin-top: 1; align-horizontal: right; }
    Confirm Button { margin-left: 1; min-width: 10; }
    """

    def __init__(self, question: Question) -> None:
        super().__init__()
        self.question = question

    def compose(self) -> ComposeResult:
        question = self.question
        with Vertical():
            yield Label(Text(question.title), classes="title")
            with VerticalScroll(can_focus=False):
                wide = max((len(name) for name, _ in question.facts), default=0)
                for name, value in question.facts:
                    yield Static(Text.assemble((f"{name:<{wide}}  ", "dim"), value), classes="fact")
            if question.warning:
                yield Label(Text(question.warning), classes="warning")
            with Horizontal():
                yield Button("Cancel", id="cancel")
                for number, choice in enumerate(question.choices):
                    yield Button(choice.label, id=f"choice-{number}", variant="error" if choice.danger else "warning")

    def on_mount(self) -> None:
        self.query_one("#cancel", Button).focus()

    def on_button_pressed(self, event: Button.Pressed) -> None:
        which = event.button.id or ""
        self.dismiss(self.question.choices[int(which.removeprefix("choice-"))] if which.startswith("choice-") else None)

    def action_dismiss_none(self) -> None:
        self.dismiss(None)


class Menu(ModalScreen[str | None]):
    """A list to choose from: (id, text)."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "dismiss_none", "Close")]
    DEFAULT_CSS = """
    Menu { align: center middle; }
    Menu > Vertical { width: 50; min-width: 24; max-width: 96%; height: auto; max-height: 80%; padding: 0 1; }
    Menu > Vertical { background: $surface; border: round $primary; }
    Menu Label { text-style: bold; }
    Menu OptionList { min-width: 12; height: auto; max-height: 16; border: none; background: $surface; }
    """

    def __init__(self, title: str, options: Sequence[tuple[str, str]], present: str = "") -> None:
        super().__init__()
        self._title = title
        self._options = options
        self._present = present

    def compose(self) -> ComposeResult:
        with Vertical():
            yield Label(Text(self._title))
            yield OptionList(*(Option(Text(f"{'● ' if key == self._present else '  '}{text}"), id=key) for key, text in self._options))

    def on_mount(self) -> None:
        options = self.query_one(OptionList)
        options.highlighted = next((i for i, (key, _) in enumerate(self._options) if key == self._present), 0)
        options.focus()

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        self.dismiss(event.option_id)

    def action_dismiss_none(self) -> None:
        self.dismiss(None)


class Prompt(ModalScreen[str | None]):
    """One line of text at the bottom of the screen. None: left with Escape."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "dismiss_none", "Cancel")]
    DEFAULT_CSS = """
    Prompt { align: center bottom; background: $background 0%; }
    Prompt > Horizontal { height: 3; background: $surface; border: round $primary; }
    Prompt Label { padding: 0 1; text-style: bold; }
    Prompt Input { border: none; height: 1; width: 1fr; background: $surface; }
    """

    def __init__(self, label: str, value: str = "", placeholder: str = "") -> None:
        super().__init__()
        self._label, self._value, self._placeholder = label, value, placeholder

    def compose(self) -> ComposeResult:
        with Horizontal():
            yield Label(self._label)
            yield Input(self._value, placeholder=self._placeholder, select_on_focus=False)

    def on_mount(self) -> None:
        self.query_one(Input).focus()

    def on_input_submitted(self, event: Input.Submitted) -> None:
        self.dismiss(event.value)

    def action_dismiss_none(self) -> None:
        self.dismiss(None)
