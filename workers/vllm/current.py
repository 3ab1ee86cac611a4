"""This process's life, for the seams, which vLLM calls with arguments of its own."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from shadowsup.wire.engine import SPEC_VARIABLE, EngineSpec
from shadowsup.workers.errors import WorkerError

if TYPE_CHECKING:
    from shadowsup.memkeeper.protocol import Fingerprint
    from shadowsup.workers.vllm.holding import Holding
    from shadowsup.workers.vllm.life import EngineLife
    from shadowsup.workers.vllm.rank import RankLife

_life: EngineLife | None = None
_rank: RankLife | None = None


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


def begin_rank(life: RankLife) -> None:
    """This process is a rank, and ``life`` what it holds. (`life` is still that of the EngineCore that it was forked from.)"""
    global _rank
    _rank = life


def rank() -> RankLife:
    """Return what this rank holds.

    Raises:
        WorkerError: this process is no rank that an EngineCore of ours has forked.
    """
    if _rank is None:
        raise WorkerError("this worker was not forked by an EngineCore of shadowsup", "see how vLLM starts it in its log", fatal=True)
    return _rank


def holding() -> Holding:
    """Return what holds this process's weights and KV.

    Raises:
        WorkerError: neither EngineCore nor one of its ranks.
    """
    return _rank if _rank is not None else life()


def weight_marks(mark: Fingerprint, digest: str) -> tuple[tuple[str, str], ...]:
    """Return what the KV's bytes depend on of weights with this fingerprint and digest. The version of vLLM decides how weights are laid
    out, not what they are: keys and values outlive an update of it."""
    return (*((f"weights.{key}", value) for key, value in mark.items if key != "vllm"), ("weights.digest", digest))


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
