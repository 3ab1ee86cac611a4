"""vLLM on a GPU, seen by clients: ``python benchmarks/gpu_vllm.py --model FOLDER --save FILE [--python P] [--env K=V …] [SECTION …]``.

FOLDER has an 8B Llama's config and a tokenizer; weights are random (``load_format: dummy``), so none are needed. Runs unattended; what is
done is saved after each kind of kill and each section, also when it is ended by SIGTERM, so that a time limit loses nothing; sections of
FILE that are not run now stay in it. Sections:

* ``shadow``: a parked shadow, 32 streams over 256k tokens of KV; by turns the API server and the EngineCore are killed. bfloat16 is not
  batch-invariant: a stream that goes on another way than undisturbed is counted as diverged, one that broke or ended early as wrong.
* ``exact``: with VLLM_BATCH_INVARIANT=1; every token of 16 streams is compared with an undisturbed run, and that with another one.
* ``beside``: rounds of 16 streams while a shadow starts beside them (from the kill of the one before until it is parked), and without.
* ``respawn``: no shadow: an engine forked from the nursery over kept memory.
* ``plain``: vLLM without shadowsup, restarted at once; its clients ask again.
* ``tp2``, ``tp2-exact``, ``tp2-beside``: two GPUs, tensor parallel: as ``shadow``, ``exact`` and ``beside``, with either rank killed, and
  EngineCore and API server. Left out, and said so, where there is one GPU only.
* ``throughput``: 32 streams on a node with a parked shadow, and on vLLM without shadowsup.

Sections that follow each other share a node, or a plain vLLM, of the same kind.
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
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil
from gpu_failover import a_node, kills, plan_of, say, scaled
from stream_gaps import Round, pace, slow, windows
from vllm_processes import victims

from shadowsup.errors import ShadowsupError
from shadowsup.supervisor.bench import failover, machine
from shadowsup.supervisor.bench import plain as servers
from shadowsup.supervisor.bench.client import Stream, stream_chat
from shadowsup.supervisor.bench.node import Node, engine_of
from shadowsup.supervisor.bench.prompts import chats, payload
from shadowsup.supervisor.bench.setting import Mode
from shadowsup.supervisor.devices import read_gpus

TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
TOKENS = 8000
"""Of a prompt: 32 of them are 256k tokens of KV."""
PROCESSES = ("rank0", "rank1", "core", "api")
"""Of an engine with two ranks."""
ROUND_TOKENS = 1500
"""Of each stream beside which a shadow starts."""
PAIR_START_S = 200.0
"""For a node of two ranks to come up, nothing compiled yet: another section is to have its turn if it does not."""


@dataclass(kw_only=True)
class Setting:
    """What the command line says."""

    model: str
    python: str
    env: dict[str, str]
    kv: str = "40GiB"
    ranks: int = 1
    args: dict[str, Any] = field(default_factory=dict)

    def content(self, **env: str) -> dict[str, Any]:
        own = {"load_format": "dummy", "max_model_len": 40000, "chat_template": TEMPLATE, "enable_prompt_tokens_details": True}
        worker = {
            "name": "chat",
            "engine": "vllm",
            "python": self.python,
            "model": self.model,
            "dtype": "bfloat16",
            "gpus": list(range(self.ranks)),
            "tensor_parallel": self.ranks,
            "shadows": 1,
            "args": own | self.args,
            "kv": {"size": self.kv, "block_tokens": 16},
            "env": self.env | env,
        }
        return {"version": 1, "workers": [worker]}


@dataclass(kw_only=True)
class Rig:
    """What is running: one thing at a time, which stays until something else is asked for."""

    setting: Setting
    save: Callable[[], None]
    """Saves what is known."""
    _key: str = ""
    _running: Any = None
    _stack: contextlib.AsyncExitStack = field(default_factory=contextlib.AsyncExitStack)

    async def node(self, content: dict[str, Any], found: dict[str, Any], mode: Mode = Mode.SHADOW, timeout_s: float = 300.0) -> Node:
        """Return a running node; ``found`` gets what its start and its end give, if it was not running."""
        node: Node = await self._have(f"{mode} {json.dumps(content)}", lambda: a_node(content, found, mode, timeout_s=timeout_s))
        return node

    async def plain(self, content: dict[str, Any]) -> servers.PlainServer:
        """Return a vLLM without shadowsup that answers."""
        server: servers.PlainServer = await self._have(f"plain {json.dumps(content)}", lambda: warm_server(content))
        return server

    async def _have(self, key: str, make: Callable[[], contextlib.AbstractAsyncContextManager[Any]]) -> Any:
        if key != self._key:
            await self.clear()
            self._running = await self._stack.enter_async_context(make())
            self._key = key
        return self._running

    async def clear(self) -> None:
        """End what is running."""
        self._key = ""
        await self._stack.aclose()


@contextlib.asynccontextmanager
async def warm_server(content: dict[str, Any]) -> AsyncIterator[servers.PlainServer]:
    async with servers.running(content, "chat") as server:
        await streams_at(server.base, 4, 1000, 8)
        yield server


# --- killing ----------------------------------------------------------------------------------------------------------------------


async def killed(
    rig: Rig,
    node: Node,
    count: int,
    found: dict[str, Any],
    *,
    streams: int,
    tokens: int,
    output: int = 96,
    kinds: Sequence[str] = ("core", "api"),
    control: dict[str, Any] | None = None,
) -> None:
    """Kill ``kinds`` one after another, ``count`` times in all; all figures by kind go to ``found``, which is saved after each.

    ``control``: gets how many streams go another way without any kill, from one undisturbed run (that computes the prompts) to the next.
    """
    plan = replace(plan_of(0, streams, tokens, output=output), settle_timeout_s=180.0)
    reference = await failover.refer(node, plan, say)
    if control is not None:
        again = (await failover.refer(node, plan, say)).streams
        differ = [told for one, other in zip(reference.streams, again, strict=True) if (told := failover.difference(one, other))]
        control["undisturbed again"] = {"streams": len(again), "diverged": len(differ)}
        say(f"undisturbed again: {len(differ)} of {len(again)} differ {differ[:2]}")
    for number, which in enumerate(kinds):
        times = count // len(kinds) + (number < count % len(kinds))
        if times:
            say(f"kills of {which}: {times}")
            with victims(which):
                found[which] = await kills(node, replace(plan, kills=times), reference)
            rig.save()


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


# --- sections ---------------------------------------------------------------------------------------------------------------------


async def shadow(rig: Rig, found: dict[str, Any], factor: float) -> None:
    node = await rig.node(rig.setting.content(), found)
    await killed(rig, node, scaled(20, factor), found.setdefault("256k tokens", {}), streams=32, tokens=TOKENS)


async def exact(rig: Rig, found: dict[str, Any], factor: float) -> None:
    node = await rig.node(rig.setting.content(VLLM_BATCH_INVARIANT="1"), found)
    await killed(rig, node, scaled(4, factor), found.setdefault("16 streams", {}), streams=16, tokens=1000, output=300, control=found)


def two_gpus(setting: Setting, found: dict[str, Any]) -> Setting | None:
    """Return a setting of two ranks; None, and why, where there is one GPU."""
    if len(read_gpus()) < 2:
        found["left out"] = "needs two GPUs"
        say("left out, it needs two GPUs")
        return None
    # Engines inherit what the machine says of its links (NCCL_*, NVSHMEM_*, TORCH_SYMM_MEM_*); vLLM has a switch of its own.
    multicast = os.environ.get("TORCH_SYMM_MEM_DISABLE_MULTICAST", "0") == "0"
    return replace(setting, ranks=2, env=({} if multicast else {"VLLM_ALLREDUCE_USE_SYMM_MEM": "0"}) | setting.env)


async def tp2(rig: Rig, found: dict[str, Any], factor: float) -> None:
    if pair := two_gpus(rig.setting, found):
        node = await rig.node(pair.content(), found, timeout_s=PAIR_START_S)
        await killed(rig, node, scaled(12, factor), found.setdefault("256k tokens", {}), streams=32, tokens=TOKENS, kinds=PROCESSES)


async def tp2_exact(rig: Rig, found: dict[str, Any], factor: float) -> None:
    if pair := two_gpus(rig.setting, found):
        node = await rig.node(pair.content(VLLM_BATCH_INVARIANT="1"), found, timeout_s=PAIR_START_S)
        await killed(
            rig,
            node,
            scaled(8, factor),
            found.setdefault("16 streams", {}),
            streams=16,
            tokens=1000,
            output=300,
            kinds=PROCESSES,
            control=found,
        )


async def tp2_beside(rig: Rig, found: dict[str, Any], factor: float) -> None:
    if pair := two_gpus(rig.setting, found):
        await on_a_node_beside(await rig.node(pair.content(), found, timeout_s=PAIR_START_S), found)


async def beside(rig: Rig, found: dict[str, Any], factor: float) -> None:
    await on_a_node_beside(await rig.node(rig.setting.content(), found), found)


async def on_a_node_beside(node: Node, found: dict[str, Any]) -> None:
    """Rounds of the same 16 streams, so that contexts are as long with a shadow beside them as without."""
    await node.wait_for("healthy", "chat", 180.0)
    await streams_at(node.url, 16, 1000, 100)
    before = found["undisturbed"] = pace([await streams_at(node.url, 16, 1000, ROUND_TOKENS) for _ in range(2)])
    parked = asyncio.Event()

    async def go_on() -> list[Round]:
        rounds: list[Round] = []
        while not parked.is_set():
            rounds.append(await streams_at(node.url, 16, 1000, ROUND_TOKENS))
        return rounds

    asked = asyncio.create_task(go_on())
    try:
        await asyncio.sleep(2.0)
        os.kill((await engine_of(node, "shadow"))["pid"], signal.SIGKILL)
        killed_s = time.monotonic()
        await asyncio.sleep(0.5)
        await node.wait_for("healthy", "chat", 90.0)
        parked_s = time.monotonic()
        parked.set()
        rounds = await asked
    finally:
        asked.cancel()
    after = found["a shadow starts"] = pace(rounds, killed_s, parked_s)
    found["parked_after_s"] = round(parked_s - killed_s, 2)
    seen = sum(last - first for _, first, last in windows(rounds, killed_s, parked_s))
    found["covered"] = round(seen / (parked_s - killed_s), 3)
    found["share"] = {key: round(after["gap_ms"][key] / before["gap_ms"][key], 2) for key in ("p50", "p99", "max")}
    found["slow"] = slow(rounds, killed_s, parked_s, 1.5 * before["gap_ms"]["p99"])
    say(f"beside: {before} {after} {found['share']}, parked after {found['parked_after_s']} s, {found['covered']:.0%} of it seen")


async def respawn(rig: Rig, found: dict[str, Any], factor: float) -> None:
    node = await rig.node(rig.setting.content(), found, Mode.RESPAWN)
    await killed(rig, node, scaled(5, factor), found.setdefault("256k tokens", {}), streams=32, tokens=TOKENS)


async def plain(rig: Rig, found: dict[str, Any], factor: float) -> None:
    first: list[float] = []
    server = await rig.plain(rig.setting.content())
    for _ in range(scaled(3, factor)):
        at = time.monotonic()
        await server.kill()
        await server.ready()
        await streams_at(server.base, 1, 4000, 1)
        first.append(round(time.monotonic() - at, 2))
        say(f"plain restart: first token of a 4,000-token prompt after {first[-1]} s")
    found["first_token_s"] = first


async def throughput(rig: Rig, found: dict[str, Any], factor: float) -> None:
    rounds = 1 + scaled(3, factor)

    async def measure(url: str) -> list[float]:
        return [pace([await streams_at(url, 32, 1000, 600, seed)])["tokens_s"] for seed in range(rounds)][1:]

    found["node"] = await measure((await rig.node(rig.setting.content(), found)).url)
    found["vllm"] = await measure((await rig.plain(rig.setting.content())).base)
    found["share"] = round(statistics.median(found["node"]) / statistics.median(found["vllm"]), 3)
    say(f"throughput: {found['node']} {found['vllm']} {found['share']}")


SECTIONS: dict[str, Callable[[Rig, dict[str, Any], float], Awaitable[None]]] = {
    "respawn": respawn,
    "shadow": shadow,
    "beside": beside,
    "throughput": throughput,
    "plain": plain,
    "exact": exact,
    "tp2-exact": tp2_exact,
    "tp2": tp2,
    "tp2-beside": tp2_beside,
}


async def run(setting: Setting, wanted: Sequence[tuple[str, float]], save: Path | None, seconds: float) -> int:
    began, load, done, status = time.monotonic(), machine.load(), {}, 0
    vllm = await version(setting)
    before: dict[str, Any] = json.loads(save.read_text())["sections"] if save is not None and save.exists() else {}

    def saved() -> None:
        if save is not None:
            sections = before | {
                name: {"date": today(), "vllm_version": vllm, **found}
                for name, found in done.items()
                if "failed" not in found or name not in before  # what is known already is better than that
            }
            save.write_text(json.dumps(machine.document("gpu_vllm", load, {"sections": sections}), indent=1) + "\n")

    rig, task = Rig(setting=setting, save=saved), asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)

    async def cleared() -> None:
        try:
            await rig.clear()
        except (ShadowsupError, OSError, TimeoutError) as error:
            say(f"what was running has not ended in order: {type(error).__name__}: {error}")

    try:
        for name, factor_of in wanted:
            left_s = seconds - (time.monotonic() - began)
            if left_s < 1.0:
                say(f"=== {name}: no time is left for it")
                status = 1
                continue
            say(f"=== {name} ({left_s:.0f} s left)")
            found: dict[str, Any] = {}
            done[name] = found
            try:
                async with asyncio.timeout(left_s):
                    await SECTIONS[name](rig, found, factor_of)
            except (ShadowsupError, OSError, TimeoutError, psutil.Error) as error:
                say(f"{name} failed: {type(error).__name__}: {error}")
                found["failed"], status = f"{type(error).__name__}: {error}", 1
                saved()
                await cleared()
            except asyncio.CancelledError:
                say(f"{name} was ended by SIGTERM")
                found["failed"], status = "ended by SIGTERM", 1
                break
            saved()
    finally:
        saved()  # before a node is stopped, which takes its time
        await cleared()
        saved()
    print(table(done))
    return status


async def version(setting: Setting) -> str:
    """Return that of the vLLM which is measured."""
    command = [setting.python, "-c", "from importlib.metadata import version; print(version('vllm'))"]
    asked = await asyncio.create_subprocess_exec(*command, env=os.environ | setting.env, stdout=asyncio.subprocess.PIPE)
    return (await asked.communicate())[0].decode().strip() or "?"


def today() -> str:
    return time.strftime("%Y-%m-%d", time.gmtime())


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
    parser.add_argument("--args", type=json.loads, default={}, metavar="JSON", help="for vLLM, beside its defaults")
    parser.add_argument("--save", type=Path)
    parser.add_argument("--seconds", type=float, default=3600.0, help="for everything")
    parser.add_argument("--factor", type=float, default=1.0, help="of the numbers of kills; SECTION=F has its own")
    options = parser.parse_args(arguments)
    wanted: list[tuple[str, float]] = []
    for one in options.sections or list(SECTIONS):
        name, _, own = one.partition("=")
        if name not in SECTIONS:
            parser.error(f"no section {name}; there are {', '.join(SECTIONS)}")
        try:
            wanted.append((name, float(own or options.factor)))
        except ValueError:
            parser.error(f"{one}: {own} is no factor")
    env = dict(one.split("=", 1) for one in options.env)
    setting = Setting(model=options.model, python=options.python, env=env, kv=options.kv, args=options.args)
    return asyncio.run(run(setting, wanted, options.save, options.seconds))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
