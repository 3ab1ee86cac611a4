"""The config editor. The text of the file is the truth; what is saved is what was written, byte for byte."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, ClassVar

from textual import on, work
from textual.binding import Binding, BindingType
from textual.timer import Timer
from textual.widget import Widget
from textual.widgets import OptionList, TextArea

from shadowsup.errors import ShadowsupError
from shadowsup.supervisor.cli.edit import editor
from shadowsup.supervisor.config.schema import json_schema
from shadowsup.tui import orders
from shadowsup.tui.config_area import ConfigArea
from shadowsup.tui.config_check import Findings, check, environment_of
from shadowsup.tui.config_complete import Candidate, Completer, place, word_before
from shadowsup.tui.config_file import ConfigFile
from shadowsup.tui.config_save import reload_lines, save_dialog
from shadowsup.tui.dialogs import Choice, Confirm, Question
from shadowsup.tui.errors import TuiError
from shadowsup.tui.grid import Column, Grid, Row
from shadowsup.tui.lines import Lines
from shadowsup.tui.view import View
from shadowsup.tui.words import Cell, plural

CHECK_S = 0.25
"""After the last key, before the text is checked."""
PLAN_S = 20.0
PROBLEMS = (Column("sign", "", 1), Column("place", "LINE", 7, right=True), Column("message", "PROBLEM", grow=1, least=20))


class ConfigView(View):
    """Edits the file that the node was started with."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("ctrl+s", "save", "Save", tooltip="Show what changes and what that does, then apply, only save, or cancel"),
        Binding("f8", "problem(1)", "Next problem", tooltip="Go to the next problem"),
        Binding("shift+f8", "problem(-1)", "Previous problem", show=False),
        Binding("f4", "external", "$EDITOR", tooltip="Edit the text with your own editor"),
        Binding("f9", "undo_apply", "Undo apply", tooltip="Bring back the config that was in force before the last one"),
        Binding("ctrl+r", "reread", "Reread", tooltip="Take the text that is in the file; yours is thrown away", show=False),
        Binding("escape", "app.look('overview')", "Back", tooltip="Back to the overview; the text is kept"),
    ]
    DEFAULT_CSS = """
    ConfigView { layers: base popup; }
    ConfigView #file { height: auto; max-height: 6; }
    ConfigView #problems { height: auto; max-height: 8; border-top: solid $panel; }
    ConfigView #completion { layer: popup; position: absolute; display: none; height: auto; }
    ConfigView #completion { min-width: 24; border: round $primary; background: $surface; }
    ConfigView #meaning { height: 1; color: $text-muted; }
    ConfigView.-short #problems { max-height: 4; }
    """
    AUTO_FOCUS = "#text"

    def __init__(self) -> None:
        super().__init__()
        self._file: ConfigFile | None = None
        self._lines: list[str] = []
        """What the editor would hold were nothing changed."""
        self._findings = Findings()
        self._completer = Completer(json_schema())
        self._check_later: Timer | None = None
        self._refused = ""
        self._elsewhere = False
        """Somebody else has changed the file."""
        self._reloads = 0
        self._previous: object = None

    def body(self) -> Iterable[Widget]:
        popup = OptionList(id="completion")
        popup.can_focus = False
        yield Lines(id="file")
        yield ConfigArea(self._complete, popup)
        yield Lines(id="meaning")
        yield Grid(PROBLEMS, id="problems", header=False, empty="no problems")
        yield popup

    # --- the file ---------------------------------------------------------------------------------------------------------------

    @property
    def area(self) -> ConfigArea:
        return self.query_one(ConfigArea)

    @property
    def path(self) -> Path | None:
        """The file of the config in force."""
        status = self.story.status
        named = (status.config or {}).get("path") or status.node.config
        return Path(named) if named else None

    @property
    def modified(self) -> bool:
        return self._file is not None and self.area.document.lines != self._lines

    def on_mount(self) -> None:
        self.area.highlight()
        self.area.read_only = True
        self.set_interval(1.0, self._watch_file)

    def show(self) -> None:
        if self._file is None and not self._refused and self.path is not None:
            self._open()
        self._show_file()

    def _open(self) -> None:
        """Take the text that is in the file now."""
        assert self.path is not None
        try:
            self._file = ConfigFile(self.path)
        except TuiError as error:
            self._refused = f"{error.message}: {error.hint}"
            return
        self._elsewhere = False
        area = self.area
        place = area.cursor_location
        area.load_text(self._file.text)
        self._lines = list(area.document.lines)
        area.move_cursor((min(place[0], len(self._lines) - 1), place[1]))
        area.read_only = not self.dashboard.writable
        self._check()

    def _watch_file(self) -> None:
        if self._file is None or not self.is_current:
            return
        elsewhere = self._file.changed()
        if elsewhere and not self.modified:
            self._open()
            self.app.notify("the file was changed elsewhere: this is the new text", timeout=4)
        elif elsewhere != self._elsewhere:
            self._elsewhere = elsewhere
        self._show_file()

    def _show_file(self) -> None:
        self.query_one("#file", Lines).show([self._head(), *self._reload_lines()])
        previous = (self.story.status.config or {}).get("previous")
        if previous != self._previous:
            self._previous = previous
            self.refresh_bindings()  # there is something to undo, or no more

    def _head(self) -> Cell:
        if self._file is None:
            return ((self._refused or "the node does not say which config it was started with", "bad" if self._refused else "dim"),)
        state = ("modified", "warn") if self.modified else ("as in the file", "dim")
        errors, warnings = len(self._findings.errors), len(self._findings.warnings)
        revision = (self.story.status.config or {}).get("revision") or ""
        return (
            (f"{self._file.path}  ", "strong"),
            state,
            ("  changed elsewhere, too (Ctrl+R takes that)" if self._elsewhere else "", "bad"),
            (f"  {plural(errors, 'error')}" if errors else "", "bad"),
            (f"  {plural(warnings, 'warning')}" if warnings else "", "warn"),
            (f"  in force: {revision}" if revision else "", "dim"),
            ("  read-only (start with --write)" if self.area.read_only else "", "dim"),
        )

    def _reload_lines(self) -> list[Cell]:
        reload = self.story.status.reload
        if not reload or not self._reloads or int(reload.get("n") or 0) < self._reloads:
            return []
        revision = str((self.story.status.config or {}).get("revision") or "what was in force")
        return reload_lines(reload, revision, self._file.backup.name if self._file is not None else "")

    # --- checking ---------------------------------------------------------------------------------------------------------------

    @on(TextArea.Changed, "#text")
    def _edited(self) -> None:
        if self._check_later is not None:
            self._check_later.stop()
        self._check_later = self.set_timer(CHECK_S, self._check)

    @work(group="check", exclusive=True)
    async def _check(self) -> None:
        """Check the text, away from the keys, and mark what is wrong."""
        if self._file is None:
            return
        text, path, pid = self.area.text, self._file.path, self.story.status.node.pid
        self._findings = await asyncio.to_thread(lambda: check(text, path, environment_of(pid)))
        marks: dict[int, list[tuple[int, str]]] = {}
        rows = []
        for number, (severity, problem) in enumerate(self._findings.all):
            if problem.line:
                marks.setdefault(problem.line - 1, []).append((max(0, problem.column - 1), severity))
            sign, tone = ("✖", "bad") if severity == "error" else ("▲", "warn")
            words: Cell = ((problem.message, tone), (f"  {problem.hint}" if problem.hint else "", "dim"))
            place = f"{problem.line}:{problem.column}" if problem.line else ""
            rows.append(Row(str(number), (((sign, tone),), ((place, "dim"),), words), copy=str(problem)))
        self.area.set_marks(marks)
        problems = self.query_one("#problems", Grid)
        problems.styles.height = min(8, max(1, len(rows))) + 1
        problems.set_rows(rows)
        self._show_file()

    def on_grid_chosen(self, event: Grid.Chosen) -> None:
        self._go_to(int(event.key))

    def _go_to(self, number: int) -> None:
        _, problem = self._findings.all[number]
        if problem.line:
            self.area.focus()
            self.area.move_cursor((problem.line - 1, max(0, problem.column - 1)), center=True)
        self.query_one("#problems", Grid).select(str(number))
        self.query_one("#meaning", Lines).show([((f" {problem.message}  {problem.hint}", "warn"),)])

    def action_problem(self, step: int) -> None:
        found = self._findings.all
        if not found:
            self.app.notify("no problems", timeout=2)
            return
        row, column = self.area.cursor_location
        here = (row + 1, column + 1)
        if step > 0:
            number = next((i for i, (_, p) in enumerate(found) if (p.line, p.column) > here), 0)
        else:
            before = [i for i, (_, p) in enumerate(found) if (p.line, p.column) < here]
            number = before[-1] if before else len(found) - 1
        self._go_to(number)

    # --- completion -------------------------------------------------------------------------------------------------------------

    def _complete(self, lines: Sequence[str], row: int, column: int) -> tuple[list[Candidate], int]:
        found = place(lines, row, column)
        if found is None:
            return [], 0
        return self._completer.candidates(found), len(word_before(lines[row], column)) if found.prefix else 0

    def on_config_area_help(self, event: ConfigArea.Help) -> None:
        self.query_one("#meaning", Lines).show([((f" {event.text}", "dim"),)] if event.text else [])

    # --- saving -----------------------------------------------------------------------------------------------------------------

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        if action in ("save", "external", "undo_apply") and not self.dashboard.writable:
            return False
        if action == "undo_apply" and not (self.story.status.config or {}).get("previous"):
            return False
        return super().check_action(action, parameters)

    @work(group="save", exclusive=True)
    async def action_save(self) -> None:
        """Show what would be saved and what that does; then do what is chosen."""
        file = self._file
        if file is None or not self.dashboard.writable:
            return
        lines = list(self.area.document.lines)
        data = file.encode(lines)
        findings = await asyncio.to_thread(lambda: check(data.decode(), file.path, environment_of(self.story.status.node.pid)))
        if findings.errors:
            count = plural(len(findings.errors), "error")
            self.dashboard.complain(TuiError(f"{count}: nothing is saved", "F8 goes to the next one"))
            self._check()
            return
        try:
            if file.changed():
                file.save(data)  # refuses, and says what to do
            plan, why = await self._plan(data)
            dialog = save_dialog(file, data, plan, why)
        except ShadowsupError as error:
            self.dashboard.complain(error)
            return
        chosen = await self.app.push_screen_wait(dialog)
        if chosen is not None:
            await self._carry_out(chosen, data, lines, plan)

    async def _plan(self, data: bytes) -> tuple[dict[str, Any] | None, str]:
        """Return the supervisor's answer to what the text would do, or why there is none."""
        assert self._file is not None
        try:
            return await self.dashboard.answer("reload", PLAN_S, plan=True, text=data.decode(), config=str(self._file.target)), ""
        except ShadowsupError as error:
            return None, f"{error.message}{': ' + error.hint if error.hint else ''}"

    async def _carry_out(self, chosen: str, data: bytes, lines: list[str], plan: dict[str, Any] | None) -> None:
        file = self._file
        assert file is not None
        if data != file.data:
            try:
                await asyncio.to_thread(file.save, data)
            except TuiError as error:
                self.dashboard.complain(error)
                return
            self._lines = lines
        if chosen == "save":
            self.app.notify(f"saved; the old one is {file.backup.name}. The node goes on as it is until the config is applied.")
        else:
            await self._apply(plan)
        self._show_file()

    async def _apply(self, plan: dict[str, Any] | None) -> None:
        assert self._file is not None
        expect = ((plan or {}).get("plan") or {}).get("current")
        args = {"config": str(self._file.target), **({"expect": expect} if expect else {})}
        try:
            answer = await self.dashboard.answer("reload", PLAN_S, **args)
        except ShadowsupError as error:
            self.dashboard.complain(TuiError(f"saved, but not applied: {error.message}", error.hint or "Ctrl+S tries again"))
            return
        self._reloads = int(answer.get("n") or 0)
        self.app.notify(str(answer.get("message") or "the config is being applied"), title="apply", markup=False)

    @work(group="save", exclusive=True)
    async def action_undo_apply(self) -> None:
        """Bring back the revision before the present one, after showing what that does."""
        try:
            plan = await self.dashboard.answer("reload", PLAN_S, plan=True, undo=True)
            found = plan.get("plan") or {}
            if found.get("refused"):
                raise TuiError(str(found["refused"]), str(found.get("hint") or ""))
            config = self.story.status.config or {}
            question = Question(
                title=f"Bring back {config.get('previous') or 'the revision before'} in the place of {config.get('revision')}?",
                verb="reload",
                facts=tuple(orders.consequences(found)),
                choices=(Choice("Bring back", {"undo": True, **({"expect": found["current"]} if found.get("current") else {})}),),
                warning="What you have written and not saved stays in the editor." if self.modified else "",
            )
            choice = await self.app.push_screen_wait(Confirm(question))
            if choice is None:
                return
            answer = await self.dashboard.answer("reload", PLAN_S, **choice.args)
        except ShadowsupError as error:
            self.dashboard.complain(error)
            return
        self._reloads = int(answer.get("n") or 0)
        self.app.notify(str(answer.get("message") or "the revision before is coming back"), title="undo", markup=False)

    # --- other editors ----------------------------------------------------------------------------------------------------------

    @work(group="save", exclusive=True)
    async def action_reread(self) -> None:
        """Take the file's text; ask when something would be lost."""
        if self._file is None and not self._refused:
            return
        if self.modified:
            question = Question(
                "Throw away what you have written?", "", (("then", "the text of the file is shown"),), (Choice("Throw away"),)
            )
            if await self.app.push_screen_wait(Confirm(question)) is None:
                return
        self._refused = ""
        if self.path is not None:
            self._open()
        self._show_file()

    def action_external(self) -> None:
        """Edit a copy of the text with $EDITOR; what it says when the editor is left is the text here, to be checked and saved as any."""
        path = self._file.target if self._file is not None else self.path
        if path is None or not self.dashboard.writable:
            return
        try:
            command = editor()
            before = self._file.encode(self.area.document.lines) if self._file is not None else path.read_bytes()
            with self._draft(path, before) as draft:
                with self.app.suspend():
                    status = subprocess.run([*command, str(draft)]).returncode
                after = draft.read_bytes()
            if status != 0:
                raise TuiError(f"{command[0]} ended with status {status}: nothing was taken over", "the text is as it was")
            text = after.decode("utf-8")
        except OSError as error:
            self.dashboard.complain(TuiError(f"the editor cannot be used: {error.strerror}", "set VISUAL or EDITOR"))
        except UnicodeDecodeError:
            self.dashboard.complain(TuiError("what the editor left is not UTF-8 text", "nothing was taken over"))
        except ShadowsupError as error:
            self.dashboard.complain(error)
        else:
            if after != before and self._file is not None:
                area = self.area
                area.replace(text, area.document.start, area.document.end)
        self.app.refresh()

    @contextlib.contextmanager
    def _draft(self, path: Path, data: bytes) -> Any:
        """A copy beside the file, so that relative paths and the schema's in it mean the same; removed at the end."""
        with tempfile.NamedTemporaryFile(prefix=f".{path.stem}.", suffix=path.suffix or ".yaml", dir=path.parent) as file:
            file.write(data)
            file.flush()
            yield Path(file.name)
