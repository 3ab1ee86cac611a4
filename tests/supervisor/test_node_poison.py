"""A whole node whose engines die of a request: classes and decisions in the records, the request failed by name, everybody else exact."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from node_world import WAIT_S, FakeNode, running, worker


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder with a short path, for sockets."""
    made = Path(tempfile.mkdtemp(prefix="shadowsup-toy-"))
    yield made
    shutil.rmtree(made)


def with_fault(fault: str) -> dict[str, object]:
    base = worker()
    return base | {"env": {**base["env"], "SHADOWSUP_FAULT": fault}}


def metric(node: FakeNode, name: str) -> float:
    connection = node.connect()
    connection.request("GET", "/metrics")
    lines = connection.getresponse().read().decode().splitlines()
    connection.close()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))


@pytest.mark.parametrize(("action", "fault"), [("segv", "segfault"), ("oom", "host_oom")])
def test_only_the_request_that_ends_engines_is_failed_and_it_is_named(folder: Path, action: str, fault: str) -> None:
    with running(folder, with_fault(f"{action}@text:BOOM")) as node:
        node.healthy()
        undisturbed = [node.answer(prompt, tokens=120) for prompt in ("Once", "Twice")]
        good = [node.ask(prompt, tokens=120) for prompt in ("Once", "Twice")]
        for answer in good:
            answer.reached(5)
        bad = node.ask("it goes BOOM", tokens=50)
        assert bad.done.wait(WAIT_S)
        for answer, text in zip(good, undisturbed, strict=True):
            assert answer.done.wait(WAIT_S)
            assert (answer.error, answer.text) == ("", text)
        # A stream that has begun, if only with a comment to keep the client waiting, ends with an event; else the status is 500.
        error = json.loads(bad.error[bad.error.index("{") :])["error"]
        assert error["code"] == "request_ends_engines"
        assert f"({fault}) while it ran alone" in error["message"]
        assert error["message"].count(f"({fault})") == 3
        node.healthy()
        node.until(lambda _: all(recovery["fault"] != "unknown" for recovery in node.recoveries()))
        recoveries = node.recoveries()
        # An engine that died before its promotion was heard of is one more rung of the failover before it, not a failover of its own.
        assert len(recoveries) in {1, 2, 3}
        assert {recovery["fault"] for recovery in recoveries} == {fault}
        assert {recovery["decision"] for recovery in recoveries} == {"restart with KV"}
        if action == "oom":
            assert recoveries[0]["evidence"]["batch"] >= 1 and recoveries[0]["evidence"]["memory"]["kv"] > 0
        assert metric(node, "shadowsup_gateway_poisoned_total") == 1
        assert metric(node, "shadowsup_gateway_isolated_total") >= 1
        assert node.answer("Once", tokens=120) == undisturbed[0]
