"""One GPU's figures through NVML. Every figure is asked for alone: a device without fans, ECC or a PCIe link has all the others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from shadowsup.wire.sensor import GpuReading

T = TypeVar("T")

THROTTLED = {
    "HwSlowdown": "hardware slowdown",
    "HwThermalSlowdown": "hardware thermal slowdown",
    "HwPowerBrakeSlowdown": "power brake",
    "SwThermalSlowdown": "thermal slowdown",
}
"""NVML's clock event reasons that a person must know of, by the end of their names."""


class Device:
    """A GPU or MIG instance by its UUID. ``nvml``: the module ``pynvml``, initialised, or what looks like it.

    Raises whatever ``nvml`` raises for a device that there is not.
    """

    def __init__(self, nvml: Any, uuid: str) -> None:
        self.uuid = uuid
        self._nvml = nvml
        self._handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
        # Of a MIG instance NVML tells memory and processes; temperature, power and the link are the whole GPU's.
        self._whole = nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self._handle) if uuid.startswith("MIG-") else self._handle

    @property
    def whole(self) -> Any:
        """The handle of the GPU itself."""
        return self._whole

    def read(self) -> GpuReading:
        """Return the present figures. Never raises: a device that is lost is a reading, too."""
        nvml, whole = self._nvml, self._whole
        try:
            memory = nvml.nvmlDeviceGetMemoryInfo(self._handle)
        except Exception as error:
            return without(self.uuid, error)
        rates = _ask(lambda: nvml.nvmlDeviceGetUtilizationRates(whole))
        return GpuReading(
            uuid=self.uuid,
            memory_used=int(memory.used),
            memory_total=int(memory.total),
            util=int(rates.gpu) if rates is not None else None,
            util_memory=int(rates.memory) if rates is not None else None,
            power_w=_ask(lambda: nvml.nvmlDeviceGetPowerUsage(whole) / 1000),
            power_limit_w=_ask(lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(whole) / 1000),
            temperature_c=_ask(lambda: int(nvml.nvmlDeviceGetTemperature(whole, nvml.NVML_TEMPERATURE_GPU))),
            clock_sm_mhz=_ask(lambda: int(nvml.nvmlDeviceGetClockInfo(whole, nvml.NVML_CLOCK_SM))),
            clock_memory_mhz=_ask(lambda: int(nvml.nvmlDeviceGetClockInfo(whole, nvml.NVML_CLOCK_MEM))),
            ecc_corrected=self._ecc("CORRECTED"),
            ecc_uncorrected=self._ecc("UNCORRECTED"),
            pcie_width=_ask(lambda: int(nvml.nvmlDeviceGetCurrPcieLinkWidth(whole))),
            pcie_width_max=_ask(lambda: int(nvml.nvmlDeviceGetMaxPcieLinkWidth(whole))),
            recovery_action=_ask(self._recovery),
            throttled=_ask(self._throttled) or (),
            processes=_ask(self._processes),
        )

    def _ecc(self, kind: str) -> int | None:
        nvml = self._nvml
        which = getattr(nvml, f"NVML_MEMORY_ERROR_TYPE_{kind}", None)
        return _ask(lambda: int(nvml.nvmlDeviceGetTotalEccErrors(self._whole, which, nvml.NVML_VOLATILE_ECC)))

    def _recovery(self) -> int | None:
        nvml = self._nvml
        (value,) = nvml.nvmlDeviceGetFieldValues(self._whole, [nvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION])
        return int(value.value.uiVal) if value.nvmlReturn == 0 else None

    def _throttled(self) -> tuple[str, ...]:
        nvml = self._nvml
        reasons = nvml.nvmlDeviceGetCurrentClocksEventReasons(self._whole)
        return tuple(words for name, words in THROTTLED.items() if reasons & getattr(nvml, f"nvmlClocksEventReason{name}", 0))

    def _processes(self) -> dict[int, int]:
        found = self._nvml.nvmlDeviceGetComputeRunningProcesses(self._handle)
        return {process.pid: process.usedGpuMemory for process in found if process.usedGpuMemory is not None}


class XidEvents:
    """Xid errors of the given devices as they come, through NVML's event set. On a machine that has none it only waits.

    ``wait`` blocks; the sensor has nothing else to do meanwhile.
    """

    def __init__(self, nvml: Any, devices: list[Device]) -> None:
        self._nvml = nvml
        self._set: Any = None
        self._devices: list[Device] = []
        self.listen(devices)

    def listen(self, devices: list[Device]) -> None:
        """Hear of these from now on, as far as they have events and are there."""
        nvml, old = self._nvml, self._set
        self._set, self._devices = None, devices
        if old is not None:
            _ask(lambda: nvml.nvmlEventSetFree(old))
        if (events := _ask(nvml.nvmlEventSetCreate)) is None:
            return
        for device in devices:
            try:
                nvml.nvmlDeviceRegisterEvents(device.whole, nvml.nvmlEventTypeXidCriticalError, events)
            except Exception:  # NVMLError_NotSupported: virtual machines, old boards; NVMLError_GpuIsLost
                continue
            self._set = events
        if self._set is None:
            _ask(lambda: nvml.nvmlEventSetFree(events))

    @property
    def supported(self) -> bool:
        return self._set is not None

    def wait(self, timeout_s: float) -> tuple[str, int] | None:
        """Return (UUID of the GPU, Xid) of the next event, None when there was none in time.

        Raises:
            Unsupported: this driver tells of no Xid, or not this time.
        """
        if self._set is None:
            raise Unsupported
        try:
            event = self._nvml.nvmlEventSetWait_v2(self._set, max(1, int(timeout_s * 1000)))
        except self._nvml.NVMLError_Timeout:
            return None
        except Exception as error:  # one of them is lost: the others are listened to without it
            self.listen(self._devices)
            raise Unsupported from error
        uuid = self._nvml.nvmlDeviceGetUUID(event.device)
        return (uuid.decode() if isinstance(uuid, bytes) else uuid), int(event.eventData)


class Unsupported(Exception):
    """Raised when there is no Xid to be had from this driver."""


def without(uuid: str, error: Exception) -> GpuReading:
    """Return the reading of a device that answered with ``error``. Only one that is gone is lost: nothing may use it any more then."""
    lost = type(error).__name__ in _GONE
    return GpuReading(uuid=uuid, lost=lost, warnings=("lost: it has fallen off the bus" if lost else f"no answer: {error}",))


_GONE = ("NVMLError_GpuIsLost", "NVMLError_NotFound")


def _ask(question: Callable[[], T]) -> T | None:
    try:
        return question()
    except Exception:  # NVMLError_NotSupported, and functions that an older driver has not
        return None
