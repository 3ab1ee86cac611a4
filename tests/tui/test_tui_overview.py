"""The overview: what is shown of a node, and how one goes about in it."""

from __future__ import annotations

import base64
from collections.abc import Callable
from typing import Any

from tui_node import BEGAN, FakeNode, engine, event, gpu, recovery, status, worker

from shadowsup.supervisor.errors import SupervisorError
from shadowsup.tui.grid import Grid
from shadowsup.tui.node_line import Banner
from shadowsup.tui.overview import Overview


async def test_every_worker_and_engine_has_its_line(node: FakeNode, drive: Callable[..., Any]) -> None:
    node.advance_s = 1.0
    async with drive(size=(150, 40)) as d:
        await d.sees("demo", "● running", "chat", "└ chat.1", "└ chat.2", "◍ parked", "127.0.0.1:8000", "no GPU is in use", "host, 16 CPU")
        await d.until(lambda: "100" in _cells(d, "e:chat.1")[5], "the token rate")
        cells = _cells(d, "e:chat.1")
        assert (cells[1], cells[4], cells[5], cells[6]) == ("active", "25", "100", "3")
        assert _cells(d, "w:chat")[8] == "83%"  # what is neither free nor reserve


async def test_a_pause_is_shown_with_what_comes_next_and_when(node: FakeNode, drive: Callable[..., Any]) -> None:
    reason = "chat.9 ended with status 1; its last output:\nRuntimeError: out of memory"
    pause = {"what": "start an engine", "in_s": 14.2, "failures": 5}
    node.status["workers"] = [worker(state="backoff", engines=[], reason=reason, backoff=pause, restarts=4)]
    async with drive(size=(150, 40)) as d:
        # The whole reason stands below the table.
        await d.sees("◔ backoff", "start an engine in 14 s (after failure 5)", "RuntimeError: out of memory")
        node.status["workers"][0]["backoff"]["in_s"] = 2.0
        await d.sees("start an engine in 2 s")


async def test_gpus_show_what_their_memory_is_for_and_what_is_wrong(node: FakeNode, drive: Callable[..., Any]) -> None:
    node.status |= status(gpus=[gpu(0), gpu(1, state="warning", warnings=["Xid 79"]), gpu(2, stale=True, age_s=12.0)])
    async with drive(size=(150, 40)) as d:
        screen = await d.sees("0 H200", "98G/141G", "37%", "412/700 W", "61°C", "Xid 79", "figures of 12s ago", "weights 48G")
        bar = next(line for line in screen.splitlines() if "0 H200" in line)
        # 16, 70, 9 and 3 of 141 GiB, the rest free.
        runs = [bar.count(char) for char in "█▓▒░·"]
        assert runs[1] > runs[4] > runs[0] > runs[2] > runs[3] >= 1


async def test_where_figures_are_missing_nothing_breaks(node: FakeNode, drive: Callable[..., Any]) -> None:
    bare = [{"name": "chat", "state": "starting"}, worker("old", engines=[{"id": "old.1", "state": "loading"}])]
    node.status = {"node": {"name": "demo"}, "workers": bare, "gpus": [{"uuid": "GPU-1"}]}
    async with drive() as d:
        await d.sees("chat", "old.1", "◌ loading")


async def test_sorting_puts_the_worst_first_and_keeps_engines_with_their_worker(node: FakeNode, drive: Callable[..., Any]) -> None:
    node.status["workers"] = [worker("aaa"), worker("bbb", state="down"), worker("ccc", state="degraded")]
    async with drive() as d:
        await d.sees("└ ccc.2")
        await d.press("o")
        await d.sees("Sort workers by")
        await d.press("down", "enter")
        await d.until(lambda: _keys(d)[:2] == ["w:bbb", "e:bbb.1"])
        assert _keys(d) == [f"{kind}:{name}" for w in ("bbb", "ccc", "aaa") for kind, name in (("w", w), ("e", f"{w}.1"), ("e", f"{w}.2"))]


async def test_the_filter_hides_what_does_not_match_and_says_so(node: FakeNode, drive: Callable[..., Any]) -> None:
    node.status["workers"] = [worker("aaa"), worker("bbb")]
    async with drive() as d:
        await d.sees("└ bbb.2")
        await d.press("slash")
        await d.type("bbb.2")
        await d.press("enter")
        await d.until(lambda: _keys(d) == ["w:bbb", "e:bbb.2"])
        await d.sees("filter: bbb.2")


async def test_the_cursor_stays_on_its_row_when_rows_come_and_go(node: FakeNode, drive: Callable[..., Any]) -> None:
    node.status["workers"] = [worker("bbb")]
    async with drive() as d:
        await d.sees("└ bbb.2")
        await d.press("down", "down")
        await d.until(lambda: d.app.screen.table.selected.key == "e:bbb.2")
        node.status["workers"] = [worker("aaa"), worker("bbb")]
        await d.sees("└ aaa.1")
        assert d.app.screen.table.selected.key == "e:bbb.2"


async def test_a_supervisor_that_is_gone_leaves_a_banner_dimmed_figures_and_their_age(node: FakeNode, drive: Callable[..., Any]) -> None:
    now = [BEGAN]
    async with drive(wall=lambda: now[0]) as d:
        await d.sees("└ chat.1")
        node.stop()
        screen = await d.sees("NO ANSWER", "no supervisor serves this node")
        assert "└ chat.1" in screen  # the last that is known stays
        now[0] = BEGAN + 42
        d.app._age()
        await d.sees("42s ago")
        assert d.app.screen.has_class("-stale")
        again = FakeNode(node.folder, status([worker("chat", epoch=9)]))
        with again:
            await d.sees("epoch 9")
            await d.until(lambda: not d.app.screen.has_class("-stale") and d.app.screen.query_one(Banner).text == "")


