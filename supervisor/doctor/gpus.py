"""Checks of the GPUs: driver, what the keeper needs of it, what makes two engines on one GPU possible, and who holds memory there."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from shadowsup.memkeeper.device_use import Unanswered
from shadowsup.supervisor import compat
from shadowsup.supervisor.compat import Standing
from shadowsup.supervisor.devices import ComputeMode
from shadowsup.supervisor.doctor.finding import Finding, Level, Wants
from shadowsup.supervisor.doctor.machine import Machine
from shadowsup.supervisor.doctor.words import cuda_version, size
from shadowsup.supervisor.holders import Holder

_ORPHANED = 256 * 2**20
"""Memory that belongs to no process is told from here on: the driver itself has some tens of megabytes."""
_WATCHERS = frozenset(
    (
        *("nvidia-persistenced", "nv-fabricmanager", "nv-hostengine", "dcgm-exporter", "dcgmi", "nvidia-smi", "nvtop", "nvitop"),
        *("Xorg", "Xwayland", "gnome-shell", "nvidia-cuda-mps-control"),
    )
)
_NVIDIA = "0x10de"
_INSTALL = "install NVIDIA's driver, reboot, and see that nvidia-smi works; in a container: docker run --gpus all"


def driver(machine: Machine, wants: Wants) -> Iterator[Finding]:
    try:
        found = machine.probe("nvml")
    except Unanswered as error:
        remedy = "dmesg | grep -i -e nvrm -e xid; a GPU that hangs needs nvidia-smi --gpu-reset, or a reboot"
        yield Finding("driver", Level.FAILED, f"NVML: {error}", remedy)
        return
    if "absent" in found:
        yield _no_driver(machine, wants)
        return
    if "error" in found:
        remedy = "nvidia-smi says the same; after an update of the driver, reboot (or reload the nvidia modules)"
        yield Finding("driver", Level.FAILED, f"NVML: {found['error']}", remedy)
        return
    version = f"driver {found['driver']}, CUDA {cuda_version(found['cuda'])}, {_count(found['gpus'])}"
    if compat.DRIVER.standing(found["driver"]) is Standing.OLDER:
        remedy = f"nothing if fd-export below is ok; else install driver {compat.DRIVER.low} or newer"
        yield Finding("driver", Level.NOTE, f"{version}; tested with {compat.DRIVER.span}", remedy)
    else:
        yield Finding("driver", Level.OK, version)
    for gpu in found["gpus"]:
        if "lost" in gpu:
            remedy = f"nvidia-smi --gpu-reset -i {gpu['index']}, or a reboot; then dmesg | grep -i xid for the cause"
            yield Finding("driver", wants.severity(certain=wants.gpus), f"GPU {gpu['index']} does not answer: {gpu['lost']}", remedy)


def _no_driver(machine: Machine, wants: Wants) -> Finding:
    there = [name for name in machine.names("/sys/bus/pci/devices") if _is_nvidia_gpu(machine, name)]
    if wants.gpus:
        workers = ", ".join(worker.name for worker in wants.workers if worker.gpus)
        return Finding("driver", Level.FAILED, f"no NVIDIA driver, but {workers} has GPUs in the config", _INSTALL)
    if there:
        return Finding("driver", Level.WARNING, f"no NVIDIA driver here, but {len(there)} of its GPUs on the PCI bus", _INSTALL)
    return Finding("driver", Level.NOTE, "no NVIDIA driver and no GPU: engines run on the CPU, memory is kept in main memory")


def _is_nvidia_gpu(machine: Machine, name: str) -> bool:
    folder = f"/sys/bus/pci/devices/{name}"
    vendor, kind = ((machine.read(f"{folder}/{file}") or "").strip() for file in ("vendor", "class"))
    return vendor == _NVIDIA and kind.startswith("0x03")  # display controllers; an NVSwitch is a bridge


def fd_export(machine: Machine, wants: Wants) -> Iterator[Finding]:
    """The keeper's memory is a file descriptor: whether this driver makes such is tried, not looked up."""
    if not _gpus(machine):
        return
    try:
        found = machine.probe("cuda")
    except Unanswered as error:
        remedy = "dmesg | grep -i -e nvrm -e xid; see that a small CUDA program runs"
        yield Finding("fd-export", Level.FAILED, f"the CUDA driver: {error}", remedy)
        return
    if "error" in found:
        remedy = found.get("hint") or "see nvidia-smi and dmesg"
        yield Finding("fd-export", Level.FAILED, found["error"], f"{remedy}; in a container: NVIDIA_DRIVER_CAPABILITIES=compute,utility")
        return
    bad = [device for device in found["devices"] if device["export"] or not device["posix_fd"]]
    for device in bad:
        why = device["export"] or "the device does not support POSIX file descriptors"
        remedy = (
            "another GPU or driver (vGPU and WSL do not support it); until then leave gpus: [] or use engine: command, without kept memory"
        )
        if "OUT_OF_MEMORY" in why:
            remedy = "free memory of that GPU (see gpu-memory below)"
        yield Finding("fd-export", wants.severity(certain=wants.gpus), f"{device['uuid']}: {why}", remedy)
    if found["devices"] and not bad:
        count = len(found["devices"])
        evidence = f"2 MiB made and exported as a file descriptor on {'the device' if count == 1 else f'each of {count} devices'}"
        yield Finding("fd-export", Level.OK, evidence)
    elif not found["devices"]:
        yield Finding(
            "fd-export", Level.FAILED, "NVML sees GPUs and CUDA none", "check the permissions of /dev/nvidia*, and that MIG has instances"
        )


