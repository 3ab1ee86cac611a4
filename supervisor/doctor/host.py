"""Checks of the machine itself: interpreter, kernel, limits, memory, disks, control groups, systemd."""

from __future__ import annotations

import resource
from collections.abc import Iterator

from shadowsup.supervisor import compat
from shadowsup.supervisor.compat import Standing
from shadowsup.supervisor.doctor.finding import Finding, Level, Wants
from shadowsup.supervisor.doctor.machine import UNLIMITED, Machine
from shadowsup.supervisor.doctor.words import size

_NOFILE_OTHER = 256
"""File descriptors of a supervisor or gateway besides one a client, and of an engine besides its memory."""
_NOFILE_ENGINE = 32
"""That the supervisor holds for one engine: lifeline, pidfd, log pipes, tether, segments."""
_NOFILE_GOOD = 65536
_MEMLOCK_GOOD = 2**30
_SHM_GOOD = 2**30
"""NCCL and torch's data loaders fail in containers with the usual 64 MiB."""
_DISK_GOOD = 2**30


def python(machine: Machine, wants: Wants) -> Iterator[Finding]:
    version, path = machine.python
    standing = compat.PYTHON.standing(version)
    evidence = f"{version}, {path}"
    if standing is Standing.OLDER:
        yield Finding("python", Level.FAILED, evidence, f"install Python {compat.PYTHON.high} and shadowsup into it")
    elif standing is Standing.NEWER:
        yield Finding("python", Level.NOTE, f"{evidence}; tested with {compat.PYTHON.span}", f"nothing, or use Python {compat.PYTHON.high}")
    else:
        yield Finding("python", Level.OK, evidence)


def kernel(machine: Machine, wants: Wants) -> Iterator[Finding]:
    release, refused = machine.kernel()
    if refused:
        what = f"Linux {release} refuses {', '.join(refused)}"
        remedy = (
            "Linux 5.4 or newer is needed; in a container, a seccomp profile that allows them: docker run --security-opt seccomp=unconfined"
        )
        yield Finding("kernel", Level.FAILED, what, remedy)
    else:
        yield Finding("kernel", Level.OK, f"Linux {release}; pidfd, sealed memfd and OFD locks work")


def nofile(machine: Machine, wants: Wants) -> Iterator[Finding]:
    _, hard = machine.limit(resource.RLIMIT_NOFILE)
    engines = sum(worker.engines for worker in wants.workers) or 2
    # A client is one descriptor; where the engine has a server of its own, so is the connection to that.
    each = 2 if any(worker.engine in ("command", "vllm") for worker in wants.workers) else 1
    needed = _NOFILE_OTHER + each * wants.max_inflight + _NOFILE_ENGINE * engines
    evidence = f"at most {_limit(hard)} open files; with {wants.max_inflight} requests at once {needed} are needed"
    good = _NOFILE_GOOD
    remedy = f"ulimit -Hn {good} as root before the start; LimitNOFILE={good} in a unit; docker run --ulimit nofile={good}"
    if hard != UNLIMITED and hard < needed:
        yield Finding("nofile", Level.FAILED, evidence, remedy)
    elif hard != UNLIMITED and hard < 4 * needed:
        yield Finding("nofile", Level.WARNING, evidence, remedy)
    else:
        yield Finding("nofile", Level.OK, evidence)


def memlock(machine: Machine, wants: Wants) -> Iterator[Finding]:
    _, hard = machine.limit(resource.RLIMIT_MEMLOCK)
    evidence = f"{_limit_size(hard)} may be locked"
    if hard == UNLIMITED or hard >= _MEMLOCK_GOOD or machine.root:
        yield Finding("memlock", Level.OK, evidence + (", root is not bound" if machine.root and hard != UNLIMITED else ""))
    else:
        remedy = (
            "LimitMEMLOCK=infinity in a unit; docker run --ulimit memlock=-1; 'USER hard memlock unlimited' in /etc/security/limits.conf"
        )
        level = Level.WARNING if wants.gpus or _swap(machine) else Level.NOTE
        yield Finding("memlock", level, f"{evidence}: pinned buffers of RDMA and GPUs may be refused", remedy)


def core(machine: Machine, wants: Wants) -> Iterator[Finding]:
    soft, _ = machine.limit(resource.RLIMIT_CORE)
    pattern = (machine.read("/proc/sys/kernel/core_pattern") or "").strip()
    # A pipe is given the dump whatever the limit says (core(5)); systemd's reads the limit itself and leaves at once.
    if pattern.startswith("|") and "systemd-coredump" not in pattern:
        evidence = (
            f"core_pattern is {pattern.split()[0]}, which is fed without regard to the limit: an engine that crashes dumps before it dies"
        )
        yield Finding("core", Level.WARNING, evidence, "sysctl -w kernel.core_pattern=core (engines set their limit to 0 themselves)")
    else:
        yield Finding("core", Level.OK, f"limit {_limit_size(soft)}; engines set theirs to 0, a dump would delay the failover")


