"""What is not proven with kept memory, and is therefore refused in words before anything is kept.

`shadowsup.supervisor` finds most of it before the start (`shadowsup.workers.vllm.plain`) and then runs vLLM without kept memory; what
only vLLM itself can tell is found here.
"""

from __future__ import annotations

from typing import Any

from shadowsup.workers.errors import WorkerError

HINT = "serve it by engine: command (a plain supervised restart), or change that"

_FLOATS = ("auto", "bfloat16", "float16", "float32", "half", "float")


def config(vllm_config: Any) -> None:
    """Raises WorkerError: (fatal) something in vLLM's config does not go with kept memory."""
    parallel, cache, model = vllm_config.parallel_config, vllm_config.cache_config, vllm_config.model_config
    found = [
        (vllm_config.speculative_config is not None, "speculative decoding"),
        (vllm_config.lora_config is not None, "LoRA"),
        (vllm_config.kv_transfer_config is not None, "a KV connector"),
        (model.quantization is not None, f"quantised weights ({model.quantization})"),
        (str(cache.cache_dtype) not in _FLOATS, f"a KV cache in {cache.cache_dtype}"),
        (not cache.enable_prefix_caching, "a KV cache without prefix caching"),
        (parallel.world_size != parallel.tensor_parallel_size, "pipeline or prefill context parallelism"),
        (parallel.decode_context_parallel_size > 1, "decode context parallelism"),
        (parallel.nnodes > 1, "an engine on several machines"),
        (parallel.data_parallel_size > 1, "data parallelism"),
        (model.runner_type != "generate", f"a model that is run to {model.runner_type}"),
    ]
    for wrong, what in found:
        if wrong:
            raise WorkerError(f"{what} is not supported with kept memory", HINT, fatal=True)


def kv_cache(kv_cache_config: Any) -> None:
    """Raises WorkerError: (fatal) the KV cache is not one kind of full attention."""
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1:
        raise WorkerError(f"a model with {len(groups)} kinds of KV cache (hybrid) is not supported with kept memory", HINT, fatal=True)
    kind = type(groups[0].kv_cache_spec).__name__
    if kind not in ("FullAttentionSpec", "MLAAttentionSpec"):
        raise WorkerError(f"a KV cache of {kind} is not supported with kept memory", HINT, fatal=True)
