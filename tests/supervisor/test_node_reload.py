"""A changed config is applied to a whole running node: real processes, streams that go on, and all of it taken back when it fails."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from node_world import WAIT_S, FakeNode, running, worker

from shadowsup.supervisor.errors import SupervisorError
from shadowsup.supervisor.reload import SETTLE_S

pytestmark = pytest.mark.timeout(120)
ENDS = ("done", "failed", "superseded")


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path


def up(node: FakeNode, *workers: str) -> None:
    """Wait until all of it is up."""
    for name in workers or ("chat",):
        node.worker_is("healthy", name)
    node.until(lambda s: s["node"]["state"] == "running")


def write(toy: FakeNode, *workers: dict[str, Any], **sections: Any) -> None:
    """Save another config in the place of the present one."""
    config = json.loads(toy.config.read_text())
    toy.config.write_text(json.dumps({**config, **sections, "workers": list(workers) or config["workers"]}))


def reload(node: FakeNode, **args: Any) -> dict[str, Any]:
    """Reload and wait for the end; return how it went."""
    answer = node.call("reload", **args)
    assert answer["state"] in ("started", "queued"), answer
    return ended(node, answer["n"])


def ended(node: FakeNode, n: int) -> dict[str, Any]:
    found = node.until(lambda s: s["reload"] is not None and s["reload"]["n"] >= n and s["reload"]["state"] in ENDS)
    progress: dict[str, Any] = found["reload"]
    return progress


def models(node: FakeNode) -> set[str]:
    connection = node.connect()
    try:
        connection.request("GET", "/v1/models")
        return {model["id"] for model in json.load(connection.getresponse())["data"]}
    finally:
        connection.close()


def revisions(node: FakeNode) -> set[str]:
    return {engine["revision"] for each in node.status()["workers"] for engine in each["engines"]}


def test_a_changed_worker_is_replaced_through_its_shadow_with_its_blocks_and_back_again(folder: Path) -> None:
    with running(folder) as node:
        up(node)
        whole = node.answer(tokens=150)
        assert node.call("reload")["state"] == "nothing"
        first = node.config.read_text()
        write(node, worker(env={**worker()["env"], "FOO": "bar"}))
        plan = node.call("reload", plan=True)
        assert plan["state"] == "planned" and "replaces chat through its shadow" in plan["plan"]["summary"]
        assert [change["change"] for change in plan["plan"]["changes"]] == ["replaced"]
        answer = node.ask(tokens=150)
        answer.reached(20)
        before = revisions(node)
        progress = reload(node)
        assert (progress["state"], progress["revision"]) == ("done", "r2"), progress
        assert answer.done.wait(WAIT_S)
        assert (answer.error, answer.text) == ("", whole), "no token was lost, repeated or changed"
        recovery = node.recovery(1)
        assert recovery["cause"] == "planned hand-over" and recovery["blocks_kept"] > 0 and recovery["blocks_dropped"] == 0
        status = node.until(lambda s: s["workers"][0]["state"] == "healthy" and not before & revisions(node))
        records = json.loads((node.runtime / "processes.json").read_text())["processes"]
        assert {one["data"]["revision"] for one in records if one["what"] == "engine"} == {status["workers"][0]["revision"]}
        node.until(lambda s: len(s["nursery"]) == 1)  # the one with the old environment has gone
        # Back: through a shadow as well, and the file is as it was.
        progress = reload(node, undo=True)
        assert (progress["state"], progress["revision"]) == ("done", "r3") and "holds it again" in progress["message"]
        assert node.config.read_text() == first
        assert [one["origin"] for one in node.call("revisions")["revisions"]] == ["start", "reload", "undo"]


def test_one_that_does_not_come_up_is_taken_back_and_nobody_notices(folder: Path) -> None:
    with running(folder) as node:
        up(node)
        whole, before = node.answer(tokens=150), revisions(node)
        answer = node.ask(tokens=150)
        answer.reached(10)
        pids = {engine["id"]: engine["pid"] for engine in node.status()["workers"][0]["engines"]}
        for change, words in (
            ({"args": {"step_s": 0.01, "fail": "load"}}, "told to fail in load"),
            ({"args": {"step_s": 0.01, "fail": "warm"}, "kv": {"size": "2MiB"}}, "told to fail in warm"),
            ({"env": {**worker()["env"], "PYTHONPATH": "/nowhere"}}, "fake_engine"),
        ):
            write(node, worker(**change))
            progress = reload(node)
            assert progress["state"] == "failed" and words in progress["message"], progress
            assert {e["id"]: e["pid"] for e in node.status()["workers"][0]["engines"]} == pids
        assert answer.done.wait(WAIT_S)
        assert (answer.error, answer.text) == ("", whole)
        status = node.until(lambda s: s["workers"][0]["state"] == "healthy" and s["memkeeper"]["segments"] == 3)
        assert status["config"]["revision"] == "r1" and revisions(node) == before and node.recoveries() == []
        assert node.events("reload.failed")[-1]["level"] == "error"


def test_one_that_fails_when_it_takes_over_hands_back_to_the_old_shadow(folder: Path) -> None:
    with running(folder) as node:
        up(node)
        whole, before = node.answer(tokens=150), revisions(node)
        answer = node.ask(tokens=150)
        answer.reached(10)
        write(node, worker(args={"step_s": 0.01, "fail": "step"}, kv={"size": "2MiB"}))
        progress = reload(node)
        assert progress["state"] == "failed" and "told to fail in step" in progress["message"]
        assert answer.done.wait(WAIT_S)
        assert (answer.error, answer.text) == ("", whole)
        node.until(lambda s: s["workers"][0]["state"] == "healthy" and s["memkeeper"]["segments"] == 3)
        assert node.recovery(max(one["n"] for one in node.recoveries()))["blocks_kept"] > 0, "the old blocks were left in good order"
        assert revisions(node) == before


def test_workers_come_and_go_the_gateway_moves_and_limits_change_without_a_new_engine(folder: Path) -> None:
    second = worker(name="code")
    with running(folder, worker(), second) as node:
        up(node, "chat", "code")
        engines = [engine["id"] for engine in node.status()["workers"][0]["engines"]]
        answer = node.ask(tokens=200)
        answer.reached(5)
        old = node.status()["gateway"]["listen"]
        write(node, worker(served_name="gpt", shadows=0, stop={"timeout": "4s"}), worker(name="prose"), gateway={"listen": "127.0.0.2:0"})
        progress = reload(node)
        assert progress["state"] == "done", progress
        status = node.status()
        assert [(each["name"], each["model"]) for each in status["workers"]] == [("chat", "gpt"), ("prose", "prose")]
        assert status["gateway"]["listen"] != old
        node.until(lambda s: [e["id"] for e in s["workers"][0]["engines"]] == engines[:1])
        assert answer.done.wait(WAIT_S)
        assert not answer.error, "the stream that came by the old address goes on"
        node.until(lambda _: models(node) == {"gpt", "prose"})  # the gateway is sent its routes
        node.until(lambda s: s["workers"][0]["state"] == "healthy" and s["workers"][0]["give_up_after_s"] > 0)
        # What is worth nothing when it is lost with the supervisor: the next one must find the config that is in force.
        node.close()
        node.process.kill()
        node.process.wait()
        node.process = node.start()
        found = node.until(lambda s: s["node"]["state"] == "running")
        assert [each["name"] for each in found["workers"]] == ["chat", "prose"]
        assert revisions(node) == {each["revision"] for each in found["workers"]}


def test_a_config_that_is_wrong_or_needs_a_restart_changes_nothing(folder: Path) -> None:
    with running(folder) as node:
        up(node)
        write(node, worker(nonsense=1))
        with pytest.raises(SupervisorError, match="unknown key 'nonsense'") as invalid:
            node.call("reload")
        assert invalid.value.exit_code == 2
        write(node, worker(env={"A": "1"}), node={"name": "other", "state_dir": str(node.state)})
        with pytest.raises(SupervisorError, match="restart of the node") as refused:
            node.call("reload")
        assert refused.value.exit_code == 2
        assert "restart of the node" in node.call("reload", plan=True)["plan"]["refused"]
        with pytest.raises(SupervisorError, match="r1 is in force, not r7"):
            node.call("reload", expect="r7")
        assert node.status()["reload"] is None and node.status()["config"]["revision"] == "r1"


def test_of_saves_in_quick_succession_the_last_one_wins_and_one_in_the_midst_of_another_takes_its_place(folder: Path) -> None:
    with running(folder) as node:
        up(node)
        numbers, began_s = [], time.monotonic()
        for value in "abc":
            write(node, worker(env={**worker()["env"], "FOO": value}, args={"step_s": 0.01, "load_s": 0.0 if value == "c" else 20.0}))
            numbers.append(node.call("reload")["n"])
        quick = time.monotonic() - began_s < SETTLE_S  # on a machine that does other things as well they may not have been
        progress = ended(node, numbers[-1])
        assert progress["state"] == "done" and (len(node.events("reload.started")) == 1 or not quick)
        # The next one would load for a minute: nothing has handed over, so another save need not wait for it.
        write(node, worker(args={"step_s": 0.01, "load_s": 60.0}))
        slow = node.call("reload")["n"]
        node.until(lambda s: s["reload"]["n"] == slow and s["reload"]["workers"].get("chat") == "starting")
        write(node, worker(args={"step_s": 0.02}))
        progress = reload(node)
        assert progress["state"] == "done" and progress["revision"] == "r3", "what was superseded never was in force"
        assert sorted(event["data"]["n"] for event in node.events("reload.superseded")) == [*numbers[:-1], slow]
        node.until(lambda s: s["workers"][0]["state"] == "healthy" and len(s["workers"][0]["engines"]) == 2)


def test_a_reload_waits_for_a_recovery_and_for_one_that_is_finishing(folder: Path) -> None:
    # The answer of code ends when the reload has come as far as to wait for it, and well within its stop timeout.
    with running(folder, worker(), worker(name="code", stop={"timeout": "60s"})) as node:
        up(node, "chat", "code")
        node.call("kill", engine="chat.1", signal="KILL")
        node.until(lambda _: bool(node.recoveries()))
        write(node, worker(env={**worker()["env"], "FOO": "a"}))  # and without code, which has a long answer to finish
        held = node.ask(tokens=800, model="code")
        held.reached(5)
        first = node.call("reload")["n"]
        node.until(lambda s: s["reload"]["n"] == first and s["reload"]["state"] == "finishing")
        assert node.recoveries()[0]["refill_ms"] is not None, "the recovery came first"
        write(node, worker(env={**worker()["env"], "FOO": "b"}))
        answer = node.call("reload")
        assert answer["state"] == "queued" and node.status()["reload"]["queued"]
        assert ended(node, answer["n"])["state"] == "done"
        assert held.done.wait(WAIT_S)
        assert not held.error, "a worker that is removed finishes what it has"
        assert [event["data"]["revision"] for event in node.events("reload.done")] == ["r2", "r3"]


def test_a_supervisor_that_dies_in_the_middle_is_followed_by_one_that_goes_on_with_what_was_in_force(folder: Path) -> None:
    with running(folder) as node:
        up(node)
        whole = node.answer(tokens=100)
        active = node.engine("active")["id"]
        write(node, worker(args={"step_s": 0.01, "load_s": 60.0}, kv={"size": "2MiB"}))
        n = node.call("reload")["n"]
        node.until(lambda s: s["reload"]["n"] == n and s["reload"]["workers"].get("chat") == "starting")
        node.close()
        node.process.send_signal(signal.SIGKILL)
        node.process.wait()
        node.process = node.start()
        node.until(lambda s: s["node"]["state"] == "running" and s["workers"][0]["state"] == "healthy")
        status = node.until(lambda s: len(s["workers"][0]["engines"]) == 2)
        assert revisions(node) == {status["workers"][0]["revision"]} and node.engine("active")["id"] == active
        assert node.answer(tokens=100) == whole
        assert node.call("reload", plan=True)["plan"]["changes"][0]["change"] == "replaced", "the file waits to be applied"


def test_p28_a_runtime_directory_that_takes_nothing_more_leaves_what_serves_as_it_is(folder: Path) -> None:
    """An engine that could not be recorded would be forgotten by the next supervisor: so there is none, and the old ones go on."""
    with running(folder) as node:
        up(node)
        before = revisions(node)
        answer = node.ask(tokens=100)
        answer.reached(5)
        obstacle = node.runtime / f".processes.json.{node.process.pid}"
        obstacle.mkdir()
        write(node, worker(args={"step_s": 0.02}))
        progress = reload(node)
        assert progress["state"] == "failed" and "cannot write" in progress["message"], progress
        assert answer.done.wait(WAIT_S) and not answer.error
        assert revisions(node) == before and node.status()["workers"][0]["state"] == "healthy"
        obstacle.rmdir()
        assert reload(node)["state"] == "done"


def test_a_worker_that_is_added_and_does_not_come_up_takes_everything_back_with_its_last_words(folder: Path) -> None:
    bad = {"name": "bad", "engine": "command", "command": ["/bin/sh", "-c", "echo dying now; exit 3"], "ready": {"http": "/"}}
    with running(folder) as node:
        up(node)
        before = revisions(node)
        write(node, worker(args={"step_s": 0.02}), bad)
        progress = reload(node)
        assert progress["state"] == "failed" and "dying now" in progress["message"], progress
        status = node.until(
            lambda s: len(s["workers"]) == 1 and s["workers"][0]["state"] == "healthy" and len(s["workers"][0]["engines"]) == 2
        )
        assert revisions(node) == before and status["config"]["revision"] == "r1"
