"""One worker: its states over time, its recoveries step by step, its KV blocks, its last end, how it is started."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

from textual import work
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, VerticalScroll
from textual.widget import Widget
from textual.widgets import TabbedContent, TabPane

from shadowsup.errors import ShadowsupError
from shadowsup.supervisor.protocol import Recovery
from shadowsup.tui import heatmap, timeline, tones
from shadowsup.tui.grid import Column, Grid, Row
from shadowsup.tui.lines import Lines
from shadowsup.tui.overview_rows import why
from shadowsup.tui.shapes import Engine, Worker
from shadowsup.tui.view import ORDERS, View
from shadowsup.tui.words import Cell, clock, millis, percent, rate, size, span

LANES = (
    Column("name", "ENGINE", limit=18),
    Column("state", "STATE", 12),
    Column("rate", "TOK/S", 6, right=True, rank=2),
    Column("memory", "OWN MEM", 7, right=True, rank=3),
    Column("line", "", grow=1, least=20),
)
RECOVERIES = (
    Column("n", "#", limit=5, right=True),
    Column("time", "TIME", 8),
    Column("kind", "KIND", 7),
    Column("who", "FROM → TO", limit=22),
    Column("token", "TOKEN", 8, right=True),
    Column("cause", "CAUSE", grow=1, least=8, rank=1),
)
ENVIRONMENT = (Column("name", "NAME", limit=28), Column("from", "FROM", 9), Column("value", "VALUE", grow=1, least=10))
WINDOWS_S = (60.0, 300.0, 900.0, 3600.0, 6 * 3600.0, 24 * 3600.0)
TABS = ("recoveries", "blocks", "exit", "start")


class WorkerView(View):
    """Shows `Dashboard.worker`."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("n", "other(1)", "Next worker", tooltip="Show the next worker"),
        Binding("p", "other(-1)", "Previous worker", show=False),
        Binding("left_square_bracket", "tab(-1)", "Previous tab", key_display="[", show=False),
        Binding("right_square_bracket", "tab(1)", "Next tab", key_display="]", tooltip="Recoveries, blocks, last exit, start"),
        Binding("plus,equals_sign", "zoom(-1)", "Zoom in", key_display="+", show=False),
        Binding("minus", "zoom(1)", "Zoom out", key_display="-", show=False),
        Binding("l", "logs", "Logs", tooltip="Show the output of this worker"),
        Binding("escape", "app.look('overview')", "Back", tooltip="Back to the overview"),
        *ORDERS,
    ]
    DEFAULT_CSS = """
    WorkerView #title { height: 2; }
    WorkerView #lanes { height: auto; max-height: 9; }
    WorkerView TabbedContent { height: 1fr; }
    WorkerView #recovery-list { height: 1fr; min-height: 3; }
    WorkerView #waterfall { height: auto; }
    WorkerView.-wide #recovery-list { width: 2fr; height: 1fr; }
    WorkerView.-wide #waterfall-box { width: 3fr; }
    WorkerView #waterfall-box { height: auto; width: 1fr; }
    WorkerView #recovery-box { height: 1fr; layout: vertical; }
    WorkerView.-wide #recovery-box { layout: horizontal; }
    WorkerView #environment { height: 1fr; }
    """
    AUTO_FOCUS = "#lanes"

    def __init__(self) -> None:
        super().__init__()
        self._window = 1
        self._blocks: dict[str, Any] = {}
        self._start: dict[str, Any] = {}
        self._told_of = ""

    def body(self) -> Iterable[Widget]:
        yield Lines(id="title", classes="ages")
        yield Grid(LANES, id="lanes", empty="no engine")
        with TabbedContent(initial=TABS[0]):
            with TabPane("Recoveries", id="recoveries"), Horizontal(id="recovery-box"):
                yield Grid(RECOVERIES, id="recovery-list", empty="no recovery since this supervisor started")
                with VerticalScroll(id="waterfall-box", can_focus=False):
                    yield Lines(id="waterfall", classes="ages")
            with TabPane("KV blocks", id="blocks"), VerticalScroll():
                yield Lines(id="heatmap", classes="ages")
            with TabPane("Last exit", id="exit"), VerticalScroll():
                yield Lines(id="last-exit", classes="ages")
            with TabPane("Start", id="start"):
                yield Lines(id="command", classes="ages")
                yield Grid(ENVIRONMENT, id="environment", empty="not told yet")

    def on_mount(self) -> None:
        self.query_one("#lanes", Grid).grown = lambda _: self.call_next(self._show_lanes)
        self.set_interval(1.0, self._look)

    @property
    def worker(self) -> Worker | None:
        """The worker that is shown; the first one when the one that was is not there any more."""
        status = self.story.status
        return status.worker(self.dashboard.worker) or next(iter(status.workers), None)

    def target(self) -> tuple[Worker | None, Engine | None]:
        worker, row = self.worker, self.query_one("#lanes", Grid).selected
        name = row.key if row is not None else ""
        return worker, next((e for e in worker.engines if e.id == name), None) if worker is not None else None

    # --- showing ----------------------------------------------------------------------------------------------------------------

    def show(self) -> None:
        worker = self.worker
        if worker is None:
            return
        if self._told_of != worker.name:
            self._told_of = worker.name
            self._blocks, self._start = {}, {}
            self._look()
        self.query_one("#title", Lines).show(self._title(worker))
        self._show_lanes()
        recoveries = self.story.recoveries_of(worker.name)
        listed = self.query_one("#recovery-list", Grid)
        at_top = listed.cursor == 0
        listed.set_rows([_recovery_row(recovery) for recovery in recoveries])
        if at_top and recoveries:
            listed.cursor = 0  # the newest, unless somebody looks at another one
        self._show_waterfall()
        self.query_one("#last-exit", Lines).show(timeline.last_exit(worker, self.story.worker_events(worker.name)))

    def _title(self, worker: Worker) -> list[Cell]:
        sign, tone = tones.of_state(worker.state)
        head = (
            (f"{worker.name}  ", "strong"),
            (f"{sign} {worker.state}", tone),
            (f" for {span(worker.since_s)}  ", "dim"),
            (f"epoch {worker.epoch}  {rate(self.story.worker_rate(worker))} tok/s  {worker.inflight} in flight  ", ""),
            (f"KV {percent(worker.kv.used)}  ", ""),
            (f"{worker.engine} {worker.source or worker.model}", "dim"),
        )
        return [head, why(worker)]

    def _show_lanes(self) -> None:
        worker, grid = self.worker, self.query_one("#lanes", Grid)
        if worker is None:
            return
        now, window_s = self.story.status.time_s, WINDOWS_S[self._window]
        width = grid.width_of("line") or 20
        by_id = {engine.id: engine for engine in worker.engines}
        rows = []
        for lane in timeline.lanes(worker, self.story.worker_events(worker.name), now, window_s):
            engine = by_id.get(lane.name)
            state = engine.state if engine is not None else worker.state if lane.name == worker.name else "gone"
            sign, tone = tones.of_state(state)
            rows.append(
                Row(
                    lane.name,
                    (
                        ((lane.name, "strong" if lane.name == worker.name else ""),),
                        ((f"{sign} {state}", tone),),
                        ((rate(self.story.token_rate(engine)) if engine is not None else "", ""),),
                        ((size(engine.memory) if engine is not None else "", "dim"),),
                        lane.drawn(now, window_s, width),
                    ),
                )
            )
        axis = f"{span(window_s)} ago"
        rows.append(Row("axis", ((), (), (), (), ((f"{axis:<{max(0, width - 3)}}now"[:width], "dim"),))))
        rows.append(Row("legend", ((), (), (), (), timeline.legend())))
        if grid.styles.height is None or grid.styles.height.value != len(rows) + 1:
            grid.styles.height = len(rows) + 1
        grid.set_rows(rows)

    def _show_waterfall(self) -> None:
        worker, row = self.worker, self.query_one("#recovery-list", Grid).selected
        shown = self.query_one("#waterfall", Lines)
        recovery = self.story.recoveries.get(int(row.key)) if worker is not None and row is not None and row.key.isdigit() else None
        width = max(40, (shown.size.width or 80) - 2)
        shown.show(timeline.waterfall(recovery, width) if recovery is not None else [])

    def on_grid_moved(self, event: Grid.Moved) -> None:
        if event.grid.id == "recovery-list":
            self._show_waterfall()

    # --- what is asked for ------------------------------------------------------------------------------------------------------

    def _look(self) -> None:
        """Ask for what no status has, when it is looked at."""
        tab = self.query_one(TabbedContent).active
        worker = self.worker
        if worker is None or not self.is_current:
            return
        if tab == "blocks" or not self._blocks:
            self._ask_blocks(worker.name)
        if tab == "start" and not self._start:
            self._ask_start(worker.name)

    def on_tabbed_content_tab_activated(self, event: TabbedContent.TabActivated) -> None:
        self._look()
        self.refresh_all()

    @work(group="blocks", exclusive=True, exit_on_error=False)
    async def _ask_blocks(self, worker: str) -> None:
        shown = self.query_one("#heatmap", Lines)
        width = max(16, min(128, (shown.size.width or 80) - 2))
        try:
            self._blocks = await self.dashboard.answer("blocks", worker=worker, cells=width * 12)
        except ShadowsupError as error:
            shown.show([((error.message, "warn"),), ((error.hint, "dim"),)])
            return
        if self.worker is not None and self.worker.name == worker:
            shown.show(heatmap.heatmap(self._blocks, width))

    @work(group="start", exclusive=True, exit_on_error=False)
    async def _ask_start(self, worker: str) -> None:
        shown = self.query_one("#command", Lines)
        try:
            found = self._start = await self.dashboard.answer("inspect", worker=worker)
        except ShadowsupError as error:
            shown.show([((error.message, "warn"),), ((error.hint, "dim"),)])
            return
        how = "forked by its nursery, or started as" if found.get("forked") else "started as"
        shown.show(
            [
                ((f"{how} ", "dim"), (str(found.get("command") or ""), "strong")),
                (("in ", "dim"), (str(found.get("cwd") or "the folder of the supervisor"), "")),
                (
                    ("model ", "dim"),
                    (str(found.get("model") or "–"), ""),
                    ("  GPUs ", "dim"),
                    (", ".join(found.get("gpus") or []) or "none", ""),
                ),
            ]
        )
        rows = [
            Row(str(e["name"]), (((str(e["name"]), "strong"),), ((str(e["from"]), "dim"),), ((str(e["value"]), ""),))) for e in found["env"]
        ]
        self.query_one("#environment", Grid).set_rows(rows)

    # --- keys -------------------------------------------------------------------------------------------------------------------

    def action_other(self, step: int) -> None:
        names = [worker.name for worker in self.story.status.workers]
        if self.worker is not None and names:
            self.dashboard.worker = names[(names.index(self.worker.name) + step) % len(names)]
            self.refresh_all()

    def action_tab(self, step: int) -> None:
        tabs = self.query_one(TabbedContent)
        tabs.active = TABS[(TABS.index(tabs.active) + step) % len(TABS)]

    def action_zoom(self, step: int) -> None:
        self._window = max(0, min(len(WINDOWS_S) - 1, self._window + step))
        self._show_lanes()

    def action_logs(self) -> None:
        worker, engine = self.target()
        self.dashboard.look_at_logs(engine.id if engine is not None else worker.name if worker is not None else "")


def _recovery_row(recovery: Recovery) -> Row:
    return Row(
        str(recovery.n),
        (
            ((str(recovery.n), "dim"),),
            ((clock(recovery.ts), ""),),
            ((recovery.kind, "good" if recovery.kind == "shadow" else "warn"),),
            ((f"{recovery.from_engine} → {recovery.to_engine or '?'}", ""),),
            ((millis(recovery.first_token_ms), "strong"),),
            ((recovery.cause, "dim"),),
        ),
    )
