"""What a result was measured on: hardware and versions, nothing that names a host, a user or a path."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import time
from pathlib import Path
from typing import Any

import psutil

from shadowsup import __version__

SCHEMA = 1
QUIET_LOAD = 0.5
"""Load average (1 minute) for each core above which a machine was not quiet before a run."""


def describe() -> dict[str, Any]:
    """Return the machine's description. Sizes in bytes."""
    return {
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "memory": psutil.virtual_memory().total,
        "gpus": _gpus(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": _version("torch"),
        "transformers": _version("transformers"),
        "shadowsup": __version__,
    }


def load() -> dict[str, Any]:
    """Return how busy the machine is, to be taken before a run: the load average of 1 and 5 minutes, and whether that is quiet."""
    one, five, _ = os.getloadavg()
    return {"1m": round(one, 2), "5m": round(five, 2), "quiet": one <= QUIET_LOAD * len(os.sched_getaffinity(0))}


def document(bench: str, load_before: dict[str, Any], result: dict[str, Any]) -> dict[str, Any]:
    """Return a result as it is printed and saved."""
    return {
        "schema": SCHEMA,
        "bench": bench,
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "machine": describe(),
        "load_before": load_before,
        **result,
    }


def cpu_s(pid: int) -> float:
    """Return the CPU seconds that all threads of a process have used, from schedstat: cpu_times counts in ticks of 10 ms.

    Threads that have ended are not in it.
    """
    total = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            total += int((task / "schedstat").read_text().split()[0])
        except (FileNotFoundError, ProcessLookupError):
            continue
    return total / 1e9


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.machine()


def _gpus() -> list[str]:
    from shadowsup.errors import ShadowsupError
    from shadowsup.supervisor.devices import read_gpus

    try:
        return [gpu.name for gpu in read_gpus()]
    except ShadowsupError:
        return []


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
