"""What every screen has: head, banner, footer, and the orders of the worker that is looked at."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from typing import TYPE_CHECKING, ClassVar, cast

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.screen import Screen
from textual.widget import Widget

from shadowsup.tui.key_line import KeyLine
from shadowsup.tui.node_line import Banner, NodeLine
from shadowsup.tui.shapes import Engine, Worker
from shadowsup.tui.story import Story

if TYPE_CHECKING:
    from shadowsup.tui.app import Dashboard

ORDERS: tuple[BindingType, ...] = (
    Binding("f", "order('failover')", "Failover", tooltip="Hand the worker over to its shadow, as planned"),
    Binding("d", "order('drain')", "Drain", tooltip="Let the worker finish its requests, then stop it"),
    Binding("r", "order('restart')", "Restart", tooltip="Replace every engine of the worker"),
    Binding("s", "order('stop')", "Stop", tooltip="Stop the worker"),
    Binding("x", "order('kill')", "Kill", tooltip="Send a signal to an engine, as a drill"),
    Binding("R", "order('reload')", "Reload", tooltip="Apply the config file to the running node", show=False),
    Binding("S", "order('stop_node')", "Stop node", tooltip="Stop the whole node", show=False),
)
"""Hidden, and without effect, unless the dashboard may write."""


class View(Screen[None]):
    """A screen of the dashboard. `show` is called with each observation while it is the present one, and when it becomes that."""

    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (100, "-normal"), (150, "-wide")]
    VERTICAL_BREAKPOINTS = [(0, "-short"), (32, "-high")]
    DEFAULT_CSS = """
    View { layout: vertical; }
    View.-stale Grid, View.-stale .ages, View.-stale NodeLine { opacity: 55%; }
    """
    BINDINGS: ClassVar[list[BindingType]] = []

    @property
    def dashboard(self) -> Dashboard:
        return cast("Dashboard", self.app)

    @property
    def story(self) -> Story:
        return self.dashboard.story

    def compose(self) -> ComposeResult:
        yield NodeLine()
        yield Banner()
        yield from self.body()
        yield KeyLine()

    @abstractmethod
    def body(self) -> Iterable[Widget]:
        """Yield what is between banner and footer."""

    @abstractmethod
    def show(self) -> None:
        """Bring everything up to the present story."""

    def target(self) -> tuple[Worker | None, Engine | None]:
        """Return the worker, and the engine, that an order is about."""
        return None, None

    def refresh_all(self) -> None:
        """Show the story, and how old it is."""
        head = self.query(NodeLine)
        if not head:  # it is being put together, or taken apart
            return
        head.first().show(self.story, self.dashboard.note)
        self.age()
        if self.story.seen:
            self.show()

    def age(self) -> None:
        """Say how old the data is, when it is not of the present."""
        text, stale = self.dashboard.banner()
        for banner in self.query(Banner):
            banner.text = text
        self.set_class(stale, "-stale")

    def on_screen_resume(self) -> None:
        self.refresh_all()

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        if action == "order" and not self.dashboard.writable:
            return False
        return super().check_action(action, parameters)

    def action_order(self, verb: str) -> None:
        """Ask whether an order shall be given."""
        worker, engine = self.target()
        self.dashboard.order(verb, worker, engine)