async def test_an_answer_of_another_protocol_is_said_and_not_shown(node: FakeNode, drive: Callable[..., Any]) -> None:
    async with drive() as d:
        await d.sees("└ chat.1")
        node.status["workers"] = "none"
        await d.sees("not of this version")
        assert "└ chat.1" in d.text()


async def test_events_follow_until_somebody_looks_further_up(node: FakeNode, drive: Callable[..., Any]) -> None:
    for n in range(1, 60):
        node.happen(event(n, "engine.state", f"happened {n}", engine="chat.1"))
    async with drive() as d:
        await d.sees("happened 59")
        events = d.app.screen.query_one("#events", Grid)
        events.focus()
        await d.press("up")
        node.happen(event(60, "engine.state", "happened 60"))
        await d.until(lambda: events.rows[-1].key == "n:60")
        assert events.selected is not None and events.selected.key == "n:58"
        await d.press("end")
        node.happen(event(61, "engine.state", "happened 61"))
        await d.sees("happened 61")


async def test_a_line_is_copied_through_the_terminal(node: FakeNode, drive: Callable[..., Any]) -> None:
    written = []
    async with drive() as d:
        await d.sees("└ chat.1")
        d.app._driver.write = written.append
        await d.press("down", "y")
        copied = await d.until(lambda: next((data for data in written if "\x1b]52;c;" in data), None))
        payload = copied.split("\x1b]52;c;")[1].split("\a")[0]
        assert base64.b64decode(payload).decode().startswith("chat.1 active active pid 1001")


async def test_what_an_engine_said_cannot_move_the_cursor_of_the_terminal(node: FakeNode, drive: Callable[..., Any]) -> None:
    node.status["workers"] = [worker(state="down", reason="bad \x1b[2J\x1b]0;owned\x07 \x00 end")]
    async with drive(size=(150, 40)) as d:
        await d.sees("bad", "end")
        assert "\x1b" not in d.text() and "owned" not in d.text()


async def test_keys_commands_and_footer_come_from_the_same_bindings(node: FakeNode, drive: Callable[..., Any]) -> None:
    async with drive(write=False, size=(150, 40)) as d:
        await d.sees("read-only", "Filter")
        assert "Failover" not in d.text()
        await d.press("question_mark")
        screen = await d.sees("Filter Only workers and engines")
        assert "Failover" not in screen
        await d.press("question_mark")
        await d.press("ctrl+p")
        await d.type("sort")
        await d.sees("Sort the workers")
        await d.press("escape")
    async with drive(write=True, size=(150, 40)) as d:
        await d.sees("Failover", "Kill")
        await d.press("ctrl+p")
        await d.type("failover")
        await d.sees("Hand the worker over to its shadow")
        await d.press("escape")


async def test_at_eighty_columns_the_columns_that_matter_stay(node: FakeNode, drive: Callable[..., Any]) -> None:
    async with drive(size=(80, 24)) as d:
        screen = await d.sees("└ chat.2", "STATE", "TOK/S", "BEAT", "WHY")
        assert "STEP/S" not in screen
        assert all(len(line) <= 80 for line in screen.splitlines())
        assert isinstance(d.app.screen, Overview)


async def test_without_colour_states_have_their_signs(node: FakeNode, drive: Callable[..., Any], monkeypatch: Any) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    node.status["workers"] = [worker(state="degraded", engines=[engine("chat", 1), engine("chat", 2, "shadow", state="loading")])]
    async with drive() as d:
        await d.sees("◐ degraded", "◌ loading")
        assert d.app.no_color
        strips = d.app.screen._compositor.render_strips(d.app.size)
        shown = [filtered for strip in strips for filtered in _filtered(d, strip)]
        colours = {
            c for segment in shown if segment.style for c in (segment.style.color, segment.style.bgcolor) if c is not None and c.triplet
        }
        assert all(c.triplet.red == c.triplet.green == c.triplet.blue for c in colours)


async def test_recoveries_are_marked_in_the_histories(node: FakeNode, drive: Callable[..., Any]) -> None:
    node.status["workers"] = [worker(last_recovery=recovery())]
    async with drive(size=(150, 40)) as d:
        await d.sees("╿", "last recovery: shadow, chat.1 → chat.2")


def _filtered(d: Any, strip: Any) -> Any:
    from textual.color import Color

    for filtering in d.app._filters:
        if filtering.enabled:
            strip = strip.apply_filter(filtering, Color(0, 0, 0))
    return strip


def _keys(d: Any) -> list[str]:
    return [row.key for row in d.app.screen.query_one("#workers", Grid).rows]


def _cells(d: Any, key: str) -> list[str]:
    row = next(row for row in d.app.screen.query_one("#workers", Grid).rows if row.key == key)
    return ["".join(text for text, _ in cell) for cell in row.cells]


async def test_an_order_that_is_refused_says_why(node: FakeNode, drive: Callable[..., Any]) -> None:
    node.refusals["failover"] = SupervisorError("worker chat is busy", "wait")
    async with drive() as d:
        await d.sees("└ chat.1")
        await d.press("f")
        await d.sees("Hand chat over")
        await d.press("right", "enter")
        await d.sees("worker chat is busy", "wait")
