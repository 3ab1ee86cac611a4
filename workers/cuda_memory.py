"""Device memory on the engine side: descriptors imported and mapped where the engine wants them, read-only or read-write.

Few large handles, each mapped whole: the cost is by handle, not by byte. A handle is released as soon as it is mapped; the mapping (and
the keeper's descriptor) holds the memory. The driver does not tell whose memory a descriptor is: `check_manifest` does, before an import.
"""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np

from shadowsup.memkeeper.backends.cuda_driver import DriverError, allocation, call, granularity, load, visible_devices
from shadowsup.memkeeper.errors import StaleHandle
from shadowsup.memkeeper.protocol import Manifest
from shadowsup.workers.errors import WorkerError
from shadowsup.workers.mapping import round_up

GRANULARITY = 2 * 1024 * 1024
"""Bytes. What every device seen so far asks for; `CudaMapper` refuses one that asks for more."""

LARGE_PAGE = 512 * 1024 * 1024
"""Bytes: the largest page of the GPUs that we know. Addresses and slabs that keep to it are mapped somewhat faster."""

KV_SLAB = 1024 * 1024 * 1024
"""Bytes. KV slabs are at least this large (unless all of the KV is smaller)."""

MAX_KV_SLABS = 16
"""Descriptors that every engine of a worker holds, and mappings on the promotion path."""


_NOT_DEVICE_MEMORY = ("CUDA_ERROR_INVALID_VALUE", "CUDA_ERROR_INVALID_HANDLE", "CUDA_ERROR_UNKNOWN")
"""What an import answers to a descriptor of anything else (UNKNOWN for a memfd, driver 580)."""


class Access(enum.Enum):
    READ_ONLY = "read-only"
    READ_WRITE = "read-write"


class Mapper(Protocol):
    """The driver calls of one device. All raise DriverError. ``handle`` is the driver's own object; sizes and addresses are ints."""

    device: str
    """UUID."""
    ordinal: int
    """As this process numbers it; the same as torch's."""

    def reserve(self, size: int, alignment: int) -> int: ...
    def free(self, address: int, size: int) -> None: ...
    def create(self, size: int) -> Any: ...
    def import_fd(self, fd: int) -> Any: ...
    def release(self, handle: Any) -> None: ...
    def map(self, address: int, size: int, handle: Any) -> None: ...
    def set_access(self, address: int, size: int, access: Access) -> None: ...
    def unmap(self, address: int, size: int) -> None: ...
    def copy_out(self, address: int, size: int) -> bytes: ...
    def copy_in(self, address: int, data: bytes) -> None: ...
    def synchronize(self) -> None: ...


class CudaMapper:
    """See `Mapper`. Mapping needs no context; copies and `synchronize` use the primary one."""

    def __init__(self, device: str) -> None:
        """Raises WorkerError when this process does not see ``device`` (a UUID), or cannot use its memory."""
        try:
            seen = visible_devices()
        except DriverError as error:
            raise WorkerError(error.message, error.hint, fatal=True) from error
        found = [one for one in seen if one.uuid == device]
        if not found:
            there = ", ".join(f"{one.ordinal}={one.uuid}" for one in seen) or "no device"
            raise WorkerError(
                f"device {device} is not visible to this engine, which sees {there}", "check CUDA_VISIBLE_DEVICES", fatal=True
            )
        self.device = device
        self.ordinal = found[0].ordinal
        self._driver = load()
        needed = granularity(self.ordinal)
        if GRANULARITY % needed:
            raise WorkerError(f"device {device} wants memory in units of {needed} bytes, not {GRANULARITY}", fatal=True)
        self._handle_type = self._driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        flags = self._driver.CUmemAccess_flags
        self._access = {
            Access.READ_ONLY: self._access_of(flags.CU_MEM_ACCESS_FLAGS_PROT_READ),
            Access.READ_WRITE: self._access_of(flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE),
        }

    def _access_of(self, flags: Any) -> Any:
        description = self._driver.CUmemAccessDesc()
        description.location.type = self._driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        description.location.id = self.ordinal
        description.flags = flags
        return description

    def reserve(self, size: int, alignment: int) -> int:
        return int(call("cuMemAddressReserve", size, alignment, 0, 0))

    def free(self, address: int, size: int) -> None:
        call("cuMemAddressFree", address, size)

    def create(self, size: int) -> Any:
        return call("cuMemCreate", size, allocation(self.ordinal), 0)

    def import_fd(self, fd: int) -> Any:
        return call("cuMemImportFromShareableHandle", fd, self._handle_type)

    def release(self, handle: Any) -> None:
        call("cuMemRelease", handle)

    def map(self, address: int, size: int, handle: Any) -> None:
        call("cuMemMap", address, size, 0, handle, 0)

    def set_access(self, address: int, size: int, access: Access) -> None:
        call("cuMemSetAccess", address, size, [self._access[access]], 1)

    def unmap(self, address: int, size: int) -> None:
        call("cuMemUnmap", address, size)

    def copy_out(self, address: int, size: int) -> bytes:
        data = np.empty(size, dtype=np.uint8)
        if size:
            with self._context():
                call("cuMemcpyDtoH", data.ctypes.data, address, size)
        return data.tobytes()

    def copy_in(self, address: int, data: bytes) -> None:
        if data:
            source = np.frombuffer(data, dtype=np.uint8)
            with self._context():
                call("cuMemcpyHtoD", address, source.ctypes.data, len(data))

    def synchronize(self) -> None:
        _, active = call("cuDevicePrimaryCtxGetState", call("cuDeviceGet", self.ordinal))
        if active:
            with self._context():
                call("cuCtxSynchronize")

    @contextlib.contextmanager
    def _context(self) -> Iterator[None]:
        """Make the primary context (torch's) current; created where there is none."""
        device = call("cuDeviceGet", self.ordinal)
        context = call("cuDevicePrimaryCtxRetain", device)
        try:
            call("cuCtxPushCurrent", context)
            try:
                yield
            finally:
                call("cuCtxPopCurrent")
        finally:
            call("cuDevicePrimaryCtxRelease", device)


