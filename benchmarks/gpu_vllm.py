"""vLLM on a GPU, seen by clients: ``python benchmarks/gpu_vllm.py --model FOLDER --save FILE [--python P] [--env K=V …] [SECTION …]``.

FOLDER has an 8B Llama's config and a tokenizer; weights are random (``load_format: dummy``), so none are needed. Runs unattended; what is
done is saved after each section, so that a time limit loses nothing. Sections:

* ``shadow``: a parked shadow, 32 streams over 256k tokens of KV; by turns the API server and the EngineCore are killed. bfloat16 is not
  batch-invariant: a stream that goes on another way than undisturbed is counted as diverged, one that broke or ended early as wrong.
* ``exact``: with VLLM_BATCH_INVARIANT=1; every token of 16 streams is compared with an undisturbed run.
* ``beside``: 16 streams while a shadow starts beside them, and without.
* ``respawn``: no shadow: an engine forked from the nursery over kept memory.
* ``plain``: vLLM without shadowsup, restarted at once; its clients ask again.
* ``tp2``: two GPUs, tensor parallel: as ``shadow``, with either rank killed by turns, beside API server and EngineCore; and the tokens of
  16 streams over kills of either rank with VLLM_BATCH_INVARIANT=1. Left out, and said so, where there is one GPU only.
* ``throughput``: 32 streams on a node with a parked shadow, and on vLLM without shadowsup.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import statistics
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
from gpu_failover import a_node, kills, plan_of, say, scaled

from shadowsup.errors import ShadowsupError
from shadowsup.supervisor.bench import failover, machine
from shadowsup.supervisor.bench import plain as servers
from shadowsup.supervisor.bench.client import Stream, stream_chat
from shadowsup.supervisor.bench.figures import percentiles
from shadowsup.supervisor.bench.node import Node, engine_of
from shadowsup.supervisor.bench.prompts import chats, payload
from shadowsup.supervisor.bench.setting import Mode
from shadowsup.supervisor.devices import read_gpus

TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
TOKENS = 8000
"""Of a prompt: 32 of them are 256k tokens of KV."""


@dataclass(kw_only=True)
class Setting:
    """What the command line says."""

    model: str
    python: str
    env: dict[str, str]
    kv: str = "40GiB"
    ranks: int = 1

    def content(self, **env: str) -> dict[str, Any]:
        args = {"load_format": "dummy", "max_model_len": 40000, "chat_template": TEMPLATE, "enable_prompt_tokens_details": True}
        worker = {
            "name": "chat",
            "engine": "vllm",
            "python": self.python,
            "model": self.model,
            "dtype": "bfloat16",
            "gpus": list(range(self.ranks)),
            "tensor_parallel": self.ranks,
            "shadows": 1,
            "args": args,
            "kv": {"size": self.kv, "block_tokens": 16},
            "env": self.env | env,
        }
        return {"version": 1, "workers": [worker]}


# --- killing ----------------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def victims(which: str) -> Any:
    """Have `failover` kill the ``core``, a ``rank`` by its number or the ``api`` server of the active engine."""
    before = failover.engine_of

    async def inner(node: Node, role: str, worker: str | None = None) -> dict[str, Any]:
        found = await before(node, role, worker)
        (core,) = psutil.Process(found["pid"]).children()
        return {**found, "pid": core.pid if which == "core" else ranks_of(core)[int(which.removeprefix("rank"))].pid}

    if which != "api":
        failover.engine_of = inner
    try:
        yield
    finally:
        failover.engine_of = before


def ranks_of(core: psutil.Process) -> list[psutil.Process]:
    """Return the ranks of an EngineCore, in order: all that it has forked but multiprocessing's own helper."""
    found = [child for child in core.children() if not any("resource_tracker" in word for word in child.cmdline())]
    return sorted(found, key=lambda child: child.pid)


async def killed(
    node: Node, count: int, *, streams: int, tokens: int, output: int = 96, kinds: Sequence[str] = ("core", "api")
) -> dict[str, Any]:
    """Kill ``kinds`` by turns, ``count`` times in all; all figures by kind."""
    found: dict[str, Any] = {}
    for number, which in enumerate(kinds):
        times = count // len(kinds) + (number < count % len(kinds))
        if times:
            with victims(which):
                plan = replace(plan_of(times, streams, tokens, output=output), settle_timeout_s=180.0)
                found[which] = await kills(node, plan)
    return found


