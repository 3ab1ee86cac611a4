"""``args:`` of a transformers worker."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields

from shadowsup.workers.errors import WorkerError

_REFUSED = {
    "trust_remote_code": "code that comes with a model is not run: it could change what the kept bytes mean",
    "dtype": "set dtype: of the worker",
    "model": "set model: of the worker",
    "revision": "set revision: of the worker",
    "device": "set gpus: of the worker",
    "device_map": "set gpus: of the worker",
    "attn_implementation": "attention runs on the kept KV, there is no choice of it",
    "quantization_config": "quantising while loading is not supported",
    "block_tokens": "set kv.block_tokens of the worker",
    "reserve": "set kv.reserve of the worker",
}


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """``max_batch``: requests that run at once (16; on a GPU 64). ``max_batch_tokens``: tokens of a step (512; on a GPU 4096).
    ``max_context``: tokens of prompt and output, at most the model's own. ``threads``: torch's. ``load_format``: ``auto`` or ``dummy``
    (random weights, the same ones each time). ``config``: model config of a dummy, as in config.json. ``chat_template``: a Jinja
    template, or the path of one."""

    max_batch: int = 16
    max_batch_tokens: int = 512
    max_context: int | None = None
    threads: int | None = None
    load_format: str = "auto"
    config: Mapping[str, object] | None = None
    chat_template: str | None = None

    def thread_count(self) -> int | None:
        """Return how many threads torch shall use: ours, else OMP_NUM_THREADS, else torch's own choice (None)."""
        if self.threads is not None:
            return self.threads
        given = os.environ.get("OMP_NUM_THREADS", "").split(",")[0]
        return int(given) if given.isdigit() and int(given) > 0 else None


HOST_SHARE = 0.125
"""Of the machine's memory: what KV takes at most where the config leaves its size to the engine."""
DEVICE_SHARE = 0.97
ENGINE_OVERHEAD = 3 * 1024**3 // 2
"""Bytes an engine costs its device beside weights and KV: context, workspaces, graphs, activations."""

GPU_DEFAULTS: Mapping[str, object] = {"max_batch": 64, "max_batch_tokens": 4096}


def parse(args: Mapping[str, object], *, gpu: bool = False) -> Arguments:
    """Read ``args``; all that is wrong is told at once. ``gpu``: the engine runs on one, and has other defaults.

    Raises:
        WorkerError: (fatal).
    """
    names = [field.name for field in fields(Arguments)]
    wrong: list[str] = []
    for name, value in args.items():
        if name in _REFUSED:
            wrong.append(f"{name} is not an argument of this engine: {_REFUSED[name]}")
        elif name not in names:
            close = difflib.get_close_matches(name, names, 1)
            wrong.append(f"unknown argument {name}" + (f", did you mean {close[0]}?" if close else f" (there are {', '.join(names)})"))
        elif problem := _problem(name, value):
            wrong.append(f"{name}: {problem}, not {value!r}")
    if not wrong:
        given = {name: value for name, value in args.items() if value is not None}
        if gpu:
            given = {**GPU_DEFAULTS, **given}
        parsed = Arguments(**given)  # type: ignore[arg-type]
        if parsed.max_batch > parsed.max_batch_tokens:
            wrong.append(f"max_batch_tokens ({parsed.max_batch_tokens}) is less than max_batch ({parsed.max_batch})")
        elif parsed.config is not None and parsed.load_format != "dummy":
            wrong.append("config goes with load_format: dummy only; a model has its own")
        else:
            return parsed
    raise WorkerError("; ".join(wrong), "correct args: of the worker", fatal=True)


def choose_kv(args: Arguments, *, longest: int, block_tokens: int, block_bytes: int, device: int | None, weights: int, shadows: int) -> int:
    """Return the bytes of a KV cache whose size the config leaves to the engine: for ``max_batch`` requests of ``longest`` tokens, or less.

    Of what there is, not of what is free: a shadow must come to the same figure when the first engine has taken its part.

    Args:
        device: bytes of the GPU; None: main memory.
        weights: bytes of the weights on it.

    Raises:
        WorkerError: (fatal) nothing is left.
    """
    wanted = args.max_batch * (-(-longest // block_tokens) + 2) * block_bytes
    if device is None:
        return min(wanted, int(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") * HOST_SHARE))
    # One engine more: the dead one's memory is given back only after its successor serves.
    engines = 2 + shadows
    usable = int(device * DEVICE_SHARE)
    left = usable - weights - engines * ENGINE_OVERHEAD
    if left < block_bytes:
        raise WorkerError(
            f"no memory is left for KV: the device has {usable} bytes to use, weights take {weights}, "
            f"{engines} engines {engines * ENGINE_OVERHEAD}",
            "use a smaller model, fewer shadows or another GPU",
            fatal=True,
        )
    return min(wanted, left)


def _problem(name: str, value: object) -> str:
    """Return what ``value`` should have been; empty when it is right."""
    if name in ("max_batch", "max_batch_tokens", "max_context", "threads"):
        if value is None and name in ("max_context", "threads"):
            return ""
        return "" if isinstance(value, int) and not isinstance(value, bool) and value > 0 else "wants a number above 0"
    if name == "load_format":
        return "" if value in ("auto", "dummy") else "wants auto or dummy"
    if name == "config":
        return "" if value is None or isinstance(value, Mapping) else "wants the keys of a config.json"
    return "" if value is None or isinstance(value, str) else "wants text"
