"""Whether workers fit on their GPUs: weights + KV + what each engine costs beside them, against what the device has for us. Pure.

An engine's own part (context, graphs, workspaces) is an estimate until the first one has parked; then it is measured and kept
(`Overheads`), and the next `plan` and `start` reckon with that.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shadowsup.supervisor.config import WorkerConfig
from shadowsup.supervisor.config.model import EngineKind
from shadowsup.supervisor.devices import Gpu

GIB = 2**30
ENGINE_OVERHEAD = 3 * GIB // 2
"""Bytes of a device that an engine takes beside kept memory, until one was measured. An 8B model of 32 layers on an H200: 1.0 GiB."""
VLLM_OVERHEAD = 7 * GIB // 2
"""The same of vLLM's: 3.2 GiB (0.26, an 8B model, 51 graphs, H200)."""
NOISE = 0.05
"""A measured overhead that differs from the known one by less than this share is no news."""


@dataclass(frozen=True, kw_only=True)
class Share:
    """What one worker needs of one device. ``weights``, ``kv``: bytes, None: not known; ``engines``: at most at once."""

    worker: str
    uuid: str
    weights: int | None
    kv: int | None
    engines: int
    overhead: int
    measured: bool = False
    weights_key: str = ""
    """Workers of one key on one device share their weights; empty: nobody does."""
    publishes: bool = False
    """The first engine loads weights of its own and copies them into kept memory: two copies, before there is any KV."""


@dataclass(frozen=True, kw_only=True)
class DeviceVerdict:
    """``fits`` None: some size is not known. ``usable``: what others leave."""

    uuid: str
    index: int
    name: str
    usable: int
    needed: int
    fits: bool | None
    arithmetic: tuple[str, ...]

    def as_dict(self) -> dict[str, object]:
        """Return the JSON form."""
        return asdict(self)

    def words(self) -> str:
        """Return one line for people."""
        state = {True: "fits", None: "not known", False: "does not fit"}[self.fits]
        return f"GPU {self.index} ({self.name}): {gib(self.needed)} of {gib(self.usable)} needed, {state}: {'; '.join(self.arithmetic)}"


def shares(worker: WorkerConfig, gpus: Sequence[Gpu], facts: Mapping[str, Any], overheads: Overheads, weights_key: str = "") -> list[Share]:
    """Return what a worker needs of each of its devices.

    Args:
        facts: what its model's files say; empty: nothing. (``kv.size`` is that of each GPU, weights are split over them.)
    """
    found = []
    for gpu in gpus:
        learnt = overheads.get(Overheads.key(worker, gpu))
        kv = worker.kv.size if worker.kv.size is not None else facts.get("kv")
        found.append(
            Share(
                worker=worker.name,
                uuid=gpu.uuid,
                weights=int(facts["weights"]) // len(gpus) if facts else None,
                kv=kv,
                engines=engines_at_once(worker),
                overhead=learnt or (VLLM_OVERHEAD if worker.engine is EngineKind.VLLM else ENGINE_OVERHEAD),
                measured=learnt is not None,
                weights_key=weights_key,
                publishes=worker.engine is EngineKind.VLLM and worker.engine.keeps_memory,
            )
        )
    return found


def engines_at_once(worker: WorkerConfig) -> int:
    """Return how many engines of a worker are on its device at most: the active, its shadows, and one that dies or is replaced."""
    return 1 + worker.shadows + 1 if worker.engine.keeps_memory else 1


def judge(gpus: Sequence[Gpu], shares: Sequence[Share]) -> tuple[DeviceVerdict, ...]:
    """Return a verdict for each device that is used, in their order. What is in use of it now counts as others'."""
    verdicts = []
    for gpu in gpus:
        mine = [share for share in shares if share.uuid == gpu.uuid]
        if not mine:
            continue
        usable = max(0, gpu.memory - gpu.used)
        needed, lines, unknown, seen = 0, [], False, dict[str, str]()
        for share in mine:
            size = share.engines * share.overhead
            how = f"{share.engines} engines × {gib(share.overhead)}{'' if share.measured else ' (estimate)'}"
            parts = [how, "" if share.kv is None else f"KV {gib(share.kv)}"]
            shared_with = seen.get(share.weights_key) if share.weights_key else None
            if shared_with is not None:
                parts.append(f"weights shared with {shared_with}")
            elif share.weights is not None:
                size += share.weights
                parts.append(f"weights {gib(share.weights)}")
                seen[share.weights_key] = share.worker
            if share.weights is None or share.kv is None:
                unknown = True
                parts.append("the rest is not known")
            size += share.kv or 0
            first = ""
            if (
                share.publishes
                and shared_with is None
                and share.weights is not None
                and (peak := 2 * share.weights + share.overhead) > size
            ):
                first = f" (at its first start 2 × weights + 1 engine: {gib(peak)})"
                size = peak
            needed += size
            lines.append(f"{share.worker}: {' + '.join(part for part in reversed(parts) if part)}{first}")
        if gpu.used:
            lines.append(f"{gib(gpu.used)} of {gib(gpu.memory)} in use now")
        fits = False if needed > usable else None if unknown else True
        verdicts.append(
            DeviceVerdict(uuid=gpu.uuid, index=gpu.index, name=gpu.name, usable=usable, needed=needed, fits=fits, arithmetic=tuple(lines))
        )
    return tuple(verdicts)


def gib(size: int) -> str:
    return f"{size / GIB:,.1f} GiB"


class Overheads:
    """What an engine was measured to cost its device, by all that this depends on. ``path``: a JSON file in the state directory."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._known: dict[str, int] = {}
        with contextlib.suppress(OSError, ValueError):
            found = json.loads(path.read_text())
            self._known = {str(key): int(size) for key, size in found.items()}

    @staticmethod
    def key(worker: WorkerConfig, gpu: Gpu) -> str:
        """Engine, model, precision and arguments, on this kind of GPU."""
        what = [worker.engine.value, worker.model, worker.revision, worker.dtype.value, dict(worker.args), worker.tensor_parallel, gpu.name]
        return hashlib.sha256(json.dumps(what, sort_keys=True, default=str).encode()).hexdigest()[:24]

    def get(self, key: str) -> int | None:
        return self._known.get(key)

    def learn(self, sizes: Mapping[str, int]) -> bool:
        """Keep measured sizes, if they are news; returns whether they were. A disk that takes nothing costs only the knowledge."""
        news = {key: size for key, size in sizes.items() if abs(size - self._known.get(key, 0)) > NOISE * size}
        if not news:
            return False
        self._known.update(news)
        other = self._path.with_name(f"{self._path.name}.new")
        with contextlib.suppress(OSError):
            other.write_text(json.dumps(self._known, indent=1))
            other.replace(self._path)
        return True


def measured(used: int, baseline: int, kept: int, engines: int) -> int | None:
    """Return what an engine costs its device, from absolute figures while none is loading. None: they make no sense.

    Args:
        used: bytes of the device in use, ours and others'.
        baseline: what was in use before this node.
        kept: bytes of our segments on it.
    """
    rest = used - baseline - kept
    if engines <= 0 or rest <= 0:
        return None
    return rest // engines