# --- measuring --------------------------------------------------------------------------------------------------------------------


async def streams_at(url: str, count: int, tokens: int, output: int, seed: int = 0) -> list[Stream]:
    prompts = chats(count, plan_of(0, count, tokens).prompt_words, seed)
    async with failover.client_session() as session:
        asked = [stream_chat(session, f"{url}/v1/chat/completions", payload("chat", chat, output)) for chat in prompts]
        found = await asyncio.gather(*asked)
    wrong = [stream.error for stream in found if stream.error]
    if wrong:
        raise ShadowsupError(f"a stream failed: {wrong[0]}")
    return found


def pace(streams: Sequence[Stream]) -> dict[str, Any]:
    """Gaps between the tokens of each stream in ms, and tokens a second from the last first token to the first end."""
    gaps = [(b - a) * 1e3 for stream in streams for a, b in zip(stream.arrivals, stream.arrivals[1:], strict=False)]
    begin, end = max(stream.arrivals[0] for stream in streams), min(stream.arrivals[-1] for stream in streams)
    between = sum(tokens for stream in streams for at, tokens in zip(stream.arrivals, stream.counts, strict=True) if begin < at <= end)
    return {"gap_ms": percentiles(gaps), "tokens_s": round(between / (end - begin), 1) if end > begin else None}


# --- sections ---------------------------------------------------------------------------------------------------------------------


async def shadow(setting: Setting, found: dict[str, Any], factor: float) -> None:
    async with a_node(setting.content(), found) as node:
        found["256k tokens"] = await killed(node, scaled(20, factor), streams=32, tokens=TOKENS)


async def exact(setting: Setting, found: dict[str, Any], factor: float) -> None:
    async with a_node(setting.content(VLLM_BATCH_INVARIANT="1"), found) as node:
        found["16 streams"] = await killed(node, scaled(4, factor), streams=16, tokens=1000, output=300)


async def tp2(setting: Setting, found: dict[str, Any], factor: float) -> None:
    if len(read_gpus()) < 2:
        found["left out"] = "needs two GPUs"
        say("tp2: left out, it needs two GPUs")
        return
    # What this machine asks of programs that use several GPUs: engines do not inherit it.
    theirs = {name: value for name, value in os.environ.items() if name.startswith(("NCCL_", "NVSHMEM_", "TORCH_SYMM_MEM_"))}
    if theirs.get("TORCH_SYMM_MEM_DISABLE_MULTICAST", "0") != "0":
        theirs["VLLM_ALLREDUCE_USE_SYMM_MEM"] = "0"
    pair, ranks = replace(setting, ranks=2, env=theirs | setting.env), ("rank0", "rank1")
    async with a_node(pair.content(), found) as node:
        found["256k tokens"] = await killed(node, scaled(12, factor), streams=32, tokens=TOKENS, kinds=(*ranks, "core", "api"))
    async with a_node(pair.content(VLLM_BATCH_INVARIANT="1"), found) as node:
        found["16 streams, exact"] = await killed(node, scaled(4, factor), streams=16, tokens=1000, output=300, kinds=ranks)


async def beside(setting: Setting, found: dict[str, Any], factor: float) -> None:
    async with a_node(setting.content(), found) as node:
        await streams_at(node.url, 16, 1000, 100)
        found["undisturbed"] = pace(await streams_at(node.url, 16, 1000, 2000))
        os.kill((await engine_of(node, "shadow"))["pid"], signal.SIGKILL)
        found["a shadow starts"] = pace(await streams_at(node.url, 16, 1000, 2000))
        found["shadow ready after that"] = (await node.worker("chat"))["state"]
        say(f"beside: {found['undisturbed']} {found['a shadow starts']} {found['shadow ready after that']}")


async def respawn(setting: Setting, found: dict[str, Any], factor: float) -> None:
    async with a_node(setting.content(), found, Mode.RESPAWN) as node:
        found["256k tokens"] = await killed(node, scaled(5, factor), streams=32, tokens=TOKENS)


