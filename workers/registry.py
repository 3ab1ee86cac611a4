"""The engines there are. Adding one is adding its module and a line here."""

from __future__ import annotations

import importlib
import importlib.util

from shadowsup.workers.api import AdapterFactory
from shadowsup.workers.errors import WorkerError

ADAPTERS = {
    "transformers": "shadowsup.workers.transformers.adapter:create",
}
"""Kind of `EngineSpec` → ``module:attribute`` of an `AdapterFactory`. A kind with a colon is such a path itself."""

_VLLM = (
    "vllm.entrypoints.openai.api_server",
    "vllm.v1.engine.async_llm",
    "vllm.v1.engine.core",
    "vllm.v1.executor.uniproc_executor",
    "shadowsup.workers.vllm.scheduler",
    "shadowsup.workers.vllm.core",
    "shadowsup.workers.vllm.front",
)
"""What vLLM's API server imports before it forks EngineCore, so none of it touches a GPU. What a worker imports may."""

PRELOADS: dict[str, tuple[str, ...]] = {
    "transformers": (
        "shadowsup.workers.transformers.adapter",
        "transformers",
        "transformers.models.auto.modeling_auto",
        "transformers.models.llama.modeling_llama",
        "transformers.models.llama.tokenization_llama",
        "transformers.modeling_gguf_pytorch_utils",
    ),
    "vllm": _VLLM,
    "vllm-cpu": (
        *_VLLM,
        "vllm.model_executor.models.llama",
        "shadowsup.workers.vllm.worker",
    ),
}
"""Kind → what a nursery imports before it forks: what the adapter imports, and what that would import while it loads a model.

Any other name is a comma-separated list of modules.
"""

GPU_PRELOADS = {
    "transformers": (
        "cuda.bindings.driver",
        "triton",
        "shadowsup.workers.arena_cuda",
        "shadowsup.workers.weights_cuda",
        "shadowsup.workers.checksum_triton",
        "shadowsup.workers.sampling_batched",
        "shadowsup.workers.transformers.paged_kernels",
    ),
}
"""The same where there is Triton, which is on machines with a GPU. None of it touches the driver when it is imported."""


def factory(kind: str) -> AdapterFactory:
    """Return what makes the adapter of ``kind``.

    Raises:
        WorkerError: (fatal) there is no such kind, or its module cannot be imported here.
    """
    target = kind if ":" in kind else ADAPTERS.get(kind)
    if target is None:
        raise WorkerError(f"no engine is named {kind}", f"there are {', '.join(sorted(ADAPTERS))}, or module:attribute", fatal=True)
    module, _, attribute = target.partition(":")
    try:
        made: AdapterFactory = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise WorkerError(
            f"engine {kind} cannot be imported: {error}", "install what it needs into the engine's Python", fatal=True
        ) from error
    return made


def preload_modules(preload: str) -> tuple[str, ...]:
    """Return the modules that ``preload`` (a key of `PRELOADS` or a comma-separated list) stands for."""
    if preload in PRELOADS:
        more = GPU_PRELOADS.get(preload, ()) if importlib.util.find_spec("triton") is not None else ()
        return (*PRELOADS[preload], *more)
    return tuple(name.strip() for name in preload.split(",") if name.strip())
