"""The output of everything on the node, merged by time."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable
from typing import ClassVar

from textual import work
from textual.binding import Binding, BindingType
from textual.widget import Widget

from shadowsup.tui.dialogs import Menu, Prompt
from shadowsup.tui.lines import Lines
from shadowsup.tui.log_buffer import Filter
from shadowsup.tui.log_pane import LogPane
from shadowsup.tui.view import View
from shadowsup.tui.words import clock, count, plural


class LogsView(View):
    """Follows `Dashboard.logs`."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("slash", "search(False)", "Filter", key_display="/", tooltip="Only lines with a match of a regular expression"),
        Binding("exclamation_mark", "search(True)", "Inverse", key_display="!", tooltip="Only lines without a match"),
        Binding("w", "source", "Source", tooltip="Only lines of a worker, an engine or a part"),
        Binding("e", "failure", "Failure", tooltip="Jump to the last words of the engine that failed; again: to the failure before"),
        Binding("n", "error(1)", "Next error", show=False),
        Binding("N", "error(-1)", "Previous error", show=False),
        Binding("escape", "clear", "Clear", tooltip="Show everything again, or go back"),
    ]
    DEFAULT_CSS = "LogsView #state { height: 1; background: $panel; }"
    AUTO_FOCUS = "LogPane"

    def __init__(self) -> None:
        super().__init__()
        self._failures_back = 0

    def body(self) -> Iterable[Widget]:
        yield LogPane(self.dashboard.logs, id="log")
        yield Lines(id="state")

    @property
    def pane(self) -> LogPane:
        return self.query_one(LogPane)

    def on_mount(self) -> None:
        self.dashboard.follow_logs()
        self._say()

    def on_screen_resume(self) -> None:
        super().on_screen_resume()
        wanted = self.dashboard.logs_wanted
        if wanted is not None:
            self.dashboard.logs_wanted = None
            self.filter(Filter(source=wanted))

    def show(self) -> None:
        self._say()

    def grew(self, added: int, gone: int) -> None:
        """The buffer has changed."""
        self.pane.grew(added, gone)
        self._say()

    def on_log_pane_changed(self) -> None:
        self._say()

    def _say(self) -> None:
        pane, buffer = self.pane, self.dashboard.logs
        wanted = buffer.filter
        parts: list[tuple[str, str]] = [(wanted.source or "all sources", "strong")]
        if wanted.pattern is not None:
            sign = "!" if wanted.invert else "/"
            parts.append((f"  {sign}{wanted.pattern.pattern}{sign if sign == '/' else ''}", "warn"))
        parts.append((f"  {count(len(buffer.shown))} of {count(len(buffer))} lines", "dim"))
        if buffer.dropped:
            parts.append((f", {count(buffer.dropped)} older ones are only on disk", "dim"))
        if pane.following:
            parts.append(("  following", "good"))
        elif pane.waiting:
            parts.append((f"  ▼ {plural(pane.waiting, 'new line')} (End follows) ", "inverse"))
        else:
            parts.append(("  standing still (End follows)", "warn"))
        self.query_one("#state", Lines).show([tuple(parts)])

    # --- which lines ------------------------------------------------------------------------------------------------------------

    @work(group="filter", exclusive=True)
    async def filter(self, wanted: Filter) -> None:
        """Show only what passes, without holding up the keys while it is looked for."""
        for _ in self.dashboard.logs.refilter(wanted):
            await asyncio.sleep(0)
        self.pane.refiltered()
        self._say()

    def action_search(self, invert: bool) -> None:
        present = self.dashboard.logs.filter
        label = "without" if invert else "with"
        text = present.pattern.pattern if present.pattern is not None else ""
        self.app.push_screen(
            Prompt(label, text, "a regular expression; empty: every line"), lambda found: self._search(found, invert=invert)
        )

    def _search(self, text: str | None, *, invert: bool) -> None:
        if text is None:
            return
        try:
            pattern = re.compile(text) if text else None
        except re.error as error:
            self.app.notify(f"{text!r} is no regular expression: {error}", severity="error", markup=False)
            return
        self.filter(Filter(self.dashboard.logs.filter.source, pattern, invert))

    def action_source(self) -> None:
        buffer = self.dashboard.logs
        found = {worker.name: sum(n for s, n in buffer.sources.items() if _of(s, worker.name)) for worker in self.story.status.workers}
        sources = {**found, **{source: n for source, n in sorted(buffer.sources.items()) if source}}
        options = [("", "everything"), *((source, f"{source:<16} {count(n):>9}") for source, n in sources.items())]
        self.app.push_screen(Menu("Only lines of", options, buffer.filter.source), self._source)

    def _source(self, source: str | None) -> None:
        if source is not None:
            present = self.dashboard.logs.filter
            self.filter(Filter(source, present.pattern, present.invert))

    def action_clear(self) -> None:
        if self.dashboard.logs.filter != Filter():
            self.filter(Filter())
        else:
            self.dashboard.action_look("overview")

    # --- jumping ----------------------------------------------------------------------------------------------------------------

    def action_failure(self) -> None:
        buffer = self.dashboard.logs
        failures = self.story.failures(buffer.filter.source)
        if not failures:
            self.app.notify("no engine has failed since this supervisor started", timeout=3)
            return
        event = failures[self._failures_back % len(failures)]
        self._failures_back += 1
        number = buffer.find_before(event.engine or "", event.ts + 0.5)
        if number is None:
            self.app.notify(f"{clock(event.ts)} {event.message}\nIts output is not among the lines that are held.", markup=False)
            return
        self.app.notify(f"{clock(event.ts)} {event.message}", timeout=5, markup=False)
        self._jump(number)

    @work(group="filter", exclusive=True)
    async def _jump(self, number: int) -> None:
        """Go to a line; one that the filter hides is worth more than the filter."""
        buffer = self.dashboard.logs
        if not buffer.filter(buffer.line(number)):
            for _ in buffer.refilter(Filter()):
                await asyncio.sleep(0)
            self.pane.refiltered()
        self.pane.jump(number)
        self._say()

    def action_error(self, step: int) -> None:
        pane, buffer = self.pane, self.dashboard.logs
        start = buffer.place(pane.mark) if pane.mark >= 0 else round(pane.scroll_offset.y) + (pane.size.height if step < 0 else -1)
        place = buffer.find_level(start, step)
        if place is None:
            self.app.notify("no more errors in this direction", timeout=2)
        else:
            pane.jump(buffer.shown[place])


def _of(source: str, worker: str) -> bool:
    return source == worker or source.startswith(f"{worker}.")
