"""Torch tensors over memory that somebody else keeps mapped: kept weights, the KV arena."""

from __future__ import annotations

import ctypes

import torch

from shadowsup.workers.errors import WorkerError
from shadowsup.workers.weights import KeptTensor


def view(kept: KeptTensor, device: torch.device) -> torch.Tensor:
    """Return a tensor over kept memory, no copy. It is good as long as the set is mapped; on sealed memory a write is a fault."""
    dtype = getattr(torch, kept.dtype)
    if kept.nbytes == 0:
        return torch.empty(kept.shape, dtype=dtype, device=device)
    return as_bytes(kept.address, kept.nbytes, device).view(dtype).view(kept.shape)


def as_bytes(address: int, size: int, device: torch.device) -> torch.Tensor:
    """Return (size,) uint8 over memory that somebody else keeps mapped.

    Raises:
        WorkerError: (fatal) it lies on another device than ``device``.
    """
    if device.type == "cpu":
        # A ctypes array: torch would warn of a read-only numpy array, and numpy of none.
        return torch.frombuffer((ctypes.c_char * size).from_address(address), dtype=torch.uint8)
    from shadowsup.workers.cuda_memory import DeviceBytes

    found = torch.as_tensor(DeviceBytes(address, size), device=device)
    if found.data_ptr() != address:  # torch copies what lies on another device: nothing written there would ever be kept
        raise WorkerError(
            f"memory that should be on {device} is on another device", "see CUDA_VISIBLE_DEVICES in the engine's environment", fatal=True
        )
    return found