def persistence(machine: Machine, wants: Wants) -> Iterator[Finding]:
    gpus = [gpu for gpu in _gpus(machine) if gpu["persistence"] is not None]
    if not gpus:
        return
    daemon = "nvidia-persistenced" in machine.names("/run")
    off = [gpu["index"] for gpu in gpus if not gpu["persistence"]]
    seen = "nvidia-persistenced runs" if daemon else "no nvidia-persistenced"
    if off:
        evidence = f"persistence mode is off on GPU {_list(off)}, {seen}: each first use wakes the driver for seconds"
        yield Finding("persistence", Level.WARNING, evidence, "systemctl enable --now nvidia-persistenced, or nvidia-smi -pm 1")
    else:
        yield Finding("persistence", Level.OK, f"on, {seen}")


def compute_mode(machine: Machine, wants: Wants) -> Iterator[Finding]:
    gpus = _gpus(machine)
    modes = list(ComputeMode)
    bad = [gpu for gpu in gpus if gpu["compute_mode"] != modes.index(ComputeMode.DEFAULT)]
    for gpu in bad:
        number = gpu["compute_mode"]
        name = modes[number].value if 0 <= number < len(modes) else str(number)
        evidence = f"GPU {gpu['index']} is in mode {name}: active and shadow are two processes on it"
        yield Finding("compute-mode", wants.severity(certain=_used(gpu, wants)), evidence, f"nvidia-smi -i {gpu['index']} -c DEFAULT")
    if gpus and not bad:
        yield Finding("compute-mode", Level.OK, "default on every GPU")


def mps(machine: Machine, wants: Wants) -> Iterator[Finding]:
    gpus = _gpus(machine)
    if not gpus:
        return
    # Names in /proc are cut to 15 characters: nvidia-cuda-mps-control and -server both read so.
    daemons = [pid for pid, name in machine.processes() if name.startswith("nvidia-cuda-mps")]
    pipe = machine.environ.get("CUDA_MPS_PIPE_DIRECTORY") or "/tmp/nvidia-mps"
    served = [gpu["index"] for gpu in gpus if gpu["mps"]]
    if daemons or served or "control" in machine.names(pipe):
        who = f"pid {_list(daemons)}" if daemons else f"GPU {_list(served)}" if served else pipe
        evidence = f"MPS is on ({who}): a fault in the active engine takes its shadows with it"
        remedy = (
            "echo quit | nvidia-cuda-mps-control (as the user who started it); or start the node with CUDA_MPS_PIPE_DIRECTORY=/nonexistent"
        )
        yield Finding("mps", Level.FAILED if wants.gpus or wants.config is None else Level.WARNING, evidence, remedy)
    else:
        yield Finding("mps", Level.OK, "off")


def mig(machine: Machine, wants: Wants) -> Iterator[Finding]:
    gpus = _gpus(machine)
    for gpu in gpus:
        if not gpu["mig"]:
            continue
        parts = ", ".join(
            f"{part['uuid']} ({part['name'].removeprefix(gpu['name']).strip()}, {size(part['total'])})" for part in gpu["instances"]
        )
        wanted = _used(gpu, wants)
        if not parts:
            remedy = f"nvidia-smi mig -i {gpu['index']} -cgi 0 -C makes one; nvidia-smi -i {gpu['index']} -mig 0 puts it together again"
            yield Finding(
                "mig", wants.severity(certain=wanted), f"GPU {gpu['index']} is divided and has no instance: nothing can use it", remedy
            )
        elif wanted:
            yield Finding(
                "mig", Level.FAILED, f"GPU {gpu['index']} is divided, and the config names it whole", f"name an instance: {parts}"
            )
        else:
            yield Finding("mig", Level.OK, f"GPU {gpu['index']}: {parts}")
    if gpus and not any(gpu["mig"] for gpu in gpus):
        yield Finding("mig", Level.OK, "no GPU is divided")


def gpu_memory(machine: Machine, wants: Wants) -> Iterator[Finding]:
    """Memory that no process owns: a descriptor keeps it (exported memory, a forgotten child), and NVML does not say whose."""
    for gpu in _gpus(machine):
        total, used = gpu["total"], gpu["used"]
        if total is None or used is None:
            continue
        processes = gpu["processes"]
        known = sum(process["used"] or 0 for process in processes)
        orphaned = used - known
        whole = f"GPU {gpu['index']} {gpu['name']}: {size(used)} of {size(total)} used"
        if orphaned < _ORPHANED or any(process["used"] is None for process in processes):
            names = ", ".join(f"{machine.who(process['pid']).command.split(' ')[0]} (pid {process['pid']})" for process in processes[:4])
            yield Finding("gpu-memory", Level.OK, whole + (f" by {names}" if names else ""))
            continue
        yield _orphan(machine, wants, gpu, orphaned, whole)


