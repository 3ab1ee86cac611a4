"""What takes more than one field, or the machine, to tell. Each finding names the paths it depends on."""

from __future__ import annotations

import grp
import shutil
from collections.abc import Iterator
from dataclasses import dataclass

from shadowsup.supervisor.config.document import Path
from shadowsup.supervisor.config.model import Backend, EngineKind, NodeConfig, WorkerConfig
from shadowsup.supervisor.config.owned import owned_argument, owned_variable
from shadowsup.supervisor.config.secret_files import check_secret_file, read_env_file
from shadowsup.supervisor.config.units import format_duration, format_size
from shadowsup.supervisor.errors import ConfigError, Problem

PAGE = 4096
VMM_GRANULE = 2 * 2**20
"""Bytes: the granularity of CUDA VMM allocations."""
VLLM_CPU_BLOCK = 32
RESERVED_NAMES = frozenset({"gateway", "memkeeper", "keeper", "nursery", "sensor", "supervisor", "scribe", "all"})
"""Names of other parts of a node, in logs and messages."""


@dataclass(frozen=True)
class Finding:
    """``about``: further paths that it depends on; if one of them is wrong by itself, this is not told. ``key``: the key is meant."""

    path: Path
    message: str
    hint: str = ""
    about: tuple[Path, ...] = ()
    key: bool = False
    warning: bool = False
    problems: tuple[Problem, ...] = ()
    """Problems of another file that this path names, told instead."""


def check(config: NodeConfig) -> Iterator[Finding]:
    """Yield everything that is wrong or doubtful about a config whose fields are right one by one."""
    yield from _node(config)
    yield from _names(config)
    for index, worker in enumerate(config.workers):
        at: Path = ("workers", index)
        yield from _engine(worker, at)
        yield from _devices(config, worker, at)
        yield from _memory(config, worker, at)
        yield from _health(worker, at)
        yield from _environment(worker, at)


def _node(config: NodeConfig) -> Iterator[Finding]:
    if config.node.group is not None:
        try:
            grp.getgrnam(config.node.group)
        except KeyError:
            yield Finding(("node", "group"), f"there is no group {config.node.group!r} on this machine")
    key_file = config.gateway.api_key_file
    if key_file is not None and (wrong := check_secret_file(key_file)) is not None:
        yield Finding(("gateway", "api_key_file"), *wrong)
    if key_file is None and not config.gateway.address.is_loopback:
        yield Finding(
            ("gateway", "listen"),
            f"{config.gateway.listen} is open to the network without a key",
            "set gateway.api_key_file",
            about=(("gateway", "api_key_file"),),
            warning=True,
        )


def _names(config: NodeConfig) -> Iterator[Finding]:
    names: dict[str, int] = {}
    served: dict[str, int] = {}
    for index, worker in enumerate(config.workers):
        at: Path = ("workers", index, "name")
        if worker.name.lower() in RESERVED_NAMES:
            yield Finding(at, f"{worker.name!r} is the name of a part of every node", "choose another name")
        first = names.setdefault(worker.name.lower(), index)
        if first != index:
            yield Finding(at, f"worker name {worker.name!r} is taken by workers[{first}]", about=(("workers", first, "name"),))
            continue
        first = served.setdefault(worker.public_name, index)
        if first != index:
            path: Path = ("workers", index, "served_name") if worker.served_name is not None else at
            yield Finding(
                path,
                f"clients could not tell this worker from {config.workers[first].name!r}: both are served as {worker.public_name!r}",
                "give them different served_name",
                about=(("workers", first, "served_name"), ("workers", first, "name"), at),
            )


def _engine(worker: WorkerConfig, at: Path) -> Iterator[Finding]:
    engine = (*at, "engine")
    for key in worker.engine.required_keys:
        if getattr(worker, key) is None:
            yield Finding(at, f"a {worker.engine.value} engine needs {key}", about=(engine, (*at, key)))
    why = "" if worker.engine.keeps_memory else "; it is served without kept memory"
    for key in worker.engine.foreign_keys:
        if key in worker.model_fields_set:
            yield Finding((*at, key), f"a {worker.engine.value} engine has no {key}{why}", about=(engine,), key=True)
    if worker.python is not None and shutil.which(worker.python) is None:
        yield Finding((*at, "python"), f"there is no program {worker.python}", "name an interpreter, like /opt/env/bin/python")
    if worker.cwd is not None and not worker.cwd.is_dir():
        yield Finding((*at, "cwd"), f"there is no folder {worker.cwd}")
    if worker.ready is not None and len(worker.ready.given) != 1:
        given = " and ".join(worker.ready.given) or "none of them"
        yield Finding((*at, "ready"), f"ready takes exactly one of http, exec, log, notify; there is {given}", about=((*at, "ready"),))
    for name in worker.args:
        reason = owned_argument(worker.engine, name)
        if reason is not None:
            yield Finding((*at, "args", name), f"shadowsup sets it: {reason}", about=(engine,), key=True)


