"""Whether a config fits into this machine's memory now: what its parts and engines will need, against what can be had.

Sizes of weights and KV come from the headers of the model's files, read in the engines' own interpreter (`estimate` there); what a
process needs for itself is an estimate, measured once with PyTorch 2.13 on the CPU.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shadowsup.memkeeper.backends.host_memory import Available
from shadowsup.memkeeper.backends.host_memory import available as host_available
from shadowsup.supervisor import model_facts
from shadowsup.supervisor.cli.output import count, plural, size
from shadowsup.supervisor.cli.plan_processes import engine_env, interpreter, plain_vllm
from shadowsup.supervisor.config import NodeConfig, WorkerConfig
from shadowsup.supervisor.config.model import EngineKind
from shadowsup.supervisor.device_memory import DeviceVerdict
from shadowsup.supervisor.errors import ExitCode, SupervisorError
from shadowsup.supervisor.paths import NodePaths

MIB = 2**20
PARTS = 96 * MIB
"""Supervisor, scribe, memkeeper and gateway together: 81 MiB proportional set size measured."""
NURSERY = 256 * MIB
"""Torch and transformers imported: 261 MiB anonymous memory measured. Its forks share most of it."""
ENGINE = 192 * MIB
"""An engine beside kept memory: 90 MiB of a parked one, 170 MiB after 4 requests at once."""
VLLM_PROCESS = 448 * MIB
"""An API server, an EngineCore or a rank of vLLM beside its weights: 440 MiB measured (0.32 on a CPU), most of it the nursery's."""
NOT_HERE = 3
"""Exit code of the estimate: a repository that would have to be downloaded."""


@dataclass(frozen=True, kw_only=True)
class Need:
    """One line of the sum. ``size``: bytes, None: not known. ``passing``: only until the first engine serves."""

    what: str
    worker: str | None
    size: int | None
    how: str
    estimate: bool = False
    passing: bool = False


