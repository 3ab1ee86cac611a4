"""Where a first config puts its engine: on which GPU or on the CPU, in which interpreter; and what it says of what was found. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from shadowsup.supervisor.cli.output import size
from shadowsup.supervisor.compat import VLLM
from shadowsup.supervisor.config.model import EngineKind
from shadowsup.supervisor.errors import ExitCode, SupervisorError
from shadowsup.supervisor.surroundings import WEIGHTS_ROOM, SeenGpu, Surroundings

HOST_SHARE = 0.4
"""Of the main memory that can be had, for weights: while they load there are two copies."""
_SHOWN = 8


@dataclass(frozen=True, kw_only=True)
class Place:
    """``gpu`` None: the CPU. ``python`` None: shadowsup's own interpreter. ``room``: bytes for weights. ``notes``: why it is so."""

    engine: EngineKind
    gpu: SeenGpu | None
    python: Path | None
    room: int
    notes: tuple[str, ...] = ()


def choose(around: Surroundings, *, gpu: str | None = None, cpu: bool = False, engine: EngineKind | None = None) -> Place:
    """Return the place. ``gpu``, ``engine``: what the user named. Without, vLLM is taken where nothing else can use the GPU.

    Raises:
        SupervisorError: (exit code 2) there is no such GPU, no PyTorch for it, or no vLLM.
    """
    notes: list[str] = []
    chosen = None if cpu else _named(around, gpu) if gpu is not None else around.freest()
    environment = around.for_transformers(gpu=chosen is not None)
    if engine is EngineKind.VLLM or (engine is None and chosen is not None and environment is None and around.vllm() is not None):
        return _with_vllm(around, chosen)
    if chosen is not None and environment is None:
        why = "no environment here has transformers and a PyTorch for GPUs; python -m pip install 'shadowsup[engine]' brings them"
        if gpu is not None:
            raise SupervisorError(
                f"GPU {gpu} cannot be used: no environment has transformers and a PyTorch for it", why, exit_code=ExitCode.USAGE
            )
        notes.append(f"the GPUs are left alone: {why}")
        chosen = None
        environment = around.for_transformers(gpu=False)
    if chosen is None and not cpu and (busy := [each for each in around.gpus if each.problem]):
        notes.append(f"GPU {busy[0].id} is not used: {busy[0].problem}")
    if chosen is not None and chosen.problem:
        notes.append(f"GPU {chosen.id}: {chosen.problem}")
    # Without any engine the plan says what is missing; the config is right all the same.
    python = None if environment is None or environment.ours else environment.python
    room = chosen.free - WEIGHTS_ROOM if chosen is not None else int(around.memory * HOST_SHARE)
    return Place(engine=EngineKind.TRANSFORMERS, gpu=chosen, python=python, room=max(0, room), notes=tuple(notes))


def _with_vllm(around: Surroundings, gpu: SeenGpu | None) -> Place:
    environment = around.vllm()
    if environment is None:
        there = ", ".join(str(each) for each in around.environments if "vllm" in each.versions) or "none"
        raise SupervisorError(
            f"no environment here has a vLLM {VLLM.span}",
            f"{there}; python -m pip install '{VLLM.needs}' brings one",
            exit_code=ExitCode.USAGE,
        )
    notes = (f"GPU {gpu.id}: {gpu.problem}",) if gpu is not None and gpu.problem else ()
    room = gpu.free - WEIGHTS_ROOM if gpu is not None else int(around.memory * HOST_SHARE)
    return Place(engine=EngineKind.VLLM, gpu=gpu, python=None if environment.ours else environment.python, room=max(0, room), notes=notes)


def _named(around: Surroundings, gpu: str) -> SeenGpu:
    for each in around.gpus:
        if each.id.lower() == gpu.lower():
            return each
    there = ", ".join(each.id for each in around.gpus) or "no GPU"
    raise SupervisorError(f"there is no GPU {gpu} here", f"there is {there}; nvidia-smi -L lists them", exit_code=ExitCode.USAGE)


def seen_lines(around: Surroundings) -> list[str]:
    """Return what was found, as lines of a comment."""
    lines = []
    if around.gpus:
        gpus = [f"{gpu.id} {gpu.name} ({size(gpu.free)} of {size(gpu.total)} free)" for gpu in around.gpus]
        lines.append(f"GPUs: {_some(gpus)}.")
    others = [str(each) for each in around.environments if not each.ours]
    if others:
        lines.append(f"Environments, for python: of a worker: {_some(others)}.")
    if around.models:
        models = [f"{model.repository} ({size(model.size)})" for model in around.models]
        lines.append(f"Models in the hub's cache: {_some(models)}.")
    return ["Found here when this was written:", *(f"  {line}" for line in lines)] if lines else []


def _some(items: list[str]) -> str:
    return ", ".join(items[:_SHOWN]) + (f" and {len(items) - _SHOWN} more" if len(items) > _SHOWN else "")