def _devices(config: NodeConfig, worker: WorkerConfig, at: Path) -> Iterator[Finding]:
    gpus, spares, ranks = (*at, "gpus"), (*at, "spares"), (*at, "tensor_parallel")
    both = [gpu for gpu in worker.spares if gpu in worker.gpus]
    if both:
        yield Finding(spares, f"{', '.join(both)} cannot be a spare: gpus has it", about=(gpus,))
    if worker.spares and not worker.gpus:
        yield Finding(spares, "spares without gpus: this worker runs on the CPU", "name its gpus, or remove spares", about=(gpus,))
    if worker.gpus and worker.engine.keeps_memory and len(worker.gpus) != worker.tensor_parallel:
        count, wanted = len(worker.gpus), worker.tensor_parallel
        path = ranks if "tensor_parallel" in worker.model_fields_set else gpus
        yield Finding(
            path,
            f"tensor_parallel is {wanted} but there {'is 1 GPU' if count == 1 else f'are {count} GPUs'}",
            f"one GPU a rank: tensor_parallel: {count}",
            about=(gpus, ranks),
        )
    if worker.tensor_parallel > 1 and not worker.gpus and worker.engine is not EngineKind.VLLM:  # a CPU build has ranks, too
        yield Finding(
            ranks, f"tensor_parallel is {worker.tensor_parallel} but there are no gpus", "name a GPU for each rank", about=(gpus,)
        )
    if worker.gpus and worker.engine.keeps_memory and config.memkeeper.backend is Backend.HOST:
        yield Finding(gpus, "this worker has GPUs, but memkeeper.backend is host", "backend: auto", about=(("memkeeper", "backend"),))


def _memory(config: NodeConfig, worker: WorkerConfig, at: Path) -> Iterator[Finding]:
    size = worker.kv.size
    if worker.engine is EngineKind.VLLM and not worker.gpus:
        yield from _vllm_on_cpu(worker, at)
    if size is None or not worker.engine.keeps_memory:
        return
    granule = VMM_GRANULE if worker.gpus else PAGE
    if size % granule:
        lower, upper = size // granule * granule, -(-size // granule) * granule
        near = format_size(upper) if not lower else f"{format_size(lower)} or {format_size(upper)}"
        yield Finding(
            (*at, "kv", "size"), f"{format_size(size)} is not a multiple of {format_size(granule)}", f"write {near}", about=((*at, "gpus"),)
        )


def _vllm_on_cpu(worker: WorkerConfig, at: Path) -> Iterator[Finding]:
    kv, gpus = (*at, "kv"), (*at, "gpus")
    if worker.kv.size is None:
        yield Finding((*kv, "size"), "vLLM on the CPU needs a size for its KV cache", "kv: {size: 4GiB}", about=(gpus, (*at, "engine")))
    if worker.kv.block_tokens % VLLM_CPU_BLOCK:
        yield Finding(
            (*kv, "block_tokens"),
            f"vLLM on the CPU takes blocks of a multiple of {VLLM_CPU_BLOCK} tokens, not {worker.kv.block_tokens}",
            f"block_tokens: {VLLM_CPU_BLOCK}",
            about=(gpus, (*at, "engine"), (*kv, "size")),
        )


def _health(worker: WorkerConfig, at: Path) -> Iterator[Finding]:
    health = worker.health
    heartbeat, floor, ceiling = (*at, "health", "heartbeat"), (*at, "health", "hang", "floor"), (*at, "health", "hang", "ceiling")
    if health.heartbeat < 0.01:
        yield Finding(heartbeat, f"{format_duration(health.heartbeat)} is too short for a heartbeat", "10ms at least; 200ms is usual")
    elif health.heartbeat >= health.hang.floor:
        yield Finding(
            heartbeat,
            f"heartbeat ({format_duration(health.heartbeat)}) must be below health.hang.floor ({format_duration(health.hang.floor)})",
            "or one late beat is a hang",
            about=(floor,),
        )
    if health.hang.floor > health.hang.ceiling:
        yield Finding(
            floor,
            f"hang.floor ({format_duration(health.hang.floor)}) is above hang.ceiling ({format_duration(health.hang.ceiling)})",
            about=(ceiling,),
        )


def _environment(worker: WorkerConfig, at: Path) -> Iterator[Finding]:
    for name in worker.env:
        if (reason := owned_variable(name)) is not None:
            yield Finding((*at, "env", name), f"shadowsup sets it: {reason}", key=True)
    if worker.env_file is None:
        return
    path = (*at, "env_file")
    if (wrong := check_secret_file(worker.env_file)) is not None:
        yield Finding(path, *wrong)
        return
    try:
        for name in read_env_file(worker.env_file):
            if (reason := owned_variable(name)) is not None:
                yield Finding(path, f"{worker.env_file}: shadowsup sets {name}: {reason}")
    except ConfigError as error:
        yield Finding(path, error.message, error.hint, problems=error.problems)
