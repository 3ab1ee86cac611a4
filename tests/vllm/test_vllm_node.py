"""A node with real vLLM on the CPU: each of its processes killed or stopped, and what a successor finds."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest
import pytest_asyncio
import vllm_tiny
from vllm_asking import PROMPTS, ask, ask_all, check_successor, over, scramble
from vllm_world import BLOCK, config, core_of, prompt, python

from shadowsup.supervisor.bench import failover, plain
from shadowsup.supervisor.bench.node import Node, engine_of, running

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.e2e,
    pytest.mark.timeout(240),
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.skipif(python() is None, reason="no interpreter with vLLM (SHADOWSUP_VLLM_PYTHON)"),
]


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def answers(node: Node) -> list[list[int]]:
    """What an engine that nobody disturbs says to `PROMPTS`."""
    return [ids for ids, _ in await ask_all(node)]


@pytest.mark.parametrize(("number", "fault"), [(signal.SIGKILL, "killed"), (signal.SIGSEGV, "segfault")])
async def test_a_killed_engine_core_is_followed_by_the_shadow(node: Node, answers: list[list[int]], number: int, fault: str) -> None:
    active = await engine_of(node, "active")
    core = core_of(active["pid"])
    core.send_signal(number)
    recovery = await check_successor(node, answers, active["id"])
    assert (recovery["fault"], recovery["evidence"]["exit"]) == (fault, f"signal {number}")
    assert recovery["kind"] == "shadow"
    assert recovery["detect_ms"] < 6000
    assert over(core)


async def test_a_killed_api_server_takes_its_engine_core_along(node: Node, answers: list[list[int]]) -> None:
    active = await engine_of(node, "active")
    core = core_of(active["pid"])
    os.kill(active["pid"], signal.SIGKILL)
    recovery = await check_successor(node, answers, active["id"])
    assert recovery["kind"] == "shadow"
    assert over(core)


async def test_an_engine_core_that_stands_still_is_found_by_its_beats(node: Node, answers: list[list[int]]) -> None:
    active = await engine_of(node, "active")
    core_of(active["pid"]).suspend()
    recovery = await check_successor(node, answers, active["id"])
    assert recovery["kind"] == "shadow"
    assert "hang" in recovery["cause"]


@pytest.mark.parametrize("busy", [True, False], ids=["busy", "idle"])
async def test_an_api_server_that_stands_still_is_found_though_its_engine_core_beats(node: Node, busy: bool) -> None:
    promised_s, always_s = (1.5, 6.0) if busy else (3.0, 10.0)
    found_s: list[float] = []
    while len(found_s) < 3 and min(found_s, default=math.inf) >= promised_s:  # a machine that does other things as well may be late once
        await node.wait_for("healthy", "chat", 150)
        active = await engine_of(node, "active")
        known = len((await node.call("recoveries"))["recoveries"])
        asking = [asyncio.create_task(ask(node, prompt(40, 40), 1500))] if busy else []
        while busy and not (await engine_of(node, "active"))["inflight"]:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        stopped_s = time.monotonic()
        os.kill(active["pid"], signal.SIGSTOP)
        while len((await node.call("recoveries"))["recoveries"]) == known:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        found_s.append(time.monotonic() - stopped_s)
        await asyncio.gather(*asking)
        await node.wait_for("healthy", "chat", 150)
        recovery: dict[str, Any] = (await node.call("recoveries"))["recoveries"][-1]
        assert recovery["from_engine"] == active["id"] and recovery["kind"] == "shadow"
        assert "its API server has not turned its event loop" in recovery["cause"] and "the process is stopped" in recovery["cause"]
    assert min(found_s) < promised_s and max(found_s) < always_s, found_s


async def test_streams_go_on_with_the_very_tokens_they_would_have_had(node: Node) -> None:
    plan = failover.Plan(kills=2, streams=4, prompt_words=60, output_tokens=40, model="chat", block_tokens=BLOCK)
    result = await failover.measure(node, plan)
    assert result["wrong"] == []
    assert result["ids_checked"]
    assert result["cached_share_min"] >= 0.95
    assert result["kinds"] == ["shadow"]


async def test_a_planned_hand_over_keeps_the_cache(node: Node, answers: list[list[int]]) -> None:
    active = await engine_of(node, "active")
    await node.cli("failover", "chat")
    await check_successor(node, answers, active["id"])


async def test_a_parked_engine_answers_nobody_before_it_is_promoted(node: Node) -> None:
    shadow = await engine_of(node, "shadow")
    path = str(node.runtime_dir / f"link-{shadow['id']}.sock")
    body = {"model": "chat", "prompt": prompt(9, 40), "max_tokens": 1}
    async with aiohttp.ClientSession(connector=aiohttp.UnixConnector(path)) as session:
        with pytest.raises(TimeoutError):
            await session.post("http://localhost/v1/completions", json=body, timeout=aiohttp.ClientTimeout(total=0.5))
    assert (await engine_of(node, "shadow"))["state"] == "parked"


async def test_bytes_that_are_not_those_of_the_index_change_the_answer(node: Node, answers: list[list[int]]) -> None:
    """The control: hits are read from kept memory, not computed again."""
    [again] = [ids for ids, cached in [await ask(node, PROMPTS[0])] if cached]
    assert again == answers[0]
    assert scramble(core_of((await engine_of(node, "active"))["pid"]).pid) > 0
    ids, cached = await ask(node, PROMPTS[0])
    assert cached >= 0.95 * (len(PROMPTS[0]) // BLOCK * BLOCK)
    assert ids != answers[0]


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def alone(model: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Node]:
    """A node without a shadow, whose engines compile what vLLM has compiled, and find nothing that was compiled before."""
    given = config(model, shadows=0)
    env = given["workers"][0]["env"]
    del env["TORCH_COMPILE_DISABLE"]
    env["TORCHINDUCTOR_CACHE_DIR"] = str(tmp_path_factory.mktemp("compiled"))
    async with running(given) as node:
        yield node


async def test_the_first_logprobs_that_are_asked_for_compile_nothing(alone: Node) -> None:
    body = {"model": "chat", "prompt": "x", "max_tokens": 2, "temperature": 0}
    async with aiohttp.ClientSession() as session:
        for more in ({}, {"logprobs": 2}):
            began_s = time.monotonic()
            async with session.post(f"{alone.url}/v1/completions", json=body | more) as response:
                assert response.status == 200
            assert time.monotonic() - began_s < 2.0


async def test_without_a_shadow_a_new_engine_finds_the_cache(alone: Node, answers: list[list[int]]) -> None:
    assert [ids for ids, _ in await ask_all(alone)] == answers
    active = await engine_of(alone, "active")
    core_of(active["pid"]).kill()
    recovery = await check_successor(alone, answers, active["id"])
    assert recovery["kind"] == "respawn"


async def test_vllms_own_server_is_the_baseline_of_the_bench(model: Path) -> None:
    plan = failover.Plan(kills=0, streams=2, prompt_words=20, output_tokens=8, model="chat", block_tokens=BLOCK)
    async with plain.running(config(model, shadows=0), "chat") as server:
        result = await plain.measure(server, plan)
        assert server.process is not None
        processes = [psutil.Process(server.process.pid), *psutil.Process(server.process.pid).children(recursive=True)]
    assert result["wrong"] == [] and server.starts == 1
    assert len(processes) > 1
    assert not psutil.wait_procs(processes, timeout=60)[1]


async def test_other_weights_of_the_same_shape_are_a_miss(alone: Node, model: Path, answers: list[list[int]]) -> None:
    vllm_tiny.write_weights(model, seed=1)
    await alone.cli("restart", "chat")
    await alone.wait_for("healthy", "chat", 150)
    found = await ask_all(alone)
    assert [cached for _, cached in found] == [0, 0, 0]
    assert all(ids != before for (ids, _), before in zip(found, answers, strict=True))
