"""What a config would run: every process with its command line, its environment's names and its sockets. Starts and writes nothing."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from shadowsup.supervisor import vllm_plain
from shadowsup.supervisor.config import NodeConfig, WorkerConfig
from shadowsup.supervisor.config.model import Backend, EngineKind
from shadowsup.supervisor.config.secrets import redact_command
from shadowsup.supervisor.environment import engine_environment
from shadowsup.supervisor.paths import NodePaths
from shadowsup.supervisor.recipe import interpreter as interpreter
from shadowsup.supervisor.recipe import kept_environment, worker_environment
from shadowsup.wire.engine import SPEC_VARIABLE
from shadowsup.workers.vllm import arguments as vllm_arguments

READY_FD = "FD"
"""Stands for the number of the pipe that a part reports on, which is known when it is started."""


@dataclass(frozen=True, kw_only=True)
class Process:
    """``command``: secrets hidden. ``env``: names, None: all that the supervisor itself has. ``how``: ``spawn``, or ``fork of NURSERY``,
    where ``command`` is what is run if there is no nursery."""

    name: str
    what: str
    how: str
    command: list[str]
    env: list[str] | None
    sockets: list[str]
    cwd: str | None = None
    role: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return asdict(self)


def parts(config: NodeConfig, paths: NodePaths) -> list[Process]:
    """Return the processes that are no engines, in the order in which they are started."""

    def ours(name: str, module: str, *arguments: str, sockets: list[str]) -> Process:
        return Process(name=name, what=name, how="spawn", command=[sys.executable, "-m", module, *arguments], env=None, sockets=sockets)

    ready = ("--ready-fd", READY_FD)
    found = [
        ours("scribe", "shadowsup.supervisor.scribe", "--socket", str(paths.scribe), *ready, sockets=[str(paths.scribe)]),
        ours("gateway", "shadowsup.supervisor.gateway", str(paths.gateway_spec), sockets=[config.gateway.listen]),
    ]
    if (kept := backend(config)) is not None:
        arguments = ("--socket", str(paths.keeper), "--backend", kept, *ready)
        found.append(ours("memkeeper", "shadowsup.memkeeper", *arguments, sockets=[str(paths.keeper)]))
    for number, (preload, python, env) in enumerate(nurseries(config, paths)):
        socket = str(paths.nursery(number))
        command = [python, "-m", "shadowsup.workers.nursery", "--socket", socket, "--preload", preload, *ready]
        found.append(Process(name=f"nursery-{number}", what="nursery", how="spawn", command=command, env=sorted(env), sockets=[socket]))
    return found


def backend(config: NodeConfig) -> str | None:
    """Return where kept memory would live, None when no worker keeps any."""
    kept = [worker for worker in config.workers if worker.engine.keeps_memory and plain_vllm(worker) is None]
    if not kept:
        return None
    if config.memkeeper.backend is Backend.AUTO:
        return str((Backend.CUDA if any(worker.gpus for worker in kept) else Backend.HOST).value)
    return str(config.memkeeper.backend.value)


def nurseries(config: NodeConfig, paths: NodePaths) -> list[tuple[str, str, dict[str, str]]]:
    """Return (what is imported, interpreter, environment) of each fork server; workers that agree in all of it share one."""
    found: list[tuple[str, str, dict[str, str]]] = []
    for worker in config.workers:
        if worker.engine.has_nursery and plain_vllm(worker) is None and (mine := _nursery(worker, paths)) not in found:
            found.append(mine)
    return found


def engines(config: NodeConfig, worker: WorkerConfig, paths: NodePaths) -> list[Process]:
    """Return the first engines of a worker: the active one, then its shadows."""
    if not worker.engine.keeps_memory:
        return [_command_engine(worker, paths)]
    if (why := plain_vllm(worker)) is not None:
        return [_plain_vllm_engine(worker, paths, why)]
    how = f"fork of nursery-{nurseries(config, paths).index(_nursery(worker, paths))}" if worker.engine.has_nursery else "spawn"
    ours = {"SHADOWSUP_ENGINE"} if worker.engine.has_nursery else {"SHADOWSUP_ENGINE", SPEC_VARIABLE}
    env = sorted({*engine_env(worker, paths), *ours})
    found = []
    for number in range(1 + worker.shadows):
        name = f"{worker.name}.{number + 1}"
        found.append(
            Process(
                name=name,
                what="engine",
                how=how,
                command=_kept_command(worker, str(paths.spec(name)), str(paths.link(name))),
                env=env,
                sockets=[str(paths.link(name))],
                cwd=str(worker.cwd) if worker.cwd is not None else None,
                role="active" if number == 0 else "shadow",
            )
        )
    return found


def engine_env(worker: WorkerConfig, paths: NodePaths, inherited: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the environment of the engines of a worker with kept memory."""
    return worker_environment(worker, inherited, worker.gpus, kept_environment(worker, paths))


