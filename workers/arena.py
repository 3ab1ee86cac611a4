"""The KV arena: one address range that an engine sees for its whole life, whatever memory is behind it.

The range is reserved once at its final size. While the engine warms up and is parked, one small scratch allocation is mapped into it
over and over, so that every block can be written and nothing is kept. At promotion the worker's real segments take its place at the
same addresses: pointers held by tensors and captured graphs stay good. Torch is not needed here; adapters wrap `KvArena.address`.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from shadowsup.workers import mapping
from shadowsup.workers.errors import WorkerError

_MIN_SCRATCH = 2 * 1024 * 1024
_MAX_SCRATCH_MAPS = 1024
"""Mappings that scratch may cost; they do not merge, and vm.max_map_count (65,530 by default) is for the whole process."""


class KvArena(ABC):
    """What an adapter sees. ``size`` in bytes, ``device`` a device UUID or ``host``, ``granularity``: sizes are multiples of it."""

    device: str
    granularity: int
    address: int
    size: int

    @staticmethod
    def reserve(size: int, device: str = "host") -> KvArena:
        """Return an arena of ``size`` bytes for ``device``; nothing is mapped yet, an access is a fault.

        Raises:
            WorkerError: the size is no multiple of the granularity, the address range cannot be had, or ``device`` is not visible.
        """
        if device == "host":
            return HostArena(size)
        from shadowsup.workers.arena_cuda import CudaArena

        return CudaArena(size, device)

    @abstractmethod
    def map_scratch(self) -> None:
        """Back the whole range by scratch. Whatever was mapped is gone from the range (not from its segments).

        Raises:
            WorkerError: there is no memory for the scratch allocation.
        """

    @abstractmethod
    def map_segments(self, fds: Sequence[int], sizes: Sequence[int]) -> None:
        """Put real memory behind the range: the segments in order, each mapped whole. The caller keeps and may close the fds.

        Raises:
            WorkerError: they do not fill the range exactly, or a mapping fails; the range is backed by scratch again then (after
                `rest`: by nothing).
        """

    def rest(self) -> None:  # noqa: B027 - host memory has nothing to gain
        """Give scratch up until something is mapped again. Until then no access to the range is allowed, on a device not even by a
        graph: that ends the process's context. For an engine that is warm and will run nothing before its promotion.

        Raises:
            WorkerError: the driver refuses.
        """

    @abstractmethod
    def view(self) -> npt.NDArray[np.uint8]:
        """Return the range as bytes (host memory only): shape ``(size,)``, the same object each time, good until `close`.

        Raises:
            WorkerError: this is device memory.
        """

    @abstractmethod
    def close(self) -> None:
        """Give the range up. No tensor or view over it may be touched afterwards: that is a segmentation fault. Idempotent."""


class HostArena(KvArena):
    """Host memory (memfd segments). See `KvArena`."""

    device = "host"
    granularity = mapping.PAGE

    def __init__(self, size: int) -> None:
        if size <= 0 or size % self.granularity:
            raise WorkerError(
                f"a KV arena of {size} bytes cannot be mapped",
                f"its size must be a positive multiple of {self.granularity} bytes",
                fatal=True,
            )
        try:
            self.address = mapping.reserve(size)
        except OSError as error:
            raise WorkerError(f"cannot reserve {size} bytes of address space: {error.strerror}", "check ulimit -v") from error
        self.size = size
        self._view = mapping.as_array(self.address, size)
        self._scratch = -1
        self._closed = False

    def map_scratch(self) -> None:
        self._check_open()
        # Big enough to need few mappings, small enough to cost nothing beside the model.
        chunk = min(self.size, max(_MIN_SCRATCH, mapping.round_up(-(-self.size // _MAX_SCRATCH_MAPS), _MIN_SCRATCH)))
        try:
            if self._scratch < 0:
                self._scratch = os.memfd_create("shadowsup-scratch", os.MFD_CLOEXEC)
                os.posix_fallocate(self._scratch, 0, chunk)  # lack of memory is an error here, not SIGBUS in a kernel later
            protection = mapping.PROT_READ | mapping.PROT_WRITE
            for start in range(0, self.size, chunk):
                mapping.map_fd(self._scratch, min(chunk, self.size - start), protection, address=self.address + start)
        except OSError as error:
            raise WorkerError(f"cannot map scratch memory: {error.strerror}", "free memory, or make kv.size smaller") from error

    def map_segments(self, fds: Sequence[int], sizes: Sequence[int]) -> None:
        self._check_open()
        self._check_segments(fds, sizes)
        address = self.address
        try:
            for fd, size in zip(fds, sizes, strict=True):
                mapping.map_fd(fd, size, mapping.PROT_READ | mapping.PROT_WRITE, address=address)
                address += size
        except OSError as error:
            self.map_scratch()
            raise WorkerError(f"cannot map the KV segments: {error.strerror}", "the worker needs fresh KV segments") from error

    def view(self) -> npt.NDArray[np.uint8]:
        return self._view

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        mapping.unmap(self.address, self.size)
        if self._scratch >= 0:
            os.close(self._scratch)
            self._scratch = -1

    def _check_segments(self, fds: Sequence[int], sizes: Sequence[int]) -> None:
        """Nothing is mapped before all of it is known to fit: a short file would be SIGBUS at the first access behind its end."""
        if len(fds) != len(sizes) or sum(sizes) != self.size:
            raise WorkerError(f"{len(fds)} segments of {sum(sizes)} bytes do not fill a KV arena of {self.size} bytes")
        for fd, size in zip(fds, sizes, strict=True):
            if size <= 0 or size % self.granularity:
                raise WorkerError(f"a KV segment of {size} bytes is not made of whole pages of {self.granularity} bytes")
            try:
                there = os.fstat(fd).st_size
            except OSError as error:
                raise WorkerError(f"a KV segment's descriptor is not usable: {error.strerror}") from error
            if there < size:
                raise WorkerError(f"a KV segment should have {size} bytes and has {there}", "the worker needs fresh KV segments")

    def _check_open(self) -> None:
        if self._closed:
            raise WorkerError("the KV arena is closed")
