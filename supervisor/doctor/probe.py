"""Run as a child, which may hang or crash: ``python -m shadowsup.supervisor.doctor.probe nvml|cuda`` prints one JSON object.

``nvml``: ``{"driver", "cuda", "gpus": [{"uuid", "index", "name", "total", "used", "reserved", "persistence", "compute_mode", "mig",
"instances": [{"uuid", "name", "total"}], "processes": [{"pid", "used"}], "mps"}]}``; sizes in bytes, ``cuda`` as ``13000``. A figure that
a device does not give is null. ``{"absent": why}``: there is no driver. ``{"error": why}``: there is one, and it does not work.

``cuda``: ``{"version", "devices": [{"uuid", "name", "posix_fd", "export"}]}``; ``export``: empty when 2 MiB were made on the device and
exported as a file descriptor, else why not. No context is made.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any

_EXPORT = 2 * 2**20


def nvml(pynvml: Any) -> dict[str, Any]:
    """Return what ``pynvml`` (the module, or a fake) says of this machine."""
    try:
        pynvml.nvmlInit()
    except (pynvml.NVMLError_LibraryNotFound, pynvml.NVMLError_DriverNotLoaded) as error:
        return {"absent": str(error)}
    except pynvml.NVMLError as error:
        return {"error": str(error)}
    try:
        count = pynvml.nvmlDeviceGetCount()
        return {
            "driver": _ask(lambda: _text(pynvml.nvmlSystemGetDriverVersion()), ""),
            "cuda": _ask(pynvml.nvmlSystemGetCudaDriverVersion_v2, 0),
            "gpus": [_gpu(pynvml, index) for index in range(count)],
        }
    except pynvml.NVMLError as error:
        return {"error": str(error)}
    finally:
        pynvml.nvmlShutdown()


def _gpu(pynvml: Any, index: int) -> dict[str, Any]:
    try:
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        uuid = _text(pynvml.nvmlDeviceGetUUID(handle))
    except pynvml.NVMLError as error:  # fallen off the bus
        return {"index": index, "lost": str(error)}
    plain = _ask(lambda: pynvml.nvmlDeviceGetMemoryInfo(handle), None)
    # Version 2 tells what the driver keeps for itself; in the plain figures it is part of what is used.
    memory = _ask(lambda: pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2), plain)
    mig = bool(_ask(lambda: pynvml.nvmlDeviceGetMigMode(handle)[0], 0))
    compute = _ask(lambda: pynvml.nvmlDeviceGetComputeRunningProcesses(handle), [])
    return {
        "uuid": uuid,
        "index": index,
        "name": _ask(lambda: _text(pynvml.nvmlDeviceGetName(handle)), "GPU"),
        "total": getattr(memory, "total", None),
        "used": getattr(memory, "used", None),
        "reserved": getattr(memory, "reserved", None),
        "persistence": _ask(lambda: bool(pynvml.nvmlDeviceGetPersistenceMode(handle)), None),
        "compute_mode": _ask(lambda: int(pynvml.nvmlDeviceGetComputeMode(handle)), 0),
        "mig": mig,
        "instances": _instances(pynvml, handle) if mig else [],
        "processes": [{"pid": process.pid, "used": process.usedGpuMemory} for process in compute],
        "mps": bool(_ask(lambda: pynvml.nvmlDeviceGetMPSComputeRunningProcesses(handle), [])),
    }


def _instances(pynvml: Any, handle: Any) -> list[dict[str, Any]]:
    found = []
    for number in range(_ask(lambda: int(pynvml.nvmlDeviceGetMaxMigDeviceCount(handle)), 0)):
        try:
            part = pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, number)
            found.append(
                {
                    "uuid": _text(pynvml.nvmlDeviceGetUUID(part)),
                    "name": _text(pynvml.nvmlDeviceGetName(part)),
                    "total": int(pynvml.nvmlDeviceGetMemoryInfo(part).total),
                }
            )
        except pynvml.NVMLError:  # not every possible instance exists
            continue
    return found


def cuda() -> dict[str, Any]:
    """Return what the driver says. Sees every device, whatever CUDA_VISIBLE_DEVICES hides from others."""
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    os.environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    from shadowsup.memkeeper.backends import cuda_driver

    try:
        driver = cuda_driver.load()
        real = cuda_driver.CudaDriver()
        attribute = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED
        devices = []
        for device in real.devices():
            handle = cuda_driver.call("cuDeviceGet", device.ordinal)
            posix_fd = bool(cuda_driver.call("cuDeviceGetAttribute", attribute, handle))
            devices.append({"uuid": device.uuid, "name": device.name, "posix_fd": posix_fd, "export": _export(real, device)})
        return {"version": int(cuda_driver.call("cuDriverGetVersion")), "devices": devices}
    except cuda_driver.DriverError as error:
        return {"error": error.message, "hint": error.hint}


def _export(driver: Any, device: Any) -> str:
    from shadowsup.memkeeper.backends.cuda_driver import DriverError

    try:
        os.close(driver.create(device, _EXPORT))
    except DriverError as error:
        return error.message
    return ""


def _ask(question: Callable[[], Any], otherwise: Any) -> Any:
    try:
        return question()
    except Exception:  # NVMLError_NotSupported on what a device does not have; a function that this pynvml does not know
        return otherwise


def _text(value: str | bytes) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def main(what: str) -> int:
    """Print one JSON object."""
    if what == "cuda":
        found = cuda()
    else:
        try:
            import pynvml
        except ImportError as error:
            found = {"absent": str(error)}
        else:
            found = nvml(pynvml)
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
