"""Seam: ``--worker-cls`` with several ranks (0.26, 0.32): the worker of one of them, and what EngineCore calls it for."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from shadowsup.workers.errors import WorkerError
from shadowsup.workers.vllm import current
from shadowsup.workers.vllm.ranks import RankPart
from shadowsup.workers.vllm.worker import KeptWorker

_TOLD = (
    "init_device",
    "load_model",
    "determine_available_memory",
    "initialize_from_config",
    "compile_or_warm_up_model",
    "execute_model",
    "sample_tokens",
)
"""Methods of vLLM's whose failure is the engine's: vLLM passes on no more than the text."""


class RankWorker(KeptWorker):
    """See `shadowsup.workers.vllm.rank`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._rank = current.rank()
        try:
            super().__init__(*args, **kwargs)
        except BaseException as error:
            self._rank.tell(error)
            raise

    def init_device(self) -> None:
        super().init_device()
        if self._rank.device != "host":
            _check_device(self._rank.device, self.device.index)

    # --- what EngineCore calls -------------------------------------------------------------------------------------------------------

    def kept_part(self) -> RankPart:
        return self._rank.part()

    def kept_map(self, sizes: list[list[int]]) -> None:
        self._rank.map(sizes[self._rank.spec.rank])

    def kept_serve(self) -> int:
        return self._rank.serve()


def _check_device(wanted: str, ordinal: int) -> None:
    """Raises WorkerError: (fatal) vLLM has put this rank on another device than its memory is on."""
    from shadowsup.memkeeper.backends.cuda_driver import visible_devices

    found = {one.ordinal: one.uuid for one in visible_devices()}.get(ordinal)
    if found != wanted:
        raise WorkerError(f"this rank runs on device {found}, its memory is on {wanted}", "name the gpus in another order", fatal=True)


def _told(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def run(self: RankWorker, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(self, *args, **kwargs)
        except Exception as error:
            self._rank.tell(error)
            raise

    return run


for _name in (*_TOLD, "kept_part", "kept_map", "kept_serve"):
    setattr(RankWorker, _name, _told(getattr(RankWorker, _name)))
