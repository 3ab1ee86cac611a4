"""Kill the active engine under load, again and again, and check every token that a client was given.

The reference is the same prompts, run undisturbed before the first kill on the same node, greedy. A kill is a SIGKILL from outside to the
engine's leader, as an operator or the kernel's OOM killer would send it. Nothing here looks into the node: what counts is what clients see,
and what ``status`` and ``recoveries`` say afterwards.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import random
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from shadowsup.supervisor.bench.client import Stream, stream_chat
from shadowsup.supervisor.bench.node import Node, engine_pid
from shadowsup.supervisor.errors import SupervisorError

_FILLER = """
harbour winter engine copper garden letter river signal mountain paper silver window bridge morning market thunder
lantern orchard compass violin feather tunnel island granite harvest mirror station velvet canyon beacon cradle meadow
"""
_WORDS = _FILLER.split()


@dataclass(frozen=True, kw_only=True)
class Plan:
    """``prompt_words``: words of filler in each prompt (a word of it is 1 to 2 tokens)."""

    kills: int
    streams: int
    prompt_words: int = 600
    output_tokens: int = 96
    seed: int = 0
    settle_timeout_s: float = 120.0
    model: str = ""
    block_tokens: int = 16


@dataclass(kw_only=True)
class Kill:
    """One kill and what followed. Milliseconds, from the kill itself."""

    number: int
    at_token: int
    resumed_ms: list[float] = field(default_factory=list)
    first_ms: float | None = None
    longest_gap_ms: list[float] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    cached_share: list[float] = field(default_factory=list)
    settled_ms: float | None = None


def prompts(plan: Plan) -> list[list[dict[str, str]]]:
    """Return one chat for each stream: different from the first words on, so that no two share a block."""
    rng = random.Random(plan.seed)
    chats = []
    for number in range(plan.streams):
        filler = " ".join(rng.choice(_WORDS) for _ in range(plan.prompt_words))
        chats.append([{"role": "user", "content": f"Story {number}: {filler}. Continue this story in your own words, at length."}])
    return chats


def payload(plan: Plan, chat: Sequence[dict[str, str]], max_tokens: int | None = None) -> dict[str, Any]:
    return {
        "model": plan.model,
        "messages": list(chat),
        "temperature": 0,
        "max_tokens": max_tokens or plan.output_tokens,
        "ignore_eos": True,
    }


def cached_share(usage: dict[str, Any] | None, block_tokens: int) -> float | None:
    """Return the share of the prompt's full blocks that were found in kept KV (the last token is always computed again)."""
    if usage is None:
        return None
    full = (usage["prompt_tokens"] - 1) // block_tokens * block_tokens
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    return cached / full if full else 1.0


def difference(reference: Stream, seen: Stream) -> str | None:
    """Return what is wrong with ``seen``, or None: lost, repeated or changed tokens, an error, an early end."""
    if seen.error:
        return seen.error
    if not seen.done or seen.finish_reason != reference.finish_reason:
        return f"ended with {seen.finish_reason!r}, not {reference.finish_reason!r}"
    if seen.token_ids != reference.token_ids:
        at = next((i for i, (a, b) in enumerate(zip(reference.token_ids, seen.token_ids, strict=False)) if a != b), -1)
        return f"token {at} of {len(reference.token_ids)} differs ({len(seen.token_ids)} received)"
    if seen.text != reference.text:
        return "same tokens, other text"
    return None


async def measure(node: Node, plan: Plan, progress: Callable[[str], None] = lambda _: None) -> dict[str, Any]:
    """Run ``plan`` against ``node``; return figures, ready for JSON.

    Raises:
        SupervisorError: the node did not come back after a kill, or the undisturbed run failed.
    """
    chats = prompts(plan)
    url = f"{node.url}/v1/chat/completions"
    rng = random.Random(plan.seed + 1)
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None), read_bufsize=2**20) as session:
        progress(f"undisturbed run of {plan.streams} streams")
        references = await asyncio.gather(*(stream_chat(session, url, payload(plan, chat)) for chat in chats))
        for reference in references:
            if reference.error or not reference.done:
                raise SupervisorError(f"the undisturbed run failed: {reference.error or 'no end'}")
        kills = []
        for number in range(plan.kills):
            kill = await _one(node, plan, session, url, chats, references, number, rng)
            kills.append(kill)
            progress(f"kill {number + 1}/{plan.kills}: first token after {kill.first_ms or -1:.0f} ms, {len(kill.wrong)} wrong")
    _, out, _ = await node.cli("recoveries", "-o", "json")
    return summary(plan, references, kills, json.loads(out))


