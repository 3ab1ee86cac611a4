"""``bench chaos``: real faults on a real node of the toy engine, and a judge that is not easily satisfied."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from bench_world import ENGINE_PATH
from click.testing import CliRunner

from shadowsup.supervisor.bench import chaos, chaos_leaks
from shadowsup.supervisor.bench.chaos_faults import Kind, Strike, chosen, missing, pids_of, possible, strike
from shadowsup.supervisor.bench.chaos_load import Load, Question
from shadowsup.supervisor.bench.client import Stream
from shadowsup.supervisor.bench.tables import tables
from shadowsup.supervisor.cli import bench as command
from shadowsup.supervisor.errors import SupervisorError


def toy() -> dict[str, Any]:
    content = chaos.toy_content()
    content["workers"][0]["env"] |= {"PYTHONPATH": ENGINE_PATH, "PYTHONSAFEPATH": "1"}
    content["workers"][0]["health"] = {"hang": {"floor": "500ms", "ceiling": "2s"}}
    return content


@pytest.mark.e2e
@pytest.mark.timeout(180)
async def test_faults_of_every_kind_change_no_token_and_leave_nothing() -> None:
    """P01, P02, P05, P31, P34, P35 under load: whichever process dies, at whatever instant. A failure says the seed."""
    plan = chaos.Plan(faults=30, seed=20_261_130, settle_timeout_s=60.0)
    said: list[str] = []
    document = await chaos.measure(toy(), plan, said.append, start=chaos.TOY_START)
    what = json.dumps({name: document[name] for name in ("plan", "wrong", "stuck", "leaks", "faults")}, indent=1)
    assert not chaos.failed(document), what
    assert document["faults"]["total"] == 30
    assert len(document["faults"]["by_kind"]) >= 8, what
    assert document["recoveries"]["total"] >= 6, what
    assert document["tokens_compared"] > 30 * 48, what
    assert document["blocks"]["share"] >= 0.95, what
    assert "seed 20261130" in said
    assert all(len(row) == len(table.columns) for table in tables(document) for row in table.rows)


# --- the judge ------------------------------------------------------------------------------------------------------------------


def stream(text: str, *, error: str | None = None, cached: int = 32) -> Stream:
    made = Stream(sent_s=0.0, text=text, token_ids=list(text.encode()), error=error, done=error is None)
    made.finish_reason = "length" if made.done else None
    made.usage = {"prompt_tokens": 40, "prompt_tokens_details": {"cached_tokens": cached}}
    return made


def load() -> Load:
    asked = [Question(payload={}, reference=stream("abcd"))]
    return Load(None, "", asked, 1, seed=0, block_tokens=16, silence_s=10.0, context=lambda at_s: {"faults": ["7 active"]})  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["abc", "abcdd", "abxd", ""])
def test_a_token_lost_repeated_or_changed_is_wrong_and_names_the_faults_around_it(text: str) -> None:
    judge = load()
    judge._judge(judge._asked[0], stream(text), cut=False)
    assert judge.tally.wrong[0]["faults"] == ["7 active"]


def test_a_stream_that_the_gateways_death_cut_is_compared_as_far_as_it_came() -> None:
    judge = load()
    judge._judge(judge._asked[0], stream("ab", error="ClientPayloadError"), cut=True)
    assert (judge.tally.cut, judge.tally.finished, judge.tally.wrong) == (1, 0, [])
    judge._judge(judge._asked[0], stream("ax", error="ClientPayloadError"), cut=True)
    assert len(judge.tally.wrong) == 1
    judge._judge(judge._asked[0], stream("ab", error="ClientPayloadError"), cut=False)
    assert len(judge.tally.wrong) == 2


def test_blocks_that_were_not_found_in_kept_memory_are_counted() -> None:
    judge = load()
    judge._judge(judge._asked[0], stream("abcd", cached=16), cut=False)
    assert (judge.tally.blocks, judge.tally.cached) == (2, 1)


@pytest.mark.parametrize(
    ("changed", "value"),
    [
        ("wrong", [{"what": "token 3 differs"}]),
        ("stuck", "worker chat is degraded"),
        ("leaks", {"processes": ["7 python"]}),
    ],
)
def test_anything_wrong_fails_the_run(changed: str, value: Any) -> None:
    fine: dict[str, Any] = {"wrong": [], "stuck": None, "leaks": {"processes": [], "fds": []}}
    assert not chaos.failed(fine)
    assert chaos.failed(fine | {changed: value})


# --- faults ---------------------------------------------------------------------------------------------------------------------


def status(**changes: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    part = {"state": "running", "pid": 999_901}
    engines = [
        {"role": "active", "pid": 999_911, "id": "chat.1", "state": "active"},
        {"role": "shadow", "pid": 999_912, "id": "chat.2", "state": "loading"},
    ]
    worker = {"name": "chat", "state": "healthy", "shadows": 1, "engines": engines}
    found = {
        "node": {"pid": 999_900},
        "memkeeper": {**part, "pid": 999_902},
        "gateway": {**part, "pid": 999_903},
        "scribe": {**part, "pid": 999_904},
        "sensor": {"state": "stopped", "pid": None},
        "nursery": [{**part, "pid": 999_905}],
        "workers": [worker],
    } | changes
    return found, worker


def test_kinds_are_named_in_several_spellings_and_an_unknown_one_lists_them() -> None:
    assert chosen(["stopped-active", "active+shadow"]) == [Kind.STOPPED, Kind.BOTH]
    assert chosen([]) == list(Kind)
    with pytest.raises(SupervisorError) as error:
        chosen(["gremlin"])
    assert "memkeeper+active" in error.value.hint


def test_a_node_without_sensor_and_nursery_is_spared_those_kinds() -> None:
    found, worker = status(nursery=[])
    kinds = possible(list(Kind), found, worker)
    assert Kind.SENSOR not in kinds and Kind.SPARE not in kinds and Kind.NURSERY_ACTIVE not in kinds
    assert Kind.ACTIVE in kinds and Kind.GATEWAY in kinds


def test_an_engine_that_loads_is_killed_but_not_stopped() -> None:
    found, worker = status(nursery=[])
    assert pids_of(found, worker)["shadow"] == 999_912
    assert "shadow" not in pids_of(found, worker, settled=True)
    assert pids_of(found, worker, settled=True)["active"] == 999_911


def test_a_node_is_whole_only_when_whoever_was_struck_has_been_replaced() -> None:
    found, worker = status()
    struck = Strike(number=1, kind=Kind.KEEPER, at_s=0.0, pids={"memkeeper": 999_902}, engine=None)
    assert "memkeeper (pid 999902)" in (missing(found, worker, [struck]) or "")
    again, worker = status(memkeeper={"state": "running", "pid": 999_999})
    assert missing(again, worker, [struck]) is None
    starting, worker = status(memkeeper={"state": "starting", "pid": 999_999})
    assert missing(starting, worker, [struck]) == "memkeeper is starting"
    worker["state"] = "degraded"
    assert "degraded" in (missing(again, worker, []) or "")


def test_a_strike_hits_exactly_the_targets_of_its_kind() -> None:
    sleepers = {name: subprocess.Popen(["sleep", "60"]) for name in ("active", "memkeeper", "gateway")}
    try:
        hit = strike(Kind.KEEPER_ACTIVE, {name: each.pid for name, each in sleepers.items()}, random.Random(1))
        assert set(hit) == {"active", "memkeeper"}
        assert [sleepers[name].wait(60) for name in ("active", "memkeeper")] == [-signal.SIGKILL] * 2
        assert sleepers["gateway"].poll() is None
    finally:
        for each in sleepers.values():
            each.kill()
            each.wait()


# --- leaks ----------------------------------------------------------------------------------------------------------------------


def test_what_a_node_leaves_is_found(tmp_path: Path) -> None:
    for name in ("node.yaml", "start.log", "state/events.jsonl", "state/logs/chat.log", "state/logs/chat.log.1"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    assert chaos_leaks.files(tmp_path) == []
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "link-chat.7.sock").touch()
    (tmp_path / "state" / ".events.new").touch()
    assert chaos_leaks.files(tmp_path) == ["run", "run/link-chat.7.sock", "state/.events.new"]
    left = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()", str(tmp_path)], stdin=subprocess.PIPE)
    try:
        assert list(chaos_leaks.processes(tmp_path)) == [left.pid]
    finally:
        left.kill()
        left.communicate()


def test_a_file_in_dev_shm_is_left_when_no_process_uses_it() -> None:
    before = chaos_leaks.shared_memory()
    path = Path("/dev/shm/shadowsup-chaos-test")
    with path.open("w") as file:
        try:
            assert path.name not in chaos_leaks.left_shared_memory(before)
            file.close()
            assert path.name in chaos_leaks.left_shared_memory(before)
        finally:
            path.unlink()


def test_the_command_refuses_what_makes_no_sense(tmp_path: Path) -> None:
    for words in (["chaos", "--toy", str(tmp_path / "node.yaml")], ["chaos", "--kinds", "gremlin"]):
        result = CliRunner().invoke(command.bench, words)
        assert isinstance(result.exception, SupervisorError)
        assert result.exception.exit_code == 2
