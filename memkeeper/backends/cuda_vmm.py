"""GPU segments: CUDA VMM allocations, exported as file descriptors. The keeper needs no context and costs no device memory.

The descriptor alone keeps the memory: whoever holds a copy of it may map it, and the last close (of descriptors and mappings) frees it.
It cannot be sealed; instead every engine but the publisher maps weights read-only, which the driver enforces. The driver does not say
which device a descriptor's memory is on, so that is in the manifest and importers check it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from shadowsup.memkeeper import device_use
from shadowsup.memkeeper.backends.cuda_driver import OUT_OF_MEMORY, CudaDriver, Device, DriverError, ExportDriver
from shadowsup.memkeeper.backends.host_memory import size_text
from shadowsup.memkeeper.device_use import DeviceUse, Unanswered
from shadowsup.memkeeper.errors import KeeperError, OutOfMemory


class CudaVmmBackend:
    """See `shadowsup.memkeeper.backends.base.Backend`.

    Args:
        driver: the CUDA driver, or a fake.
        use: who uses a device; raises `Unanswered`. Only asked when memory has run out.
        holders: pid → name of processes with a device file open; likewise.
    """

    name = "cuda"

    def __init__(
        self,
        driver: ExportDriver | None = None,
        *,
        use: Callable[[str], DeviceUse] = device_use.query,
        holders: Callable[[], dict[int, str]] = device_use.device_file_holders,
    ) -> None:
        self._driver: ExportDriver = CudaDriver() if driver is None else driver
        self._use = use
        self._holders = holders

    @functools.cached_property
    def _devices(self) -> dict[str, Device]:
        return {device.uuid: device for device in self._driver.devices()}

    def probe(self) -> None:
        """Raises KeeperError when there is no driver here, or no device."""
        if not self._devices:
            raise KeeperError("the CUDA driver sees no device", "check CUDA_VISIBLE_DEVICES and nvidia-smi")

    def granularity(self, device: str) -> int:
        return self._driver.granularity(self._device(device))

    def require(self, size: int, device: str) -> None:
        """On a device only what can never fit is refused here: the driver gives or refuses at once and promises nothing twice."""
        there = self._device(device)
        if size > there.total:
            raise OutOfMemory(
                f"{size_text(size)} can never fit on {device}, which has {size_text(there.total)} in all",
                "make kv.size or the model smaller",
            )

    def allocate(self, size: int, name: str, device: str) -> int:
        """See `base.Backend`. Device memory is rounded up to the device's unit, and what it contains at first is undefined.

        Raises:
            OutOfMemory: the driver has not that much; see `usage`.
            KeeperError: there is no such device here, or the driver fails otherwise.
        """
        there = self._device(device)
        unit = self._driver.granularity(there)
        try:
            return self._driver.create(there, -(-size // unit) * unit)
        except DriverError as error:
            if error.code != OUT_OF_MEMORY:
                raise
            message = f"no room for {name} of {size_text(size)} on {device}"
            raise OutOfMemory(message, "stop what else runs on this GPU, or make kv.size smaller") from error

    def usage(self, device: str) -> str:
        try:
            use = self._use(device)
        except Unanswered as error:
            return f"{size_text(self._device(device).total)} in all; what is in use is not known, NVML: {error}"
        processes = sorted(use.processes, key=lambda process: -(process.used or 0))
        parts = [f"process {one.pid} ({one.name}) {_used(one.used)}" for one in processes]
        rest = use.used - sum(process.used or 0 for process in processes)
        if rest > 0:
            parts.append(f"{size_text(rest)} in kept memory and the driver, of no process")
        others = {pid: name for pid, name in self._holders().items() if pid not in {process.pid for process in processes}}
        if others:
            parts.append("device files are open in " + ", ".join(f"process {pid} ({name})" for pid, name in sorted(others.items())))
        return f"{size_text(use.total)} in all, {size_text(use.total - use.used)} free; " + "; ".join(parts)

    def seal(self, fd: int) -> None:
        """Nothing: device memory has no seals. Every engine maps sealed weights read-only, and the driver holds it to that."""

    def _device(self, uuid: str) -> Device:
        try:
            return self._devices[uuid]
        except KeyError:
            there = ", ".join(self._devices) or "none"
            raise KeeperError(f"device {uuid} is not visible to the keeper, which sees {there}", "check CUDA_VISIBLE_DEVICES") from None


def _used(size: int | None) -> str:
    return "an unknown amount" if size is None else size_text(size)
