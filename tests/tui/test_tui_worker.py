"""The worker view: states over time, recoveries step by step, blocks, the last end, how engines are started."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
from tui_node import BEGAN, FakeNode, block_map, engine, event, recovery, worker

from shadowsup.supervisor.protocol import Event, Recovery
from shadowsup.tui import heatmap, timeline
from shadowsup.tui.lines import Lines
from shadowsup.tui.shapes import Worker


def events(*found: dict[str, Any]) -> list[Event]:
    return [msgspec.convert(one, Event) for one in found]


def text(cells: Any) -> str:
    return "".join(part for part, _ in cells)


FAILOVER = [
    event(1, "engine.state", "chat.1 is active", at_s=-100, worker="chat", engine="chat.1", data={"state": "active"}),
    event(2, "engine.state", "chat.2 is parked", at_s=-90, worker="chat", engine="chat.2", data={"state": "parked"}),
    event(3, "worker.state", "chat is healthy", at_s=-90, worker="chat", data={"state": "healthy"}),
    event(4, "engine.drill", "SIGKILL to chat.1, as a drill", at_s=-30.1, worker="chat", engine="chat.1"),
    event(5, "engine.verdict", "chat.1 (active): engine process died", at_s=-30, level="warning", worker="chat", engine="chat.1"),
    event(6, "worker.state", "chat is recovering", at_s=-30, level="warning", worker="chat", data={"state": "recovering"}),
    event(7, "engine.state", "chat.2 is promoting", at_s=-29.99, worker="chat", engine="chat.2", data={"state": "promoting"}),
    event(8, "engine.state", "chat.2 is active", at_s=-29.98, worker="chat", engine="chat.2", data={"state": "active"}),
    event(9, "worker.state", "chat is degraded", at_s=-29.98, worker="chat", data={"state": "degraded"}),
    event(10, "engine.gone", "chat.1 is gone (signal 9)", at_s=-29.8, worker="chat", engine="chat.1", data={"exit": "signal 9"}),
]
AFTER = worker(state="degraded", since_s=29.98, epoch=2, engines=[engine("chat", 2, since_s=29.98)])


def test_a_lane_shows_each_state_in_its_time_and_what_is_short_but_notable() -> None:
    lanes = timeline.lanes(msgspec.convert(AFTER, Worker), events(*FAILOVER), BEGAN, 100.0)
    assert [lane.name for lane in lanes] == ["chat", "chat.1", "chat.2"]
    own, first, second = (text(lane.drawn(BEGAN, 100.0, 100)) for lane in lanes)
    assert own[:9].strip() == "" and own[50] == "█" and "▼" in own[68:71] and own[90] == "▓"
    # Dead: seen for its one column, then nothing.
    assert first[50] == "█" and "✖" in first[68:71] and first[80:].strip() == ""
    assert second[50] == "▒" and "◆" in second[68:72] and second[90] == "█"


def test_an_engine_from_before_the_oldest_event_has_its_state_all_the_same() -> None:
    old = msgspec.convert(worker(engines=[engine("chat", 7, since_s=50.0)]), Worker)
    lane = timeline.lanes(old, [], BEGAN, 100.0)[1]
    assert text(lane.drawn(BEGAN, 100.0, 10)) == "    ██████"


def test_a_waterfall_has_every_step_with_its_figure_in_order() -> None:
    lines = [text(line) for line in timeline.waterfall(msgspec.convert(recovery(), Recovery), 90)]
    names = [line.split()[0] for line in lines[2:8]]
    assert names == ["seen", "frozen", "promoted", "first", "fenced", "refilled"]
    assert "chat.1 → chat.2" in lines[0] and "signal 9" in lines[0]
    assert all(figure in line for figure, line in zip(("0.4 ms", "2.4 ms", "8.2 ms", "32 ms", "161 ms", "2.31 s"), lines[2:], strict=False))
    begins = [line.index("█") for line in lines[3:8]]
    assert begins[0] < begins[1] < begins[2]  # each where the one that it follows ends
    assert "3,112 blocks of KV kept" in lines[8] and "4 requests resumed" in lines[8]
    assert all(len(line) <= 92 for line in lines)


def test_a_recovery_says_what_kind_of_failure_it_was_and_by_what_evidence() -> None:
    told = recovery(fault="out_of_memory", decision="retry_smaller", evidence={"output": ["CUDA out of memory"], "batch": 64, "none": ""})
    lines = [text(line) for line in timeline.waterfall(msgspec.convert(told, Recovery), 90)]
    assert lines[-3:] == ["failure  out of memory → retry smaller", "  output: CUDA out of memory", "  batch: 64"]


def test_a_recovery_that_goes_on_shows_what_it_waits_for() -> None:
    going = recovery(first_token_ms=None, fence_ms=None, refill_ms=None, requests_resumed=None, to_engine=None)
    lines = [text(line) for line in timeline.waterfall(msgspec.convert(going, Recovery), 80)]
    assert sum("…" in line for line in lines) == 3


def test_an_end_is_explained_by_its_signal_and_by_what_was_seen() -> None:
    explained = "\n".join(text(line) for line in timeline.last_exit(msgspec.convert(AFTER, Worker), events(*FAILOVER)))
    assert "chat.1 ended with signal 9" in explained and "SIGKILL" in explained
    assert "it was a drill: SIGKILL to chat.1" in explained
    assert "out of memory" in timeline.explain_exit("signal 9") and "no such command" in timeline.explain_exit("status 127")
    assert "not known" in timeline.explain_exit("")


def test_the_heatmap_shows_each_cell_by_what_most_of_its_blocks_are() -> None:
    lines = [text(line) for line in heatmap.heatmap(block_map(), 32)]
    assert "62% valid (160)" in lines[0] and "18 being written" in lines[0] and "70 free" in lines[0]
    cells = "".join(lines[3:])
    assert len(cells) == 64
    assert cells[0] == "█" and cells[39] == "▒" and cells[40:42] == "rr" and set(cells[42:]) == {"·"}
    before_fence = block_map() | {"fenced": False}
    before_fence["cells"]["quarantined"], before_fence["cells"]["open"] = before_fence["cells"]["open"], [0] * 64
    assert "✖" in text(heatmap.heatmap(before_fence, 64)[3]) and "NOT fenced" in text(heatmap.heatmap(before_fence, 64)[0])


async def test_the_view_shows_a_worker_with_everything_that_is_asked_for(node: FakeNode, drive: Callable[..., Any]) -> None:
    for happened in FAILOVER:
        node.happen(happened)
    node.recoveries = [recovery(1, ts=BEGAN - 500), recovery(2, kind="respawn", first_token_ms=912.0)]
    node.status["workers"] = [AFTER | {"last_recovery": node.recoveries[-1]}, worker("other")]
    async with drive(size=(120, 44)) as d:
        await d.sees("└ chat.2")
        await d.press("enter")
        await d.sees("◐ degraded", "chat.1 → chat.2", "respawn", "912 ms", "promoted", "refilled", "5m00s ago")
        # The one under the cursor is the one that is drawn: the newest first, then the one before.
        await d.until(lambda: "chat.2 → chat.3" in d.app.screen.query_one("#waterfall", Lines).text)
        d.app.screen.query_one("#recovery-list").focus()
        await d.press("down")
        await d.until(lambda: "chat.1 → chat.2" in d.app.screen.query_one("#waterfall", Lines).text)
        await d.press("right_square_bracket")
        await d.sees("62% valid")
        await d.press("right_square_bracket")
        await d.sees("it was a drill")
        await d.press("right_square_bracket")
        screen = await d.sees("shadowsup.workers.main SPEC.json", "HF_TOKEN", "***")
        assert ("inspect", {"worker": "chat"}) in node.asked and screen
        await d.press("n")
        await d.sees("other  ● healthy")
        await d.press("x")
        await d.sees("Kill other.1, as a drill?")
        await d.press("escape", "escape")
        await d.sees("WORKER / ENGINE")


async def test_a_worker_without_memory_says_so(node: FakeNode, drive: Callable[..., Any]) -> None:
    from shadowsup.supervisor.errors import SupervisorError

    node.refusals["blocks"] = SupervisorError("worker chat has no KV memory now", "it gets some when its first engine is promoted")
    async with drive(size=(80, 24)) as d:
        await d.sees("└ chat.1")
        await d.press("2", "right_square_bracket")
        await d.sees("worker chat has no KV memory now")
