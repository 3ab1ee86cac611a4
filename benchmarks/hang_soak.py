"""Hang detection: no false alarm on a saturated machine, and how soon a real hang is seen.

``python benchmarks/hang_soak.py [--minutes 20] [--stops 20] [--stuck 20] [--save FILE]`` starts a node of its own (SmolLM2 on the CPU; with
``--toy`` the engine without a model) at default settings.

First the soak: clients stream all the time, some prompts are as long as the context takes, every core is kept busy by a process beside,
shadows are killed now and then so that others load in the midst of it. Every verdict that is passed meanwhile on an engine that nobody
killed is a false alarm. Then, under the same load but without the busy processes, the active engine is stopped (SIGSTOP), or its step loop
made to stand still (``SHADOWSUP_FAULT``), again and again: milliseconds from there to the verdict. Every answer is compared with an
undisturbed one. Exit status 1: a false alarm, a hang that was not seen, or a wrong answer.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shadowsup.supervisor.bench import machine
from shadowsup.supervisor.bench.chaos import TOY_START
from shadowsup.supervisor.bench.chaos_load import Load, questions
from shadowsup.supervisor.bench.failover import Plan, chats_of, client_session
from shadowsup.supervisor.bench.figures import percentiles
from shadowsup.supervisor.bench.modes import describe
from shadowsup.supervisor.bench.node import START, Node, engine_of, running
from shadowsup.supervisor.bench.setting import choose, content_of
from shadowsup.supervisor.errors import SupervisorError

RELOAD_EVERY_S = 45.0
"""Between two kills of a shadow in the soak."""
SEEN_S = 60.0
"""A hang that nobody has seen by then is not seen."""
LONG = 4
"""One prompt in so many is a long one."""


@contextlib.contextmanager
def busy_cores(count: int) -> Iterator[None]:
    """Keep ``count`` cores busy, at normal priority."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


async def verdicts(node: Node) -> list[dict[str, Any]]:
    """Return every verdict that the node tells of, oldest first."""
    return [event for event in (await node.call("events"))["events"] if event["event"] == "engine.verdict"]


async def gone(path: Path) -> float:
    """Wait until there is no such file; return when, monotonic."""

    def wait() -> float:
        while path.exists():
            time.sleep(0.001)
        return time.monotonic()

    return await asyncio.to_thread(wait)


async def soak(node: Node, load: Load, arguments: argparse.Namespace) -> dict[str, Any]:
    """Watch for false alarms."""
    ours: set[str] = set()
    began_s = time.monotonic()
    end_s = began_s + 60.0 * arguments.minutes
    with busy_cores(arguments.busy):
        while (left_s := end_s - time.monotonic()) > 0:
            await asyncio.sleep(min(left_s, RELOAD_EVERY_S))
            if end_s - time.monotonic() > RELOAD_EVERY_S / 2:
                with contextlib.suppress(SupervisorError):
                    shadow = await engine_of(node, "shadow")
                    ours.add(shadow["id"])
                    os.kill(shadow["pid"], signal.SIGKILL)
                    await node.wait_for("healthy", timeout_s=SEEN_S * 3)
            print(f"soak: {time.monotonic() - began_s:.0f} s, {load.tally.finished} answers", file=sys.stderr)
        false = [event["message"] for event in await verdicts(node) if event["engine"] not in ours]
    return {"minutes": arguments.minutes, "busy_processes": arguments.busy, "shadows_killed": len(ours), "false_alarms": false}


async def strikes(node: Node, load: Load, count: int, how: str, fault: Path, rng: random.Random) -> dict[str, Any]:
    """Make the active engine hang ``count`` times; return how soon each was seen, in ms, and what was not."""
    seen, unseen = [], 0
    for number in range(count):
        await node.wait_for("healthy", timeout_s=180.0)
        await asyncio.sleep(1.0 + rng.random())
        await load.moves(30.0)
        active = await engine_of(node, "active")
        if how == "stop":
            os.kill(active["pid"], signal.SIGSTOP)
            at_s = time.monotonic()
        else:
            fault.touch()
            at_s = await gone(fault)  # the engine takes it away when it is struck
        deadline_s = at_s + SEEN_S
        while not (mine := [event for event in await verdicts(node) if event["engine"] == active["id"]]):
            if time.monotonic() > deadline_s:
                unseen += 1
                os.kill(active["pid"], signal.SIGKILL)
                break
            await asyncio.sleep(0.1)
        else:
            seen.append(1e3 * (mine[0]["mono_s"] - at_s))
        print(f"{how} {number + 1} of {count}: {f'{seen[-1]:.0f} ms' if mine else 'not seen'}", file=sys.stderr)
    await node.wait_for("healthy", timeout_s=180.0)
    return {"detect_ms": percentiles(seen), "unseen": unseen, "each_ms": [round(one, 1) for one in seen]}