async def _one(
    node: Node,
    plan: Plan,
    session: aiohttp.ClientSession,
    url: str,
    chats: Sequence[Sequence[dict[str, str]]],
    references: Sequence[Stream],
    number: int,
    rng: random.Random,
) -> Kill:
    pid = await engine_pid(node, "active")
    seen = [Stream(sent_s=time.monotonic()) for _ in chats]
    tasks = [asyncio.create_task(stream_chat(session, url, payload(plan, chat), into)) for chat, into in zip(chats, seen, strict=True)]
    kill = Kill(number=number, at_token=rng.randrange(2, max(3, plan.output_tokens * 3 // 4)))
    await asyncio.gather(*(stream.reached(kill.at_token) for stream in seen))
    killed_s = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    await asyncio.gather(*tasks)
    for stream, reference in zip(seen, references, strict=True):
        problem = difference(reference, stream)
        if problem:
            kill.wrong.append(problem)
        resumed = stream.resumed_after(killed_s)
        if resumed is not None:
            kill.resumed_ms.append(resumed * 1e3)
        kill.longest_gap_ms.append(stream.longest_gap_s() * 1e3)
    kill.first_ms = min(kill.resumed_ms, default=None)
    again = await asyncio.gather(*(stream_chat(session, url, payload(plan, chat, max_tokens=1)) for chat in chats))
    for stream in again:
        share = cached_share(stream.usage, plan.block_tokens)
        if stream.error or share is None:
            kill.wrong.append(stream.error or "no usage")
        else:
            kill.cached_share.append(share)
    await node.wait_for("healthy", timeout_s=plan.settle_timeout_s)
    kill.settled_ms = (time.monotonic() - killed_s) * 1e3
    return kill


def percentiles(values: Sequence[float]) -> dict[str, float] | None:
    """Return p50, p90, p99 (nearest rank) and max, or None for no values."""
    if not values:
        return None
    ordered = sorted(values)

    def rank(share: float) -> float:
        return round(ordered[max(0, math.ceil(share * len(ordered)) - 1)], 3)

    return {"p50": rank(0.5), "p90": rank(0.9), "p99": rank(0.99), "max": round(ordered[-1], 3), "n": float(len(ordered))}


def summary(plan: Plan, references: Sequence[Stream], kills: Sequence[Kill], recoveries: dict[str, Any]) -> dict[str, Any]:
    """Put the figures of a run together."""
    records = recoveries.get("recoveries", [])[-len(kills) :] if kills else []
    steps = ("detect_ms", "freeze_ms", "promote_ms", "first_token_ms", "fence_ms", "refill_ms")
    gaps = [stream.longest_gap_s() * 1e3 for stream in references]
    return {
        "plan": {"kills": plan.kills, "streams": plan.streams, "output_tokens": plan.output_tokens, "seed": plan.seed},
        "prompt_tokens": [stream.usage["prompt_tokens"] for stream in references if stream.usage],
        "tokens_checked": sum(len(stream.token_ids) for stream in references) * len(kills),
        "wrong": [{"kill": kill.number, "what": kill.wrong} for kill in kills if kill.wrong],
        "client": {
            "first_token_ms": percentiles([kill.first_ms for kill in kills if kill.first_ms is not None]),
            "each_stream_ms": percentiles([ms for kill in kills for ms in kill.resumed_ms]),
            "longest_gap_ms": percentiles([ms for kill in kills for ms in kill.longest_gap_ms]),
            "undisturbed_longest_gap_ms": percentiles(gaps),
        },
        "cached_share_min": min((share for kill in kills for share in kill.cached_share), default=None),
        "settled_ms": percentiles([kill.settled_ms for kill in kills if kill.settled_ms is not None]),
        "node": {step: percentiles([record[step] for record in records if record.get(step) is not None]) for step in steps},
        "kinds": sorted({record["kind"] for record in records}),
    }