class DeviceRange:
    """An address range of one device, kept for the life of the object, and what is mapped in it just now."""

    def __init__(self, mapper: Mapper, size: int) -> None:
        """Reserve ``size`` bytes, rounded up to `GRANULARITY`. Raises DriverError."""
        self.mapper = mapper
        self.size = round_up(size, GRANULARITY)
        self.address = mapper.reserve(self.size, LARGE_PAGE if self.size >= LARGE_PAGE else GRANULARITY)
        self.mapped = 0
        """Bytes mapped, from ``address`` on."""

    def map(self, pieces: Iterable[tuple[Any, int]], access: Access) -> None:
        """Map ``(handle, size)`` one behind the other from the start of the range, which must be empty. Handles stay the caller's.

        Raises:
            DriverError: and the range is empty again.
        """
        try:
            for handle, size in pieces:
                self.mapper.map(self.address + self.mapped, size, handle)
                self.mapped += size
            self.mapper.set_access(self.address, self.mapped, access)
        except BaseException:
            self.unmap()
            raise

    def set_access(self, access: Access) -> None:
        """Change how everything mapped may be used. Raises DriverError."""
        self.mapper.set_access(self.address, self.mapped, access)

    def unmap(self) -> None:
        """Empty the range with one driver call; no kernel may still use it. Raises DriverError."""
        if self.mapped:
            self.mapper.unmap(self.address, self.mapped)
            self.mapped = 0

    def close(self) -> None:
        """Unmap and give the addresses back. Idempotent. Raises DriverError."""
        if self.address:
            self.unmap()
            address, self.address = self.address, 0
            self.mapper.free(address, self.size)


class DeviceBytes:
    """``size`` bytes at a device address, as ``torch.as_tensor(…, device="cuda")`` takes them: shape ``(size,)``, u8, no copy.

    Does not keep the memory mapped. It must be mapped when a tensor is made over it.
    """

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (address, False),  # torch refuses what is marked read-only; the mapping's own protection is what counts
            "strides": None,
            "version": 3,
        }


def check_manifest(manifest: Manifest, device: str, *, generation: int = 0) -> None:
    """Refuse memory that is not what this engine must use. An import would not: it reads another GPU's memory over NVLink.

    Args:
        generation: the oldest keeper generation whose memory is still good; older handles come from a run that is over.

    Raises:
        WorkerError: the segment lies on another device.
        StaleHandle: the segment is older than ``generation``.
    """
    if manifest.device != device:
        raise WorkerError(
            f"segment {manifest.segment} lies on device {manifest.device}, this engine runs on {device}",
            "a worker's engines must use the GPU that its memory is on",
        )
    if manifest.generation < generation:
        raise StaleHandle(
            f"segment {manifest.segment} is of generation {manifest.generation}, only {generation} and newer are still good",
            "ask the keeper for the segments of this run",
        )


def import_all(mapper: Mapper, fds: Sequence[int]) -> list[Any]:
    """Import descriptors; all or none. Release the handles once they are mapped (`release_all`).

    Raises:
        StaleHandle: a descriptor no longer names device memory (the driver was restarted, or it is none of ours).
        DriverError: the driver refuses for another reason.
    """
    handles: list[Any] = []
    try:
        for fd in fds:
            handles.append(mapper.import_fd(fd))
    except DriverError as error:
        release_all(mapper, handles)
        if error.code in _NOT_DEVICE_MEMORY:
            raise StaleHandle(
                f"a descriptor does not name device memory any more ({error.message})", "the worker needs fresh segments from the keeper"
            ) from error
        raise
    return handles


def release_all(mapper: Mapper, handles: Sequence[Any]) -> None:
    """Release every handle, whatever happens to one of them."""
    for handle in handles:
        try:
            mapper.release(handle)
        except DriverError:  # a context that is lost takes its handles along; nothing else can be done about one
            continue


def kv_slabs(size: int) -> tuple[int, ...]:
    """Split a KV arena into slabs, in bytes: `KV_SLAB` or more each, multiples of `LARGE_PAGE` but for the last, exactly ``size`` in all.

    Raises:
        WorkerError: ``size`` is no positive multiple of `GRANULARITY`.
    """
    if size <= 0 or size % GRANULARITY:
        raise WorkerError(
            f"a KV arena of {size} bytes cannot be mapped", f"its size must be a positive multiple of {GRANULARITY} bytes", fatal=True
        )
    count = max(1, min(size // KV_SLAB, MAX_KV_SLABS))
    whole, rest = divmod(size // LARGE_PAGE, count)
    slabs = [(whole + (index < rest)) * LARGE_PAGE for index in range(count)]
    slabs[-1] += size - sum(slabs)
    return tuple(slabs)
