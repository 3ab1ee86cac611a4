"""Which GPUs this machine has, what the names in a config mean, and what an engine is told so that it sees just those.

NVML can hang or crash, so it is asked in a child process that is given up after a time (`read_gpus`). Everything inside uses UUIDs: an
index is resolved once, here, and CUDA_DEVICE_ORDER=PCI_BUS_ID makes CUDA count as NVML does.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from shadowsup.memkeeper.device_use import Unanswered, run_bounded
from shadowsup.supervisor.errors import SupervisorError

T = TypeVar("T")

_TIMEOUT_S = 15.0
"""NVML takes under a second; without persistence mode the driver first wakes every GPU, some seconds each on large machines."""


class DeviceError(SupervisorError):
    """A GPU that a config names cannot be used, or NVML does not say which GPUs there are."""


class ComputeMode(str, enum.Enum):
    """Active and shadow are two contexts on one GPU: only ``default`` allows that."""

    DEFAULT = "default"
    EXCLUSIVE_THREAD = "exclusive_thread"
    PROHIBITED = "prohibited"
    EXCLUSIVE_PROCESS = "exclusive_process"


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """A GPU, or one MIG instance of a divided one (``parent``: UUID of that; ``index``: the parent's). ``memory``, ``used`` in bytes."""

    uuid: str
    index: int
    name: str
    memory: int
    used: int = 0
    bus_id: str = ""
    parent: str = ""
    mig_enabled: bool = False
    compute_mode: ComputeMode = ComputeMode.DEFAULT


class Nvml(Protocol):
    """What is used of the module ``pynvml``; its functions raise ``NVMLError`` (an Exception) or hang."""

    def nvmlInit(self) -> None: ...
    def nvmlShutdown(self) -> None: ...
    def nvmlDeviceGetCount(self) -> int: ...
    def nvmlDeviceGetHandleByIndex(self, index: int) -> Any: ...
    def nvmlDeviceGetUUID(self, handle: Any) -> str: ...
    def nvmlDeviceGetName(self, handle: Any) -> str: ...
    def nvmlDeviceGetMemoryInfo(self, handle: Any) -> Any: ...
    def nvmlDeviceGetPciInfo(self, handle: Any) -> Any: ...
    def nvmlDeviceGetComputeMode(self, handle: Any) -> int: ...
    def nvmlDeviceGetMigMode(self, handle: Any) -> Sequence[int]: ...
    def nvmlDeviceGetMaxMigDeviceCount(self, handle: Any) -> int: ...
    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: Any, index: int) -> Any: ...


def inventory(nvml: Nvml) -> tuple[Gpu, ...]:
    """Return every GPU, each followed by its MIG instances, in order of the index (PCI bus order).

    A GPU that has fallen off the bus answers nothing; it is left out, and naming it is an error. Raises what ``nvmlInit`` raises.
    """
    nvml.nvmlInit()
    try:
        return tuple(gpu for index in range(nvml.nvmlDeviceGetCount()) for gpu in _read(nvml, index))
    finally:
        nvml.nvmlShutdown()


def _read(nvml: Nvml, index: int) -> Iterator[Gpu]:
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        uuid, name = _text(nvml.nvmlDeviceGetUUID(handle)), _text(nvml.nvmlDeviceGetName(handle))
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
        bus_id = _text(nvml.nvmlDeviceGetPciInfo(handle).busId)
    except Exception:  # NVMLError_GpuIsLost and the like
        return
    mode = _ask(lambda: int(nvml.nvmlDeviceGetComputeMode(handle)), 0)
    divided = bool(_ask(lambda: nvml.nvmlDeviceGetMigMode(handle)[0], 0))
    yield Gpu(
        uuid=uuid,
        index=index,
        name=name,
        memory=int(memory.total),
        used=int(getattr(memory, "used", 0)),
        bus_id=bus_id,
        mig_enabled=divided,
        compute_mode=list(ComputeMode)[mode] if 0 <= mode < len(ComputeMode) else ComputeMode.DEFAULT,
    )
    for instance in range(_ask(lambda: nvml.nvmlDeviceGetMaxMigDeviceCount(handle), 0) if divided else 0):
        try:
            part = nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, instance)
            part_uuid, part_memory = _text(nvml.nvmlDeviceGetUUID(part)), nvml.nvmlDeviceGetMemoryInfo(part)
        except Exception:  # not every possible instance exists
            continue
        part_name = _ask(functools.partial(nvml.nvmlDeviceGetName, part), f"{name} MIG")
        yield Gpu(
            uuid=part_uuid,
            index=index,
            name=_text(part_name),
            memory=int(part_memory.total),
            used=int(getattr(part_memory, "used", 0)),
            bus_id=bus_id,
            parent=uuid,
        )