def other_limits(machine: Machine, wants: Wants) -> Iterator[Finding]:
    for name, which, option in (("address space", resource.RLIMIT_AS, "-v"), ("file size", resource.RLIMIT_FSIZE, "-f")):
        soft, _ = machine.limit(which)
        if soft != UNLIMITED:
            evidence = f"{name} is limited to {_limit_size(soft)}, which kept memory counts against"
            yield Finding("limits", Level.WARNING, evidence, f"ulimit {option} unlimited")


def shm(machine: Machine, wants: Wants) -> Iterator[Finding]:
    space = machine.space("/dev/shm") if "shm" in machine.names("/dev") else None
    if space is None:
        yield Finding("shm", Level.WARNING, "there is no /dev/shm", "mount -t tmpfs -o size=8g shm /dev/shm")
    elif space.total < _SHM_GOOD:
        remedy = "docker run --shm-size=8g, or --ipc=host; elsewhere mount -o remount,size=8g /dev/shm"
        yield Finding("shm", Level.WARNING, f"/dev/shm has {size(space.total)}; NCCL and engines with several processes need more", remedy)
    else:
        yield Finding("shm", Level.OK, f"/dev/shm has {size(space.total)}, {size(space.free)} free")


def memory(machine: Machine, wants: Wants) -> Iterator[Finding]:
    found = machine.memory()
    if found is None:
        return
    remedy = "shadowsup plan CONFIG says what a node needs; end what else runs here, or raise the control group's memory.max"
    if found.usable < 2**30:
        yield Finding("memory", Level.WARNING, str(found), remedy)
    else:
        yield Finding("memory", Level.OK, str(found))


def disk(machine: Machine, wants: Wants) -> Iterator[Finding]:
    folder = str(wants.state_dir)
    space = machine.space(folder)
    if space is not None and space.free < _DISK_GOOD:
        evidence = f"{size(space.free)} free for logs and history in {folder}"
        yield Finding("disk", Level.WARNING, evidence, f"df {folder} and make room, or set node.state_dir to another disk")
    elif space is not None:
        yield Finding("disk", Level.OK, f"{size(space.free)} free for logs and history in {folder}")


def cgroup(machine: Machine, wants: Wants) -> Iterator[Finding]:
    lines = (machine.read("/proc/self/cgroup") or "").splitlines()
    path = next((line[3:] for line in lines if line.startswith("0::")), None)
    if path is None:
        evidence = "no unified control groups (cgroup v2) here: memory limits are not seen"
        yield Finding("cgroup", Level.NOTE, evidence, "boot with systemd.unified_cgroup_hierarchy=1")
        return
    folder = f"/sys/fs/cgroup{path.rstrip('/')}"
    controllers = (machine.read(f"{folder}/cgroup.controllers") or "").strip() or "none"
    if machine.writable(f"{folder}/cgroup.procs") and machine.writable(f"{folder}/cgroup.subtree_control"):
        yield Finding("cgroup", Level.OK, f"{path} is delegated to this user (controllers: {controllers})")
    else:
        remedy = (
            "Delegate=yes in the unit (shadowsup@.service has it), or systemd-run --user --scope -p Delegate=yes shadowsup start CONFIG"
        )
        evidence = f"{path} is not delegated to this user (controllers: {controllers}): engines get no control group of their own"
        yield Finding("cgroup", Level.NOTE, evidence, remedy)


def systemd(machine: Machine, wants: Wants) -> Iterator[Finding]:
    """The service manager's fd store keeps the node's memory while no supervisor runs."""
    if "systemd" not in machine.names("/run"):
        yield Finding("systemd", Level.NOTE, "systemd does not run here: no fd store keeps memory while supervisor and engines are down")
        return
    words = machine.output(["systemctl", "--version"]).split()
    version = words[1] if len(words) > 1 else "?"
    stored = machine.environ.get("FDSTORE", "")
    if stored:
        yield Finding("systemd", Level.OK, f"systemd {version}, this service may store {stored} descriptors")
    else:
        remedy = "shadowsup config example shadowsup@.service has a unit with one"
        yield Finding("systemd", Level.NOTE, f"systemd {version}; no fd store, this is not a service that has one", remedy)


def _swap(machine: Machine) -> bool:
    return len((machine.read("/proc/swaps") or "").splitlines()) > 1


def _limit(value: int) -> str:
    return "any number of" if value == UNLIMITED else f"{value:,}"


def _limit_size(value: int) -> str:
    return "unlimited" if value == UNLIMITED else size(value)
