"""Seam: ``--worker-cls`` (0.26, 0.32): the worker that vLLM would have taken itself, with kept weights and KV.

With one rank vLLM runs it in EngineCore's process, with several each in one of its own (`shadowsup.workers.vllm.rank_worker`).
"""

from __future__ import annotations

import contextlib
import gc
import logging
import time
from collections.abc import Callable
from typing import Any

from vllm.platforms import current_platform

from shadowsup.workers.errors import WorkerError
from shadowsup.workers.vllm import current, graphs, kv_memory, loader, pacing, refuse, rehearsal, sampling, token_ids

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as Worker
else:
    from vllm.v1.worker.gpu_worker import Worker

log = logging.getLogger("shadowsup.engine")

DEVICE_SHARE = 0.97
ENGINE_BYTES = 4 * 1024**3
"""``kv.size: auto``: this part of the device, less the weights and so much for each engine; one shadow of an 8B model took 3.4 GiB
(H200)."""


class KeptWorker(Worker):
    """See `shadowsup.workers.vllm.life` for the order of what happens."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        refuse.config(self.vllm_config)
        self._kept = current.holding()
        worker: Any = self
        where = str(worker.distributed_init_method)
        if where.startswith("file://"):  # the same for all ranks; a killed engine would leave it in the temporary folder
            worker.distributed_init_method = f"file://{current.files(self._kept.spec) / where.rpartition('/')[2]}"

    def load_model(self, **kwargs: Any) -> None:
        with loader.kept(self._kept):
            super().load_model(**kwargs)

    def determine_available_memory(self) -> int:
        size = self._kept.spec.kv.size
        if not size:
            size = self._auto_size()
            self.cache_config.kv_cache_memory_bytes = size
        # The compiled model is loaded here, a million objects that stay: the collector walked them again and again (an eighth of the time).
        gc.disable()
        try:
            return int(super().determine_available_memory())
        finally:
            gc.enable()

    def _auto_size(self) -> int:
        """Every engine of the worker must come to the same: nothing that is free just now may matter."""
        if self._kept.device == "host":
            raise WorkerError("the size of the KV cache is not given", "set kv.size; on the CPU there is no good guess", fatal=True)
        import torch

        total = torch.cuda.get_device_properties(self.device).total_memory
        weights = self._kept.weight_bytes
        left = int(DEVICE_SHARE * total) - weights - (self._kept.spec.shadows + 2) * ENGINE_BYTES
        if left <= 0:
            raise WorkerError("no room is left for the KV cache", "set kv.size, or fewer shadows", fatal=True)
        granule = 2 * 1024**2
        return left // granule * granule

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        refuse.kv_cache(kv_cache_config)
        if self._kept.spec.hurry:
            graphs.hurry(self.vllm_config)
        memory = kv_memory.KvMemory(self._kept, self.vllm_config, kv_cache_config, self.device)
        with memory:
            super().initialize_from_config(kv_cache_config)
        token_ids.hasten(self.model_runner)
        memory.hold()

    def compile_or_warm_up_model(self) -> Any:
        alone = self.parallel_config.world_size == 1  # ranks are told at different moments, and must do the same
        hurried = current.life().hurried.is_set if alone else lambda: False
        beside = pacing.Beside(self, hurried)
        gently = self._kept.spec.gentle and self.device.type == "cuda" and alone
        with beside.paced() if gently else contextlib.nullcontext():
            result = super().compile_or_warm_up_model()
            sampling.warm(self.model_runner)
            if not self._kept.spec.hurry:
                beside.rehearsing = True
                self._rehearse(hurried, alone)
        if self.device.type == "cuda":
            import torch

            torch.cuda.synchronize(self.device)
        self._kept.warmed()
        return result

    def _rehearse(self, hurried: Callable[[], bool], alone: bool) -> None:
        """What goes wrong costs the first step after a promotion some time, and nothing else. But a rank that left this by itself would be
        waited for by the others."""
        begun_s = time.monotonic()
        try:
            rehearsal.rehearse(self, hurried, long=alone)  # ranks are not paced
        except Exception:
            if not alone:
                raise
            log.exception("the first step after a promotion could not be rehearsed")
        else:
            log.info("rehearsed in %.2f s", time.monotonic() - begun_s)
