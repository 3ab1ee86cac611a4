"""From a worker's config to vLLM's command line. Imports neither vLLM nor torch: the supervisor shows it too (``shadowsup plan``)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from shadowsup.wire.engine import EngineSpec

ENVIRONMENT = {
    "PYTHONHASHSEED": "0",
    "VLLM_WORKER_MULTIPROC_METHOD": "fork",
}
"""What an engine's processes need, beside what the config says: hashes of blocks that are the same in each, and EngineCore forked."""

SERVER = "shadowsup.workers.vllm.server"
"""The module that an engine's first process runs."""

PLAIN_SERVER = "vllm.entrypoints.openai.api_server"
"""vLLM's own, which `SERVER` runs in its turn."""

WORKER_CLS = "shadowsup.workers.vllm.worker.KeptWorker"
SCHEDULER_CLS = "shadowsup.workers.vllm.scheduler.create"

UNI_EXECUTOR = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
"""Worker and scheduler in EngineCore's process. By its full name, because a CPU build takes ``uni`` for ``mp``."""

MIDDLEWARE = "shadowsup.workers.vllm.turns.Counted"
"""Counts the requests that the API server has."""

RANKS_EXECUTOR = "shadowsup.workers.vllm.executor.KeptExecutor"
"""With more than one rank, each of which is a process of its own."""

RANK_WORKER_CLS = "shadowsup.workers.vllm.rank_worker.RankWorker"

UNUSED_FRACTION = "0.01"
"""``--gpu-memory-utilization``: vLLM refuses to start where less than this is free, and takes nothing from it once the KV's size is
given."""


def command_line(
    *,
    model: str,
    served_name: str,
    revision: str | None,
    uds: str,
    dtype: str,
    block_tokens: int,
    kv_size: int,
    args: Mapping[str, object],
    tensor_parallel: int = 1,
) -> list[str]:
    """Return the arguments of vLLM's API server. ``kv_size``: bytes of each rank, 0: the engine works it out. ``args``: the worker's."""
    several = tensor_parallel > 1
    own: dict[str, object] = {
        "model": model,
        "served_model_name": served_name,
        "revision": revision,
        "uds": uds,
        "dtype": dtype,
        "block_size": block_tokens,
        "kv_cache_memory_bytes": kv_size or None,
        "gpu_memory_utilization": UNUSED_FRACTION,
        "worker_cls": RANK_WORKER_CLS if several else WORKER_CLS,
        "scheduler_cls": SCHEDULER_CLS,
        "tensor_parallel_size": tensor_parallel if several else None,
        "distributed_executor_backend": RANKS_EXECUTOR if several else UNI_EXECUTOR,
        "middleware": MIDDLEWARE,
    }
    return [*words(own), *words(args)]


def of_spec(spec: EngineSpec) -> list[str]:
    """Return the arguments of the engine ``spec``."""
    return command_line(
        model=spec.model,
        served_name=spec.served_name,
        revision=spec.revision,
        uds=spec.link_socket,
        dtype=spec.dtype,
        block_tokens=spec.kv.block_tokens,
        kv_size=spec.kv.size,
        args=spec.args,
        tensor_parallel=spec.world,
    )


def plain_command_line(
    *,
    model: str,
    served_name: str,
    revision: str | None,
    uds: str | None,
    dtype: str,
    kv_size: int,
    tensor_parallel: int,
    args: Mapping[str, object],
    port: int | None = None,
) -> list[str]:
    """Return the arguments without kept memory: vLLM as it is, on a socket of ours, or on a port of this machine."""
    own: dict[str, object] = {
        "model": model,
        "served_model_name": served_name,
        "revision": revision,
        "uds": uds,
        "host": "127.0.0.1" if port is not None else None,
        "port": port,
        "dtype": dtype,
        "kv_cache_memory_bytes": kv_size or None,
        "tensor_parallel_size": tensor_parallel if tensor_parallel > 1 else None,
    }
    return [*words(own), *words(args)]


def words(options: Mapping[str, object]) -> list[str]:
    """Return ``options`` as vLLM's parser takes them: ``--max-model-len 4096``, ``--enforce-eager``, ``--no-enable-prefix-caching``, JSON
    for mappings. None is left out."""
    found: list[str] = []
    for name, value in options.items():
        flag = "--" + name.lstrip("-").replace("_", "-")
        if value is None:
            continue
        if value is True:
            found.append(flag)
        elif value is False:
            found.append("--no-" + flag.removeprefix("--"))
        elif isinstance(value, Mapping):
            found += [flag, json.dumps(value)]
        elif isinstance(value, Sequence) and not isinstance(value, str):
            found += [flag, *(json.dumps(one) if isinstance(one, Mapping) else str(one) for one in value)]
        else:
            found += [flag, str(value)]
    return found
