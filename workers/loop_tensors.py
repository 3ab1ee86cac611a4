"""What a loop of one's own keeps by name: torch tensors, numpy arrays, bytes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from shadowsup.memkeeper.protocol import Fingerprint
from shadowsup.workers.errors import WorkerError
from shadowsup.workers.weights import KeptTensor, TensorSpec, WeightStore, WeightWriter

LAYOUT = "loop-1"
"""Changes when what is kept is laid out in another way."""

_TORCH = "torch."
"""In front of the dtype of a torch tensor; a numpy array's is numpy's own word (``<f4``)."""


def keep(store: WeightStore, load: Callable[[], Mapping[str, Any]], fingerprint: Fingerprint, device: str) -> dict[str, Any]:
    """See `shadowsup.workers.loop.Loop.keep`."""
    kept = store.attach(fingerprint)
    if kept is None:
        loaded = load()
        tensors = {name: value for name, value in loaded.items() if not isinstance(value, bytes)}
        extras = {name: value for name, value in loaded.items() if isinstance(value, bytes)}
        writer = store.publish([_spec(name, value, device) for name, value in tensors.items()], extras, fingerprint)
        try:
            for name, value in tensors.items():
                _copy(writer, name, value, device)
            _settle(device)
        except BaseException:
            writer.abort()
            raise
        kept = writer.seal()
    return {**{name: _view(tensor, device) for name, tensor in kept.tensors.items()}, **kept.extras}


def private(loaded: Mapping[str, Any], device: str) -> dict[str, Any]:
    """Return ``loaded`` as `keep` would give it, where nothing is kept.

    Raises:
        WorkerError: as there.
    """
    found = {}
    for name, value in loaded.items():
        if not isinstance(value, bytes):
            _spec(name, value, device)
        if hasattr(value, "detach"):
            found[name] = value.detach().to(device)
        elif isinstance(value, np.ndarray):
            found[name] = value.copy()
            found[name].setflags(write=False)
        else:
            found[name] = value
    return found


def _spec(name: str, value: Any, device: str) -> TensorSpec:
    if hasattr(value, "detach"):
        return TensorSpec(name, str(value.dtype), tuple(value.shape), value.numel() * value.element_size())
    if not isinstance(value, np.ndarray) or value.dtype.hasobject:
        raise WorkerError(f"{name} cannot be kept: it is {type(value).__name__}", "a tensor, an array of numbers, or bytes", fatal=True)
    if device != "cpu":
        raise WorkerError(f"{name} is an array, and this worker's memory is on a GPU", "make it a tensor, or bytes", fatal=True)
    return TensorSpec(name, value.dtype.str, value.shape, value.nbytes)


def _copy(writer: WeightWriter, name: str, value: Any, device: str) -> None:
    kept = writer.tensors[name]
    if not kept.nbytes:
        return
    if kept.dtype.startswith(_TORCH):
        _view(kept, device).copy_(value.detach())
    else:
        writer.array(name)[:] = np.ascontiguousarray(value).reshape(-1).view(np.uint8)


def _settle(device: str) -> None:
    if device != "cpu":
        import torch

        torch.cuda.synchronize(device)


def _view(kept: KeptTensor, device: str) -> Any:
    if kept.dtype.startswith(_TORCH):
        import torch

        from shadowsup.workers.torch_memory import view

        return view(replace(kept, dtype=kept.dtype.removeprefix(_TORCH)), torch.device(device))
    if not kept.nbytes:
        return np.empty(kept.shape, np.dtype(kept.dtype))
    array = kept.array().view(np.dtype(kept.dtype)).reshape(kept.shape)
    array.setflags(write=False)
    return array
