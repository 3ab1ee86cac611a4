"""A model's tensors as kept weights: what to keep of a loaded model, and how to put a model together over what was kept.

Parameters are shared, read-only. Buffers and plain tensor attributes are kept too (rotary frequencies and the like are computed, not
loaded), but each engine gets copies of its own: models write to them.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from shadowsup.workers.errors import WorkerError
from shadowsup.workers.torch_memory import as_bytes as as_bytes
from shadowsup.workers.torch_memory import view as view
from shadowsup.workers.weights import KeptTensor, TensorSpec


class Place(enum.Enum):
    """Where a tensor sits in its module."""

    PARAMETER = "parameter"
    BUFFER = "buffer"
    ATTRIBUTE = "attribute"


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a model. ``key``: its name among the kept ones."""

    place: Place
    module: nn.Module
    path: str
    name: str

    @property
    def key(self) -> str:
        full = f"{self.path}.{self.name}" if self.path else self.name
        return full if self.place is Place.PARAMETER else f"{self.place.value}:{full}"

    def get(self) -> torch.Tensor:
        return getattr(self.module, self.name)

    def set(self, tensor: torch.Tensor) -> None:
        setattr(self.module, self.name, nn.Parameter(tensor, requires_grad=False) if self.place is Place.PARAMETER else tensor)


def entries(model: nn.Module) -> Iterator[Entry]:
    """Yield every tensor of ``model``, tied ones once for each name."""
    for path, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                yield Entry(Place.PARAMETER, module, path, name)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                yield Entry(Place.BUFFER, module, path, name)
        for name, value in vars(module).items():
            if isinstance(value, torch.Tensor):
                yield Entry(Place.ATTRIBUTE, module, path, name)


def collect(model: nn.Module) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Return (tensors to keep by key, ties: key → the key that has the bytes)."""
    kept: dict[str, torch.Tensor] = {}
    ties: dict[str, str] = {}
    seen: dict[tuple[int, torch.Size, tuple[int, ...]], str] = {}
    for entry in entries(model):
        tensor = entry.get()
        # On meta nothing has an address: there a tied parameter is one object.
        where = (id(tensor) if tensor.is_meta else tensor.data_ptr(), tensor.shape, tensor.stride())
        tensor = tensor.detach()
        if entry.place is Place.PARAMETER and tensor.numel() and where in seen:
            ties[entry.key] = seen[where]
            continue
        seen.setdefault(where, entry.key)
        kept[entry.key] = tensor
    return kept, ties


def plan(tensors: Mapping[str, torch.Tensor]) -> list[TensorSpec]:
    """Return what the weight store has to make room for."""
    return [
        TensorSpec(key, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), tensor.numel() * tensor.element_size())
        for key, tensor in tensors.items()
    ]


def assemble(model: nn.Module, kept: Mapping[str, KeptTensor], ties: Mapping[str, str], device: torch.device) -> None:
    """Put kept tensors into ``model``, which was built on meta.

    Raises:
        WorkerError: the model wants a tensor that was not kept, or one of another shape.
    """
    views: dict[str, torch.Tensor] = {}

    def shared(key: str) -> torch.Tensor:
        if key not in views:
            views[key] = view(kept[key], device)
        return views[key]

    for entry in list(entries(model)):
        tied = ties.get(entry.key, entry.key)
        if tied not in kept:
            raise _mismatch(f"they have no {entry.key}")
        wanted, tensor = entry.get(), shared(tied)
        if wanted.shape != tensor.shape:
            raise _mismatch(f"{entry.key} is {tuple(tensor.shape)}, the model wants {tuple(wanted.shape)}")
        entry.set(tensor if entry.place is Place.PARAMETER else tensor.clone())


def _mismatch(what: str) -> WorkerError:
    return WorkerError(
        f"the kept weights do not fit this engine's model: {what}",
        "they were published by another version of transformers: stop the worker, which frees them, and start it again",
        fatal=True,
    )


def copy(tensors: Mapping[str, torch.Tensor], target: Callable[[str], torch.Tensor]) -> None:
    """Write ``tensors`` to the memory that ``target`` gives for a key."""
    for key, tensor in tensors.items():
        target(key).copy_(tensor)


def fill_random(tensors: Mapping[str, torch.Tensor], target: Callable[[str], torch.Tensor], deviation: float) -> None:
    """Write the weights of a dummy model: the same each time for the same names and shapes, and small enough to stay finite.

    ``target``: the memory for a key. Norms are ones, biases zeros, matrices normal with ``deviation``; what is not on meta is copied.
    """
    for at, (key, tensor) in enumerate(tensors.items()):
        memory = target(key)
        if not tensor.is_meta:
            memory.copy_(tensor)
        elif key.endswith("bias"):
            memory.zero_()
        elif tensor.dim() < 2:
            memory.fill_(1.0)
        else:
            memory.normal_(0.0, deviation, generator=torch.Generator(memory.device).manual_seed(at + 1))
