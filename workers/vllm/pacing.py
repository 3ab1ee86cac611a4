"""Seam: how a shadow that starts shares the GPU with the engine that serves (read and run with 0.26 on an H200).

Two processes that have work for one GPU take turns of some milliseconds, so a decode step beside a forward pass takes up to twice as long.
Warming up for 102 CUDA graphs means 102 passes of 4 to 10 ms. A shadow nobody waits for has them cut into pieces of about a
millisecond, with a rest after each. Attention is what vLLM calls between the compiled pieces of a model, once a layer: there it can be
cut. Sampling, for which vLLM warms up with the most requests that may run, is cut after each of its operations. Nothing is cut while a
graph is captured (the GPU does next to nothing then), nor where ranks wait for each other.
"""

from __future__ import annotations

import functools
import sys
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


@dataclass(frozen=True)
class Seam:
    """A function that is called on ``owner`` by its name, after which a pass can be cut."""

    owner: Any
    name: str
    wanted: Callable[[], bool]
    """Asked each time: whether anybody else needs the GPU, and cutting is allowed just now."""

    @property
    def callable(self) -> bool:
        return callable(getattr(self.owner, self.name, None))


@dataclass
class Pace:
    """Cuts passes at ``seams``; one that is not there is left alone.

    Args:
        finish: waits until the GPU has done what it was given.
    """

    seams: Iterable[Seam]
    finish: Callable[[], None]
    clock: Callable[[], float] = time.perf_counter
    rest: Callable[[float], None] = time.sleep
    _since_s: float | None = None
    """When the burst began; None: none has."""

    @contextmanager
    def kept(self) -> Iterator[None]:
        """While this lasts, passes are cut."""
        once = {(id(seam.owner), seam.name): seam for seam in self.seams if seam.callable}.values()
        cut = [(seam, vars(seam.owner).get(seam.name)) for seam in once]
        for seam, _ in cut:
            setattr(seam.owner, seam.name, self._after(getattr(seam.owner, seam.name), seam.wanted))
        try:
            yield
        finally:
            for seam, own in cut:
                if own is None:
                    delattr(seam.owner, seam.name)  # the class's is found again
                else:
                    setattr(seam.owner, seam.name, own)

    def _after(self, function: Callable[..., Any], wanted: Callable[[], bool]) -> Callable[..., Any]:
        @functools.wraps(function)
        def paced(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            self.pause(wanted)
            return result

        return paced

    def pause(self, wanted: Callable[[], bool]) -> None:
        """Something has been given to the GPU: rest, if the burst was long enough."""
        if not wanted():
            self._since_s = None
            return
        self.finish()
        now_s = self.clock()
        if self._since_s is None:
            self._since_s = now_s
        elif (burst_s := now_s - self._since_s) >= BURST_S:
            self.rest(min(REST * burst_s, MAX_REST_S))
            self._since_s = self.clock()


class Beside:
    """What a shadow's worker does while it warms up beside an active engine.

    Args:
        worker: vLLM's.
        hurried: says whether somebody waits for the shadow now.
    """

    def __init__(self, worker: Any, hurried: Callable[[], bool]) -> None:
        self._worker = worker
        self._hurried = hurried
        self.rehearsing = False
        """Passes whose pieces are graphs count, too. While graphs are captured such a pass gives the GPU nothing to do."""

    @contextmanager
    def paced(self) -> Iterator[None]:
        """Cut what this process does on its GPU, until somebody waits for it."""
        import torch

        with Pace([*self._layers(), *self._sampling()], lambda: torch.cuda.current_stream().synchronize()).kept():
            yield

    def _layers(self) -> Iterator[Seam]:
        layers = self._worker.vllm_config.compilation_config.static_forward_context.values()
        for impl in (getattr(layer, "impl", None) for layer in layers):
            if impl is not None:
                yield Seam(impl, "forward", self._between_layers)

    def _sampling(self) -> Iterator[Seam]:
        """Of the second model runner. The first one's compiles what it does."""
        sampler = getattr(self._worker.model_runner, "sampler", None)
        module = sys.modules.get(type(sampler).__module__)
        if sampler is None or not hasattr(sampler, "sampling_states"):
            return
        yield Seam(self._worker.model_runner.model, "compute_logits", self._allowed)
        for state in (*vars(sampler).values(), *getattr(sampler, "logits_processors", ())):  # those are 0.32's
            for name in dir(type(state)):
                if name == "apply" or (name.startswith("apply_") and name != "apply_staged_writes"):
                    yield Seam(state, name, self._allowed)
        for name in ("apply_top_k_top_p", "gumbel_sample", "compute_topk_scores"):
            yield Seam(module, name, self._allowed)

    def _allowed(self) -> bool:
        import torch

        return not self._hurried() and not torch.cuda.is_current_stream_capturing()

    def _between_layers(self) -> bool:
        from vllm.config import CUDAGraphMode
        from vllm.forward_context import get_forward_context, is_forward_context_available

        if not self._allowed() or not is_forward_context_available():
            return False
        return self.rehearsing or bool(get_forward_context().cudagraph_runtime_mode == CUDAGraphMode.NONE)
