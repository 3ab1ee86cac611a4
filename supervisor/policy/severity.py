"""What follows from which failure: one table, no code. Sources: CUDA Runtime API (cudaError_t), NVIDIA's Xid catalogue, signal(7).

Kept memory outlives a CUDA context that has failed: another process's context, and what lies in memory, are not touched by an illegal
access (measured). So most errors cost their engine and no block. What the device itself did to its memory is another matter.
"""

from __future__ import annotations

import enum
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from shadowsup.supervisor.policy.messages import GpuNotice, GpuTrouble
from shadowsup.wire.faults import Fault


class Decision(str, enum.Enum):
    """From mild to severe."""

    NOTE = "note"
    """It is written down, as evidence for what may follow."""
    HAND_OVER = "hand over"
    """Admit no new requests, let those that run finish, then a planned failover: to a spare GPU where there is one."""
    KEEP = "restart with KV"
    DISCARD = "restart and discard KV"
    RELOAD = "discard KV, verify or reload weights"
    QUARANTINE = "quarantine the GPU, move to a spare"
    GIVE_UP = "give up"


@dataclass(frozen=True, slots=True)
class Severity:
    """``own``: of the engine's own making, so that a request may be to blame (`shadowsup.supervisor.gateway.suspects`)."""

    decision: Decision
    own: bool
    text: str


SEVERITY: Mapping[Fault, Severity] = MappingProxyType(
    {
        Fault.UNKNOWN: Severity(Decision.KEEP, False, "its process died"),
        Fault.PLANNED: Severity(Decision.KEEP, False, "it was asked to"),
        Fault.KILLED: Severity(Decision.KEEP, False, "it was killed from outside"),
        Fault.STOPPED: Severity(Decision.KEEP, False, "it was stopped from outside"),
        Fault.SEGFAULT: Severity(Decision.KEEP, True, "it accessed memory that is not there"),
        Fault.ABORT: Severity(Decision.KEEP, True, "it aborted itself"),
        Fault.BUS_ERROR: Severity(Decision.KEEP, True, "memory behind a mapping was gone"),
        Fault.BAD_INSTRUCTION: Severity(Decision.KEEP, True, "the processor refused an instruction"),
        Fault.EXIT: Severity(Decision.KEEP, True, "it exited without a word"),
        Fault.EXCEPTION: Severity(Decision.KEEP, True, "an error that nothing handled"),
        Fault.HOST_OOM: Severity(Decision.KEEP, True, "main memory ran out"),
        Fault.OOM_KILLED: Severity(Decision.KEEP, True, "the kernel killed it for memory"),
        Fault.HANG: Severity(Decision.KEEP, True, "it made no progress"),
        Fault.CUDA_OOM: Severity(Decision.KEEP, True, "device memory ran out"),
        Fault.CUDA_ILLEGAL_ACCESS: Severity(Decision.KEEP, True, "a kernel accessed memory that is not there"),
        Fault.CUDA_ASSERT: Severity(Decision.KEEP, True, "a kernel's assertion failed"),
        Fault.CUDA_LAUNCH: Severity(Decision.KEEP, True, "a kernel could not be launched or run"),
        Fault.CUDA_OTHER: Severity(Decision.KEEP, True, "a CUDA error"),
        # The driver itself is in a state that nobody knows: what its engine had mapped is not to be trusted.
        Fault.CUDA_DRIVER: Severity(Decision.DISCARD, True, "the CUDA driver failed"),
        Fault.CUDA_ECC: Severity(Decision.RELOAD, False, "device memory has an uncorrectable error"),
        Fault.CUDA_CONTAINED: Severity(Decision.RELOAD, False, "device memory has an error that was contained"),
        Fault.CUDA_NVLINK: Severity(Decision.QUARANTINE, False, "NVLink has an uncorrectable error"),
        Fault.CUDA_LOST: Severity(Decision.QUARANTINE, False, "the device is gone"),
        Fault.GPU_ERROR: Severity(Decision.QUARANTINE, False, "the driver reports an error of the device"),
        Fault.GPU_LOST: Severity(Decision.QUARANTINE, False, "the device is gone"),
        Fault.GPU_WARNING: Severity(Decision.KEEP, False, "its device was in trouble"),
        Fault.START: Severity(Decision.KEEP, False, "it did not come up in time"),
        Fault.REFUSED: Severity(Decision.GIVE_UP, False, "it can never run"),
        Fault.PROMOTION: Severity(Decision.KEEP, False, "it did not take over in time"),
        Fault.LEDGER_LOST: Severity(Decision.KEEP, False, "another engine owned its memory"),
        Fault.UNFENCED: Severity(Decision.DISCARD, False, "its predecessor cannot be ended"),
        Fault.DISOBEDIENT: Severity(Decision.KEEP, False, "it did what nobody ordered"),
    }
)

