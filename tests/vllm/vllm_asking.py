"""Asking a node with vLLM, and what its successor must know."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from typing import Any

import aiohttp
import psutil
from vllm_world import BLOCK, prompt

from shadowsup.supervisor.bench.node import Node

PROMPTS = [prompt(number, tokens) for number, tokens in enumerate((600, 900, 333))]
FULL = sum(len(one) // BLOCK * BLOCK for one in PROMPTS)


async def ask(node: Node, ids: list[int], tokens: int = 24) -> tuple[list[int], int]:
    """Return (the ids of ``tokens`` tokens, tokens of the prompt found in the cache); a worker without an engine is asked again."""
    body = {"model": "chat", "prompt": ids, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    deadline = time.monotonic() + 180
    async with aiohttp.ClientSession() as session:
        while True:
            try:
                async with session.post(f"{node.url}/v1/completions", json=body) as response:
                    answer: dict[str, Any] = await response.json(content_type=None)
                    if response.status == 200:
                        break
                    assert response.status >= 500, answer
            except (aiohttp.ClientError, ValueError):
                answer = {}
            assert time.monotonic() < deadline, f"no answer: {answer}; {node.tail()}"
            await asyncio.sleep(0.02)
    details = answer["usage"].get("prompt_tokens_details") or {}
    return answer["choices"][0]["token_ids"], details.get("cached_tokens") or 0


async def ask_all(node: Node) -> list[tuple[list[int], int]]:
    return [await ask(node, ids) for ids in PROMPTS]


def over(process: psutil.Process) -> bool:
    """Whether it has ended; the supervisor reaps it within two seconds."""
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


async def check_successor(node: Node, answers: list[list[int]], before: str) -> dict[str, Any]:
    """The answers are those of an undisturbed engine, and nearly all of their prompts' full blocks were in the cache."""
    found = await ask_all(node)
    assert [ids for ids, _ in found] == answers
    assert sum(cached for _, cached in found) >= 0.95 * FULL
    await node.wait_for("healthy", "chat", 150)
    recovery: dict[str, Any] = (await node.call("recoveries"))["recoveries"][-1]
    assert recovery["from_engine"] == before
    return recovery


def scramble(pid: int) -> int:
    """Overwrite the KV that a process has mapped from kept memory. Returns the bytes."""
    done = 0
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        where, mode, *_, name = line.split(maxsplit=5)
        if "memfd:" in name and "kv-" in name and mode.startswith("rw"):
            start, end = (int(one, 16) for one in where.split("-"))
            with open(f"/proc/{pid}/mem", "r+b", buffering=0) as memory:
                memory.seek(start)
                done += memory.write(os.urandom(end - start))
    return done