async def plain(setting: Setting, found: dict[str, Any], factor: float) -> None:
    first: list[float] = []
    async with servers.running(setting.content(), "chat") as server:
        await streams_at(server.base, 4, 1000, 8)
        for _ in range(scaled(3, factor)):
            at = time.monotonic()
            await server.kill()
            await server.ready()
            await streams_at(server.base, 1, 4000, 1)
            first.append(round(time.monotonic() - at, 2))
            say(f"plain restart: first token of a 4,000-token prompt after {first[-1]} s")
    found["first_token_s"] = first


async def throughput(setting: Setting, found: dict[str, Any], factor: float) -> None:
    rounds = 1 + scaled(3, factor)

    async def measure(url: str) -> list[float]:
        return [pace(await streams_at(url, 32, 1000, 600, seed))["tokens_s"] for seed in range(rounds)][1:]

    async with a_node(setting.content(), found) as node:
        found["node"] = await measure(node.url)
    async with servers.running(setting.content(), "chat") as server:
        found["vllm"] = await measure(server.base)
    found["share"] = round(statistics.median(found["node"]) / statistics.median(found["vllm"]), 3)
    say(f"throughput: {found}")


SECTIONS: dict[str, Callable[[Setting, dict[str, Any], float], Awaitable[None]]] = {
    "shadow": shadow,
    "respawn": respawn,
    "plain": plain,
    "exact": exact,
    "tp2": tp2,
    "beside": beside,
    "throughput": throughput,
}


async def run(setting: Setting, names: Sequence[str], save: Path | None, seconds: float, factor: float) -> int:
    began, load, done, status = time.monotonic(), machine.load(), {}, 0
    for name in names:
        left_s = seconds - (time.monotonic() - began)
        say(f"=== {name} ({left_s:.0f} s left)")
        found: dict[str, Any] = {}
        done[name] = found
        try:
            async with asyncio.timeout(max(1.0, left_s)):
                await SECTIONS[name](setting, found, factor)
        except (ShadowsupError, OSError, TimeoutError) as error:
            say(f"{name} failed: {type(error).__name__}: {error}")
            found["failed"], status = f"{type(error).__name__}: {error}", 1
        if save is not None:
            save.write_text(json.dumps(machine.document("gpu_vllm", load, {"factor": factor, "sections": done}), indent=1) + "\n")
    print(table(done))
    return status


def table(done: dict[str, Any]) -> str:
    """Return what was measured, a line a row."""
    lines = []
    for name, found in done.items():
        for what, rows in found.items():
            for which, row in rows.items() if isinstance(rows, dict) else ():
                if isinstance(row, dict) and "client" in row:
                    client, node = row["client"], row["node_ms"]
                    lines.append(
                        f"{name:8} {what:12} {which:5} each stream ms {client['each_stream_ms']}  first {client['first_token_ms']}  "
                        f"seen {node['death_seen']}  promoted {node['promote']}  fence {node['fence']}  refill {node['refill']}  "
                        f"cached {row['cached_share_min']}  diverged {row.get('diverged')}  wrong {len(row['wrong'])}"
                    )
        for key in ("first_token_s", "share", "undisturbed", "a shadow starts", "failed"):
            if key in found:
                lines.append(f"{name:8} {key}: {found[key]}")
    return "\n".join(lines)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description="vLLM on a GPU, seen by clients.")
    parser.add_argument("sections", nargs="*", help=", ".join(SECTIONS))
    parser.add_argument("--model", required=True)
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--env", action="append", default=[], metavar="NAME=VALUE", help="for vLLM's processes")
    parser.add_argument("--kv", default="40GiB")
    parser.add_argument("--save", type=Path)
    parser.add_argument("--seconds", type=float, default=3600.0, help="for everything")
    parser.add_argument("--factor", type=float, default=1.0, help="of the numbers of kills")
    options = parser.parse_args(arguments)
    if unknown := [name for name in options.sections if name not in SECTIONS]:
        parser.error(f"no section {unknown[0]}; there are {', '.join(SECTIONS)}")
    env = dict(one.split("=", 1) for one in options.env)
    setting = Setting(model=options.model, python=options.python, env=env, kv=options.kv)
    return asyncio.run(run(setting, options.sections or list(SECTIONS), options.save, options.seconds, options.factor))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
