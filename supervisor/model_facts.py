"""What a worker's interpreter says of its model before anything is started: the command that asks, and how its answer is read."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Mapping
from typing import Any

from shadowsup.supervisor.config import WorkerConfig
from shadowsup.supervisor.config.model import EngineKind

ASK_S = 60.0
"""Reading the headers of a model on a slow disk."""


def known(worker: WorkerConfig) -> bool:
    """Return whether there is somebody to ask: an engine of ours, whose model files have headers."""
    return worker.engine is EngineKind.TRANSFORMERS


def command(worker: WorkerConfig, python: str, device: int | None) -> list[str]:
    """Return the command line that prints the facts as JSON (`shadowsup.workers.transformers.estimate`).

    Args:
        device: bytes of the GPU that the worker runs on; None: main memory.
    """
    words = [python, "-m", "shadowsup.workers.transformers.estimate", str(worker.model)]
    words += ["--dtype", worker.dtype.value, "--args", json.dumps(worker.args), "--kv-size", str(worker.kv.size or 0)]
    words += ["--block-tokens", str(worker.kv.block_tokens), "--shadows", str(worker.shadows)]
    words += [] if device is None else ["--device", str(device)]
    words += [] if worker.kv.reserve is None else ["--reserve", str(worker.kv.reserve)]
    return words + ([] if worker.revision is None else ["--revision", worker.revision])


def weights_key(facts: Mapping[str, Any], worker: WorkerConfig) -> str:
    """Return what weights depend on: workers of one key share them."""
    return json.dumps([facts["path"], facts["revision"], facts["dtype"], dict(worker.args)], sort_keys=True, default=str)


async def ask(worker: WorkerConfig, python: str, env: Mapping[str, str], device: int | None) -> dict[str, Any]:
    """Return the facts; empty when they cannot be had. What is wrong with a model its engine says better, and it will."""
    process = await asyncio.create_subprocess_exec(
        *command(worker, python, device),
        env=dict(env),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        async with asyncio.timeout(ASK_S):
            out, _ = await process.communicate()
    except BaseException as error:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        if isinstance(error, TimeoutError):
            return {}
        raise
    if process.returncode != 0:
        return {}
    found: dict[str, Any] = json.loads(out)
    return found
