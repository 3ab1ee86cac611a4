"""A module that looks like ``pynvml``, with one H200. What it does is said by the file named in FAKE_NVML, read anew at each reading.

The file is JSON: ``used``, ``ecc``, ``width``, ``action`` (recovery), ``lost``, ``xid`` (told once), ``then`` (``hang``, ``crash``,
``refuse``, or ``unknown``: it does not know the GPU for a reason of its own).
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

UUID = "GPU-aaaaaaaa-0000-0000-0000-000000000001"

NVML_TEMPERATURE_GPU = 0
NVML_CLOCK_SM = 1
NVML_CLOCK_MEM = 2
NVML_MEMORY_ERROR_TYPE_CORRECTED = 0
NVML_MEMORY_ERROR_TYPE_UNCORRECTED = 1
NVML_VOLATILE_ECC = 0
NVML_FI_DEV_GET_GPU_RECOVERY_ACTION = 230
nvmlEventTypeXidCriticalError = 8
nvmlClocksEventReasonHwSlowdown = 8


class NVMLError(Exception):
    pass


class NVMLError_GpuIsLost(NVMLError):
    pass


class NVMLError_NotFound(NVMLError):
    pass


class NVMLError_Timeout(NVMLError):
    pass


_told: set[int] = set()


def _says() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(Path(os.environ["FAKE_NVML"]).read_text())
    return found


def nvmlInit() -> None:
    if _says().get("then") == "refuse":
        raise NVMLError("Driver/library version mismatch")


def nvmlDeviceGetHandleByUUID(uuid: str) -> str:
    if uuid != UUID:
        raise NVMLError_NotFound("Not Found")
    if _says().get("then") == "unknown":
        raise NVMLError("Unknown Error")
    return uuid


def nvmlDeviceGetUUID(handle: str) -> str:
    return handle


def nvmlDeviceGetMemoryInfo(handle: str) -> Any:
    says = _says()
    if says.get("then") == "hang":
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        while True:
            time.sleep(60)
    if says.get("then") == "crash":
        ctypes.string_at(0)
    if says.get("lost"):
        raise NVMLError_GpuIsLost("GPU is lost")
    return SimpleNamespace(used=says.get("used", 5 << 30), total=141 << 30)


def nvmlDeviceGetUtilizationRates(handle: str) -> Any:
    return SimpleNamespace(gpu=87, memory=41)


def nvmlDeviceGetPowerUsage(handle: str) -> int:
    return 412_500


def nvmlDeviceGetEnforcedPowerLimit(handle: str) -> int:
    raise NVMLError("Not Supported")


def nvmlDeviceGetTemperature(handle: str, which: int) -> int:
    return 51


def nvmlDeviceGetClockInfo(handle: str, which: int) -> int:
    return {NVML_CLOCK_SM: 1980, NVML_CLOCK_MEM: 3201}[which]


def nvmlDeviceGetTotalEccErrors(handle: str, kind: int, counter: int) -> int:
    return int(_says().get("ecc", 0)) if kind == NVML_MEMORY_ERROR_TYPE_UNCORRECTED else 3


def nvmlDeviceGetCurrPcieLinkWidth(handle: str) -> int:
    return int(_says().get("width", 16))


def nvmlDeviceGetMaxPcieLinkWidth(handle: str) -> int:
    return 16


def nvmlDeviceGetFieldValues(handle: str, fields: list[int]) -> list[Any]:
    return [SimpleNamespace(nvmlReturn=0, value=SimpleNamespace(uiVal=_says().get("action", 0)))]


def nvmlDeviceGetCurrentClocksEventReasons(handle: str) -> int:
    return 8


def nvmlDeviceGetComputeRunningProcesses(handle: str) -> list[Any]:
    return [SimpleNamespace(pid=os.getppid(), usedGpuMemory=1 << 30), SimpleNamespace(pid=4, usedGpuMemory=None)]


def nvmlEventSetCreate() -> str:
    return "set"


def nvmlEventSetFree(events: str) -> None:
    pass


def nvmlDeviceRegisterEvents(handle: str, types: int, events: str) -> None:
    if _says().get("lost"):
        raise NVMLError_GpuIsLost("GPU is lost")
    if _says().get("no_events"):
        raise NVMLError("Not Supported")


def nvmlEventSetWait_v2(events: str, timeout_ms: int) -> Any:
    if _says().get("lost"):
        raise NVMLError_GpuIsLost("GPU is lost")
    xid = _says().get("xid")
    if xid and xid not in _told:
        _told.add(xid)
        return SimpleNamespace(device=UUID, eventData=xid)
    time.sleep(timeout_ms / 1000)
    raise NVMLError_Timeout("Timeout")