def _ask(question: Callable[[], T], otherwise: T) -> T:
    try:
        return question()
    except Exception:  # NVMLError_NotSupported on what a device does not have
        return otherwise


def _text(value: str | bytes) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def read_gpus(timeout_s: float = _TIMEOUT_S, *, run: Callable[[Sequence[str], float], bytes] = run_bounded) -> tuple[Gpu, ...]:
    """Return the GPUs of this machine; none where there is no NVIDIA driver.

    Raises:
        DeviceError: NVML hangs, crashes or fails.
    """
    try:
        answer = json.loads(run([sys.executable, "-m", "shadowsup.supervisor.devices"], timeout_s))
        if "error" in answer:
            raise DeviceError(f"NVML cannot be used: {answer['error']}", "see nvidia-smi and dmesg")
        return tuple(Gpu(**{**gpu, "compute_mode": ComputeMode(gpu["compute_mode"])}) for gpu in answer["gpus"])
    except Unanswered as error:
        raise DeviceError(f"NVML cannot be used: {error}", "see nvidia-smi and dmesg; a hung GPU may need a reset") from error
    except (ValueError, TypeError, KeyError) as error:
        raise DeviceError(f"NVML's answer is not understood: {error}") from error


def resolve(names: Sequence[str], gpus: Sequence[Gpu]) -> tuple[Gpu, ...]:
    """Return the device of each name: index, UUID of a GPU or MIG instance, or an unambiguous beginning of one.

    Raises:
        DeviceError: a name is unknown, ambiguous, given twice in whatever spelling, or names a GPU that cannot be shared or is divided.
    """
    from shadowsup.supervisor.config import gpus as ids  # here: the child that asks NVML needs nothing of the config

    known = [ids.GpuIdentity(index=gpu.index, uuid=gpu.uuid, mig_enabled=gpu.mig_enabled) for gpu in gpus]
    try:
        uuids = ids.resolve(names, known)
    except ValueError as error:
        raise DeviceError(str(error), "nvidia-smi -L lists what there is") from error
    by_uuid = {gpu.uuid: gpu for gpu in gpus}
    found = tuple(by_uuid[uuid] for uuid in uuids)
    for gpu in found:
        mode = by_uuid.get(gpu.parent, gpu).compute_mode
        if mode is not ComputeMode.DEFAULT:
            raise DeviceError(
                f"GPU {gpu.index} ({gpu.uuid}) is in compute mode {mode.value}, but active and shadow are two processes on it",
                f"nvidia-smi -i {gpu.index} -c DEFAULT",
            )
    return found


VARIABLES = ("CUDA_DEVICE_ORDER", "CUDA_VISIBLE_DEVICES")
"""Those of `environment`."""


def environment(uuids: Sequence[str]) -> dict[str, str]:
    """Return the variables that make CUDA see just these devices, in this order. With none it sees no device at all."""
    return {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": ",".join(uuids)}


def _main() -> int:
    """Print the inventory as JSON."""
    try:
        import pynvml
    except ImportError:
        print(json.dumps({"gpus": []}))
        return 0
    try:
        found = inventory(pynvml)
    except (pynvml.NVMLError_LibraryNotFound, pynvml.NVMLError_DriverNotLoaded):
        found = ()
    except pynvml.NVMLError as error:
        print(json.dumps({"error": str(error)}))
        return 0
    print(json.dumps({"gpus": [dataclasses.asdict(gpu) for gpu in found]}))
    return 0


if __name__ == "__main__":
    sys.exit(_main())
