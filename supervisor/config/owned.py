"""What shadowsup sets itself: engine arguments and environment variables that a config may not set, each with the reason."""

from __future__ import annotations

from shadowsup.supervisor.config.model import EngineKind

_COMMON = {
    "model": "use the worker's model",
    "model_path": "use the worker's model",
    "revision": "use the worker's revision",
    "served_name": "use the worker's served_name",
    "served_model_name": "use the worker's served_name",
    "dtype": "use the worker's dtype",
    "torch_dtype": "use the worker's dtype",
    "tensor_parallel": "use the worker's tensor_parallel",
    "tensor_parallel_size": "use the worker's tensor_parallel",
    "block_size": "use kv.block_tokens; kept blocks must fit the next engine",
    "block_tokens": "use kv.block_tokens; kept blocks must fit the next engine",
    "num_blocks": "use kv.size; kept blocks must fit the next engine",
    "host": "engines listen on Unix sockets; clients reach them through gateway.listen",
    "port": "engines listen on Unix sockets; clients reach them through gateway.listen",
}

_BY_ENGINE = {
    EngineKind.TRANSFORMERS: {
        "pretrained_model_name_or_path": "use the worker's model",
        "device": "use gpus",
        "device_map": "use gpus",
        "tp_plan": "use tensor_parallel",
        "tp_size": "use tensor_parallel",
        "attn_implementation": "attention runs over the kept KV blocks and cannot be exchanged",
        "use_cache": "the KV cache is kept memory",
        "cache_implementation": "the KV cache is kept memory",
    },
    EngineKind.VLLM: {
        "device": "use gpus",
        "uds": "engines listen on sockets in the runtime directory",
        "distributed_executor_backend": "processes are started so that they keep the memory",
        "worker_cls": "kept memory is attached there",
        "scheduler_cls": "the ledger is attached there",
        "worker_extension_cls": "kept memory is attached there",
        "gpu_memory_utilization": "use kv.size",
        "kv_cache_memory_bytes": "use kv.size",
        "num_gpu_blocks_override": "use kv.size",
        "prefix_caching_hash_algo": "block hashes must be the same in every engine of the worker",
        "enable_sleep_mode": "parking is done by shadowsup",
    },
    EngineKind.LOOP: {},
    EngineKind.COMMAND: {},
}

FAULT_DRILL = "SHADOWSUP_FAULT"
"""Of our own names the one that is for operators: faults on demand (docs/design.md, Error classes)."""

_ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "use gpus",
    "NVIDIA_VISIBLE_DEVICES": "use gpus",
    "CUDA_DEVICE_ORDER": "it is always PCI_BUS_ID, so that an index means the same GPU everywhere",
    "PYTHONHASHSEED": "block hashes must be the same in every engine of the worker",
    "NOTIFY_SOCKET": "use ready: {notify: true}",
    "PORT": "use port",
}


def owned_argument(engine: EngineKind, name: str) -> str | None:
    """Return why ``args`` may not have ``name``, in any spelling (``--block-size``, ``block_size``); None if it may."""
    if engine is EngineKind.LOOP:
        return None  # nobody but the user's own program looks at them
    canonical = name.lstrip("-").replace("-", "_").lower()
    return _BY_ENGINE[engine].get(canonical) or _COMMON.get(canonical)


def owned_variable(name: str) -> str | None:
    """Return why ``env`` may not have ``name``; None if it may."""
    if name.startswith("SHADOWSUP_") and name != FAULT_DRILL:
        return "names that start with SHADOWSUP_ are for shadowsup itself"
    return _ENVIRONMENT.get(name)
