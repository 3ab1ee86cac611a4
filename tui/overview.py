"""The overview: workers and engines, devices, events."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from rich.text import Text
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.widget import Widget
from textual.widgets import Static

from shadowsup.tui import overview_rows as rows
from shadowsup.tui import tones
from shadowsup.tui.dialogs import Menu, Prompt
from shadowsup.tui.grid import Grid
from shadowsup.tui.shapes import Engine, Worker
from shadowsup.tui.view import ORDERS, View
from shadowsup.tui.words import Cell, clean, millis

MOST_DEVICES = 8


class Overview(View):
    """What the person on call looks at first."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("enter", "open", "Worker", tooltip="Show the worker under the cursor", priority=False),
        Binding("l", "logs", "Logs", tooltip="Show the output of the worker under the cursor"),
        Binding("slash", "filter", "Filter", key_display="/", tooltip="Only workers and engines that have a text"),
        Binding("o", "sort", "Sort", tooltip="Sort the workers"),
        *ORDERS,
    ]
    DEFAULT_CSS = """
    Overview #workers { height: 2fr; min-height: 5; }
    Overview #reason { height: auto; max-height: 3; padding: 0 1; color: $text-muted; border-top: solid $panel; }
    Overview #devices-box { height: auto; border-top: solid $panel; }
    Overview #devices { height: auto; max-height: 9; }
    Overview #legend { height: 1; padding: 0 1; }
    Overview #events { height: 1fr; min-height: 3; border-top: solid $panel; }
    Overview.-short #legend { display: none; }
    Overview.-short #devices-box { border-top: none; }
    """
    AUTO_FOCUS = "#workers"

    def __init__(self) -> None:
        super().__init__()
        self._sort = "name"
        self._wanted = ""

    def body(self) -> Iterable[Widget]:
        yield Grid(rows.WORKERS, id="workers", empty="no worker yet")
        yield Static("", id="reason", classes="ages")
        with Vertical(id="devices-box"):
            yield Grid(rows.DEVICES, id="devices", empty="no figures of devices")
            yield Static("", id="legend", classes="ages")
        yield Grid(rows.EVENTS, id="events", header=False, empty="nothing has happened yet")

    @property
    def table(self) -> Grid:
        return self.query_one("#workers", Grid)

    def on_mount(self) -> None:
        devices = self.query_one("#devices", Grid)
        devices.grown = lambda _: self.call_next(self._show_devices)
        self.table.sorted_by = self._sort

    def show(self) -> None:
        story = self.story
        self.table.set_rows(rows.worker_rows(story, sort=self._sort, wanted=self._wanted, trend=self.table.width_of("trend") or 1))
        self._show_reason()
        self._show_devices()
        events = self.query_one("#events", Grid)
        # It follows until somebody looks further up.
        at_end = events.cursor >= len(events.rows) - 1
        events.set_rows(rows.event_rows(story), follow=at_end)

    def _show_devices(self) -> None:
        if not self.story.seen:
            return
        devices = self.query_one("#devices", Grid)
        found = rows.device_rows(self.story, devices.width_of("bar") or 12, devices.width_of("trend") or 1)
        high = min(len(found) or 1, MOST_DEVICES) + 1
        if devices.styles.height is None or devices.styles.height.value != high:
            devices.styles.height = high
        devices.set_rows(found)
        self._say("#legend", rows.legend(self.story))

    def _show_reason(self) -> None:
        """The whole reason of the worker under the cursor: in the table there may be no room for it."""
        worker, engine = self.target()
        if worker is None:
            self._say("#reason", ((f"filter {self._wanted!r} hides every worker" if self._wanted else "", "dim"),))
            return
        parts = list(rows.why(worker))
        text = engine.cause or engine.detail if engine is not None else worker.reason
        last = worker.last_recovery or {}
        if text:
            parts = [(text, "")]
        elif last:
            ended = last.get("first_token_ms") or last.get("promote_ms")
            parts = [
                (f"last recovery: {last.get('kind')}, {last.get('from_engine')} → {last.get('to_engine')}, {last.get('cause')}", "dim")
            ]
            if ended is not None:
                parts.append((f", served again after {millis(ended)}", "dim"))
        filtered = f"  [filter: {self._wanted}]" if self._wanted else ""
        self._say("#reason", ((f"{engine.id if engine is not None else worker.name}: ", "strong"), *parts, (filtered, "warn")))

    def _say(self, where: str, cell: Cell) -> None:
        styles = tones.palette(self.app)
        text = Text.assemble(*((clean(part), styles[tone]) for part, tone in cell), end="")
        static = self.query_one(where, Static)
        if getattr(static, "said", None) != text.markup:
            static.said = text.markup  # type: ignore[attr-defined]
            static.update(text)

    def target(self) -> tuple[Worker | None, Engine | None]:
        row = self.table.selected
        if row is None:
            return None, None
        kind, _, name = row.key.partition(":")
        if kind == "w":
            return self.story.status.worker(name), None
        worker = self.story.status.worker(name.rpartition(".")[0])
        engine = next((e for e in worker.engines if e.id == name), None) if worker is not None else None
        return worker, engine

    def on_grid_moved(self, event: Grid.Moved) -> None:
        if event.grid.id == "workers":
            self._show_reason()

    def on_grid_chosen(self, event: Grid.Chosen) -> None:
        if event.grid.id == "workers":
            self.action_open()

    def on_grid_head_clicked(self, event: Grid.HeadClicked) -> None:
        if event.grid.id == "workers" and event.column in rows.SORTS:
            self._sort_by(event.column)

    def action_open(self) -> None:
        worker, _ = self.target()
        if worker is not None:
            self.dashboard.look_at(worker.name)

    def action_logs(self) -> None:
        worker, engine = self.target()
        self.dashboard.look_at_logs(engine.id if engine is not None else worker.name if worker is not None else "")

    def action_sort(self) -> None:
        options = [(key, text) for key, (text, _) in rows.SORTS.items()]
        self.app.push_screen(Menu("Sort workers by", options, self._sort), self._sort_by)

    def _sort_by(self, key: str | None) -> None:
        if key is not None:
            self._sort = key
            self.table.sorted_by = key
            self.table.forget_styles()
            self.refresh_all()

    def action_filter(self) -> None:
        self.app.push_screen(Prompt("only", self._wanted, "part of a name, state, role or reason; empty: all"), self._filter_by)

    def _filter_by(self, text: str | None) -> None:
        if text is not None:
            self._wanted = text.strip()
            self.refresh_all()
