"""What the host's memory and processors are used for, for ``status``."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

HOST = "host"
"""The device of segments in main memory (`shadowsup.memkeeper.protocol.Manifest`)."""
_PAGE = os.sysconf("SC_PAGE_SIZE")


def host(kept: Mapping[str, int], private: int) -> dict[str, Any]:
    """Return the state of the machine.

    Processor time is given as two counters, so that any number of clients can take differences over spans of their own.

    Args:
        kept: bytes of kept memory in main memory, by kind of segment.
        private: bytes that the engines have to themselves.
    """
    memory, times = psutil.virtual_memory(), psutil.cpu_times()
    idle_s = times.idle + getattr(times, "iowait", 0.0)
    # guest time is contained in user time already.
    all_s = sum(times) - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0)
    used = memory.total - memory.available
    return {
        "memory_total": memory.total,
        "memory_used": used,
        "cpus": os.cpu_count() or 1,
        "cpu_busy_s": round(all_s - idle_s, 2),
        "cpu_all_s": round(all_s, 2),
        "load": round(os.getloadavg()[0], 2),
        "memory": purposes(kept, used, private),
    }


def purposes(kept: Mapping[str, int], used: int, private: int) -> dict[str, int]:
    """Split used memory, in bytes: ``weights`` and ``kv`` (with ledgers) are kept, ``engines`` have memory of their own, the rest is
    ``foreign``. Figures of different moments may not fit; none is ever negative."""
    weights = kept.get("weights", 0)
    kv = sum(kept.values()) - weights
    rest = max(0, used - weights - kv)
    own = min(private, rest)
    return {"weights": weights, "kv": kv, "engines": own, "foreign": rest - own}


def private_bytes(pid: int | None) -> int:
    """Return the resident memory that a process does not share, 0 for one that is gone. Mapped segments are shared and not in it."""
    if pid is None:
        return 0
    try:
        fields = Path(f"/proc/{pid}/statm").read_bytes().split()
        return max(0, int(fields[1]) - int(fields[2])) * _PAGE
    except (OSError, IndexError, ValueError):
        return 0
