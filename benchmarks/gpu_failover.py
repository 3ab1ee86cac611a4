"""Failover of a whole node on a GPU, seen by clients: ``python benchmarks/gpu_failover.py --save FILE [--seconds N] [SECTION …]``.

Runs unattended and takes no model from anywhere: weights are random, of real shapes (``load_format: dummy``). Each section starts a node of
its own and stops it again; what is done is saved after each, so that a time limit loses nothing. Sections:

* ``exact``: the shape of SmolLM2-135M in float32 without TF32; every token is compared with an undisturbed run.
* ``shadow``: an 8B Llama in bfloat16, a parked shadow; kills at several amounts of KV in use, with contexts of 32k tokens, of the keeper,
  and of keeper and engine together. bfloat16 is not batch-invariant: a stream that goes on another way than in the undisturbed run is
  counted as diverged and not compared from there on, one that broke or ended early as wrong.
* ``often``: the same node with 2 GB of KV in use, and more kills, for the percentiles.
* ``respawn``: the same with ``shadows: 0``.
* ``plain``: the same engine without shadowsup, restarted at once.
* ``throughput``: steady decoding on a node and without one, in turns.
* ``neighbours``: two workers on one GPU, the first one's engine killed; ``two-gpus``: the same, each on a GPU of its own (only when it is
  named); ``illegal-access``: an engine that reads out of bounds on the device at a certain prompt, with streams beside it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import gpu_neighbours
import pynvml

from shadowsup.errors import ShadowsupError
from shadowsup.supervisor.bench import failover, machine, plain, throughput
from shadowsup.supervisor.bench.client import Stream, stream_chat
from shadowsup.supervisor.bench.failover import Plan
from shadowsup.supervisor.bench.figures import percentiles
from shadowsup.supervisor.bench.node import Node, engine_of, running
from shadowsup.supervisor.bench.prompts import chats, payload
from shadowsup.supervisor.bench.setting import Mode, for_mode

SMALL: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "initializer_range": 0.1,
}
"""SmolLM2-135M's shape. Wider weights than it starts from: with its own, logits are so even that rounding decides."""

EIGHT_B: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
}
"""Llama 3.1 8B's shape."""

KV_OF_TOKEN = 131072
"""Bytes of K and V that a token of `EIGHT_B` takes in bfloat16."""
WORD = 7.6
"""Tokens (bytes) of a word of the prompts, with its space: a dummy model has no tokenizer."""

STARTED_S = time.monotonic()
MOST_RESTARTS = 2
"""Until a node is up."""
LOG_LINES = int(os.environ.get("BENCH_LOG_LINES", "0"))
"""Of each log of a node, shown at its end; of one that failed some are shown in any case."""


def say(text: str) -> None:
    print(f"[{time.monotonic() - STARTED_S:6.1f}] {text}", flush=True)


def config(model: dict[str, Any], dtype: str, kv: str, context: int, **args: Any) -> dict[str, Any]:
    return {
        "version": 1,
        "workers": [
            {
                "name": "chat",
                "engine": "transformers",
                "model": "dummy:llama",
                "dtype": dtype,
                "gpus": [0],
                "shadows": 1,
                "args": {"load_format": "dummy", "config": model, "max_context": context, **args},
                "kv": {"size": kv, "block_tokens": 16},
            }
        ],
    }


def eight_b(kv: str) -> dict[str, Any]:
    return config(EIGHT_B, "bfloat16", kv, 34000)


def plan_of(kills: int, streams: int, tokens: int, output: int = 96, seed: int = 0) -> Plan:
    """``tokens``: of each prompt, about."""
    words = max(1, round((tokens - 80) / WORD))
    return Plan(
        kills=kills,
        streams=streams,
        prompt_words=words,
        output_tokens=output,
        seed=seed,
        model="chat",
        worker="chat",
        settle_timeout_s=90.0,
    )


class Gpus:
    """What NVML says about the first ``count`` GPUs together."""

    def __init__(self, count: int) -> None:
        pynvml.nvmlInit()
        self._handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(count)]

    def used(self) -> int:
        return sum(int(pynvml.nvmlDeviceGetMemoryInfo(handle).used) for handle in self._handles)

    def of_process(self, pid: int) -> int | None:
        found = [one for handle in self._handles for one in pynvml.nvmlDeviceGetComputeRunningProcesses(handle) if one.pid == pid]
        return int(found[0].usedGpuMemory) if found and found[0].usedGpuMemory else None

    async def back_to(self, used: int, timeout_s: float = 10.0) -> int:
        """Wait until no more than ``used`` bytes are in use; return how many more there are."""
        deadline = time.monotonic() + timeout_s
        while self.used() > used and time.monotonic() < deadline:  # noqa: ASYNC110 - NVML has no event for it
            await asyncio.sleep(0.1)
        return self.used() - used


