"""Orders: what is sent, what will be hit, and when they count as done. A node that really does it is in `test_cli_node`."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cli_fakes import RECOVERY, STATUS, FakeSupervisor, event

from shadowsup.supervisor.cli.orders import blast_radius

Cli = Callable[..., Any]


def looks(*states: tuple[str, list[str]]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Return an answer to status that goes through (state, engines) and stays at the last; the first one is what there was before."""
    left = list(states)

    def answer(_: dict[str, Any]) -> dict[str, Any]:
        state, engines = left.pop(0) if len(left) > 1 else left[0]
        status = copy.deepcopy(STATUS)
        status["workers"][0] |= {"state": state, "reason": "exits at once", "engines": [{"id": each, "state": "x"} for each in engines]}
        return status

    return answer


def test_orders_are_passed_on_and_need_not_be_waited_for(cli: Cli, folder: Path) -> None:
    answers = {verb: {"message": f"{verb} taken"} for verb in ("restart", "drain", "failover")}
    with FakeSupervisor(folder, {**answers, "kill": None, "status": STATUS}) as supervisor:
        for verb in answers:
            assert cli("--runtime-dir", folder, verb, "chat", "--no-wait").out == f"{verb} taken\n"
        assert cli("--runtime-dir", folder, "kill", "chat.2", "--no-wait").out == "chat.2: sent KILL\n"
        for name in ("sigterm", "TERM", "15"):
            cli("--runtime-dir", folder, "kill", "chat.2", "--signal", name)
    asked = [each for each in supervisor.asked if each[0] != "status"]
    assert asked[:3] == [(verb, {"worker": "chat"}) for verb in answers]
    assert asked[3:] == [("kill", {"engine": "chat.2", "signal": name}) for name in ("KILL", "TERM", "TERM", "TERM")]


def test_a_signal_that_does_not_exist_is_a_usage_error(cli: Cli, folder: Path) -> None:
    result = cli("--runtime-dir", folder, "kill", "chat.1", "-s", "KIL")
    assert result.code == 2
    assert "did you mean KILL?" in result.err


def test_a_restart_is_done_when_every_engine_is_a_new_one(cli: Cli, folder: Path) -> None:
    status = looks(
        ("healthy", ["chat.1", "chat.2"]), ("healthy", ["chat.1", "chat.3"]), ("degraded", ["chat.3"]), ("healthy", ["chat.3", "chat.4"])
    )
    past = [event(8, "chat.3 is parked") | {"worker": "chat"}, event(9, "of another") | {"worker": "other"}]
    with FakeSupervisor(folder, {"status": status, "restart": {"message": "taken"}, "events": {"events": past}}):
        result = cli("--runtime-dir", folder, "restart", "chat")
    assert result.code == 0
    assert result.out.startswith("taken\nchat: restarted in ")
    assert "chat.3 is parked" in result.err
    assert "of another" not in result.err


def test_what_happened_while_nobody_looked_is_told_too(cli: Cli, folder: Path) -> None:
    """The order was carried out before the command line had asked for the events of it for a second time."""
    happened = [event(3, "of long ago") | {"worker": "chat"}]

    def events(args: dict[str, Any]) -> dict[str, Any]:
        answer = {"events": [one for one in happened if one["n"] >= args["since"]]}
        if len(happened) == 1:
            happened.append(event(8, "chat.2 is parked") | {"worker": "chat"})
        return answer

    status = looks(("healthy", ["chat.1"]), ("healthy", ["chat.2"]))
    with FakeSupervisor(folder, {"status": status, "restart": {}, "events": events}):
        result = cli("--runtime-dir", folder, "restart", "chat")
    assert result.code == 0
    assert "chat.2 is parked" in result.err and "long ago" not in result.err


def test_a_drain_is_done_when_no_engine_is_left(cli: Cli, folder: Path) -> None:
    status = looks(("healthy", ["chat.1"]), ("draining", ["chat.1"]), ("stopped", ["chat.1"]), ("stopped", []))
    with FakeSupervisor(folder, {"status": status, "drain": {}, "events": {"events": []}}):
        result = cli("--runtime-dir", folder, "drain", "chat")
    assert (result.code, "drained and stopped" in result.out) == (0, True)


def test_a_worker_that_goes_down_ends_the_waiting_with_its_reason(cli: Cli, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shadowsup.supervisor.cli.waiting.TAKEN_S", -1.0)
    status = looks(("healthy", ["chat.1"]), ("down", ["chat.1"]))
    with FakeSupervisor(folder, {"status": status, "restart": {}, "events": {"events": []}}):
        result = cli("--runtime-dir", folder, "restart", "chat")
    assert result.code == 1
    assert "chat is down: exits at once" in result.err


def test_waiting_can_be_bounded(cli: Cli, folder: Path) -> None:
    with FakeSupervisor(folder, {"status": looks(("healthy", ["chat.1"])), "restart": {}, "events": {"events": []}}):
        result = cli("--runtime-dir", folder, "restart", "chat", "--timeout", "0")
    assert result.code == 1
    assert "the restart of chat is not done after 0 s (it is healthy)" in result.err


def test_what_a_kill_hits_is_said() -> None:
    def of(role: str, state: str = "active", **worker: Any) -> str:
        engine = {"id": "chat.1", "role": role, "state": state, "inflight": 3}
        parked = {"id": "chat.2", "role": "shadow", "state": worker.pop("shadow", "parked")}
        return blast_radius({"name": "chat", "engine": "transformers", "engines": [engine, parked], **worker}, engine)

    assert of("active") == "chat.1 is the active engine of chat, with 3 requests: chat.2 takes them over"
    assert "no shadow is parked" in of("active", shadow="loading")
    assert "no request is on it" in of("shadow", "parked")
    assert "its requests fail" in of("active", engine="command")


def test_a_recovery_is_shown_step_by_step() -> None:
    from shadowsup.supervisor.cli.recoveries import timeline

    lines = timeline(RECOVERY).splitlines()
    assert lines[0] == "chat: chat.1 → chat.2, shadow, epoch 2 (signal 9)"
    assert [line.split()[0] for line in lines[1:-1]] == ["detect", "freeze", "promote", "first", "fence"]
    assert lines[-1] == "  3,112 blocks kept, 4 requests resumed"
    assert max(map(len, lines)) <= 80