@dataclass(frozen=True, kw_only=True)
class Model:
    """A worker's model: what its engines will need, or (``unknown``) why that cannot be told."""

    worker: str
    facts: dict[str, Any]
    unknown: str = ""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """``fits`` None: cannot be told; ``reason`` says why."""

    needs: tuple[Need, ...]
    needed: int
    usable: int
    available: str
    fits: bool | None
    reason: str
    devices: tuple[DeviceVerdict, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {**asdict(self), "needs": [asdict(need) for need in self.needs], "devices": [one.as_dict() for one in self.devices]}


def read_model(worker: WorkerConfig, paths: NodePaths, device: int | None = None) -> Model:
    """Ask the worker's interpreter what its engines will need. ``device``: bytes of its GPU.

    Raises:
        SupervisorError: (exit code 2) there is no such model, or the worker's arguments do not go with it.
    """
    with tempfile.TemporaryDirectory(prefix="shadowsup-plan-") as folder:
        scratch = NodePaths(runtime=Path(folder), state=paths.state)
        if worker.python is not None:
            from shadowsup.supervisor.pypath import make_pypath

            make_pypath(scratch.runtime)
        command = model_facts.command(worker, interpreter(worker), device)
        try:
            done = subprocess.run(
                command,
                env=engine_env(worker, scratch),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=model_facts.ASK_S,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise SupervisorError(f"worker {worker.name}: {command[0]} cannot be asked for its model: {error}", "is it a Python?") from None
    words = done.stderr.strip() or f"exit status {done.returncode}"
    if done.returncode == NOT_HERE:
        return Model(worker=worker.name, facts={}, unknown=words)
    if done.returncode != 0:
        raise SupervisorError(f"worker {worker.name}: {words.splitlines()[-1]}", exit_code=ExitCode.USAGE)
    facts: dict[str, Any] = json.loads(done.stdout)
    return Model(worker=worker.name, facts=facts)


def judge(
    config: NodeConfig,
    models: Iterable[Model],
    figures: Callable[[], Available] = host_available,
    devices: tuple[DeviceVerdict, ...] = (),
    unknown_devices: str = "",
) -> Verdict:
    """Add up what will be needed of main memory and compare it with what can be had now; then see whether the GPUs have room.

    Args:
        unknown_devices: why it cannot be told which GPUs there are.
    """
    found = {model.worker: model for model in models}
    needs = [Need(what="parts of the node", worker=None, size=PARTS, how="supervisor, scribe, memkeeper, gateway", estimate=True)]
    if any(worker.engine.has_nursery for worker in config.workers):
        needs.append(Need(what="nursery", worker=None, size=NURSERY, how="what the engines import", estimate=True))
    shared: dict[str, str] = {}
    for worker in config.workers:
        if worker.engine is EngineKind.LOOP:
            needs.append(Need(what="engines", worker=worker.name, size=None, how="a loop of its own: not counted"))
            if worker.kv.size is not None and not worker.gpus:
                needs.append(Need(what="KV", worker=worker.name, size=worker.kv.size, how="kv.size"))
        elif plain_vllm(worker) is not None:
            needs.append(Need(what="engine", worker=worker.name, size=None, how="vLLM without kept memory: not counted"))
        elif worker.engine.keeps_memory:
            needs += _kept(worker, found.get(worker.name) or Model(worker=worker.name, facts={}), shared)
        else:
            needs.append(Need(what="engine", worker=worker.name, size=None, how="a command: not counted"))
    now = figures()
    lasting = sum(need.size or 0 for need in needs if not need.passing)
    # Workers load one after the other or at once, as it happens: the largest alone is the least that is needed.
    needed = lasting + max((need.size or 0 for need in needs if need.passing), default=0)
    unknown = [f"{model.worker}: {model.unknown}" for model in found.values() if model.unknown]
    full = [verdict.words() for verdict in devices if verdict.fits is False]
    unknown += [verdict.words() for verdict in devices if verdict.fits is None]
    unknown += [unknown_devices] if unknown_devices else []
    if needed > now.usable:
        fits, reason = False, f"{size(needed)} needed, {size(now.usable)} can be had now"
    elif full:
        fits, reason = False, "; ".join(full)
    elif unknown:
        fits, reason = None, "; ".join(unknown)
    else:
        fits, reason = True, f"{size(needed)} of {size(now.usable)}"
    return Verdict(needs=tuple(needs), needed=needed, usable=now.usable, available=str(now), fits=fits, reason=reason, devices=devices)


def _vllm(worker: WorkerConfig) -> list[Need]:
    name, engines, ranks = worker.name, 1 + worker.shadows, worker.tensor_parallel
    processes = 2 + (ranks if ranks > 1 else 0)
    how = f"{plural(engines, 'engine')} × {processes} processes"
    needs = [Need(what="engines", worker=name, size=processes * engines * VLLM_PROCESS, how=how, estimate=True)]
    where = "in GPU memory" if worker.gpus else "as large as the model's files, twice until kept"
    on_host = worker.kv.size * ranks if worker.kv.size is not None and not worker.gpus else None
    how = "in GPU memory" if worker.gpus else "kv.size" if ranks == 1 else f"kv.size × {ranks} ranks"
    kv = Need(what="KV", worker=name, size=on_host, how=how)
    return [Need(what="weights", worker=name, size=None, how=where), kv, *needs]


def _kept(worker: WorkerConfig, model: Model, shared: dict[str, str]) -> list[Need]:
    name, facts = worker.name, model.facts
    engines = 1 + worker.shadows
    each = f"{plural(engines, 'engine')} × {size(ENGINE)}"
    needs = [Need(what="engines", worker=name, size=engines * ENGINE, how=each, estimate=True)]
    if worker.engine is EngineKind.VLLM:
        return _vllm(worker)
    if not facts:
        return [Need(what="weights", worker=name, size=None, how="not known: the model is not here yet"), *needs]
    kv = f"{count(facts['blocks'])} blocks of {worker.kv.block_tokens} tokens × {size(facts['block'])}"
    if worker.kv.size is None:
        kv += ", kv.size: auto"
    if worker.gpus:
        return [
            Need(what="weights", worker=name, size=None, how=f"in GPU memory: {size(facts['weights'])}"),
            Need(what="KV", worker=name, size=None, how=f"in GPU memory: {kv}"),
            *needs,
        ]
    # Kept weights are shared by whoever agrees in all that their bytes depend on.
    key = model_facts.weights_key(facts, worker)
    item = facts["weights"] // max(facts["parameters"], 1)
    how = f"{facts['parameters'] / 1e6:,.1f} M parameters × {item} B ({facts['dtype']})"
    if key in shared:
        weights = [Need(what="weights", worker=name, size=0, how=f"shared with {shared[key]}")]
    else:
        shared[key] = name
        weights = [
            Need(what="weights", worker=name, size=facts["weights"], how=how, estimate=bool(facts["estimated"])),
            Need(what="loading", worker=name, size=facts["loading"], how="a second copy, until kept", estimate=True, passing=True),
        ]
    return [*weights, Need(what="KV", worker=name, size=facts["kv"], how=kv), *needs]
