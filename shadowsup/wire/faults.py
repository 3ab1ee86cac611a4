"""Kinds of ends that an engine can come to, and how the texts of errors tell them. Data, shared by engines and supervisor.

CUDA's names and numbers: cudaError_t in the CUDA Runtime API, section Data types. Texts: cudaGetErrorString, as torch prints them.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Sequence


class Fault(str, enum.Enum):
    """Why an engine ended, as far as can be known."""

    UNKNOWN = "unknown"
    PLANNED = "planned"
    KILLED = "killed"
    """SIGKILL or another signal to end, from outside."""
    STOPPED = "stopped"
    """SIGSTOP, a debugger: from outside, too."""
    SEGFAULT = "segfault"
    ABORT = "abort"
    BUS_ERROR = "bus_error"
    BAD_INSTRUCTION = "bad_instruction"
    EXIT = "exit"
    """It exited by itself, without a word."""
    EXCEPTION = "exception"
    HOST_OOM = "host_oom"
    """It asked for memory that was not there."""
    OOM_KILLED = "oom_killed"
    """The kernel took it, for memory."""
    HANG = "hang"
    CUDA_OOM = "cuda_oom"
    CUDA_ILLEGAL_ACCESS = "cuda_illegal_access"
    CUDA_ASSERT = "cuda_assert"
    CUDA_LAUNCH = "cuda_launch"
    CUDA_ECC = "cuda_ecc"
    CUDA_CONTAINED = "cuda_contained"
    CUDA_LOST = "cuda_lost"
    CUDA_NVLINK = "cuda_nvlink"
    CUDA_DRIVER = "cuda_driver"
    CUDA_OTHER = "cuda_other"
    GPU_ERROR = "gpu_error"
    """The driver reported an error of the device (Xid)."""
    GPU_LOST = "gpu_lost"
    GPU_WARNING = "gpu_warning"
    START = "start"
    """It did not come up in time."""
    REFUSED = "refused"
    """It cannot run at all: no such model, a bad argument."""
    PROMOTION = "promotion"
    LEDGER_LOST = "ledger_lost"
    UNFENCED = "unfenced"
    """Its predecessor cannot be ended."""
    DISOBEDIENT = "disobedient"


CUDA_ERRORS: Sequence[tuple[Fault, str, Sequence[str]]] = (
    # fault, name of the error, what its text contains (lower case). The first row that fits holds.
    (Fault.CUDA_OOM, "cudaErrorMemoryAllocation", ("cuda out of memory", "cuda error: out of memory", "cuda_error_out_of_memory")),
    (
        Fault.CUDA_CONTAINED,
        "cudaErrorContained",
        ("contained error", "error containment", "peer gpu memory over nvlink", "cuda_error_contained"),
    ),
    (Fault.CUDA_ECC, "cudaErrorECCUncorrectable", ("uncorrectable ecc", "cuda_error_ecc_uncorrectable")),
    (Fault.CUDA_NVLINK, "cudaErrorNvlinkUncorrectable", ("uncorrectable nvlink", "cuda_error_nvlink_uncorrectable")),
    (
        Fault.CUDA_ILLEGAL_ACCESS,
        "cudaErrorIllegalAddress",
        ("an illegal memory access", "misaligned address", "invalid address space", "cuda_error_illegal_address", "cuda_error_misaligned"),
    ),
    (Fault.CUDA_ASSERT, "cudaErrorAssert", ("device-side assert", "cuda_error_assert")),
    (
        Fault.CUDA_LAUNCH,
        "cudaErrorLaunchFailure",
        (
            "unspecified launch failure",
            "the launch timed out",
            "illegal instruction was encountered",
            "invalid program counter",
            "hardware stack error",
            "too many resources requested",
            "cuda_error_launch",
        ),
    ),
    (
        Fault.CUDA_LOST,
        "cudaErrorDevicesUnavailable",
        (
            "gpu is lost",
            "no cuda-capable device",
            "devices are busy or unavailable",
            "device(s) is/are busy",
            "device is unavailable",
            "fallen off the bus",
            "cuda_error_no_device",
            "cuda_error_device_unavailable",
            "gpu requires reset",
        ),
    ),
    (
        Fault.CUDA_DRIVER,
        "cudaErrorUnknown",
        ("cuda error: unknown error", "driver shutting down", "system not yet initialized", "initialization error", "cuda_error_unknown"),
    ),
    (Fault.CUDA_OTHER, "cudaError", ("cuda error:", "cublas_status_", "cudnn_status_", "cuda_error_", "triton error [cuda]")),
)

_OOM_TYPES = frozenset({"OutOfMemoryError"})
"""torch.OutOfMemoryError; torch.cuda's is the same class."""


def known_fault(name: str) -> Fault:
    """Return the fault of this name; what another version calls by a name of its own is an exception."""
    try:
        return Fault(name) if name else Fault.EXCEPTION
    except ValueError:
        return Fault.EXCEPTION


def fault_of_text(text: str) -> Fault | None:
    """Return what an error's text says of CUDA; None: nothing."""
    lower = text.lower()
    return next((fault for fault, _, parts in CUDA_ERRORS if any(part in lower for part in parts)), None)


def fault_of(error: BaseException) -> Fault:
    """Classify an exception, without importing what raised it."""
    names = [kind.__name__ for kind in type(error).__mro__]
    found = fault_of_text(str(error))
    if found is Fault.CUDA_OOM or (_OOM_TYPES.intersection(names) and _of_torch(error)):
        return Fault.CUDA_OOM if "cpu" not in str(error).lower() else Fault.HOST_OOM
    if "MemoryError" in names or _HOST_ALLOCATION.search(str(error)):
        return Fault.HOST_OOM
    if found is not None:
        return found
    return Fault.CUDA_OTHER if "AcceleratorError" in names else Fault.EXCEPTION


_HOST_ALLOCATION = re.compile(r"DefaultCPUAllocator|can't allocate memory|Cannot allocate memory", re.IGNORECASE)


def _of_torch(error: BaseException) -> bool:
    return any(kind.__module__.partition(".")[0] == "torch" for kind in type(error).__mro__)
