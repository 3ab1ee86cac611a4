"""Kill the active engine under load, again and again, and check every token that a client was given.

The reference is the same prompts, run undisturbed before the first kill on the same node, greedy. A kill is a SIGKILL from outside to the
engine's leader, as an operator or the kernel's OOM killer would send it. What counts is what clients see; the node's own timeline is read
afterwards and told from the kill on, too.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from shadowsup.supervisor.bench.client import Stream, stream_chat
from shadowsup.supervisor.bench.figures import cached_share, difference, percentiles
from shadowsup.supervisor.bench.node import Node, engine_of
from shadowsup.supervisor.bench.prompts import Chat, chats, payload, sized_chats
from shadowsup.supervisor.errors import SupervisorError

__all__ = ["Kill", "Plan", "Reference", "chats_of", "difference", "measure", "refer", "undisturbed"]

STEPS = ("freeze", "promote", "first_token", "fence", "refill")
"""Of a recovery's timeline, each in ms from the verdict."""
COMPLETE_S = 10.0
"""The record of a recovery is complete a moment after the worker is healthy: its last steps are told by other messages."""

Progress = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """``prompt_tokens``: of each prompt, at least; None: ``prompt_words`` words of filler (a word is 1 to 2 tokens).

    ``model``: the name that clients use. ``worker``: None is the first one.
    """

    kills: int
    streams: int
    prompt_words: int = 600
    prompt_tokens: int | None = None
    output_tokens: int = 96
    seed: int = 0
    settle_timeout_s: float = 120.0
    model: str = ""
    worker: str | None = None
    block_tokens: int = 16

    def as_dict(self) -> dict[str, Any]:
        """Return what identifies a run, for JSON."""
        return {"kills": self.kills, "streams": self.streams, "output_tokens": self.output_tokens, "seed": self.seed}


@dataclass(kw_only=True)
class Kill:
    """One kill and what followed. Milliseconds, from the kill itself."""

    number: int
    at_token: int
    resumed_ms: list[float] = field(default_factory=list)
    longest_gap_ms: list[float] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    cached_share: list[float] = field(default_factory=list)
    settled_ms: float | None = None
    node_ms: dict[str, float] = field(default_factory=dict)
    """When the node saw the death, froze, promoted, sent the first token, fenced, had its shadow again."""
    kind: str = ""

    @property
    def first_ms(self) -> float | None:
        """When the first of the clients got its next token."""
        return min(self.resumed_ms, default=None)


@dataclass(frozen=True, kw_only=True)
class Reference:
    """What the prompts of a plan give undisturbed; holds for plans that differ from it in the number of kills alone.

    ``blocks``: of KV that the node has; ``needed``: that the streams take.
    """

    prompts: Sequence[Chat]
    streams: Sequence[Stream]
    blocks: int
    needed: int
    rng: random.Random
    """Says when to kill; goes on from plan to plan."""


