"""The CUDA driver as the keeper needs it: which devices there are, and memory that becomes a file descriptor. No context, ever.

``cuInit`` is enough to create and export memory, so the keeper costs no device memory and NVML lists no process for it. ``load`` and
``call`` are shared with the engine side. Nothing of CUDA is imported before a device is asked for: a node on host memory needs no driver.
"""

from __future__ import annotations

import functools
import uuid
from dataclasses import dataclass
from typing import Any, Protocol

from shadowsup.memkeeper.errors import KeeperError


class DriverError(KeeperError):
    """A driver call failed. ``code``: the driver's name of it (``CUDA_ERROR_OUT_OF_MEMORY``); empty when there is no driver."""

    def __init__(self, message: str, hint: str = "", *, code: str = "") -> None:
        super().__init__(message, hint)
        self.code = code


OUT_OF_MEMORY = "CUDA_ERROR_OUT_OF_MEMORY"


@dataclass(frozen=True, kw_only=True)
class Device:
    """One device as this process sees it. ``ordinal`` depends on CUDA_VISIBLE_DEVICES, ``uuid`` (``GPU-…``, ``MIG-…``) does not."""

    ordinal: int
    uuid: str
    name: str
    total: int
    """Bytes."""


class ExportDriver(Protocol):
    """What `shadowsup.memkeeper.backends.cuda_vmm` asks of the driver."""

    def devices(self) -> tuple[Device, ...]:
        """Raises DriverError when there is no driver, or it does not start."""

    def granularity(self, device: Device) -> int:
        """Return what sizes must be a multiple of, in bytes."""

    def create(self, device: Device, size: int) -> int:
        """Return a file descriptor that holds ``size`` bytes of new device memory; the last close of it and its mappings frees them.

        Raises:
            DriverError: with code `OUT_OF_MEMORY`, or any other.
        """


@functools.cache
def load() -> Any:
    """Return ``cuda.bindings.driver``, initialised.

    Raises:
        DriverError: the bindings or the driver are missing, or the driver does not start.
    """
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise DriverError(f"the CUDA bindings cannot be imported: {error}", "pip install cuda-bindings") from error
    try:
        (result,) = driver.cuInit(0)
    except Exception as error:  # the bindings load libcuda here and say in their own ways, by version, that there is none
        raise DriverError(f"no CUDA driver: {error}", "is the NVIDIA driver installed and visible here (nvidia-smi)?") from error
    if int(result) != 0:
        raise DriverError(f"the CUDA driver does not start: {result.name}", "see nvidia-smi and dmesg", code=str(result.name))
    return driver


def call(name: str, *arguments: Any) -> Any:
    """Call a driver function and return what it returns beside its result code: nothing, one value, or a tuple.

    Raises:
        DriverError: the result is not CUDA_SUCCESS.
    """
    driver = load()
    result, *values = getattr(driver, name)(*arguments)
    if int(result) != 0:
        raise DriverError(f"{name} failed: {result.name}", code=str(result.name))
    if not values:
        return None
    return values[0] if len(values) == 1 else tuple(values)


def allocation(ordinal: int) -> Any:
    """Return the properties of memory on device ``ordinal`` that can be exported as a file descriptor."""
    driver = load()
    properties = driver.CUmemAllocationProp()
    properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    properties.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    properties.location.id = ordinal
    properties.requestedHandleTypes = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    return properties


def granularity(ordinal: int) -> int:
    """Return what sizes and addresses of memory on device ``ordinal`` must be a multiple of, in bytes (2 MiB on all seen so far)."""
    flag = load().CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
    return int(call("cuMemGetAllocationGranularity", allocation(ordinal), flag))


def visible_devices() -> tuple[Device, ...]:
    """Return the devices this process may use, in order of their ordinals.

    Raises:
        DriverError: there is no driver, or it does not start.
    """
    found = []
    for ordinal in range(int(call("cuDeviceGetCount"))):
        handle = call("cuDeviceGet", ordinal)
        name = bytes(call("cuDeviceGetName", 256, handle)).split(b"\0")[0].decode(errors="replace")
        total = int(call("cuDeviceTotalMem", handle))
        found.append(Device(ordinal=ordinal, uuid=_uuid(handle, name), name=name, total=total))
    return tuple(found)


def _uuid(handle: Any, name: str) -> str:
    # Before CUDA 13 only the _v2 function tells MIG instances apart.
    function = "cuDeviceGetUuid_v2" if hasattr(load(), "cuDeviceGetUuid_v2") else "cuDeviceGetUuid"
    raw = bytes(call(function, handle).bytes)
    return f"{'MIG' if ' MIG ' in f'{name} ' else 'GPU'}-{uuid.UUID(bytes=raw)}"


class CudaDriver:
    """The real one. See `ExportDriver`."""

    def devices(self) -> tuple[Device, ...]:
        return visible_devices()

    def granularity(self, device: Device) -> int:
        return granularity(device.ordinal)

    def create(self, device: Device, size: int) -> int:
        kind = load().CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        handle = call("cuMemCreate", size, allocation(device.ordinal), 0)
        try:
            return int(call("cuMemExportToShareableHandle", handle, kind, 0))
        finally:
            call("cuMemRelease", handle)  # from here on the descriptor alone keeps the memory
