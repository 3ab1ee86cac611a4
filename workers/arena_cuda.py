"""The KV arena on a GPU. See `shadowsup.workers.arena`: the same promises, kept by the driver's virtual memory.

The address range is reserved once. One scratch allocation is mapped over it again and again while the engine warms up and is parked;
CUDA graphs captured over it follow whatever is mapped there when they run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from shadowsup.memkeeper.backends.cuda_driver import OUT_OF_MEMORY, DriverError
from shadowsup.memkeeper.errors import StaleHandle
from shadowsup.workers import cuda_memory
from shadowsup.workers.arena import KvArena
from shadowsup.workers.cuda_memory import GRANULARITY, Access, CudaMapper, DeviceBytes, DeviceRange, Mapper
from shadowsup.workers.errors import WorkerError

SCRATCH = 256 * 1024 * 1024
"""Bytes of scratch at most, for an arena that takes it few times."""

LARGE_SCRATCH = 512 * 1024 * 1024
"""Bytes, for a larger one: mapping scratch and taking it away costs by the number of mappings (37 and 24 µs each, H200)."""

MAX_MAPS = 64


class CudaArena(KvArena):
    """Device memory (exported VMM allocations). ``address`` is a device pointer; `device_bytes` makes tensors over it."""

    granularity = GRANULARITY

    def __init__(self, size: int, device: str, mapper: Mapper | None = None) -> None:
        """Reserve ``size`` bytes of device addresses. Raises WorkerError: wrong size, unknown device, no address range."""
        if size <= 0 or size % GRANULARITY:
            raise WorkerError(
                f"a KV arena of {size} bytes cannot be mapped", f"its size must be a positive multiple of {GRANULARITY} bytes", fatal=True
            )
        self.device = device
        self.size = size
        self._mapper: Mapper = CudaMapper(device) if mapper is None else mapper
        # The range may be a little longer than the arena, so that it takes scratch a whole number of times: handles are mapped whole.
        self._chunk = min(SCRATCH if size <= MAX_MAPS * SCRATCH else LARGE_SCRATCH, size)
        self.scratch_maps = -(-size // self._chunk)
        """How often scratch is mapped over the range."""
        try:
            self._range = DeviceRange(self._mapper, self.scratch_maps * self._chunk)
        except DriverError as error:
            raise WorkerError(f"cannot reserve {size} bytes of addresses on {device}: {error.message}", "make kv.size smaller") from error
        self.address = self._range.address
        self._scratch: Any = None
        self._closed = False

    def map_scratch(self) -> None:
        self._check_open()
        try:
            self._mapper.synchronize()
            self._range.unmap()
            if self._scratch is None:
                self._scratch = self._mapper.create(self._chunk)
            self._range.map([(self._scratch, self._chunk)] * self.scratch_maps, Access.READ_WRITE)
        except DriverError as error:
            hint = "free device memory, or make kv.size smaller" if error.code == OUT_OF_MEMORY else ""
            raise WorkerError(f"cannot map scratch memory on {self.device}: {error.message}", hint) from error

    def map_segments(self, fds: Sequence[int], sizes: Sequence[int]) -> None:
        self._check_open()
        if len(fds) != len(sizes) or sum(sizes) != self.size:
            raise WorkerError(f"{len(fds)} segments of {sum(sizes)} bytes do not fill a KV arena of {self.size} bytes")
        if odd := [size for size in sizes if size <= 0 or size % GRANULARITY]:
            raise WorkerError(f"a KV segment of {odd[0]} bytes is not made of whole units of {GRANULARITY} bytes")
        # All imports come first: a descriptor that is no good leaves the scratch where it is.
        try:
            handles = cuda_memory.import_all(self._mapper, fds)
        except (DriverError, StaleHandle) as error:
            raise WorkerError(f"cannot import the KV segments: {error.message}", "the worker needs fresh KV segments") from error
        was_mapped = self._range.mapped > 0
        try:
            self._mapper.synchronize()
            self._range.unmap()
            self._range.map(zip(handles, sizes, strict=True), Access.READ_WRITE)
        except DriverError as error:
            if was_mapped:
                self.map_scratch()
            raise WorkerError(f"cannot map the KV segments: {error.message}", "the worker needs fresh KV segments") from error
        finally:
            cuda_memory.release_all(self._mapper, handles)
        self._release_scratch()

    def rest(self) -> None:
        """See `KvArena.rest`: a parked engine then costs no scratch, and its promotion takes none away (a half to two thirds of it)."""
        self._check_open()
        try:
            self._mapper.synchronize()
            self._range.unmap()
        except DriverError as error:
            raise WorkerError(f"cannot unmap scratch memory on {self.device}: {error.message}") from error
        self._release_scratch()

    def device_bytes(self) -> DeviceBytes:
        """Return the range for ``torch.as_tensor(…, device="cuda")``; something must be mapped when that is called."""
        return DeviceBytes(self.address, self.size)

    def view(self) -> npt.NDArray[np.uint8]:
        raise WorkerError("the KV arena is device memory", "use its device_bytes()")

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        try:
            self._mapper.synchronize()
            self._range.close()
        except DriverError:
            pass  # after a fatal CUDA error the context is lost, and everything that was mapped in it with it
        self._release_scratch()

    def _release_scratch(self) -> None:
        """Costs 0.1 to 0.2 ms whatever its size, so a promotion can afford it."""
        if self._scratch is not None:
            handle, self._scratch = self._scratch, None
            cuda_memory.release_all(self._mapper, [handle])

    def _check_open(self) -> None:
        if self._closed:
            raise WorkerError("the KV arena is closed")
