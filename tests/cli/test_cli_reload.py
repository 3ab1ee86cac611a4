"""``reload``: the plan as it is shown, what is asked of the supervisor, and the exit code of each end."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cli_fakes import STATUS, FakeSupervisor, event

Cli = Callable[..., Any]

PLAN = {
    "current": "r1",
    "path": "/etc/node.yaml",
    "summary": "replaces chat through its shadow (env.A); mistral untouched",
    "refused": "",
    "hint": "",
    "text": "",
    "changes": [
        {
            "section": "worker",
            "name": "chat",
            "change": "replaced",
            "keys": [{"key": "env.A", "old": "", "new": "1"}],
            "kv": "kept",
            "gap_s": None,
            "text": "replaces chat through its shadow (env.A); its KV is kept",
        },
        {"section": "worker", "name": "mistral", "change": "kept", "keys": [], "kv": "", "gap_s": None, "text": "mistral untouched"},
    ],
}


def answer(state: str, n: int = 4, **plan: Any) -> dict[str, Any]:
    return {"schema": 1, "n": n, "state": state, "plan": {**PLAN, **plan}, "message": "so be it"}


def ending(state: str, message: str = "done at last") -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Return an answer to status that is in the middle of it at first."""
    left = ["preparing", "preparing", state]

    def status(_: dict[str, Any]) -> dict[str, Any]:
        now = left.pop(0) if len(left) > 1 else left[0]
        return copy.deepcopy(STATUS) | {"reload": {"n": 4, "state": now, "message": message, "revision": "r2"}}

    return status


def test_the_plan_is_a_line_for_each_part_with_the_settings_that_differ(cli: Cli, folder: Path) -> None:
    with FakeSupervisor(folder, {"status": STATUS, "reload": answer("planned", 0)}) as supervisor:
        result = cli("--runtime-dir", folder, "reload", "--plan", "some/node.yaml")
        shown = json.loads(cli("--runtime-dir", folder, "reload", "--plan", "-o", "json").out)
    assert result.code == 0
    assert result.out.splitlines() == [
        "~ replaces chat through its shadow (env.A); its KV is kept",
        "    env.A: - → 1",
        "= mistral untouched",
    ]
    asked = [arguments for verb, arguments in supervisor.asked if verb == "reload"]
    assert asked == [{"config": str(Path("some/node.yaml").absolute()), "plan": True}, {"plan": True}]
    assert shown["state"] == "planned" and shown["plan"]["changes"][0]["kv"] == "kept"


def test_it_is_done_when_the_supervisor_says_so(cli: Cli, folder: Path) -> None:
    past = {"events": [event(8, "chat: new settings: ready")]}
    with FakeSupervisor(folder, {"status": ending("done"), "reload": answer("started"), "events": past}):
        result = cli("--runtime-dir", folder, "reload")
    assert (result.code, result.out.splitlines()[-1]) == (0, "done at last")
    assert "new settings: ready" in result.err


def test_what_is_taken_back_is_a_failure_with_the_reason(cli: Cli, folder: Path) -> None:
    with FakeSupervisor(
        folder, {"status": ending("failed", "chat.3: no such model"), "reload": answer("started"), "events": {"events": []}}
    ):
        result = cli("--runtime-dir", folder, "reload")
        as_json = cli("--runtime-dir", folder, "reload", "-o", "json")
    assert result.code == as_json.code == 1
    assert "taken back" in result.err and "no such model" in result.err
    assert json.loads(as_json.out)["state"] == "failed"


def test_what_needs_a_restart_of_the_node_is_a_usage_error_in_the_plan_too(cli: Cli, folder: Path) -> None:
    refused = answer("planned", 0, refused="node.name needs a restart of the node", hint="stop it")
    with FakeSupervisor(folder, {"status": STATUS, "reload": refused}):
        result = cli("--runtime-dir", folder, "reload", "--plan")
    assert result.code == 2 and "node.name needs a restart" in result.err


def test_nothing_to_do_is_done_at_once_and_undo_takes_no_config(cli: Cli, folder: Path) -> None:
    with FakeSupervisor(folder, {"status": STATUS, "reload": answer("nothing", 0)}) as supervisor:
        assert cli("--runtime-dir", folder, "reload", "--undo").code == 0
        assert cli("--runtime-dir", folder, "reload", "node.yaml", "--undo").code == 2
    assert [arguments for verb, arguments in supervisor.asked if verb == "reload"] == [{"undo": True}]


def test_the_revisions_are_listed(cli: Cli, folder: Path) -> None:
    kept = [{"id": "r1", "ts": 0.0, "path": "/n.yaml", "digest": "x", "origin": "start"}]
    kept.append({"id": "r2", "ts": 1.0, "path": "/n.yaml", "digest": "y", "origin": "undo"})
    with FakeSupervisor(folder, {"status": STATUS, "revisions": {"schema": 1, "current": "r2", "revisions": kept}}):
        lines = cli("--runtime-dir", folder, "reload", "--revisions").out.splitlines()
    assert lines[0].startswith("  r1") and lines[1].startswith("* r2") and "undo" in lines[1]
