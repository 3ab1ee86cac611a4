"""A node with a serving loop of the user's own, as docs/own-loop.md has it: started, killed in mid-stream, and none the wiser."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml
from leftovers import processes

from shadowsup.supervisor.bench.client import Stream, stream_chat
from shadowsup.supervisor.bench.node import Node, engine_of, engine_pid, running

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "configs" / "own-loop.yaml"
QUESTION = {
    "model": "toy",
    "prompt": "a tale of two processes, one of which is about to die " * 2,
    "max_tokens": 120,
    "temperature": 1.0,
    "seed": 5,
}

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]


async def complete(node: Node, count: int) -> list[dict[str, Any]]:
    """Wait until so many recoveries are complete (what they tell comes by several messages); return all."""
    async with asyncio.timeout(60):
        while True:
            events = (await node.call("events"))["events"]
            if sum(event["event"] == "recovery.done" for event in events) >= count:
                found: list[dict[str, Any]] = (await node.call("recoveries"))["recoveries"]
                return found
            await asyncio.sleep(0.05)


async def test_the_example_of_an_own_loop_survives_kill_9_and_its_shadow_loads_nothing() -> None:
    config = yaml.safe_load(CONFIG.read_text())
    [worker] = config["workers"]
    worker["cwd"] = str((CONFIG.parent / worker["cwd"]).resolve())  # the node reads a copy of the file, from elsewhere
    async with running(config, state="healthy") as node, aiohttp.ClientSession() as session:
        url = f"{node.url}/v1/completions"
        undisturbed = await stream_chat(session, url, QUESTION)
        assert undisturbed.error is None and len(undisturbed.token_ids) == 120
        for kill in range(2):
            await node.wait_for("healthy")
            # The command line takes as long to start as a hundred tokens: the answer must not be over before.
            question = {**QUESTION, "prompt": f"{kill} {QUESTION['prompt']}", "max_tokens": 200 + 200 * kill}
            expected = await stream_chat(session, url, question)
            seen = Stream(sent_s=time.monotonic())
            streaming = asyncio.create_task(stream_chat(session, url, question, seen))
            await seen.reached(40)
            if kill == 0:
                os.kill(await engine_pid(node, "active"), signal.SIGKILL)
            else:
                await node.cli("kill", (await engine_of(node, "active"))["id"])
            await streaming
            assert seen.error is None
            assert (seen.token_ids, seen.text, seen.finish_reason) == (expected.token_ids, expected.text, "length")
        recoveries = await complete(node, 2)
        assert [one["kind"] for one in recoveries] == ["shadow", "shadow"]
        assert all(one["blocks_kept"] > 8 and one["requests_resumed"] == 1 for one in recoveries), recoveries
        await node.wait_for("healthy")
        log = (node.folder / "state" / "logs" / "toy.log").read_text()
        assert log.count("loading the weights") == 1, "four engines, one load"
        assert log.count("active in epoch 3, ") == 1
        refused = await stream_chat(
            session, f"{node.url}/v1/chat/completions", {"model": "toy", "messages": [{"role": "user", "content": "hi"}]}
        )
        assert refused.error is not None and "no chat template" in refused.error
    assert processes(node.folder) == {}
