"""GPU segments: CUDA VMM allocations, exported as file descriptors. The keeper needs no context and costs no device memory. What goes to
``host`` (the ledgers of GPU workers do) is host memory as ever.

The descriptor alone keeps the memory: whoever holds a copy of it may map it, and the last close (of descriptors and mappings) frees it.
It cannot be sealed; instead every engine but the publisher maps weights read-only, which the driver enforces. The driver does not say
which device a descriptor's memory is on, so that is in the manifest and importers check it.
"""

from __future__ import annotations

import errno
import functools
from collections.abc import Callable, Iterable

from shadowsup.memkeeper import device_use
from shadowsup.memkeeper.backends.cuda_driver import OUT_OF_MEMORY, CudaDriver, Device, DriverError, ExportDriver
from shadowsup.memkeeper.backends.host import DEVICE as HOST
from shadowsup.memkeeper.backends.host import HostBackend
from shadowsup.memkeeper.backends.host_memory import size_text
from shadowsup.memkeeper.device_use import DeviceUse, Unanswered
from shadowsup.memkeeper.errors import KeeperError, OutOfMemory


class CudaVmmBackend:
    """See `shadowsup.memkeeper.backends.base.Backend`.

    Args:
        driver: the CUDA driver, or a fake.
        kept: (name, bytes) of the segments that the keeper holds on a device.
        use: who uses a device; raises `Unanswered`. Only asked when memory has run out.
        holders: pid → name of processes with a device file open; likewise.
    """

    name = "cuda"

    def __init__(
        self,
        driver: ExportDriver | None = None,
        *,
        kept: Callable[[str], Iterable[tuple[str, int]]] = lambda device: (),
        use: Callable[[str], DeviceUse] = device_use.query,
        holders: Callable[[], dict[int, str]] = device_use.device_file_holders,
    ) -> None:
        self._driver: ExportDriver = CudaDriver() if driver is None else driver
        self._host = HostBackend()
        self.kept = kept
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
        return self._host.granularity(device) if device == HOST else self._driver.granularity(self._device(device))

    def require(self, size: int, device: str) -> None:
        """On a device only what can never fit is refused here: the driver gives or refuses at once and promises nothing twice."""
        if device == HOST:
            self._host.require(size, device)
        elif size > (there := self._device(device)).total:
            raise OutOfMemory(
                f"{size_text(size)} can never fit on {device}, which has {size_text(there.total)} in all",
                "make kv.size or the model smaller",
            )

    def allocate(self, size: int, name: str, device: str) -> int:
        """See `base.Backend`. Device memory is rounded up to the device's unit, and what it contains at first is undefined.

        Raises:
            OutOfMemory: with the arithmetic, and who holds what.
            KeeperError: there is no such device here, or the driver fails otherwise.
        """
        if device == HOST:
            return self._host.allocate(size, name, device)
        there = self._device(device)
        unit = self._driver.granularity(there)
        try:
            return self._driver.create(there, -(-size // unit) * unit)
        except DriverError as error:
            if error.code != OUT_OF_MEMORY:
                raise
            raise OutOfMemory(
                f"no room for {name} of {size_text(size)} on {device}: {self._explain(there)}",
                "stop what else runs on this GPU, or make kv.size smaller",
            ) from error

    def seal(self, fd: int) -> None:
        """Seal host memory. Device memory has no seals: every engine maps sealed weights read-only, and the driver holds it to that."""
        try:
            self._host.seal(fd)
        except OSError as error:
            if error.errno != errno.EINVAL:  # F_GET_SEALS of anything but a memfd
                raise

    def _device(self, uuid: str) -> Device:
        try:
            return self._devices[uuid]
        except KeyError:
            there = ", ".join(self._devices) or "none"
            raise KeeperError(f"device {uuid} is not visible to the keeper, which sees {there}", "check CUDA_VISIBLE_DEVICES") from None

    def _explain(self, device: Device) -> str:
        kept = sorted(self.kept(device.uuid), key=lambda item: -item[1])
        held = sum(size for _, size in kept)
        parts = [f"kept memory {size_text(held)}" + (f" ({', '.join(f'{name} {size_text(size)}' for name, size in kept)})" if kept else "")]
        try:
            use = self._use(device.uuid)
        except Unanswered as error:
            return f"{size_text(device.total)} in all; {parts[0]}; who else uses it is not known: NVML {error}"
        parts += [
            f"process {process.pid} ({process.name}) {size_text(process.used) if process.used is not None else 'an unknown amount'}"
            for process in sorted(use.processes, key=lambda process: -(process.used or 0))
        ]
        rest = use.used - held - sum(process.used or 0 for process in use.processes)
        if rest > 0:
            parts.append(f"{size_text(rest)} in the driver, or in descriptors of other keepers")
        idle = {pid: name for pid, name in self._holders().items() if pid not in {process.pid for process in use.processes}}
        if idle:
            parts.append("device files are open in " + ", ".join(f"process {pid} ({name})" for pid, name in sorted(idle.items())))
        return f"{size_text(use.total)} in all, {size_text(use.total - use.used)} free; " + "; ".join(parts)
