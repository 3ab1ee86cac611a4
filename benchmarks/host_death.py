"""How soon a SIGKILL of a CPU engine is seen: the tether, the address space left by every thread, EOF of the lifeline, the pidfd.

``python benchmarks/host_death.py [KILLS] [MIB]`` prints JSON: milliseconds from the kill. The victim maps MIB of shared memory (touched)
and multiplies matrices on all cores.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from shadowsup.robust_mutex import RobustMutex
from shadowsup.supervisor.bench.figures import percentiles
from shadowsup.supervisor.bench.machine import describe
from shadowsup.supervisor.tether import left_its_memory

VICTIM = """
import mmap, os, sys, torch
from shadowsup.workers import tether
from shadowsup.workers.lifeline import Lifeline
tether.hold(sys.argv[1])
line = Lifeline(int(sys.argv[2]))
size = int(sys.argv[3]) << 20
memory = os.memfd_create("victim")
os.ftruncate(memory, size)
mapped = mmap.mmap(memory, size)
torch.frombuffer(mapped, dtype=torch.uint8).fill_(1)
line.renew()
a = torch.randn(1500, 1500)
os.write(1, b"r")
while True:
    a @ a
"""


def one(folder: Path, mib: int) -> dict[str, float]:
    """Kill one victim; return milliseconds from the kill."""
    path = folder / "tether"
    path.unlink(missing_ok=True)
    mutex = RobustMutex(str(path), create=True)
    ours, theirs = socket.socketpair()
    victim = subprocess.Popen(
        [sys.executable, "-c", VICTIM, str(path), str(theirs.fileno()), str(mib)], pass_fds=[theirs.fileno()], stdout=subprocess.PIPE
    )
    theirs.close()
    assert victim.stdout is not None
    assert victim.stdout.read(1) == b"r", "the victim did not start"
    seen: dict[str, float] = {}
    pidfd = os.pidfd_open(victim.pid)

    def wait() -> None:
        assert mutex.wait_for_death()
        seen["tether"] = time.perf_counter()
        assert left_its_memory(victim.pid, 10.0)
        seen["memory_left"] = time.perf_counter()

    waiter = threading.Thread(target=wait)
    waiter.start()
    time.sleep(0.2)  # the waiter is in the kernel, the victim in its products
    killed = time.perf_counter()
    os.kill(victim.pid, signal.SIGKILL)
    select.select([ours], [], [])
    seen["lifeline_eof"] = time.perf_counter()
    select.select([pidfd], [], [])
    seen["pidfd"] = time.perf_counter()
    waiter.join()
    victim.wait()
    victim.stdout.close()
    os.close(pidfd)
    ours.close()
    mutex.close()
    return {name: (at - killed) * 1e3 for name, at in seen.items()}


def main() -> None:
    kills = int(sys.argv[1]) if len(sys.argv) > 1 else 20
    mib = int(sys.argv[2]) if len(sys.argv) > 2 else 800
    with tempfile.TemporaryDirectory() as folder:
        runs = [one(Path(folder), mib) for _ in range(kills)]
    figures = {name: percentiles([run[name] for run in runs]) for name in runs[0]}
    print(json.dumps({"schema": 1, "machine": describe(), "mapped_mib": mib, "ms_from_kill": figures}, indent=1))


if __name__ == "__main__":
    main()