def hopeless(worker: dict[str, Any]) -> bool:
    """Whether a worker that starts will not come up: it is down, or one engine after another has ended."""
    return worker["state"] == "down" or worker["restarts"] > MOST_RESTARTS


@contextlib.asynccontextmanager
async def a_node(
    content: dict[str, Any], found: dict[str, Any], mode: Mode = Mode.SHADOW, neighbour: int | None = None, timeout_s: float = 300.0
) -> Any:
    """A running node; what it cost its devices, and whether it gave that back, goes to ``found``. ``neighbour``: GPU of a second worker."""
    gpu = Gpus(max(len(worker["gpus"]) for worker in content["workers"]))
    before, started_s = gpu.used(), time.monotonic()
    node: Node | None = None
    try:
        changed = for_mode(content, "chat", mode)
        if neighbour is not None:
            changed = gpu_neighbours.with_neighbour(changed, neighbour)
        async with running(changed, environment=mode.environment, timeout_s=timeout_s, hopeless=hopeless, keep=True) as node:
            found["start_s"] = round(time.monotonic() - started_s, 2)
            shown = (await node.status())["memkeeper"]
            found["memory"] = {"kept": shown["bytes"], "used": gpu.used() - before}
            for role in ("active", "shadow")[: 2 if mode is Mode.SHADOW else 1]:
                found["memory"][role] = gpu.of_process((await engine_of(node, role))["pid"])
            say(f"up after {found['start_s']} s; bytes: {found['memory']}")
            yield node
            found["recoveries"] = (await node.call("recoveries"))["recoveries"]
        found["memory"]["left_after_stop"] = await gpu.back_to(before)
        say(f"left after stop: {found['memory']['left_after_stop']} bytes")
    finally:
        if node is not None and (LOG_LINES or sys.exc_info()[0] is not None):
            for log in (
                node.output,
                *sorted((node.folder / "state").glob("*.jsonl")),
                *sorted((node.folder / "state" / "logs").glob("*.log")),
            ):
                lines = [line[:300] for line in log.read_text(errors="replace").splitlines() if "shadowsup.access" not in line]
                print(f"--- {log.name}", *lines[-(LOG_LINES or 25) :], sep="\n", flush=True)


def judged(result: dict[str, Any]) -> dict[str, Any]:
    """Tell streams that went on another way (as bfloat16 may) from those that are wrong."""
    told = [what for kill in result["wrong"] for what in kill["what"]]
    diverged = [what for what in told if what.endswith("differs")]
    result["diverged"] = len(diverged)
    result["wrong"] = [what for what in told if not what.endswith("differs")]
    say(
        f"first token {result['client']['first_token_ms']}, each stream {result['client']['each_stream_ms']}, death seen "
        f"{result['node_ms']['death_seen']}, promote {result['node_ms']['promote']}, refill {result['node_ms']['refill']}, "
        f"cached {result['cached_share_min']}, diverged {result['diverged']}, wrong {result['wrong'][:3]}"
    )
    return result


async def kills(node: Node, plan: Plan, reference: failover.Reference | None = None) -> dict[str, Any]:
    result = judged(await failover.measure(node, plan, say, reference))
    result["kv_in_use"] = sum(result["prompt_tokens"]) * KV_OF_TOKEN
    return result


async def parts_killed(node: Node, plan: Plan, *, engine: bool) -> dict[str, Any]:
    """Kill the keeper under load, with the active engine or without."""
    url = f"{node.url}/v1/chat/completions"
    async with failover.client_session() as session:
        seen = [Stream(sent_s=time.monotonic()) for _ in range(plan.streams)]
        prompts = chats(plan.streams, plan.prompt_words, plan.seed)
        asked = [
            asyncio.create_task(stream_chat(session, url, payload("chat", chat, plan.output_tokens), into))
            for chat, into in zip(prompts, seen, strict=True)
        ]
        await asyncio.gather(*(stream.reached(20) for stream in seen))
        victims = [(await node.status())["memkeeper"]["pid"]]
        if engine:
            victims.append((await engine_of(node, "active"))["pid"])
        killed_s = time.monotonic()
        for pid in victims:
            os.kill(pid, signal.SIGKILL)
        await asyncio.gather(*asked)
    await node.wait_for("healthy", "chat", timeout_s=plan.settle_timeout_s)
    resumed = [after * 1e3 for stream in seen if (after := stream.resumed_after(killed_s)) is not None]
    result = {
        "wrong": [stream.error or "not complete" for stream in seen if stream.error or len(stream.token_ids) != plan.output_tokens],
        "longest_gap_ms": percentiles([stream.longest_gap_s() * 1e3 for stream in seen]),
        "each_stream_ms": percentiles(resumed),
        "healthy_after_s": round(time.monotonic() - killed_s, 2),
    }
    say(f"keeper{' and engine' if engine else ''} killed: {result}")
    return result


# --- sections -------------------------------------------------------------------------------------------------------------------


