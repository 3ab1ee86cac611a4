"""What ``status``, ``blocks`` and ``inspect`` tell a dashboard: states with their age, pauses with their end, memory by purpose."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from node_world import running, worker
from policy_world import World

from shadowsup.memkeeper.ledger import RESERVE, Snapshot
from shadowsup.supervisor import usage
from shadowsup.supervisor.block_map import summary
from shadowsup.supervisor.errors import SupervisorError
from shadowsup.supervisor.policy.command import CommandPolicy
from shadowsup.supervisor.policy.messages import Died, Gone, RunWorker, Spawned
from shadowsup.supervisor.policy.model import WorkerSettings
from shadowsup.supervisor.since import Since


def test_memory_is_split_by_purpose_and_adds_up() -> None:
    kept = {"weights": 500, "kv": 300, "ledger": 10}
    assert usage.purposes(kept, 1000, 150) == {"weights": 500, "kv": 310, "engines": 150, "foreign": 40}
    # More than there is cannot be anybody's: figures of different moments must not make a negative rest.
    assert usage.purposes(kept, 820, 150) == {"weights": 500, "kv": 310, "engines": 10, "foreign": 0}


def test_private_memory_is_of_this_process_and_nobody_elses() -> None:
    before = usage.private_bytes(os.getpid())
    kept = bytearray(64 << 20)
    kept[:: os.sysconf("SC_PAGE_SIZE")] = b"x" * len(kept[:: os.sysconf("SC_PAGE_SIZE")])
    assert usage.private_bytes(os.getpid()) - before > 50 << 20
    assert usage.private_bytes(None) == usage.private_bytes(2**22 + 1) == 0


def test_a_state_has_an_age_until_it_changes() -> None:
    world = World()
    since = Since(world.now_s)
    since.note(world.policy, 10.0)
    world.serve()
    since.note(world.policy, 20.0)
    since.note(world.policy, 30.0)
    assert since.worker_s == 20.0
    assert set(since.engines_s.values()) == {20.0}
    gone = next(iter(since.engines_s))
    world.policy.engines.pop(gone)
    since.note(world.policy, 40.0)
    assert gone not in since.engines_s


def test_a_pause_says_what_comes_after_it_and_when() -> None:
    policy = CommandPolicy(WorkerSettings(name="cmd", backoff_s=(0.0, 5.0)))
    policy.handle(RunWorker(), 0.0)
    assert policy.backoff is None
    for n, now_s in ((1, 1.0), (2, 2.0)):
        policy.handle(Spawned(f"cmd.{n}", 100 + n), now_s)
        policy.handle(Died(f"cmd.{n}", 1), now_s)
        policy.handle(Gone(f"cmd.{n}", 1), now_s)
    assert policy.backoff == ("start an engine", 7.0, 2)
    assert policy.started == 2


def test_blocks_are_counted_by_cell_and_none_is_lost() -> None:
    blocks, rng = 1003, np.random.default_rng(3)
    valid = rng.random(blocks) < 0.5
    flags = np.where(~valid & (rng.random(blocks) < 0.2), RESERVE, 0).astype(np.uint8)
    snapshot = Snapshot(
        epoch=4,
        owner=2,
        valid=valid,
        generation=np.zeros(blocks, np.uint32),
        hashes=np.zeros((blocks, 2), np.uint64),
        tokens=np.zeros(blocks, np.uint32),
        last_use=np.arange(blocks, dtype=np.uint64),
        flags=flags,
    )
    fenced = summary(snapshot, 100, fenced=True)
    assert fenced["per_cell"] == 11
    assert len(fenced["cells"]["valid"]) == len(fenced["cells"]["age"]) == 92
    assert fenced["valid"] == int(valid.sum())
    assert fenced["valid"] + fenced["reserve"] + fenced["open"] == blocks
    assert fenced["quarantined"] == 0
    ages = fenced["cells"]["age"]
    assert ages[0] > 95 > 5 > ages[-1]  # the first blocks were used the longest ago
    # Before the fence the same blocks are not free but quarantined.
    unfenced = summary(snapshot, 100, fenced=False)
    assert (unfenced["quarantined"], unfenced["open"]) == (fenced["open"], 0)


@pytest.mark.e2e
def test_a_node_tells_what_a_dashboard_shows(tmp_path: Path) -> None:
    secrets = tmp_path / "secrets"
    secrets.write_text("PLAIN_NAME=from-the-file\n")
    secrets.chmod(0o600)
    env = worker()["env"] | {"MY_TOKEN": "abc-secret", "SHOWN": "yes"}
    with running(tmp_path, worker(env=env, env_file=str(secrets))) as node:
        node.healthy()
        assert node.answer(tokens=80)
        status = node.until(lambda s: s["workers"][0]["kv"]["valid"] > 0 and s["workers"][0]["tokens_total"] >= 80)
        (chat,) = status["workers"]
        active = chat["engines"][0]
        assert active["tokens_total"] >= 80
        assert active["memory"] > 1 << 20
        assert 0 <= active["last_step_age_s"] < 60
        assert chat["since_s"] >= 0 and active["since_s"] <= active["started_s"] + 0.01
        assert (chat["restarts"], chat["backoff"]) == (0, None)
        assert status["node"]["config"] == str(node.config)
        assert status["host"]["memory"]["kv"] >= 1 << 20
        assert 0 < status["host"]["cpu_busy_s"] < status["host"]["cpu_all_s"]

        found = node.call("blocks", worker="chat", cells=32)
        assert found["valid"] == chat["kv"]["valid"]
        assert found["blocks"] == chat["kv"]["blocks"]
        assert len(found["cells"]["valid"]) <= 32
        assert found["free"] + found["inflight"] == found["open"]

        told = node.call("inspect", worker="chat")
        shown = {entry["name"]: (entry["value"], entry["from"]) for entry in told["env"]}
        assert shown["SHOWN"] == ("yes", "env")
        assert shown["MY_TOKEN"] == ("***", "env")
        assert shown["PLAIN_NAME"] == ("***", "env_file")
        assert "abc-secret" not in str(told) and "from-the-file" not in str(told)
        with pytest.raises(SupervisorError, match="no worker"):
            node.call("blocks", worker="nobody")
