"""Every order shows what it does first, has its focus on Cancel, and is there only for those who may write."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from textual.widgets import Button
from tui_node import MEMORY, FakeNode, engine, recovery, status, worker

from shadowsup.tui import orders
from shadowsup.tui.dialogs import Confirm, Question
from shadowsup.tui.errors import TuiError
from shadowsup.tui.story import Observation, Story


def story(*workers: dict[str, Any]) -> Story:
    made = Story()
    made.take(Observation(status(list(workers) or None), recoveries=(recovery(),)))
    return made


def facts(question: Question) -> dict[str, str]:
    return dict(question.facts)


def test_a_failover_names_both_engines_the_streams_and_how_long_it_took_the_last_time() -> None:
    told = story()
    found = facts(orders.failover(told, told.status.workers[0]))
    assert found["ends"] == "chat.1 (pid 1001)"
    assert found["takes over"] == "chat.2 (pid 1002)"
    assert "3 requests held for about 32 ms (the last time)" in found["streams"]
    assert "none is freed: 3,112 blocks" in found["memory"]
    lonely = story(worker(engines=[engine("chat", 1)]))
    with pytest.raises(TuiError, match="no parked shadow"):
        orders.failover(lonely, lonely.status.workers[0])


def test_a_stop_counts_the_memory_that_goes_and_no_other() -> None:
    told = story(worker(), worker("other"))
    question = orders.stop(told, told.status.workers[0], MEMORY)
    # Its KV and ledger, and the weights that nobody else uses; not the other worker's.
    assert "757M of kept memory is freed" in facts(question)["memory"]
    assert facts(question)["ends"] == "chat.1 (pid 1001), chat.2 (pid 1002)"
    assert question.warning == ""
    assert "only worker that serves" in orders.stop(story(), story().status.workers[0], MEMORY).warning
    shared = {"segments": [{"worker": "", "kind": "weights", "size": 1 << 30, "leases": ["chat.1", "other.1"]}]}
    assert facts(orders.drain(told, told.status.workers[0], shared))["memory"] == "nothing is kept"
    assert "7.74G" in facts(orders.stop_node(told, MEMORY))["memory"]


def test_a_drill_says_who_takes_over() -> None:
    told = story()
    chat = told.status.workers[0]
    question = orders.kill(told, chat, chat.engines[0])
    assert facts(question)["afterwards"] == "chat.2 takes over"
    assert [choice.args["signal"] for choice in question.choices] == ["KILL", "TERM", "STOP"]
    assert facts(orders.kill(told, chat, chat.engines[1]))["streams"] == "none: it does not serve"
    alone = story(worker(engines=[engine("chat", 1)]))
    assert "no shadow is parked" in facts(orders.kill(alone, alone.status.workers[0], alone.status.workers[0].engines[0]))["afterwards"]
    with pytest.raises(TuiError, match="no process"):
        orders.kill(told, chat, type(chat.engines[0])(id="chat.9"))


def test_a_restart_tells_a_hand_over_from_a_gap() -> None:
    told = story()
    assert "through their shadows" in facts(orders.restart(told, told.status.workers[0]))["streams"]
    alone = story(worker(engines=[engine("chat", 1)]))
    assert "until a new engine has started" in facts(orders.restart(alone, alone.status.workers[0]))["streams"]
    down = story(worker(state="down", engines=[]))
    assert "does not serve" in facts(orders.restart(down, down.status.workers[0]))["streams"]


def test_a_reload_that_cannot_be_or_need_not_be_says_so() -> None:
    with pytest.raises(TuiError, match="needs a node restart"):
        orders.reload({"state": "planned", "plan": {"refused": "memkeeper.backend needs a node restart"}})
    with pytest.raises(TuiError, match="nothing to do"):
        orders.reload({"state": "nothing", "message": "nothing to do", "plan": {}})
    changes = [{"name": "chat", "change": "restarted_with_gap", "gap_s": 12.4, "text": "restarts chat"}]
    question = orders.reload({"state": "planned", "plan": {"current": "r3", "changes": changes}})
    assert question.facts == (("chat", "restarts chat (a gap of about 12 s)"),)
    assert question.choices[0].args == {"expect": "r3"}


ORDERS: tuple[tuple[str, int, tuple[str, dict[str, Any]]], ...] = (
    ("f", 1, ("failover", {"worker": "chat"})),
    ("d", 1, ("drain", {"worker": "chat"})),
    ("r", 1, ("restart", {"worker": "chat"})),
    ("s", 1, ("stop", {"worker": "chat"})),
    ("S", 1, ("stop", {})),
    ("x", 3, ("kill", {"engine": "chat.1", "signal": "STOP"})),
)
"""Key, how far the answer is from Cancel, and what the supervisor is told."""


async def test_every_order_is_given_by_a_second_deliberate_move(node: FakeNode, drive: Callable[..., Any]) -> None:
    given = []
    async with drive() as d:
        await d.sees("└ chat.1")
        for key, moves, order in ORDERS:
            await d.press(key)
            await d.until(lambda: isinstance(d.app.screen, Confirm) and d.app.focused is not None)
            assert isinstance(d.app.focused, Button) and d.app.focused.id == "cancel"
            # Enter, out of habit, does nothing.
            await d.press("enter")
            await d.until(lambda: not isinstance(d.app.screen, Confirm))
            assert node.orders() == given
            await d.press(key)
            await d.until(lambda: isinstance(d.app.screen, Confirm) and d.app.focused is not None)
            await d.press(*["right"] * moves, "enter")
            given.append(order)
            await d.until(lambda: node.orders() == given)
        await d.sees("taken")


async def test_a_reload_is_planned_before_it_is_given(node: FakeNode, drive: Callable[..., Any]) -> None:
    node.config.write_text(node.config.read_text().replace("hello", "good day"))
    async with drive() as d:
        await d.sees("└ chat.1")
        await d.press("R")
        await d.sees("replaces chat through its shadow; its KV is kept")
        await d.press("right", "enter")
        await d.until(lambda: node.orders() == [("reload", {"expect": "r1"})])


async def test_who_may_only_look_can_give_no_order_by_any_key_or_command(node: FakeNode, drive: Callable[..., Any]) -> None:
    async with drive(write=False) as d:
        await d.sees("└ chat.1", "read-only")
        await d.press(*"fdrsxSR")
        assert not isinstance(d.app.screen, Confirm)
        await d.app.run_action("order('kill')", d.app.screen)
        d.app.order("stop", d.app.story.status.workers[0], None)
        await d.app.workers.wait_for_complete()
        await d.press("ctrl+p")
        await d.type("kill")
        await d.until(lambda: "kill" in d.text())
        assert "Send a signal" not in d.text()
        await d.press("escape")
        await d.press("4")
        await d.sees("read-only (start")
        await d.type("zzz")
        await d.press("ctrl+s", "f4", "f9")
        assert "zzz" not in d.text()
        assert node.orders() == []
