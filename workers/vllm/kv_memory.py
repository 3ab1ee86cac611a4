"""Seam: the tensors of the KV cache. All releases allocate them by ``torch.zeros(…, dtype=torch.int8)`` (0.26: one for each layer, 0.32:
one for all), which must neither take memory of its own nor erase what is kept: while this mode is on, such a call returns a piece of the
arena.
"""

from __future__ import annotations

import hashlib
import json
from types import TracebackType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from shadowsup.workers.api import KvGeometry
from shadowsup.workers.errors import WorkerError
from shadowsup.workers.mapping import round_up
from shadowsup.workers.torch_memory import as_bytes
from shadowsup.workers.vllm import hashing
from shadowsup.workers.vllm.holding import Holding
from shadowsup.workers.vllm.scheduler import reserve_of

ALIGNMENT = 512
"""Bytes; of the pieces of the arena."""


class KvMemory(TorchFunctionMode):
    """Used once, around ``Worker.initialize_from_config``. Leaving it checks that every KV tensor lies in the arena."""

    def __init__(self, life: Holding, vllm_config: Any, kv_cache_config: Any, device: torch.device) -> None:
        super().__init__()
        self._life = life
        self._config = vllm_config
        self._groups = kv_cache_config.kv_cache_groups
        self._blocks = int(kv_cache_config.num_blocks)
        self._device = device
        self._sizes = backing_sizes(kv_cache_config.kv_cache_tensors)
        self._next = 0
        """Offset of the next piece."""
        self._block_bytes = -(-sum(round_up(size, ALIGNMENT) for size in self._sizes) // self._blocks)
        self._arena = life.reserve_range(self._blocks * self._block_bytes)
        self._all = as_bytes(self._arena.address, self._arena.size, device)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.zeros and self._sizes and kwargs.get("dtype") is torch.int8 and args and args[0] == self._sizes[0]:
            size = self._sizes.pop(0)
            start, self._next = self._next, self._next + round_up(size, ALIGNMENT)
            return self._all[start : start + size].view(torch.int8)
        return func(*args, **kwargs)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        super().__exit__(kind, error, trace)
        if error is None and self._sizes:
            raise WorkerError(
                f"this vLLM has allocated its KV cache in another way: {len(self._sizes)} of its tensors are not in kept memory",
                "serve it by engine: command, without kept memory",
                fatal=True,
            )

    def hold(self) -> None:
        """Get the worker's KV from the keeper; what the bytes mean is part of its fingerprint."""
        life, spec = self._life, self._life.spec
        layout = self._layout()
        digest = hashlib.blake2b(json.dumps(layout).encode(), digest_size=16).hexdigest()
        block_tokens = int(self._groups[0].kv_cache_spec.block_size)
        reserve = reserve_of(spec.kv.reserve, self._config.scheduler_config.max_num_seqs, self._blocks)
        geometry = KvGeometry(
            blocks=self._blocks,
            block_tokens=block_tokens,
            block_bytes=self._block_bytes,
            reserve=reserve,
            fingerprint=(("engine", "vllm"), ("vllm.layout", digest), ("vllm.hash", hashing.NAME), *life.weight_marks),
        )
        life.hold(geometry, None)

    def _layout(self) -> list[list[object]]:
        """Return where each layer's keys and values lie: offset, shape, strides, type, and the code that reads them so."""
        first, end = self._arena.address, self._arena.address + self._arena.size
        context = self._config.compilation_config.static_forward_context
        found: list[list[object]] = []
        for name in sorted(name for group in self._groups for name in group.layer_names):
            layer = context[name]
            tensors = layer.kv_cache if isinstance(layer.kv_cache, list | tuple) else [layer.kv_cache]
            backend = type(getattr(layer, "impl", layer)).__name__
            for tensor in tensors:
                at = tensor.data_ptr()
                if not first <= at < end:
                    raise WorkerError(f"the KV cache of layer {name} is not in kept memory", "serve it by engine: command", fatal=True)
                found.append([name, backend, at - first, list(tensor.shape), list(tensor.stride()), str(tensor.dtype)])
        return found


def backing_sizes(tensors: Any) -> list[int]:
    """Return the sizes, in bytes, of the allocations that vLLM will ask for, in order."""
    if not tensors:
        return []
    if hasattr(tensors[0], "layers"):  # 0.32: all are places in one allocation
        return [int(tensors[0].size)]
    packed = [int(one.size) for one in tensors if one.block_stride > 0]
    if packed:
        single = [int(one.size) for one in tensors if one.block_stride <= 0]
        if single:
            raise WorkerError("this model's KV cache is partly packed, which is not supported with kept memory", fatal=True)
        return packed[:1]
    return [int(one.size) for one in tensors]