async def refer(node: Node, plan: Plan, progress: Progress = lambda _: None) -> Reference:
    """Run the prompts of ``plan`` on ``node`` with nothing in the way.

    Raises:
        SupervisorError: a stream failed.
    """
    url = f"{node.url}/v1/chat/completions"
    async with client_session() as session:
        prompts = await chats_of(session, url, plan)
        progress(f"undisturbed run of {plan.streams} streams")
        streams = await undisturbed(session, url, plan, prompts)
    blocks = (await node.worker(plan.worker))["kv"]["blocks"]
    needed = sum(-(-_tokens(stream) // plan.block_tokens) for stream in streams)
    if needed > blocks:
        progress(f"warning: {plan.streams} streams need {needed} KV blocks of {blocks}: what is evicted counts as not cached")
    return Reference(prompts=prompts, streams=streams, blocks=blocks, needed=needed, rng=random.Random(plan.seed + 1))


async def measure(node: Node, plan: Plan, progress: Progress = lambda _: None, reference: Reference | None = None) -> dict[str, Any]:
    """Run ``plan`` against ``node``; return figures, ready for JSON.

    Args:
        reference: of this plan but for the number of kills, if there is one already (`refer`).

    Raises:
        SupervisorError: the node did not come back after a kill, or the undisturbed run failed.
    """
    url = f"{node.url}/v1/chat/completions"
    known = reference or await refer(node, plan, progress)
    async with client_session() as session:
        kills = []
        for number in range(plan.kills):
            kill = Kill(number=number, at_token=moment(plan, known.rng))
            kills.append(await _one(node, plan, session, url, known.prompts, known.streams, kill, known.rng))
            progress(f"kill {number + 1}/{plan.kills}: first token after {kill.first_ms or -1:.0f} ms, {len(kill.wrong)} wrong")
    return {**summary(plan, known.streams, kills), "kv_blocks": known.blocks, "kv_blocks_needed": known.needed}


def client_session() -> aiohttp.ClientSession:
    """Return a session that waits as long as it takes, with a connection of its own for each stream."""
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    return aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None), read_bufsize=2**20, connector=connector)


async def chats_of(session: aiohttp.ClientSession, url: str, plan: Plan) -> list[Chat]:
    """Return the prompts of ``plan``, one for each stream."""
    if plan.prompt_tokens is None:
        return chats(plan.streams, plan.prompt_words, plan.seed)

    async def count(chat: Chat) -> int:
        answer = await stream_chat(session, url, payload(plan.model, chat, 1))
        if answer.usage is None:
            raise SupervisorError(f"a prompt could not be measured: {answer.error or 'no usage'}")
        return int(answer.usage["prompt_tokens"])

    return await sized_chats(plan.streams, plan.prompt_tokens, plan.seed, count)


async def undisturbed(session: aiohttp.ClientSession, url: str, plan: Plan, prompts: Sequence[Chat]) -> list[Stream]:
    """Run every prompt at once, with nothing in the way.

    Raises:
        SupervisorError: a stream failed.
    """
    asked = [stream_chat(session, url, payload(plan.model, chat, plan.output_tokens)) for chat in prompts]
    references = await asyncio.gather(*asked)
    for reference in references:
        if reference.error or not reference.done or reference.usage is None:
            raise SupervisorError(f"the undisturbed run failed: {reference.error or 'no end'}")
    return references


