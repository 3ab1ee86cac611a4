"""Logs: what is held, what is shown, and that what somebody looks at stands still."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tui_node import FakeNode, event, worker

from shadowsup.tui.log_buffer import Filter, Line, LogBuffer, level, parse
from shadowsup.tui.log_pane import LogPane
from shadowsup.tui.log_tail import LogTail


def stamped(second: int, source: str, text: str) -> str:
    return f"2023-11-14T22:{second // 60:02}:{second % 60:02}.000Z {source} | {text}"


def shown(screen: str) -> list[str]:
    """The lines of the log, without the scroll bar."""
    return [line[:99].rstrip() for line in screen.splitlines()[2:-2]]


def run(buffer: LogBuffer, wanted: Filter) -> None:
    for _ in buffer.refilter(wanted):
        pass


def texts(buffer: LogBuffer) -> list[str]:
    return [buffer.line(number).text for number in buffer.shown]


def test_a_line_is_taken_apart_and_its_level_known() -> None:
    line = parse(b"2023-11-14T22:13:20.123Z chat.1 | 22:13:20 ERROR out of memory \xff")
    assert (line.stamp, line.source) == ("2023-11-14T22:13:20.123Z", "chat.1")
    assert level(line) == "bad"
    assert level(Line("", "", "WARNING x")) == "warn" and level(Line("", "", "RuntimeError: x")) == "bad"
    assert level(Line("", "", "an ERRORless day")) == ""
    assert parse(b"no stamp at all") == Line("", "", "no stamp at all")


def test_a_hundred_thousand_lines_are_held_and_older_ones_counted() -> None:
    buffer = LogBuffer()
    for start in range(0, 250_000, 10_000):
        buffer.extend([Line("", "chat.1", f"line {n}") for n in range(start, start + 10_000)])
    assert 100_000 <= len(buffer) <= 105_000
    assert buffer.dropped == 250_000 - len(buffer)
    assert buffer.line(249_999).text == "line 249999"
    assert len(buffer.shown) == len(buffer)
    run(buffer, Filter(pattern=re.compile("7$")))
    assert len(buffer.shown) == len(buffer) // 10


def test_filters_are_by_source_by_match_and_by_no_match() -> None:
    buffer = LogBuffer()
    lines = [("chat.1", "GET /a"), ("chat.12", "POST /b"), ("chatter.1", "GET /c"), ("gateway", "GET /d")]
    buffer.extend([Line("", source, text) for source, text in lines])
    run(buffer, Filter(source="chat"))
    assert texts(buffer) == ["GET /a", "POST /b"]
    run(buffer, Filter(source="chat.1"))
    assert texts(buffer) == ["GET /a"]
    run(buffer, Filter(pattern=re.compile("GET")))
    assert texts(buffer) == ["GET /a", "GET /c", "GET /d"]
    run(buffer, Filter(pattern=re.compile("GET"), invert=True))
    assert texts(buffer) == ["POST /b"]


def test_lines_that_come_while_a_filter_is_applied_are_neither_lost_nor_twice() -> None:
    buffer = LogBuffer(keep=20_000)
    buffer.extend([Line("", "a", str(n)) for n in range(20_000)])
    came = 20_000
    for _ in buffer.refilter(Filter(pattern=re.compile("5$"))):
        buffer.extend([Line("", "a", str(n)) for n in range(came, came + 1_000)])  # and old ones go meanwhile
        came += 1_000
    assert texts(buffer) == [str(n) for n in range(buffer.dropped, came) if n % 10 == 5]


def test_the_last_words_of_an_engine_are_found_by_time() -> None:
    buffer = LogBuffer()
    buffer.extend([parse(stamped(s, f"chat.{s % 2}", f"at {s}").encode()) for s in range(60)])
    from datetime import UTC, datetime

    moment = datetime(2023, 11, 14, 22, 0, 30, 500_000, UTC).timestamp()
    number = buffer.find_before("chat.1", moment)
    assert number is not None and buffer.line(number).text == "at 29"
    assert buffer.find_before("chat.7", moment) is None


def test_files_are_merged_by_time_and_followed_over_rotation(tmp_path: Path) -> None:
    for name, seconds in (("chat", (1, 4)), ("gateway", (2, 3))):
        (tmp_path / f"{name}.log").write_text("".join(stamped(s, name, f"at {s}") + "\n" for s in seconds))
    (tmp_path / "supervisor.log").write_text("[  1.93] listening\n")  # which the scribe does not write
    tail = LogTail(lambda: {"paths": [str(tmp_path / "chat.log")]})
    first, *rest = [parse(raw) for raw in tail.read()]
    assert first == ("", "supervisor", "[  1.93] listening")
    assert [line.text for line in rest] == ["at 1", "at 2", "at 3", "at 4"]
    assert tail.read() == []
    with (tmp_path / "chat.log").open("a") as file:
        file.write(stamped(5, "chat", "at 5") + "\n")
    (tmp_path / "chat.log").rename(tmp_path / "chat.log.1")
    (tmp_path / "chat.log").write_text(stamped(6, "chat", "at 6") + "\n")
    assert [parse(raw).text for raw in tail.read()] == ["at 5", "at 6"]
    tail.close()


async def test_scrolling_up_really_stops_it_and_the_new_lines_are_counted(node: FakeNode, drive: Callable[..., Any]) -> None:
    node.write(*(stamped(n, "chat.1", f"line {n:03} {'x' * 200} end") for n in range(100)))
    async with drive(size=(100, 24)) as d:
        await d.sees("└ chat.1")
        await d.press("3")
        await d.sees("line 099", "following")
        await d.press("pageup", "right", "right")
        before = await d.until(lambda: "line 070" in d.text() and "standing still" in d.text() and d.text())
        rows = shown(before)
        node.write(*(stamped(n, "chat.1", f"line {n:03}") for n in range(100, 117)))
        await d.sees("▼ 17 new lines")
        assert shown(d.text()) == rows  # not one line has moved
        pane = d.app.screen.query_one(LogPane)
        side = pane.scroll_offset.x
        assert side > 0
        await d.press("end")
        await d.sees("line 116", "following")
        node.write(stamped(117, "chat.1", "line 117"))
        await d.until(lambda: len(pane.buffer) == 118)
        await d.until(lambda: pane.scroll_offset.y == pane.max_scroll_y)
        assert pane.scroll_offset.x == side  # the place to the side is kept


async def test_lines_that_are_looked_at_stay_when_the_oldest_go(node: FakeNode, drive: Callable[..., Any]) -> None:
    node.write(*(stamped(n, "chat.1", f"line {n:04}") for n in range(1000)))
    async with drive(size=(100, 24)) as d:
        d.app.logs._keep = 1000
        await d.sees("└ chat.1")
        await d.press("3")
        await d.sees("line 0999")
        await d.press("pageup")
        rows = shown(await d.until(lambda: "line 0970" in d.text() and d.text()))
        node.write(*(stamped(n, "chat.1", f"line {n:04}") for n in range(1000, 1500)))
        await d.sees("▼ 500 new lines", "500 older ones are only on disk")
        assert shown(d.text()) == rows


async def test_filters_sources_and_the_jump_to_the_failure(node: FakeNode, drive: Callable[..., Any]) -> None:
    node.status["workers"] = [worker(), worker("other")]
    lines = [stamped(n, "chat.1" if n % 2 else "gateway", f"GET /{n}" if n % 2 else f"INFO {n}") for n in range(200)]
    lines[101] = stamped(101, "chat.1", "\x1b[31mERROR: out of memory\x1b[0m")
    node.write(*lines)
    happened = event(1, "engine.verdict", "chat.1 (active): died", worker="chat", engine="chat.1")
    happened["ts"] = 1_700_000_000.0 - 13 * 60 - 20 + 101.2
    node.happen(happened)
    async with drive(size=(100, 24)) as d:
        await d.sees("└ chat.1")
        await d.press("3")
        await d.sees("INFO 198")
        await d.press("slash")
        await d.type("GET")
        await d.press("enter")
        await d.sees("/GET/", "99 of 200 lines")
        await d.press("exclamation_mark", "enter")
        await d.sees("!GET", "101 of 200 lines", "INFO 198")
        await d.press("slash", "enter")
        await d.sees("/GET/", "99 of 200 lines")
        # The line of the failure is hidden by the filter: the filter goes.
        await d.press("e")
        await d.sees("ERROR: out of memory", "200 of 200 lines", "standing still")
        assert "\x1b" not in d.text()
        await d.press("slash")
        await d.type("(")
        await d.press("enter")
        await d.sees("is no regular expression")
        await d.press("w")
        await d.sees("gateway", "Only lines of")
        await d.press("down", "down", "down", "enter")
        await d.sees("chat.1  100 of 200 lines")
        await d.press("escape")
        await d.sees("all sources  200 of 200 lines")
