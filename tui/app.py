"""The dashboard: one story of a node, and the screens that show it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any, ClassVar

import msgspec
from textual import work
from textual.app import App
from textual.binding import Binding, BindingType
from textual.message import Message
from textual.screen import Screen

from shadowsup.errors import ShadowsupError
from shadowsup.tui import orders
from shadowsup.tui.config_view import ConfigView
from shadowsup.tui.dialogs import Choice, Confirm, Question
from shadowsup.tui.errors import TuiError
from shadowsup.tui.feed import Feed
from shadowsup.tui.log_buffer import LogBuffer, parse
from shadowsup.tui.logs_view import LogsView
from shadowsup.tui.overview import Overview
from shadowsup.tui.palette import BindingCommands
from shadowsup.tui.recording import Recorder, Replay
from shadowsup.tui.shapes import Engine, Worker
from shadowsup.tui.story import Observation, Story
from shadowsup.tui.view import View
from shadowsup.tui.words import clean, clock, span
from shadowsup.tui.worker_view import WorkerView

LOGS_S = 0.2
"""Between two looks into the log files."""
PLAN_S = 20.0
"""Planning a reload may ask the GPUs."""


STOP_NODE = 64
"""Exit code of the dashboard: whoever started the node with it shall stop it."""


class Observed(Message):
    """A look at the node."""

    def __init__(self, observation: Observation) -> None:
        super().__init__()
        self.observation = observation


class Missed(Message):
    """The node did not answer."""

    def __init__(self, message: str, hint: str) -> None:
        super().__init__()
        self.message = message
        self.hint = hint


class Dashboard(App[int]):
    """Shows what ``feed`` tells. ``writable``: orders may be given, the config may be saved.

    Args:
        started: it was started together with the node, which may be stopped with it; `run` returns `STOP_NODE` then.
        wall: the wall clock (tests: a frozen one).
    """

    TITLE = "shadowsup"
    MODES: ClassVar[dict[str, str | Callable[[], Screen[Any]]]] = {
        "overview": Overview,
        "worker": WorkerView,
        "logs": LogsView,
        "config": ConfigView,
    }
    COMMANDS = App.COMMANDS | {BindingCommands}
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("1", "look('overview')", "Overview", tooltip="Workers, engines, devices", show=False),
        Binding("2", "look('worker')", "Worker", tooltip="One worker: timeline, recoveries, blocks, last exit, start", show=False),
        Binding("3", "look('logs')", "Logs", tooltip="The output of everything on the node", show=False),
        Binding("4", "look('config')", "Config", tooltip="Edit the config: checked as you write, applied without a gap", show=False),
        Binding("f5", "play('pause')", "Pause", tooltip="Pause the recording, or go on"),
        Binding("f6", "play('back')", "-30 s", tooltip="Half a minute back"),
        Binding("f7", "play('forward')", "+30 s", tooltip="Half a minute forward"),
        Binding("f10", "play('faster')", "Speed", tooltip="1, 4, 16 or 64 times as fast"),
        Binding("question_mark,f1", "help", "Keys", key_display="?", tooltip="Every key of where you are"),
        Binding("ctrl+p", "command_palette", "Commands", tooltip="Everything that can be done here", show=False),
        Binding("q", "quit", "Quit", tooltip="Leave; the node goes on"),
    ]
    CSS = """
    ToastRack { margin-bottom: 2; }
    """
    NOTIFICATION_TIMEOUT = 6

    def __init__(self, feed: Feed, *, writable: bool = False, started: bool = False, wall: Callable[[], float] = time.time) -> None:
        super().__init__()
        self.feed = feed
        self.writable = writable and feed.live
        self.story = Story()
        self.logs = LogBuffer()
        self.logs_wanted: str | None = None
        """Whose output the log screen is to show when it comes."""
        self.worker = ""
        """The worker that the worker view shows."""
        self._wall = wall
        self._started = started
        self._lost: tuple[str, str] | None = None
        self._heard = wall()

    # --- life -------------------------------------------------------------------------------------------------------------------

    def on_mount(self) -> None:
        self.switch_mode("overview")
        self.feed.start(
            lambda observation: void(self.post_message(Observed(observation))),
            lambda message, hint: void(self.post_message(Missed(message, hint))),
        )
        self.set_interval(1.0, self._age)
        if isinstance(self.feed, Recorder):
            self.follow_logs()  # they are of the recording, whether somebody looks or not

    def on_unmount(self) -> None:
        self.feed.close()

    @property
    def note(self) -> str:
        """What stands at the end of the head: whether one may write, what is recorded or played."""
        mode = "" if self.writable or not self.feed.live else "read-only"
        return "  ".join(filter(None, (mode, self.feed.note)))

    @property
    def view(self) -> View | None:
        """The present screen of the dashboard, under whatever covers it."""
        return next((screen for screen in reversed(self.screen_stack) if isinstance(screen, View)), None)

    # --- what comes in ----------------------------------------------------------------------------------------------------------

    def on_observed(self, event: Observed) -> None:
        if event.observation.rewound:
            self.logs.clear()
            if isinstance(self.feed, Replay):
                self.feed.logs_again()
        try:
            self.story.take(event.observation)
        except msgspec.ValidationError as error:
            self._lost = (f"the supervisor's answer is not of this version: {error}", "use the shadowsup that started the node")
        else:
            self._lost = None
            self._heard = self._wall() if self.feed.live else event.observation.ts
        if (view := self.view) is not None and view.is_mounted:
            view.refresh_all()

    def on_missed(self, event: Missed) -> None:
        self._lost = (event.message, event.hint)
        self._age()

    def _age(self) -> None:
        if (view := self.view) is not None and view.is_mounted:
            view.age()

    def banner(self) -> tuple[str, bool]:
        """Return what the banner says, and whether what is shown is stale."""
        if self._lost is None:
            return "", False
        message, hint = self._lost
        if not self.story.seen:
            return f"{message}: {hint}" if hint else message, True
        age = span(max(0.0, self._wall() - self._heard))
        return f"NO ANSWER, trying again · shown: {clock(self._heard)}, {age} ago · {message}{': ' + hint if hint else ''}", True

    # --- going about ------------------------------------------------------------------------------------------------------------

    def action_look(self, mode: str) -> None:
        self.switch_mode(mode)

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        if action == "play" and not isinstance(self.feed, Replay):
            return False
        return super().check_action(action, parameters)

    async def action_run_key(self, key: str) -> None:
        """Do what a key does: the key line was clicked on it."""
        self.simulate_key(key)

    def action_play(self, what: str) -> None:
        """Control a recording that is played."""
        feed = self.feed
        if isinstance(feed, Replay):
            if what == "pause":
                feed.pause()
            elif what == "faster":
                feed.faster()
            else:
                feed.seek(-30.0 if what == "back" else 30.0)
            if (view := self.view) is not None:
                view.refresh_all()

    def look_at(self, worker: str) -> None:
        """Show one worker."""
        self.worker = worker
        self.switch_mode("worker")

    def look_at_logs(self, source: str) -> None:
        """Show the output of a worker or an engine; empty: of all."""
        self.logs_wanted = source
        self.switch_mode("logs")

    @work(group="logs", exclusive=True)
    async def follow_logs(self) -> None:
        """Read logs from now on, whichever screen is shown."""
        while True:
            lines = await asyncio.to_thread(lambda: [parse(raw) for raw in self.feed.log_lines()])
            if lines:
                added, gone = self.logs.extend(lines)
                if (view := self._logs_view) is not None:
                    view.grew(added, gone)
            await asyncio.sleep(LOGS_S)

    @property
    def _logs_view(self) -> LogsView | None:
        """The log screen once it exists, present or not: it keeps its place while lines come and go."""
        stack = self._screen_stacks.get("logs")
        return stack[0] if stack and isinstance(stack[0], LogsView) and stack[0].is_mounted else None

    def action_help(self) -> None:
        """Show, or hide, the keys of the widget that has the focus."""
        if self.screen.query("HelpPanel"):
            self.action_hide_help_panel()
        else:
            self.action_show_help_panel()

    @work(group="quit", exclusive=True)
    async def action_quit(self) -> None:  # type: ignore[override]
        """Leave; a text that is not saved is asked about."""
        stack = self._screen_stacks.get("config") or []
        if any(isinstance(screen, ConfigView) and screen.is_mounted and screen.modified for screen in stack):
            lost = Question(
                "Leave without saving the config?", "", (("then", "what you have written is lost"),), (Choice("Leave", danger=True),)
            )
            if await self.push_screen_wait(Confirm(lost)) is None:
                return
        if not self._started:
            self.exit(0)
            return
        name = self.story.status.node.name
        ends = (("stop", "the node is stopped, as Ctrl-C would do"), ("leave", "the node goes on in the background"))
        choices = (Choice("Stop the node", {"stop": True}, danger=True), Choice("Leave it running", {"stop": False}))
        chosen: Choice | None = await self.push_screen_wait(Confirm(Question(f"What about node {name}?", "", ends, choices)))
        if chosen is not None:
            self.exit(STOP_NODE if chosen.args["stop"] else 0)

    # --- orders -----------------------------------------------------------------------------------------------------------------

    @work(group="order", exclusive=True)
    async def order(self, verb: str, worker: Worker | None, engine: Engine | None) -> None:
        """Ask, and give the order when the answer is yes."""
        if not self.writable:
            return
        try:
            question = await self._question(verb, worker, engine)
        except ShadowsupError as error:
            self.complain(error)
            return
        choice: Choice | None = await self.push_screen_wait(Confirm(question))
        if choice is not None:
            await self.give(question.verb, choice.args)

    async def _question(self, verb: str, worker: Worker | None, engine: Engine | None) -> Question:
        if verb == "reload":
            return orders.reload(await self.answer("reload", PLAN_S, plan=True))
        if verb == "stop_node":
            return orders.stop_node(self.story, await self.answer("memory"))
        if worker is None:
            raise TuiError("no worker is selected", "put the cursor on one")
        if verb == "kill":
            target = engine or worker.active
            if target is None:
                raise TuiError(f"{worker.name} has no active engine", "put the cursor on an engine")
            return orders.kill(self.story, worker, target)
        if verb in ("drain", "stop"):
            ask = orders.drain if verb == "drain" else orders.stop
            return ask(self.story, worker, await self.answer("memory"))
        return (orders.failover if verb == "failover" else orders.restart)(self.story, worker)

    async def give(self, verb: str, args: dict[str, Any]) -> Any:
        """Give an order and tell what the supervisor said. Returns its answer, None when it refused."""
        try:
            answer = await self.answer(verb, PLAN_S, **args)
        except ShadowsupError as error:
            self.complain(error)
            return None
        self.notify(clean(str((answer or {}).get("message") or f"{verb}: taken")), title=verb, markup=False)
        return answer

    async def answer(self, verb: str, timeout_s: float = 5.0, /, **args: Any) -> Any:
        """Ask the supervisor, without holding up the screen. Raises ShadowsupError."""
        return await asyncio.to_thread(lambda: self.feed.ask(verb, timeout_s, **args))

    def complain(self, error: ShadowsupError) -> None:
        """Show an error and its hint."""
        text = "\n".join(clean(line) for line in f"{error.message}\n{error.hint}".strip().splitlines())
        self.notify(text, title="Not done", severity="error", timeout=12, markup=False)


def void(_: object) -> None:
    """For callbacks whose result nobody wants."""