def moment(plan: Plan, rng: random.Random) -> int:
    """Return after how many pieces of every stream to kill: early enough that there is something left to resume."""
    return rng.randrange(2, max(3, plan.output_tokens * 3 // 4))


@contextlib.asynccontextmanager
async def ended(tasks: Sequence[asyncio.Task[Any]]) -> AsyncIterator[None]:
    """See to it that no task is left when the block is left by an error."""
    try:
        yield
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


async def _one(
    node: Node,
    plan: Plan,
    session: aiohttp.ClientSession,
    url: str,
    prompts: Sequence[Chat],
    references: Sequence[Stream],
    kill: Kill,
    rng: random.Random,
) -> Kill:
    victim = await engine_of(node, "active", plan.worker)
    seen = [Stream(sent_s=time.monotonic()) for _ in prompts]
    asked = [
        asyncio.create_task(stream_chat(session, url, payload(plan.model, chat, plan.output_tokens), into))
        for chat, into in zip(prompts, seen, strict=True)
    ]
    async with ended(asked):
        await asyncio.gather(*(stream.reached(kill.at_token) for stream in seen))
        await asyncio.sleep(rng.uniform(0.0, _step_s(seen)))  # anywhere in a step, not always right after one
        killed_s = time.monotonic()
        os.kill(victim["pid"], signal.SIGKILL)
        await asyncio.gather(*asked)
    for stream, reference in zip(seen, references, strict=True):
        problem = difference(reference, stream)
        if problem:
            kill.wrong.append(problem)
        resumed = stream.resumed_after(killed_s)
        if resumed is not None:
            kill.resumed_ms.append(resumed * 1e3)
        kill.longest_gap_ms.append(stream.longest_gap_s() * 1e3)
    again = await asyncio.gather(*(stream_chat(session, url, payload(plan.model, chat, 1)) for chat in prompts))
    for stream in again:
        share = cached_share(stream.usage, plan.block_tokens)
        if stream.error or share is None:
            kill.wrong.append(stream.error or "no usage")
        else:
            kill.cached_share.append(share)
    await node.wait_for("healthy", plan.worker, timeout_s=plan.settle_timeout_s)
    kill.settled_ms = (time.monotonic() - killed_s) * 1e3
    await _ask_node(node, kill, victim["id"], killed_s)
    return kill


def _step_s(streams: Sequence[Stream]) -> float:
    """Return how long a step takes, roughly."""
    lengths = [(s.arrivals[-1] - s.arrivals[0]) / (len(s.arrivals) - 1) for s in streams if len(s.arrivals) > 1]
    return min(lengths, default=0.0)


async def _ask_node(node: Node, kill: Kill, engine: str, killed_s: float) -> None:
    """Read what the node has noted of this kill, once that is complete."""
    deadline = time.monotonic() + COMPLETE_S
    while True:
        events = (await node.call("events", limit=200))["events"]
        recoveries = (await node.call("recoveries"))["recoveries"]
        record = next((one for one in reversed(recoveries) if one["from_engine"] == engine), None)
        done = {one["data"]["n"] for one in events if one["event"] == "recovery.done"}
        if (record is not None and record["n"] in done) or time.monotonic() > deadline:
            break
        await asyncio.sleep(0.05)
    verdict = next((one for one in reversed(events) if one["event"] == "engine.verdict" and one["engine"] == engine), None)
    if record is None or verdict is None:
        kill.wrong.append(f"the node has no recovery from the death of {engine}")
        return
    kill.kind = record["kind"]
    seen_ms = (verdict["mono_s"] - killed_s) * 1e3
    kill.node_ms = {"death_seen": seen_ms}
    for step in STEPS:
        if record.get(f"{step}_ms") is not None:
            kill.node_ms[step] = seen_ms + record[f"{step}_ms"]


def _tokens(stream: Stream) -> int:
    assert stream.usage is not None
    return int(stream.usage["total_tokens"])


def summary(plan: Plan, references: Sequence[Stream], kills: Sequence[Kill]) -> dict[str, Any]:
    """Put the figures of a run together."""
    return {
        "plan": plan.as_dict(),
        "prompt_tokens": [stream.usage["prompt_tokens"] for stream in references if stream.usage],
        "tokens_checked": sum(stream.usage["completion_tokens"] for stream in references if stream.usage) * len(kills),
        "ids_checked": all(stream.token_ids for stream in references),
        "streams_killed": plan.streams * len(kills),
        "streams_broken": 0,
        "wrong": [{"kill": kill.number, "what": kill.wrong} for kill in kills if kill.wrong],
        "client": {
            "first_token_ms": percentiles([kill.first_ms for kill in kills if kill.first_ms is not None]),
            "each_stream_ms": percentiles([ms for kill in kills for ms in kill.resumed_ms]),
            "longest_gap_ms": percentiles([ms for kill in kills for ms in kill.longest_gap_ms]),
            "undisturbed_longest_gap_ms": percentiles([stream.longest_gap_s() * 1e3 for stream in references]),
        },
        "cached_share_min": min((share for kill in kills for share in kill.cached_share), default=None),
        "settled_ms": percentiles([kill.settled_ms for kill in kills if kill.settled_ms is not None]),
        "node_ms": {step: percentiles([kill.node_ms[step] for kill in kills if step in kill.node_ms]) for step in ("death_seen", *STEPS)},
        "kinds": sorted({kill.kind for kill in kills}),
    }
