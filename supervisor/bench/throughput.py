"""Steady tokens a second of one active engine: on a node, with keeper, ledger and gateway, and as a plain server, in the same run.

Both are up all the time and take turns, round by round, so that whatever else the machine does falls on both. Counted is what clients get
while every stream runs: from the moment when the last one has its first token to the moment when the first one ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import aiohttp

from shadowsup.supervisor.bench import failover, machine, plain
from shadowsup.supervisor.bench.client import Stream
from shadowsup.supervisor.bench.failover import Plan, Progress
from shadowsup.supervisor.bench.modes import describe
from shadowsup.supervisor.bench.node import START, running
from shadowsup.supervisor.bench.prompts import Chat
from shadowsup.supervisor.bench.setting import Mode, choose, for_mode
from shadowsup.supervisor.errors import SupervisorError


def steady_tokens_per_s(streams: Sequence[Stream]) -> float:
    """Return tokens a second over all streams while all of them ran.

    Raises:
        SupervisorError: there was no such time.
    """
    start = max((stream.arrivals[0] for stream in streams if stream.arrivals), default=0.0)
    end = min((stream.arrivals[-1] for stream in streams if stream.arrivals), default=0.0)
    if end <= start or not all(stream.arrivals for stream in streams):
        raise SupervisorError("the streams did not run at the same time", "more --output-tokens, or fewer --streams")
    tokens = 0
    for stream in streams:
        tokens += sum(count for at, count in zip(stream.arrivals, stream.counts, strict=True) if start < at <= end)
    return tokens / (end - start)


async def measure(
    content: dict[str, Any],
    plan: Plan,
    rounds: int,
    progress: Progress = lambda _: None,
    *,
    start: Sequence[str] = START,
    adapters: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Run ``rounds`` rounds of ``plan`` (its kills do not matter) on each; return the document. See `modes.measure` for the rest."""
    load = machine.load()
    if not load["quiet"]:
        progress(f"warning: this machine is busy (load average {load['1m']}): the figures will be of a busy machine")
    worker = choose(content, plan.worker)
    plan = replace(plan, worker=worker.name, model=worker.public_name, block_tokens=worker.kv.block_tokens)
    async with contextlib.AsyncExitStack() as stack:
        progress("starting a node")
        node = await stack.enter_async_context(running(for_mode(content, worker.name, Mode.SHADOW), start=start))
        progress("starting a plain server")
        server = await stack.enter_async_context(plain.running(for_mode(content, worker.name, Mode.PLAIN), worker.name, adapters))
        session = await stack.enter_async_context(failover.client_session())
        urls = {"node": f"{node.url}/v1/chat/completions", "plain": server.url}
        prompts = await failover.chats_of(session, urls["node"], plan)
        rates: dict[str, list[float]] = {name: [] for name in urls}
        for number in range(rounds + 1):
            # Each begins as often as the other; the first round only fills caches.
            for name in sorted(urls, reverse=bool(number % 2)):
                rate = await _round(session, urls[name], plan, prompts)
                if number:
                    rates[name].append(rate)
                    progress(f"round {number}/{rounds}: {name} {rate:.1f} tokens/s")
    medians = {name: statistics.median(values) for name, values in rates.items()}
    result = {
        "plan": {"streams": plan.streams, "output_tokens": plan.output_tokens, "rounds": rounds},
        "engine": describe(content, worker.name),
        "tokens_per_s": {name: [round(value, 2) for value in values] for name, values in rates.items()},
        "median_tokens_per_s": {name: round(value, 2) for name, value in medians.items()},
        "ratio": round(medians["node"] / medians["plain"], 4),
    }
    return machine.document("throughput", load, result)


async def _round(session: aiohttp.ClientSession, url: str, plan: Plan, prompts: Sequence[Chat]) -> float:
    async with asyncio.timeout(600.0):
        return steady_tokens_per_s(await failover.undisturbed(session, url, plan, prompts))
