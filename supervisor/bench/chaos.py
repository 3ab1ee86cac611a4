"""``bench chaos``: strike the processes of a node at random, under load, again and again; compare every token; look for what is left.

The load never pauses: clients ask one of a set of prompts after the other, whose answers were taken before the first fault. A fault is a
signal from outside to one process or two, anywhere in a step. Mostly the next one waits until the node is whole again and has replaced
whoever was struck; now and then it does not, and meets a node that is still recovering.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import random
import secrets
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shadowsup.supervisor.bench import chaos_faults as faults
from shadowsup.supervisor.bench import chaos_leaks as leaks
from shadowsup.supervisor.bench import machine
from shadowsup.supervisor.bench.chaos_load import Load, Tally, questions
from shadowsup.supervisor.bench.chaos_run import Fault, Run, context
from shadowsup.supervisor.bench.failover import Plan as LoadPlan
from shadowsup.supervisor.bench.failover import Progress, chats_of, client_session
from shadowsup.supervisor.bench.figures import percentiles
from shadowsup.supervisor.bench.modes import describe
from shadowsup.supervisor.bench.node import START, Node, running
from shadowsup.supervisor.bench.setting import Mode, choose, for_mode
from shadowsup.supervisor.errors import SupervisorError

TOY_START = (sys.executable, "-m", "shadowsup.supervisor.bench.toy_node", "{config}", "{runtime}")
PROGRESS_S = 10.0
STREAM_END_S = 120.0
FD_SLACK = 4
"""Descriptors more than at the start that are no leak: a connection that is just being made or dropped."""
STAYS_S = 10.0
"""What is more than at the start for this long is a leak."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """``faults`` None: until ``minutes`` are over. ``seed`` None: drawn. ``prompts`` None: 4 for each client."""

    faults: int | None = None
    minutes: float | None = None
    seed: int | None = None
    kinds: tuple[str, ...] = ()
    streams: int = 4
    prompts: int | None = None
    prompt_tokens: int = 200
    output_tokens: int = 48
    worker: str | None = None
    settle_timeout_s: float = 120.0
    """How long a node may take to be whole again after a fault, and a stream to go on. Every rung of a recovery takes less."""


@dataclass(kw_only=True)
class Outcome:
    """What a run leaves to be told."""

    seed: int
    done: list[Fault] = field(default_factory=list)
    recoveries: Sequence[Mapping[str, Any]] = ()
    tally: Tally = field(default_factory=Tally)
    kinds: Sequence[str] = ()
    seconds: float = 0.0
    stuck: str | None = None
    before: dict[str, dict[str, int]] = field(default_factory=dict)
    after: dict[str, dict[str, int]] = field(default_factory=dict)
    memory: set[str] = field(default_factory=set)
    """What its processes held when it was told to stop."""
    cgroups: set[Path] = field(default_factory=set)
    left: dict[str, list[str]] = field(default_factory=dict)


def check_kinds(names: Sequence[str]) -> None:
    """Raises SupervisorError: (usage) there is no such kind of fault."""
    faults.chosen(names)


def toy_content() -> dict[str, Any]:
    """Return a config of the toy engine, whose shadows are parked in a fraction of a second: many faults in little time."""
    worker = {
        "name": "chat",
        "engine": "transformers",
        "model": "toy",
        "args": {"step_s": 0.004, "unicode": True},
        "kv": {"size": "2MiB"},
        "env": {"OMP_NUM_THREADS": "1"},
        "stop": {"timeout": "5s"},
    }
    return {"version": 1, "workers": [worker]}


async def measure(
    content: dict[str, Any],
    plan: Plan,
    progress: Progress = lambda _: None,
    *,
    start: Sequence[str] = START,
    environment: Mapping[str, str] | None = None,
    keep: bool = False,
) -> dict[str, Any]:
    """Run ``plan`` on a node of ``content`` (`setting.content_of`); return the document.

    Args:
        keep: leave the node's folder when something went wrong.

    Raises:
        SupervisorError: no node came up, or the undisturbed run failed. A node that does not recover is part of the document.
    """
    load_before = machine.load()
    worker = choose(content, plan.worker)
    outcome = Outcome(seed=plan.seed if plan.seed is not None else secrets.randbelow(10**9))
    progress(f"seed {outcome.seed}")
    changed = for_mode(content, worker.name, Mode.SHADOW)
    # Killing is the point here: it must not use up what the config allows for engines that fail by themselves.
    changed["workers"][0]["restart"] = {"backoff": ["0s"], "max": "1000000 in 1h"}
    shm = leaks.shared_memory()
    folder = Path(tempfile.mkdtemp(prefix="shadowsup-chaos-"))
    try:
        try:
            async with running(changed, start=start, environment=environment, folder=folder) as node:
                await _on(node, worker.name, worker.public_name, worker.kv.block_tokens, plan, outcome, progress)
        except SupervisorError as error:
            if not outcome.done:
                raise
            outcome.stuck = outcome.stuck or f"{error}"
        outcome.left = {
            "processes": [f"{pid} {what}" for pid, what in leaks.processes(folder).items()],
            "memory": sorted(leaks.memory() & outcome.memory),
            "shared_memory": leaks.left_shared_memory(shm),
            "files": leaks.files(folder),
            "cgroups": sorted(str(path) for path in outcome.cgroups if path.exists()),
        }
        document = machine.document("chaos", load_before, summary(outcome, plan, describe(content, worker.name)))
        keep = keep and failed(document)
        if keep:
            progress(f"the node's folder is left for you: {folder}")
    finally:
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)
    return document


async def _on(node: Node, worker: str, model: str, block_tokens: int, plan: Plan, outcome: Outcome, progress: Progress) -> None:
    rng = random.Random(outcome.seed)
    url = f"{node.url}/v1/chat/completions"
    async with client_session() as session:
        prompts = plan.prompts or 4 * plan.streams
        sized = LoadPlan(kills=0, streams=prompts, prompt_tokens=plan.prompt_tokens, seed=outcome.seed, model=model)
        chats = await chats_of(session, url, sized)
        progress(f"undisturbed run of {prompts} prompts")
        asked = await questions(session, url, model, chats, plan.output_tokens)
        load = Load(
            session,
            url,
            asked,
            plan.streams,
            seed=outcome.seed,
            block_tokens=block_tokens,
            silence_s=plan.settle_timeout_s,
            context=functools.partial(context, outcome.done),
        )
        outcome.tally = load.tally
        run = Run(node=node, worker=worker, rng=rng, load=load, kinds=[], settle_timeout_s=plan.settle_timeout_s, done=outcome.done)
        run.kinds = faults.possible(faults.chosen(plan.kinds), *await run.status())
        if not run.kinds:
            raise SupervisorError("this node has none of the processes to be struck", "choose other --kinds")
        outcome.kinds = [kind.value for kind in run.kinds]
        await run.settle()
        outcome.before = await _figures(run)
        began_s = time.monotonic()
        try:
            await _strike_on(run, plan, outcome, progress)
        finally:
            outcome.seconds = time.monotonic() - began_s
            outcome.recoveries = list(run.recoveries.values())
            outcome.memory = leaks.memory(leaks.processes(node.folder))
            outcome.cgroups = leaks.cgroups(leaks.processes(node.folder))
            await _make_stoppable(node)
        if outcome.stuck is None:
            outcome.after = await _figures(run)
            deadline = time.monotonic() + STAYS_S
            while _grown(outcome, "fds", FD_SLACK) + _grown(outcome, "processes", 0) and time.monotonic() < deadline:
                await asyncio.sleep(0.2)  # what is just ending is no leak
                outcome.after = await _figures(run)


async def _strike_on(run: Run, plan: Plan, outcome: Outcome, progress: Progress) -> None:
    """Strike until the plan is fulfilled or the node does not recover; then let the streams end."""
    load, end_s = run.load, None if plan.minutes is None else time.monotonic() + 60.0 * plan.minutes
    told_s = time.monotonic()
    load.start()
    try:
        while (plan.faults is None or len(run.done) < plan.faults) and (end_s is None or time.monotonic() < end_s):
            await run.fault()
            if time.monotonic() - told_s > PROGRESS_S:
                told_s = time.monotonic()
                tally = load.tally
                progress(f"{len(run.done)} faults, {tally.finished} streams, {tally.tokens:,} tokens compared, {len(tally.wrong)} wrong")
        await run.settle()
        async with asyncio.timeout(STREAM_END_S):
            await load.finish()
        await run.settle()
    except (SupervisorError, TimeoutError) as error:
        outcome.stuck = str(error) or "the streams did not end"
        progress(f"stuck: {outcome.stuck}")
        await _note_stuck(run)
    finally:
        await load.cancel()


async def _note_stuck(run: Run) -> None:
    """Write what the node said and which processes there were into its folder, for whoever looks for the cause."""
    found: dict[str, Any] = {"processes": leaks.described(run.node.folder)}
    with contextlib.suppress(SupervisorError):
        found["status"] = await run.node.status()
    (run.node.folder / "stuck.json").write_text(json.dumps(found, indent=1))


async def _make_stoppable(node: Node) -> None:
    """A supervisor that is away cannot stop its node: end what it left as an operator would."""
    if node.process.returncode is not None:
        await node.cli("stop", check=False, timeout_s=120.0)


async def _figures(run: Run) -> dict[str, dict[str, int]]:
    """Return what the node's processes have open and in memory while nobody asks anything."""
    status, worker = await run.status()
    pids = {name: pid for name, pid in faults.pids_of(status, worker).items() if name != "spare"}
    return {"fds": leaks.open_fds(pids), "rss": leaks.resident(pids), "processes": {"all": len(leaks.processes(run.node.folder))}}


