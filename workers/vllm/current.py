"""This process's life, for the seams, which vLLM calls with arguments of its own."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from shadowsup.wire.engine import SPEC_VARIABLE, EngineSpec
from shadowsup.workers.errors import WorkerError

if TYPE_CHECKING:
    from shadowsup.workers.vllm.life import EngineLife

_life: EngineLife | None = None


def begin(life: EngineLife) -> None:
    """Make ``life`` that of this process."""
    global _life
    _life = life


def life() -> EngineLife:
    """Return it.

    Raises:
        WorkerError: this process is not an EngineCore that shadowsup has started.
    """
    if _life is None:
        raise WorkerError("this vLLM was not started by shadowsup", "kept memory needs its supervisor", fatal=True)
    return _life


def files(spec: EngineSpec) -> Path:
    """Return the folder for files that are of no use after the engine's end, when the supervisor removes it. Makes it."""
    folder = Path(spec.runtime_dir) / "engines" / f"{spec.engine}.files"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


def read_spec() -> EngineSpec:
    """Return the spec that the environment names.

    Raises:
        WorkerError: (fatal) it names none, or none that can be read.
    """
    path = os.environ.get(SPEC_VARIABLE)
    if path is None:
        raise WorkerError(f"{SPEC_VARIABLE} is not set", "a vLLM engine is started by its supervisor", fatal=True)
    try:
        return msgspec.json.decode(Path(path).read_bytes(), type=EngineSpec)
    except (OSError, msgspec.MsgspecError) as error:
        raise WorkerError(f"{SPEC_VARIABLE}={path} is no engine spec: {error}", fatal=True) from error
