"""A node with real vLLM in two ranks (tensor parallelism) on the CPU: every process of an engine killed or stopped."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_asyncio
from vllm_asking import PROMPTS, ask, ask_all, check_successor, over, scramble
from vllm_world import BLOCK, config, core_of, python, ranks_of

from shadowsup.supervisor.bench import failover
from shadowsup.supervisor.bench.node import Node, engine_of, running

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.e2e,
    pytest.mark.timeout(240),
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.skipif(python() is None, reason="no interpreter with vLLM (SHADOWSUP_VLLM_PYTHON)"),
]


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def pair(model: Path) -> AsyncIterator[Node]:
    """A node whose engines have two ranks."""
    shm = set(Path("/dev/shm").iterdir())
    async with running(config(model, shadows=1, ranks=2)) as node:
        yield node
    assert set(Path("/dev/shm").iterdir()) - shm == set()
    assert not node.runtime_dir.exists()


@pytest_asyncio.fixture(autouse=True, loop_scope="session")
async def _healthy(pair: Node) -> None:
    """Whatever the test before this one came to."""
    await pair.wait_for("healthy", "chat", 150)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def answers(pair: Node) -> list[list[int]]:
    """What an engine that nobody disturbs says."""
    return [ids for ids, _ in await ask_all(pair)]


def victim_of(leader: int, which: str) -> psutil.Process:
    if which == "server":
        return psutil.Process(leader)
    return core_of(leader) if which == "core" else ranks_of(leader)[int(which)]


@pytest.mark.parametrize("which", ["0", "1", "core", "server"])
async def test_whichever_process_is_killed_all_go_and_the_shadow_takes_over(pair: Node, answers: list[list[int]], which: str) -> None:
    active = await engine_of(pair, "active")
    tree = [psutil.Process(active["pid"]), core_of(active["pid"]), *ranks_of(active["pid"])]
    assert len(tree) == 4
    victim_of(active["pid"], which).kill()
    recovery = await check_successor(pair, answers, active["id"])
    assert recovery["kind"] == "shadow"
    assert all(over(process) for process in tree)


@pytest.mark.parametrize("rank", [0, 1])
async def test_streams_go_on_when_a_rank_dies_under_them(pair: Node, monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    before = failover.engine_of

    async def of_rank(node: Node, role: str, worker: str | None = None) -> dict[str, Any]:
        found = await before(node, role, worker)
        return {**found, "pid": ranks_of(found["pid"])[rank].pid}

    monkeypatch.setattr(failover, "engine_of", of_rank)
    plan = failover.Plan(kills=1, streams=4, prompt_words=60, output_tokens=40, model="chat", block_tokens=BLOCK, seed=rank)
    result = await failover.measure(pair, plan)
    assert result["wrong"] == []
    assert result["ids_checked"]
    assert result["cached_share_min"] >= 0.95
    assert result["kinds"] == ["shadow"]


async def test_a_rank_that_stands_still_is_found_by_the_step_that_does_not_end(pair: Node, answers: list[list[int]]) -> None:
    active = await engine_of(pair, "active")
    ranks_of(active["pid"])[1].suspend()
    recovery = await check_successor(pair, answers, active["id"])
    assert recovery["kind"] == "shadow"
    assert "hang" in recovery["cause"]


async def test_a_shadow_one_rank_of_which_stands_still_is_not_promoted_by_half(pair: Node) -> None:
    """All ranks or none: the next rung of the ladder finds what the engine that died has left."""
    fresh = [(7 * at) % 250 for at in range(400)]
    ids, _ = await ask(pair, fresh)
    active, shadow = await engine_of(pair, "active"), await engine_of(pair, "shadow")
    ranks_of(shadow["pid"])[1].suspend()
    core_of(active["pid"]).kill()
    again, cached = await ask(pair, fresh)
    assert again == ids
    assert cached >= 0.95 * (len(fresh) // BLOCK * BLOCK)
    await pair.wait_for("healthy", "chat", 150)
    recovery = (await pair.call("recoveries"))["recoveries"][-1]
    assert recovery["kind"] == "respawn"


async def test_the_blocks_of_each_rank_are_read_from_kept_memory(pair: Node, answers: list[list[int]]) -> None:
    """The control: what stands in the memory of one rank decides the answer. The last test: random bytes are NaN, too, and what vLLM
    masks out of a block that is not full is multiplied by zero."""
    ids, cached = await ask(pair, PROMPTS[0])
    assert cached and ids == answers[0]
    assert scramble(ranks_of((await engine_of(pair, "active"))["pid"])[1].pid) > 0
    ids, cached = await ask(pair, PROMPTS[0])
    assert cached
    assert ids != answers[0]