# --- the document ---------------------------------------------------------------------------------------------------------------


def summary(outcome: Outcome, plan: Plan, engine: dict[str, Any]) -> dict[str, Any]:
    """Put the figures of a run together."""
    tally = outcome.tally
    kinds: dict[str, list[Fault]] = {}
    for fault in outcome.done:
        kinds.setdefault(fault.strike.kind.value, []).append(fault)
    recoveries = outcome.recoveries
    return {
        "plan": {
            "faults": plan.faults,
            "minutes": plan.minutes,
            "streams": plan.streams,
            "output_tokens": plan.output_tokens,
            "seed": outcome.seed,
            "kinds": list(outcome.kinds),
        },
        "engine": engine,
        "seconds": round(outcome.seconds, 1),
        "faults": {"total": len(outcome.done), "by_kind": {kind: len(those) for kind, those in sorted(kinds.items())}},
        "recoveries": {"total": len(recoveries), "by_kind": dict(Counter(str(each["kind"]) for each in recoveries))},
        "streams": {"finished": tally.finished, "cut_by_gateway": tally.cut, "wrong": len(tally.wrong)},
        "tokens_compared": tally.tokens,
        "wrong": tally.wrong,
        "longest_gap_ms": round(tally.longest_gap_s * 1e3, 1),
        "blocks": {"full": tally.blocks, "cached": tally.cached, "share": round(tally.cached / tally.blocks, 4) if tally.blocks else None},
        "detected_ms": _by_kind(kinds, "detected_ms"),
        "settled_ms": _by_kind(kinds, "settled_ms"),
        "stuck": outcome.stuck,
        "leaks": {**outcome.left, "fds": _grown(outcome, "fds", FD_SLACK), "running": _grown(outcome, "processes", 0)},
        "fds": {"before": outcome.before.get("fds"), "after": outcome.after.get("fds")},
        "rss": {"before": outcome.before.get("rss"), "after": outcome.after.get("rss")},
    }


def failed(document: Mapping[str, Any]) -> bool:
    """Tell whether anything went wrong: a token, a node that did not recover, a leak."""
    return bool(document["wrong"] or document["stuck"] or any(document["leaks"].values()))


def _by_kind(kinds: Mapping[str, Sequence[Fault]], name: str) -> dict[str, Any]:
    found = {kind: percentiles([value for fault in those if (value := getattr(fault, name)) is not None]) for kind, those in kinds.items()}
    return {kind: figures for kind, figures in sorted(found.items()) if figures is not None}


def _grown(outcome: Outcome, what: str, slack: int) -> list[str]:
    before, after = outcome.before.get(what, {}), outcome.after.get(what, {})
    return [f"{name}: {before[name]} → {count}" for name, count in after.items() if name in before and count > before[name] + slack]
