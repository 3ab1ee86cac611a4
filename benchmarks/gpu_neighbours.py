"""Two workers, each with a shadow, on one GPU or on two: what the streams of one feel when the other's engine is killed.

Sections of `gpu_failover`: ``neighbours`` puts both on the first GPU, ``two-gpus`` each on its own; ``illegal-access`` sends the first
one a prompt at which its engine reads out of bounds on the device, as a broken kernel would.
"""

from __future__ import annotations

import asyncio
import copy
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import aiohttp

from shadowsup.supervisor.bench import failover
from shadowsup.supervisor.bench.client import Stream, longest_gap_s, stream_chat
from shadowsup.supervisor.bench.figures import percentiles
from shadowsup.supervisor.bench.node import Node, engine_of
from shadowsup.supervisor.bench.prompts import chats, payload

OTHER = "other"
STREAMS = 16
OUTPUT_TOKENS = 192
KILL_AT = 40
"""Tokens that every stream has got before the kill."""


POISON = "please read out of bounds"


def faulty(content: dict[str, Any]) -> dict[str, Any]:
    """Return the config with a first worker whose engines break at `POISON`."""
    changed = copy.deepcopy(content)
    changed["workers"][0]["env"] = {"SHADOWSUP_FAULT": f"cuda@text:{POISON}"}
    return changed


def with_neighbour(content: dict[str, Any], gpu: int) -> dict[str, Any]:
    """Return the config with a second worker like its only one, on ``gpu``."""
    changed = copy.deepcopy(content)
    (chat,) = changed["workers"]
    changed["workers"].append(copy.deepcopy(chat) | {"name": OTHER, "gpus": [gpu]})
    return changed


async def measure(node: Node, kills: int, say: Callable[[str], None]) -> dict[str, Any]:
    """Stream from both workers, undisturbed and then with a kill of the first one's engine; compare the second one's gaps."""
    async with failover.client_session() as session:
        quiet = [await _round(node, session, seed, victim=None) for seed in range(2)]
        killed = [await _round(node, session, 100 + seed, victim="chat") for seed in range(kills)]
    result = {
        "kills": kills,
        "streams": STREAMS,
        "undisturbed_gap_ms": percentiles([gap for one in quiet for gap in one["other_gaps"]]),
        "other_gap_ms": percentiles([gap for one in killed for gap in one["other_gaps"]]),
        "killed_resumed_ms": percentiles([after for one in killed for after in one["resumed"]]),
        "wrong": [problem for one in (*quiet, *killed) for problem in one["wrong"]],
        "other_epochs": (await node.worker(OTHER))["epoch"],
    }
    say(f"neighbours: {result}")
    return result


async def _round(node: Node, session: aiohttp.ClientSession, seed: int, victim: str | None) -> dict[str, Any]:
    url = f"{node.url}/v1/chat/completions"
    seen = {name: [Stream(sent_s=time.monotonic()) for _ in range(STREAMS)] for name in ("chat", OTHER)}
    asked = [
        asyncio.create_task(stream_chat(session, url, payload(name, chat, OUTPUT_TOKENS), into))
        for name, streams in seen.items()
        for chat, into in zip(chats(STREAMS, 60, seed), streams, strict=True)
    ]
    await asyncio.gather(*(stream.reached(KILL_AT) for streams in seen.values() for stream in streams))
    killed_s = time.monotonic()
    if victim is not None:
        os.kill((await engine_of(node, "active", victim))["pid"], signal.SIGKILL)
    await asyncio.gather(*asked)
    if victim is not None:
        await node.wait_for("healthy", victim, timeout_s=90.0)
    every = [stream for streams in seen.values() for stream in streams]
    return {
        # From the moment of the kill: what prefilling does to the first tokens is another matter.
        "other_gaps": [_gap_after(stream, killed_s) * 1e3 for stream in seen[OTHER]],
        "resumed": [after * 1e3 for stream in seen["chat"] if victim is not None and (after := stream.resumed_after(killed_s)) is not None],
        "wrong": [stream.error or "not complete" for stream in every if stream.error or len(stream.token_ids) != OUTPUT_TOKENS],
    }


async def illegal_access(node: Node, say: Callable[[str], None]) -> dict[str, Any]:
    """Send the poison while both workers stream; say what became of it, of the others, and how the deaths were classified."""
    url = f"{node.url}/v1/chat/completions"
    seen = {name: [Stream(sent_s=time.monotonic()) for _ in range(STREAMS)] for name in ("chat", OTHER)}
    async with failover.client_session() as session:
        asked = [
            asyncio.create_task(stream_chat(session, url, payload(name, chat, OUTPUT_TOKENS), into))
            for name, streams in seen.items()
            for chat, into in zip(chats(STREAMS, 60, 7), streams, strict=True)
        ]
        await asyncio.gather(*(stream.reached(KILL_AT) for streams in seen.values() for stream in streams))
        sent_s = time.monotonic()
        poison = await stream_chat(session, url, payload("chat", [{"role": "user", "content": POISON}], 8))
        await asyncio.gather(*asked)
        await node.wait_for("healthy", "chat", timeout_s=120.0)
    recoveries = (await node.call("recoveries"))["recoveries"]
    result = {
        "poison": poison.error or "answered",
        "deaths": [{"fault": one["fault"], "decision": one["decision"], "blocks_kept": one["blocks_kept"]} for one in recoveries],
        "other_recoveries": sum(one["worker"] == OTHER for one in recoveries),
        "wrong": [
            stream.error or "not complete"
            for streams in seen.values()
            for stream in streams
            if stream.error or len(stream.token_ids) != OUTPUT_TOKENS
        ],
        "other_gap_ms": percentiles([_gap_after(stream, sent_s) * 1e3 for stream in seen[OTHER]]),
    }
    say(f"illegal access: {result}")
    return result


def _gap_after(stream: Stream, moment_s: float) -> float:
    """Return the longest time between two arrivals after ``moment_s``, that in which it lies included."""
    before = [at for at in stream.arrivals if at <= moment_s][-1:]
    return longest_gap_s([*before, *(at for at in stream.arrivals if at > moment_s)])