def _kept_command(worker: WorkerConfig, spec: str, link: str) -> list[str]:
    if worker.command is not None:
        return redact_command([word.replace("{python}", interpreter(worker)) for word in worker.command])
    if worker.engine is EngineKind.VLLM:
        words = vllm_arguments.command_line(
            model=worker.model or "",
            served_name=worker.public_name,
            revision=worker.revision,
            uds=link,
            dtype=worker.dtype.value,
            block_tokens=worker.kv.block_tokens,
            kv_size=worker.kv.size or 0,
            args=worker.args,
            tensor_parallel=worker.tensor_parallel,
        )
        return redact_command([interpreter(worker), "-m", vllm_arguments.SERVER, *words])
    return [interpreter(worker), "-m", "shadowsup.workers.main", spec]


def _command_engine(worker: WorkerConfig, paths: NodePaths) -> Process:
    name = f"{worker.name}.1"
    port = str(worker.port) if worker.port is not None else "{port}"
    command = redact_command([word.replace("{port}", port) for word in worker.command or ()])
    names = {*engine_environment(os.environ, env=worker.env, env_file=worker.env_file, extra={}), "PORT", "SHADOWSUP_ENGINE"}
    sockets = [f"127.0.0.1:{port}" if worker.port is not None else "127.0.0.1, a free port for each engine"]
    if worker.ready is not None and worker.ready.notify:
        names.add("NOTIFY_SOCKET")
        sockets.append(str(paths.notify(name)))
    cwd = str(worker.cwd) if worker.cwd is not None else None
    return Process(name=name, what="engine", how="spawn", command=command, env=sorted(names), sockets=sockets, cwd=cwd, role="active")


_plain: dict[str, tuple[WorkerConfig, str | None]] = {}


def plain_vllm(worker: WorkerConfig) -> str | None:
    """Return why the memory of a vLLM worker would not be kept; None: it would, or it is another engine. Asks its interpreter, once.

    Raises:
        SupervisorError: there is no vLLM in that interpreter, or it cannot be asked.
    """
    if worker.engine is not EngineKind.VLLM:
        return None
    known = _plain.get(worker.name)
    if known is None or known[0] is not worker:
        known = _plain[worker.name] = (worker, vllm_plain.why_not(worker, worker_environment(worker, os.environ, worker.gpus, {})))
    return known[1]


def _plain_vllm_engine(worker: WorkerConfig, paths: NodePaths, why: str) -> Process:
    name = f"{worker.name}.1"
    link = str(paths.link(name))
    words = vllm_arguments.plain_command_line(
        model=worker.model or "",
        served_name=worker.public_name,
        revision=worker.revision,
        uds=link,
        dtype=worker.dtype.value,
        kv_size=worker.kv.size or 0,
        tensor_parallel=worker.tensor_parallel,
        args=worker.args,
    )
    return Process(
        name=name,
        what="engine",
        how=f"spawn, without kept memory: {why}",
        command=redact_command([interpreter(worker), "-m", vllm_arguments.PLAIN_SERVER, *words]),
        env=sorted({*worker_environment(worker, os.environ, worker.gpus, {}), "SHADOWSUP_ENGINE"}),
        sockets=[link],
        cwd=str(worker.cwd) if worker.cwd is not None else None,
        role="active",
    )


def _nursery(worker: WorkerConfig, paths: NodePaths) -> tuple[str, str, dict[str, str]]:
    vllm = worker.engine is EngineKind.VLLM
    preload = "vllm-cpu" if vllm and not worker.gpus else worker.engine.value
    # A nursery sees no GPU, it must not touch one; but what vLLM finds out of it stays with its engines.
    gpus = worker.gpus if vllm else ()
    return preload, interpreter(worker), worker_environment(worker, os.environ, gpus, kept_environment(worker, paths))