async def exact(found: dict[str, Any], factor: float) -> None:
    content = config(SMALL, "float32", "4GiB", 8192)
    async with a_node(content, found) as node:
        result = await failover.measure(node, plan_of(scaled(10, factor), 16, 900), say)
        found["kills"] = result
        say(f"{result['tokens_checked']} tokens checked, wrong: {result['wrong']}; first token {result['client']['first_token_ms']}")


async def shadow(found: dict[str, Any], factor: float) -> None:
    sizes = {"2 GB": (16, 32, 480), "16 GB": (4, 32, 3800), "64 GB": (4, 32, 15200), "32k context": (2, 4, 32000)}
    async with a_node(eight_b("80GiB"), found) as node:
        for number, (name, (count, streams, tokens)) in enumerate(sizes.items()):
            say(f"KV in use: {name}")
            found[name] = await kills(node, plan_of(scaled(count, factor), streams, tokens, seed=number))
        small = plan_of(0, 32, 480, seed=7)
        found["keeper killed"] = await parts_killed(node, small, engine=False)
        found["after that"] = await kills(node, replace(small, kills=1))
        found["keeper and engine killed"] = await parts_killed(node, small, engine=True)


async def often(found: dict[str, Any], factor: float) -> None:
    async with a_node(eight_b("80GiB"), found) as node:
        found["2 GB"] = await kills(node, plan_of(scaled(40, factor), 32, 480))


async def respawn(found: dict[str, Any], factor: float) -> None:
    async with a_node(eight_b("12GiB"), found, Mode.RESPAWN) as node:
        found["2 GB"] = await kills(node, plan_of(scaled(5, factor), 32, 480))


async def without(found: dict[str, Any], factor: float) -> None:
    content = for_mode(eight_b("12GiB"), "chat", Mode.PLAIN)
    async with plain.running(content, "chat") as server:
        found["2 GB"] = judged(await plain.measure(server, plan_of(scaled(2, factor), 32, 480), say))


async def steady(found: dict[str, Any], factor: float) -> None:
    found.update(await throughput.measure(eight_b("12GiB"), plan_of(0, 32, 480, output=256), scaled(4, factor), say))


async def neighbours(found: dict[str, Any], factor: float, gpu: int = 0) -> None:
    async with a_node(eight_b("12GiB"), found, neighbour=gpu) as node:
        await node.wait_for("healthy", gpu_neighbours.OTHER, timeout_s=120.0)
        found["2 workers"] = await gpu_neighbours.measure(node, scaled(4, factor), say)


async def illegal_access(found: dict[str, Any], factor: float) -> None:
    async with a_node(gpu_neighbours.faulty(eight_b("12GiB")), found, neighbour=0) as node:
        await node.wait_for("healthy", gpu_neighbours.OTHER, timeout_s=120.0)
        found["2 workers"] = await gpu_neighbours.illegal_access(node, say)


async def two_gpus(found: dict[str, Any], factor: float) -> None:
    await neighbours(found, factor, gpu=1)


SECTIONS: dict[str, Callable[[dict[str, Any], float], Awaitable[None]]] = {
    "shadow": shadow,
    "often": often,
    "respawn": respawn,
    "exact": exact,
    "plain": without,
    "throughput": steady,
    "neighbours": neighbours,
    "illegal-access": illegal_access,
    "two-gpus": two_gpus,
}
DEFAULT = [name for name in SECTIONS if name != "two-gpus"]


def scaled(count: int, factor: float) -> int:
    return max(1, round(count * factor))


async def run(names: Sequence[str], save: Path | None, seconds: float, factor: float) -> int:
    load, done, status = machine.load(), {}, 0
    for name in names:
        left_s = seconds - (time.monotonic() - STARTED_S)
        say(f"=== {name} ({left_s:.0f} s left)")
        found: dict[str, Any] = {}
        done[name] = found
        try:
            async with asyncio.timeout(max(1.0, left_s)):
                await SECTIONS[name](found, factor)
        except (ShadowsupError, OSError, TimeoutError) as error:
            say(f"{name} failed: {type(error).__name__}: {error}")
            found["failed"], status = f"{type(error).__name__}: {error}", 1
        if save is not None:
            save.write_text(json.dumps(machine.document("gpu_failover", load, {"factor": factor, "sections": done}), indent=1) + "\n")
    return status


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description="Failover on a GPU, seen by clients.")
    parser.add_argument("sections", nargs="*", help=", ".join(SECTIONS))
    parser.add_argument("--save", type=Path)
    parser.add_argument("--seconds", type=float, default=3600.0, help="for everything")
    parser.add_argument("--factor", type=float, default=1.0, help="of the numbers of kills")
    options = parser.parse_args(arguments)
    if unknown := [name for name in options.sections if name not in SECTIONS]:
        parser.error(f"no section {unknown[0]}; there are {', '.join(SECTIONS)}")
    return asyncio.run(run(options.sections or DEFAULT, options.save, options.seconds, options.factor))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
