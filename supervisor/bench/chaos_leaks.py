"""What a node has open while it runs, and what it leaves behind after its stop. Looked at from outside, through /proc."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Mapping, Set
from pathlib import Path, PurePosixPath

import psutil

from shadowsup.supervisor.cgroup import own_group
from shadowsup.supervisor.shm import shm_of

FOLDER = Path("/dev/shm")


def processes(folder: Path) -> dict[int, str]:
    """Return every living process that has ``folder`` in its command line or environment: pid → command line, cut."""
    found = {}
    for process in psutil.process_iter():
        try:
            command = " ".join(process.cmdline())
            belongs = str(folder) in command or any(str(folder) in value for value in process.environ().values())
            if belongs and process.pid != os.getpid() and process.status() != psutil.STATUS_ZOMBIE:
                found[process.pid] = command[:150]
        except psutil.Error:
            continue
    return found


def described(folder: Path) -> list[dict[str, str]]:
    """Return the processes of `processes` with their state, parent and where in the kernel they wait."""
    found = []
    for pid, command in processes(folder).items():
        with contextlib.suppress(psutil.Error, OSError):
            process = psutil.Process(pid)
            waits = Path(f"/proc/{pid}/wchan").read_text()
            found.append({"pid": str(pid), "parent": str(process.ppid()), "state": process.status(), "waits": waits, "command": command})
    return found


def memory(pids: Iterable[int] | None = None) -> set[str]:
    """Return the project's memory that these processes (None: any) hold: ``device:inode name`` of each memfd."""
    found = set()
    for pid in psutil.pids() if pids is None else pids:
        try:
            fds = list(Path(f"/proc/{pid}/fd").iterdir())
        except OSError:
            continue
        for fd in fds:
            try:
                name = str(fd.readlink())
                if name.startswith("/memfd:shadowsup"):
                    status = fd.stat()
                    found.add(f"{status.st_dev}:{status.st_ino} {name}")
            except OSError:
                continue
    return found


def cgroups(pids: Iterable[int]) -> set[Path]:
    """Return the folders of the control groups (v2) that these processes are in and that a node made."""
    ours = own_group()
    if ours is None:
        return set()
    found = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
                engine = PurePosixPath(line.removeprefix("0::"))
                if line.startswith("0::") and engine.parent.name.startswith("shadowsup-"):
                    found |= {ours / engine.parent.name / engine.name, ours / engine.parent.name}
    return found


def shared_memory() -> set[str]:
    """Return the names in /dev/shm."""
    try:
        return {entry.name for entry in FOLDER.iterdir()}
    except OSError:
        return set()


def left_shared_memory(before: Set[str]) -> list[str]:
    """Return the names in /dev/shm that were not there ``before`` and that no process uses: what somebody's death left."""
    new = shared_memory() - before
    if not new:
        return []
    used = {file.path.name for file in shm_of(psutil.pids())}
    return sorted((new - used) & shared_memory())


def open_fds(pids: Mapping[str, int]) -> dict[str, int]:
    """Return how many files each of ``pids`` (by name) has open; those that are gone are left out."""
    found = {}
    for name, pid in pids.items():
        try:
            found[name] = sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())
        except OSError:
            continue
    return found


def resident(pids: Mapping[str, int]) -> dict[str, int]:
    """Return the resident memory of each of ``pids`` (by name), bytes."""
    found = {}
    for name, pid in pids.items():
        try:
            found[name] = psutil.Process(pid).memory_info().rss
        except psutil.Error:
            continue
    return found


def children(pid: int) -> int:
    """Return how many processes live below ``pid``."""
    try:
        return sum(child.status() != psutil.STATUS_ZOMBIE for child in psutil.Process(pid).children(recursive=True))
    except psutil.Error:
        return 0


def files(folder: Path) -> list[str]:
    """Return the files under a node's folder that should not be there after its stop: all but its config, logs and history."""
    found = []
    for path in folder.rglob("*"):
        name = path.relative_to(folder).as_posix()
        kept = name.startswith("state/") and not path.name.startswith(".")  # logs, history, revisions; not what a write left half done
        if not (path.is_dir() or kept or name in _OURS):
            found.append(name)
    if (folder / "run").exists():
        found.append("run")
    return sorted(found)


_OURS = frozenset({"node.yaml", "start.log", "stuck.json"})
