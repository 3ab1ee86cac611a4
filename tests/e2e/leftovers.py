"""What a node leaves behind on the machine, found from outside."""

from __future__ import annotations

import time
from pathlib import Path

import psutil


def processes(folder: Path) -> dict[int, str]:
    """Return every process that has ``folder`` in its command line or environment: pid → command line."""
    found = {}
    for process in psutil.process_iter():
        try:
            command = " ".join(process.cmdline())
            belongs = str(folder) in command or any(str(folder) in value for value in process.environ().values())
        except psutil.Error:
            continue
        if belongs and process.pid != psutil.Process().pid:
            found[process.pid] = command[:150]
    return found


def left(folder: Path, timeout_s: float = 30.0) -> dict[int, str]:
    """Return those of `processes` that stay: a spare nursery ends a moment after a supervisor that was killed."""
    deadline = time.monotonic() + timeout_s
    while (found := processes(folder)) and time.monotonic() < deadline:
        time.sleep(0.05)  # nobody tells
    return found


def memfds() -> dict[int, list[str]]:
    """Return the project's memory held by any process: pid → names."""
    found: dict[int, list[str]] = {}
    for process in Path("/proc").iterdir():
        if not process.name.isdigit():
            continue
        try:
            names = [str(fd.readlink()) for fd in (process / "fd").iterdir()]
        except OSError:
            continue
        ours = [name for name in names if "memfd:shadowsup" in name]
        if ours:
            found[int(process.name)] = ours
    return found


def shared_memory() -> set[str]:
    return {entry.name for entry in Path("/dev/shm").iterdir()}