def _orphan(machine: Machine, wants: Wants, gpu: Mapping[str, Any], orphaned: int, whole: str) -> Finding:
    listed = {process["pid"] for process in gpu["processes"]}
    holders, complete = machine.device_holders()
    suspects = [holder for holder in holders if holder.pid not in listed and not _watches(holder)]
    keepers = [holder for holder in suspects if _ours(holder)]
    strangers = [holder for holder in suspects if not _ours(holder)]
    evidence = f"{whole}, {size(orphaned)} by no process that NVML lists"
    certain = _used(gpu, wants)
    if keepers and not strangers:
        if wants.running:
            return Finding("gpu-memory", Level.OK, f"{evidence}: kept by this node ({_people(keepers)})")
        found = re.search(r"--socket (\S+)/keeper\.sock", " ".join(holder.command for holder in keepers))
        where = f" --runtime-dir {found[1]}" if found else ""
        remedy = f"shadowsup{where} status shows whose it is; shadowsup{where} stop frees it"
        return Finding("gpu-memory", Level.NOTE, f"{evidence}: kept by shadowsup, {_people(keepers)}", remedy)
    if suspects:
        pids = " ".join(str(holder.pid) for holder in strangers)
        evidence += f"; /dev/nvidia* is held by {_people(strangers)}" + (f", and by shadowsup, {_people(keepers)}" if keepers else "")
        return Finding(
            "gpu-memory", wants.severity(certain=certain), evidence, f"end who holds it: kill {pids}, and kill -9 {pids} if it stays"
        )
    if not complete:
        remedy = "sudo shadowsup doctor, or sudo fuser -v /dev/nvidia*, names the processes of other users"
        return Finding("gpu-memory", wants.severity(certain=certain), f"{evidence}; not every process could be looked into", remedy)
    remedy = f"on the host (outside this container): fuser -v /dev/nvidia*; if nobody holds it, nvidia-smi --gpu-reset -i {gpu['index']}"
    return Finding("gpu-memory", wants.severity(certain=certain), f"{evidence}; no process here holds /dev/nvidia*", remedy)


def _watches(holder: Holder) -> bool:
    """Whether it is one of those that hold the device files to look, or to draw: they keep no memory of the dead."""
    return holder.command.split(" ")[0].rpartition("/")[2] in _WATCHERS


def _ours(holder: Holder) -> bool:
    return "shadowsup" in holder.command


def _people(holders: Sequence[Holder]) -> str:
    shown = "; ".join(str(holder) for holder in holders[:4])
    return f"{shown}; {len(holders) - 4} more" if len(holders) > 4 else shown


def wanted_gpus(machine: Machine, wants: Wants) -> Iterator[Finding]:
    """Whether the ids in the config name GPUs of this machine."""
    if not wants.gpus or not (gpus := _gpus(machine)):
        return
    from shadowsup.supervisor.config import gpus as ids

    known = [ids.GpuIdentity(index=gpu["index"], uuid=gpu["uuid"], mig_enabled=gpu["mig"]) for gpu in gpus]
    known += [ids.GpuIdentity(index=gpu["index"], uuid=part["uuid"]) for gpu in gpus for part in gpu["instances"]]
    for worker in wants.workers:
        try:
            found = ids.resolve(worker.gpus, known)
        except ValueError as error:
            yield Finding(
                "gpus", Level.FAILED, f"worker {worker.name}: {error}", "nvidia-smi -L lists what there is; correct gpus: in the config"
            )
        else:
            if found:
                yield Finding("gpus", Level.OK, f"worker {worker.name}: {', '.join(found)}")


def _used(gpu: Mapping[str, Any], wants: Wants) -> bool:
    """Whether a worker of the config names this GPU, by index or (a beginning of) its UUID."""
    return any(_names(text, gpu) for worker in wants.workers for text in worker.gpus)


def _names(text: str, gpu: Mapping[str, Any]) -> bool:
    return text == str(gpu["index"]) or (not text.isdigit() and str(gpu["uuid"]).lower().startswith(text.lower()))


def _gpus(machine: Machine) -> list[dict[str, Any]]:
    """Return the GPUs that answer; none where NVML does not (`driver` says so)."""
    try:
        found = machine.probe("nvml")
    except Unanswered:
        return []
    return [gpu for gpu in found.get("gpus", []) if "lost" not in gpu]


def _count(gpus: Sequence[Mapping[str, Any]]) -> str:
    names = [str(gpu.get("name", "lost")) for gpu in gpus]
    return ", ".join(f"{names.count(name)} × {name}" for name in dict.fromkeys(names)) or "no GPU"


def _list(values: Sequence[int]) -> str:
    return ", ".join(str(value) for value in values)