async def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Run everything; return the document."""
    load_before = machine.load()
    content = content_of(arguments.config)
    if arguments.toy:
        args = {"step_s": 0.02, "context": 4096}
        content = {
            "version": 1,
            "workers": [{"name": "chat", "engine": "transformers", "model": "toy", "args": args, "kv": {"size": "8MiB"}}],
        }
    worker = choose(content, None)
    rng = random.Random(arguments.seed)
    with tempfile.TemporaryDirectory(prefix="shadowsup-hangs-") as folder:
        fault = Path(folder) / "strike"
        section = content["workers"][0]
        section["env"] = {**section.get("env", {}), "SHADOWSUP_FAULT": f"hang@file:{fault}"}
        if arguments.threads is not None:
            section["env"]["OMP_NUM_THREADS"] = str(arguments.threads)
        section["restart"] = {"backoff": ["0s"], "max": "1000000 in 1h"}
        async with running(content, start=TOY_START if arguments.toy else START, timeout_s=600.0) as node, client_session() as session:
            url = f"{node.url}/v1/chat/completions"
            chats = []
            for tokens, count in ((200, 4 * arguments.streams), (arguments.long, max(1, arguments.streams * 4 // LONG))):
                plan = Plan(kills=0, streams=count, prompt_tokens=tokens, seed=arguments.seed, model=worker.public_name)
                chats += await chats_of(session, url, plan)
            print(f"undisturbed run of {len(chats)} prompts", file=sys.stderr)
            asked = await questions(session, url, worker.public_name, chats, arguments.output_tokens)
            load = Load(
                session,
                url,
                asked,
                arguments.streams,
                seed=arguments.seed,
                block_tokens=worker.kv.block_tokens,
                silence_s=plan.settle_timeout_s,
                context=lambda at_s: {"at_s": round(at_s, 1)},
            )
            load.start()
            try:
                found: dict[str, Any] = {"soak": await soak(node, load, arguments)}
                found["stopped"] = await strikes(node, load, arguments.stops, "stop", fault, rng)
                found["stuck"] = await strikes(node, load, arguments.stuck, "stuck", fault, rng)
                await load.finish()
            finally:
                await load.cancel()
            tally = load.tally
            found["clients"] = {
                "answers": tally.finished,
                "tokens": tally.tokens,
                "wrong": tally.wrong,
                "longest_gap_ms": round(1e3 * tally.longest_gap_s, 1),
            }
    said = ("minutes", "stops", "stuck", "streams", "busy", "threads", "long", "output_tokens", "seed", "toy")
    plan_of = {name: getattr(arguments, name) for name in said}
    return machine.document("hang_soak", load_before, {"plan": plan_of, "engine": describe(content, worker.name), **found})


def failed(document: dict[str, Any]) -> bool:
    """Say whether a document tells of anything that must not be."""
    missed = document["stopped"]["unseen"] + document["stuck"]["unseen"]
    return bool(document["soak"]["false_alarms"] or missed or document["clients"]["wrong"])


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--config", type=Path, help="a node config; default: SmolLM2 on the CPU")
    parser.add_argument("--toy", action="store_true", help="the engine without a model")
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--stops", type=int, default=20)
    parser.add_argument("--stuck", type=int, default=20)
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--busy", type=int, default=len(os.sched_getaffinity(0)), help="processes that keep a core busy each, in the soak")
    parser.add_argument("--threads", type=int, help="of an engine; default: as the config says")
    parser.add_argument("--long", type=int, default=1500, help="tokens of the long prompts")
    parser.add_argument("--output-tokens", type=int, default=96)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save", type=Path)
    arguments = parser.parse_args(words)
    document = asyncio.run(measure(arguments))
    text = json.dumps(document, indent=1)
    if arguments.save is not None:
        arguments.save.write_text(text + "\n")
    print(text)
    return 1 if failed(document) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
