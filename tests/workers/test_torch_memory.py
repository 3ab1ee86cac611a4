"""Torch tensors over memory that somebody else keeps mapped."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from shadowsup.workers.errors import WorkerError
from shadowsup.workers.torch_memory import as_bytes


def test_host_memory_is_written_through() -> None:
    memory = np.zeros(64, np.uint8)
    as_bytes(memory.ctypes.data, 64, torch.device("cpu"))[3] = 7
    assert memory[3] == 7


def test_a_copy_on_the_device_that_was_asked_for_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's answer to memory of another GPU (there is none here): it copies without a word."""
    there, copy = torch.zeros(64, dtype=torch.uint8), torch.zeros(64, dtype=torch.uint8)

    def placed(answer: torch.Tensor) -> None:
        def as_tensor(source: Any, *, device: torch.device) -> torch.Tensor:
            assert source.__cuda_array_interface__["data"][0] == there.data_ptr()
            return answer

        monkeypatch.setattr(torch, "as_tensor", as_tensor)

    placed(there)
    assert as_bytes(there.data_ptr(), 64, torch.device("cuda", 1)) is there
    placed(copy)
    with pytest.raises(WorkerError, match="cuda:1"):
        as_bytes(there.data_ptr(), 64, torch.device("cuda", 1))
