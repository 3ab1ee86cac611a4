"""Seam: how a shadow that starts shares the GPU with the engine that serves (read and run with 0.26 on an H200).

Two processes that have work for one GPU take turns of some milliseconds, so a decode step beside a forward pass takes up to twice as long.
Warming up for 102 CUDA graphs means 102 passes of 4 to 10 ms. A shadow nobody waits for has them cut into pieces of about a
millisecond, with a rest after each. Attention is what vLLM calls between the compiled pieces of a model, once a layer: there it can be
cut. Nothing is cut while a graph is captured (the GPU does next to nothing then), nor where ranks wait for each other.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

BURST_S = 0.001
"""How long a starting shadow keeps the GPU, about: a sixth of a decode step of an 8B model for 16 streams over 40k tokens (H200)."""

REST = 4.0
"""The rest after a burst, in bursts: the GPU is the other's for four fifths of the time."""

MAX_REST_S = 0.008
"""What took longer than a burst was mostly not the GPU's time."""


@dataclass
class Pace:
    """Cuts forward passes of ``impls``, whose ``forward`` is called once a layer.

    Args:
        impls: attention implementations; one without ``forward`` is left alone.
        wanted: asked at each layer: whether anybody else needs the GPU, and cutting is allowed just now.
        finish: waits until the GPU has done what it was given.
    """

    impls: Iterable[Any]
    wanted: Callable[[], bool]
    finish: Callable[[], None]
    clock: Callable[[], float] = time.perf_counter
    rest: Callable[[float], None] = time.sleep
    _since_s: float | None = None
    """When the burst began; None: none has."""

    @contextmanager
    def kept(self) -> Iterator[None]:
        """While this lasts, passes are cut."""
        once = {id(impl): impl for impl in self.impls}.values()
        cut = [(impl, vars(impl).get("forward")) for impl in once if callable(getattr(impl, "forward", None))]
        for impl, _ in cut:
            impl.forward = self._after(impl.forward)
        try:
            yield
        finally:
            for impl, own in cut:
                if own is None:
                    del impl.forward  # the class's is found again
                else:
                    impl.forward = own

    def _after(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(forward)
        def paced(*args: Any, **kwargs: Any) -> Any:
            result = forward(*args, **kwargs)
            self.layer()
            return result

        return paced

    def layer(self) -> None:
        """A layer has been given to the GPU: rest, if the burst was long enough."""
        if not self.wanted():
            self._since_s = None
            return
        self.finish()
        now_s = self.clock()
        if self._since_s is None:
            self._since_s = now_s
        elif (burst_s := now_s - self._since_s) >= BURST_S:
            self.rest(min(REST * burst_s, MAX_REST_S))
            self._since_s = self.clock()


@contextmanager
def beside_another(vllm_config: Any, hurried: Callable[[], bool]) -> Iterator[None]:
    """Cut what this process does on its GPU, until ``hurried`` says that somebody waits for it."""
    import torch
    from vllm.config import CUDAGraphMode
    from vllm.forward_context import get_forward_context, is_forward_context_available

    def wanted() -> bool:
        if hurried() or torch.cuda.is_current_stream_capturing() or not is_forward_context_available():
            return False
        return bool(get_forward_context().cudagraph_runtime_mode == CUDAGraphMode.NONE)

    layers = vllm_config.compilation_config.static_forward_context.values()
    impls = [impl for layer in layers if (impl := getattr(layer, "impl", None)) is not None]
    with Pace(impls, wanted, lambda: torch.cuda.current_stream().synchronize()).kept():
        yield
