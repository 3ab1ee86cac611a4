"""The config editor on the screen: marks, completion, saving with its consequences, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from textual.widgets import Button, OptionList
from tui_node import CONFIG, FakeNode

from shadowsup.tui.config_area import ConfigArea
from shadowsup.tui.config_save import SaveDialog
from shadowsup.tui.config_view import ConfigView


async def opened(d: Any) -> ConfigArea:
    await d.until(lambda: d.app.story.seen)
    await d.press("4")
    await d.sees("A comment that must survive")
    area: ConfigArea = await d.until(lambda: d.app.screen.query_one(ConfigArea))
    await d.until(lambda: area.has_focus)
    return area


def line_of(area: ConfigArea, text: str) -> int:
    return next(n for n, line in enumerate(area.document.lines) if text in line)


async def test_an_edit_changes_its_bytes_and_no_other_and_is_saved_only_when_chosen(node: FakeNode, drive: Callable[..., Any]) -> None:
    node.config.write_bytes(CONFIG.replace("\n", "\r\n", 2).encode())  # a file of two minds about its line ends
    before = node.config.read_bytes()
    async with drive() as d:
        area = await opened(d)
        assert area.highlighted_by == "tree-sitter"
        area.move_cursor((line_of(area, "hello"), len('      GREETING: "hello')))
        await d.type(", you")
        await d.sees("modified", "no problems")
        await d.press("ctrl+s")
        shown = ('+      GREETING: "hello, you"', '-      GREETING: "hello"')
        await d.sees(*shown, "replaces chat through its shadow", "Save only", "Apply")
        await d.until(lambda: isinstance(d.app.focused, Button) and d.app.focused.id == "cancel")
        await d.press("enter")
        await d.until(lambda: isinstance(d.app.screen, ConfigView))
        assert node.config.read_bytes() == before and node.orders() == []
        await d.press("ctrl+s")
        await d.until(lambda: isinstance(d.app.screen, SaveDialog) and d.app.focused is not None)
        await d.press("right", "enter")
        await d.sees("saved; the old one is node.yaml~", "as in the file")
        assert node.config.read_bytes() == before.replace(b"hello", b"hello, you")
        assert (node.folder / "node.yaml~").read_bytes() == before
        assert node.orders() == []
        # Saved, but not applied: there is nothing to save, and still something to apply.
        await d.press("ctrl+s")
        await d.sees("the file stays as it is", "replaces chat")
        assert "Save only" not in d.text()
        await d.press("escape")


async def test_apply_saves_reloads_and_can_be_taken_back(node: FakeNode, drive: Callable[..., Any]) -> None:
    async with drive(size=(120, 44)) as d:
        area = await opened(d)
        assert "Undo apply" not in d.text()
        area.move_cursor((line_of(area, "hello"), len('      GREETING: "hello')))
        await d.type("!")
        await d.until(lambda: d.app.screen.modified)
        await d.press("ctrl+s")
        await d.until(lambda: isinstance(d.app.screen, SaveDialog) and d.app.focused is not None)
        await d.press("right", "right", "enter")
        await d.until(lambda: node.orders() == [("reload", {"config": str(node.config), "expect": "r1"})])
        assert 'GREETING: "hello!"' in node.config.read_text()
        await d.sees("reload 1 done", "in force: r2", "Undo apply")
        await d.press("f9")
        await d.sees("Bring back r1 in the place of r2?", "replaces chat through its shadow")
        await d.press("right", "enter")
        await d.until(lambda: node.orders()[-1] == ("reload", {"undo": True, "expect": "r2"}))
        await d.until(lambda: node.config.read_text() == CONFIG)
        # The editor follows the file, which it has not touched since.
        await d.until(lambda: area.text == CONFIG)


async def test_problems_are_marked_listed_and_gone_to(node: FakeNode, drive: Callable[..., Any]) -> None:
    async with drive() as d:
        area = await opened(d)
        area.move_cursor((line_of(area, "shadows"), len("    shadow")))
        await d.press("delete")
        area.move_cursor((line_of(area, "version"), len("version: 1")))
        await d.type("0")
        row = line_of(area, "    shadow")
        await d.until(lambda: set(area.marks) == {1, row})
        await d.sees("2 errors", "unknown key 'shadow'", f"{row + 1}✖", "did you mean 'shadows'")
        assert any(span.style.underline for span in area.get_line(row).spans)  # type: ignore[union-attr]
        area.move_cursor((0, 0))
        await d.press("f8")
        assert area.cursor_location == (1, 9)
        await d.press("f8")
        assert area.cursor_location == (row, 4)
        await d.press("f8")
        assert area.cursor_location == (1, 9)
        await d.press("shift+f8")
        assert area.cursor_location == (row, 4)
        await d.press("ctrl+s")
        await d.sees("2 errors: nothing is saved")
        assert node.config.read_text() == CONFIG
        await d.press("ctrl+z", "ctrl+z")
        await d.sees("no problems")
        assert not area.marks


async def test_completion_offers_what_may_stand_there_and_takes_it(node: FakeNode, drive: Callable[..., Any]) -> None:
    async with drive() as d:
        area = await opened(d)
        popup = d.app.screen.query_one("#completion", OptionList)
        end = line_of(area, "hello")
        area.move_cursor((end, len(area.document.get_line(end))))
        await d.press("enter")
        await d.press("backspace", "backspace")
        await d.type("ser")
        await d.until(lambda: popup.display)
        await d.sees("The model name that clients use")
        await d.press("enter")
        assert area.document.get_line(end + 1) == "    served_name: "
        assert not popup.display
        await d.type("x")
        await d.press("enter")
        await d.type("dtype: b")
        await d.until(lambda: popup.display)
        await d.press("tab")
        assert area.document.get_line(end + 2) == "    dtype: bfloat16"
        await d.press("enter")
        await d.type("health:")
        await d.press("enter", "ctrl+space")
        await d.until(lambda: popup.display)
        await d.press("escape")
        assert not popup.display and isinstance(d.app.screen, ConfigView)
        assert area.document.get_line(area.cursor_location[0]) == "      "  # one step deeper behind a section
        # Without a popup Escape leads out, and the text is there when one comes back.
        await d.press("escape")
        await d.sees("WORKER / ENGINE")
        await d.press("4")
        await d.sees("served_name: x")


async def test_a_change_from_elsewhere_is_shown_refused_and_never_overwritten(node: FakeNode, drive: Callable[..., Any]) -> None:
    async with drive() as d:
        area = await opened(d)
        node.config.write_text(CONFIG + "# theirs\n")
        await d.until(lambda: "# theirs" in area.text, "the new text of an untouched editor")
        await d.type("# mine ")
        node.config.write_text(CONFIG + "# theirs, again\n")
        await d.sees("changed elsewhere, too")
        await d.press("ctrl+s")
        await d.sees("Not done", "somebody", "meanwhile:")  # words: where the lines break depends on the path
        assert node.config.read_text() == CONFIG + "# theirs, again\n"
        await d.press("ctrl+r")
        await d.sees("Throw away what you have written?")
        await d.press("right", "enter")
        await d.until(lambda: area.text == CONFIG + "# theirs, again\n")


async def test_what_a_running_node_cannot_take_can_only_be_saved(node: FakeNode, drive: Callable[..., Any]) -> None:
    async with drive() as d:
        area = await opened(d)
        area.move_cursor((line_of(area, "workers:"), 0))
        await d.type("memkeeper: {backend: host}")
        await d.press("enter")
        await d.until(lambda: isinstance(d.app.screen, ConfigView) and "memkeeper: {backend: host}" in area.document.lines)
        await d.press("ctrl+s")
        await d.sees("memkeeper.backend needs a node restart", "Save only")
        assert "Apply" not in [str(button.label) for button in d.app.screen.query(Button)]
        await d.press("escape")
        node.reloads = False
        await d.press("ctrl+s")
        await d.sees("no verb 'reload'", "Save only")
        await d.press("escape")


async def test_another_editor_gives_back_a_text_that_can_be_undone(
    node: FakeNode, drive: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    script = tmp_path / "editor"
    script.write_text('#!/bin/sh\nsed -i s/hello/salut/ "$1"\n')
    script.chmod(0o755)
    monkeypatch.setenv("EDITOR", str(script))
    async with drive() as d:
        area = await opened(d)
        # There is no terminal to hand over here.
        monkeypatch.setattr(d.app, "suspend", _nothing)
        await d.press("f4")
        await d.until(lambda: "salut" in area.text)
        assert node.config.read_text() == CONFIG  # nothing is saved by that
        there = ["control.sock", "events.sock", "logs", "model", "node.yaml"]
        await d.until(lambda: sorted(entry.name for entry in node.folder.iterdir()) == there, "the end of the draft")
        await d.press("ctrl+z")
        assert area.text == CONFIG
        script.write_text("#!/bin/sh\nexit 3\n")
        await d.press("f4")
        await d.sees("ended with status 3")


async def test_leaving_with_unsaved_text_asks(node: FakeNode, drive: Callable[..., Any]) -> None:
    async with drive() as d:
        await opened(d)
        await d.type("# x")
        await d.press("escape")
        await d.sees("WORKER / ENGINE")
        await d.press("q")
        await d.sees("Leave without saving the config?")
        await d.press("enter")
        await d.until(lambda: "Leave without" not in d.text())
        assert d.app.is_running


def _nothing() -> Any:
    import contextlib

    return contextlib.nullcontext()
