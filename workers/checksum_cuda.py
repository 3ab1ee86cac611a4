"""Checksums of device memory: the values of `shadowsup.workers.checksum`, computed where the bytes are, at memory bandwidth."""

from __future__ import annotations

import functools
import logging
from typing import Any

import numpy as np
import numpy.typing as npt

from shadowsup.workers import checksum
from shadowsup.workers.checksum import CHUNKS, KEYS, MULTIPLIER, PIECE, WORDS

_BATCH = 64
"""Pieces a torch operation takes at once where there is no Triton: 256 MiB of data, and as much again for each temporary."""


def whole_pieces(words: Any) -> npt.NDArray[np.uint64]:
    """Return the checksums of whole pieces.

    Args:
        words: torch tensor, (n × PIECE / 8,) int64, contiguous, on any device.

    Returns:
        (n,) uint64.
    """
    count = words.numel() * 8 // PIECE
    sums = None
    if count and words.is_cuda and (kernel := _kernel()) is not None:
        try:
            sums = _with_triton(words, count, kernel)
        except Exception as error:  # a C compiler that Triton wants, a driver that it does not know: slower, but no reason to fail
            logging.getLogger(__name__).warning("Triton cannot run here (%s); checksums are computed more slowly", error)
            _broken.append(str(error))
    if sums is None:
        sums = by_torch(words, count)
    # The length stands before the first chunk, so Horner's rule has multiplied it once a chunk.
    found: npt.NDArray[np.uint64] = sums.cpu().numpy().view(np.uint64) + np.uint64(PIECE * pow(MULTIPLIER, CHUNKS, 2**64) % 2**64)
    return found


_broken: list[str] = []
"""Why the kernel does not run on this machine, once it has been tried."""


def _kernel() -> Any:
    if _broken:
        return None
    try:
        from shadowsup.workers import checksum_triton
    except ImportError:
        return None
    return checksum_triton


def kernel_available() -> bool:
    """Return whether the GPU kernel can be used (it has not failed, and Triton is there)."""
    return _kernel() is not None


def _with_triton(words: Any, count: int, kernel: Any) -> Any:
    import torch

    keys, multiplier = _constants(str(words.device))
    sums = torch.empty((count, kernel.TILES), dtype=torch.int64, device=words.device)
    with torch.cuda.device(words.device):
        kernel.tile_sums(words, keys, multiplier, sums)
    return sums.sum(1)


def by_torch(words: Any, count: int) -> Any:
    """The same by torch operations, on any device; integers wrap as they should."""
    import torch

    keys, multiplier = _constants(str(words.device))
    pieces = words.view(count, CHUNKS, WORDS)
    sums = torch.zeros(count, dtype=torch.int64, device=words.device)
    for start in range(0, count, _BATCH):
        batch = pieces[start : start + _BATCH]
        partial = ((batch & 0xFFFFFFFF) * keys[0]).sum(2) + (((batch >> 32) & 0xFFFFFFFF) * keys[1]).sum(2)
        for chunk in range(CHUNKS):
            sums[start : start + _BATCH] = sums[start : start + _BATCH] * multiplier + partial[:, chunk]
    return sums


@functools.lru_cache(maxsize=8)
def _constants(device: str) -> tuple[Any, Any]:
    import torch

    keys = torch.from_numpy(KEYS[:2].view(np.int64)).to(device)
    multiplier = torch.from_numpy(np.array([MULTIPLIER], dtype=np.uint64).view(np.int64)).to(device)
    return keys, multiplier


def checksums(words: Any, rest: bytes) -> npt.NDArray[np.uint64]:
    """Return `checksum.checksums` of whole pieces on a device (``words``, see `whole_pieces`) and of the ``rest`` behind them."""
    sums = whole_pieces(words)
    return np.concatenate([sums, checksum.checksums(np.frombuffer(rest, dtype=np.uint8))]) if rest else sums