SIGNALS: Mapping[int, Fault] = MappingProxyType(
    {
        signal.SIGKILL: Fault.KILLED,
        signal.SIGTERM: Fault.KILLED,
        signal.SIGINT: Fault.KILLED,
        signal.SIGHUP: Fault.KILLED,
        signal.SIGQUIT: Fault.KILLED,
        signal.SIGSEGV: Fault.SEGFAULT,
        signal.SIGABRT: Fault.ABORT,
        signal.SIGBUS: Fault.BUS_ERROR,
        signal.SIGILL: Fault.BAD_INSTRUCTION,
        signal.SIGFPE: Fault.BAD_INSTRUCTION,
        signal.SIGTRAP: Fault.ABORT,
        signal.SIGSYS: Fault.BAD_INSTRUCTION,
        signal.SIGXCPU: Fault.KILLED,
    }
)
"""Of an engine's leader. One that is not named here comes from outside."""

STATUSES: Mapping[int, Fault] = MappingProxyType({2: Fault.REFUSED, 3: Fault.LEDGER_LOST})
"""Exit statuses with a meaning of their own (`shadowsup.workers.errors.ExitCode`); a shell's 128 + N is signal N."""

XIDS: Mapping[int, Severity] = MappingProxyType(
    {
        13: Severity(Decision.NOTE, True, "graphics engine exception"),
        31: Severity(Decision.NOTE, True, "page fault of a kernel"),
        43: Severity(Decision.NOTE, True, "a process's channel was stopped"),
        45: Severity(Decision.NOTE, True, "a process's channels were torn down"),
        48: Severity(Decision.QUARANTINE, False, "double bit ECC error"),
        63: Severity(Decision.NOTE, False, "a row is to be remapped"),
        64: Severity(Decision.QUARANTINE, False, "a row cannot be remapped"),
        79: Severity(Decision.QUARANTINE, False, "the GPU has fallen off the bus"),
        92: Severity(Decision.NOTE, False, "many corrected ECC errors"),
        94: Severity(Decision.RELOAD, False, "contained ECC error"),
        95: Severity(Decision.QUARANTINE, False, "uncontained ECC error"),
        109: Severity(Decision.QUARANTINE, False, "context switch timed out"),
        119: Severity(Decision.QUARANTINE, False, "GSP does not answer"),
        120: Severity(Decision.QUARANTINE, False, "GSP failed"),
        140: Severity(Decision.QUARANTINE, False, "unrecovered ECC error"),
        143: Severity(Decision.QUARANTINE, False, "GPU initialisation failed"),
    }
)
"""Others are a warning."""

RECOVERY_XID = 154
RECOVERY_ACTIONS: Sequence[tuple[str, Decision]] = (
    # What NVML asks for, in the text of the notice. The first that fits.
    ("none", Decision.NOTE),
    ("drain and reset", Decision.HAND_OVER),
    ("drain p2p", Decision.HAND_OVER),
    ("reset", Decision.QUARANTINE),
    ("reboot", Decision.QUARANTINE),
)

TROUBLES: Mapping[GpuTrouble, Severity] = MappingProxyType(
    {
        GpuTrouble.XID: Severity(Decision.HAND_OVER, False, "an Xid"),
        GpuTrouble.ECC: Severity(Decision.HAND_OVER, False, "ECC errors rise"),
        GpuTrouble.PCIE: Severity(Decision.HAND_OVER, False, "PCIe lanes were lost"),
        GpuTrouble.LOST: Severity(Decision.QUARANTINE, False, "the GPU is lost"),
    }
)


def of(fault: Fault) -> Severity:
    """Return what follows from a failure."""
    return SEVERITY[fault]


def of_notice(notice: GpuNotice) -> Severity:
    """Return what follows from what a sensor says."""
    if notice.kind is GpuTrouble.XID and notice.number == RECOVERY_XID:
        text = notice.text.lower()
        asked = next((decision for words, decision in RECOVERY_ACTIONS if words in text), Decision.HAND_OVER)
        return Severity(asked, False, f"NVML asks for a recovery: {notice.text}")
    if notice.kind is GpuTrouble.XID and notice.number in XIDS:
        return XIDS[notice.number]
    return TROUBLES[notice.kind]


def fault_of_end(status: int | None, *, oom: bool) -> Fault:
    """Classify the end of a process that said nothing. ``status``: as of `subprocess`; ``oom``: the kernel counted an OOM kill with it."""
    if status is None:
        return Fault.OOM_KILLED if oom else Fault.UNKNOWN
    number = -status if status < 0 else status - 128 if status > 128 else 0
    if number:
        fault = SIGNALS.get(number, Fault.KILLED)
        return Fault.OOM_KILLED if oom and number == signal.SIGKILL else fault
    return STATUSES.get(status, Fault.EXIT)
