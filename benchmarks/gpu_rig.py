"""Starting, feeding, watching and killing the processes of `gpu_child`; shared by `gpu_facts` and the GPU tests."""

from __future__ import annotations

import os
import platform
import select
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

import pynvml
from gpu_child import Peer

MIB, GIB = 2**20, 2**30
CHILD = Path(__file__).with_name("gpu_child.py")


class Child:
    """A process of `gpu_child` with its socket. ``early``: our ends of two lifelines that it has since before it imported anything of
    CUDA, at a low and at a high number."""

    def __init__(self, role: str) -> None:
        ours, theirs = socket.socketpair()
        pairs = [socket.socketpair() for _ in range(2)]
        self.early = [pair[0] for pair in pairs]
        given = [theirs, *(pair[1] for pair in pairs)]
        numbers = [end.fileno() for end in given]
        self.process = subprocess.Popen([sys.executable, str(CHILD), role, *map(str, numbers)], pass_fds=numbers)
        for end in given:
            end.close()
        self.peer = Peer(ours)

    def ask(self, do: str, fds: list[int] | None = None, **arguments: Any) -> dict[str, Any]:
        self.peer.send({"do": do, **arguments}, fds)
        return self.peer.receive()

    def lifeline_at(self, *least: int) -> tuple[list[socket.socket], dict[str, Any]]:
        """Give it lifelines now, after CUDA, each at the lowest free number from ``least`` on. Returns our ends, and the numbers."""
        pairs = [socket.socketpair() for _ in least]
        answer = self.ask("lifelines", [theirs.fileno() for _, theirs in pairs], least=least)
        for _, theirs in pairs:
            theirs.close()
        return [ours for ours, _ in pairs], answer

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self.peer.socket.close()
        for line in self.early:
            line.close()


def start_exporter() -> tuple[Child, dict[str, Any]]:
    child = Child("exporter")
    return child, child.peer.receive()


def export(child: Child, size: int, count: int = 1) -> tuple[list[int], dict[str, Any]]:
    """Return (descriptors, timings) of ``count`` new allocations of ``size`` bytes."""
    child.peer.send({"size": size, "count": count})
    answer = child.peer.receive()
    while len(child.peer.fds) < count:
        child.peer.send({})
        child.peer.receive()
    fds, child.peer.fds = child.peer.fds, []
    return fds, answer


def start_engine(device: str) -> tuple[Child, dict[str, Any]]:
    child = Child("engine")
    child.peer.send({"device": device})
    return child, child.peer.receive()


@contextmanager
def memory(exporting: Child, sizes: list[int]) -> Iterator[list[int]]:
    """New device memory, one descriptor a size; freed when the block ends, if nobody else holds it."""
    fds = [export(exporting, size)[0][0] for size in sizes]
    try:
        yield fds
    finally:
        for fd in fds:
            os.close(fd)


class KeeperProcess:
    """A memkeeper with the cuda backend. ``socket`` is there once it is constructed."""

    def __init__(self, folder: Path) -> None:
        self.socket = folder / "keeper.sock"
        ready, theirs = os.pipe()
        command = [
            sys.executable,
            "-m",
            "shadowsup.memkeeper",
            "--socket",
            str(self.socket),
            "--backend",
            "cuda",
            "--ready-fd",
            str(theirs),
        ]
        self.process = subprocess.Popen(command, pass_fds=[theirs])
        os.close(theirs)
        with os.fdopen(ready, "rb") as pipe:
            assert pipe.read(1) == b"1", "the keeper did not start"

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(30)


class Device:
    """What NVML says about one device now."""

    def __init__(self, uuid: str) -> None:
        pynvml.nvmlInit()
        self._handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)

    def used(self) -> int:
        """Return bytes."""
        return int(pynvml.nvmlDeviceGetMemoryInfo(self._handle).used)

    def total(self) -> int:
        """Return bytes."""
        return int(pynvml.nvmlDeviceGetMemoryInfo(self._handle).total)

    def pids(self) -> set[int]:
        """Return the processes with a context."""
        return {process.pid for process in pynvml.nvmlDeviceGetComputeRunningProcesses(self._handle)}


def ends(watched: dict[int, str], since: float) -> Iterator[tuple[str, float]]:
    """Yield (sign, seconds since) as each descriptor reports its end."""
    poll = select.poll()
    for fd in watched:
        poll.register(fd, select.POLLIN | select.POLLHUP)
    while watched:
        ready = poll.poll(10_000)
        now = time.perf_counter() - since
        if not ready:
            raise TimeoutError(f"no sign from {list(watched.values())}")
        for fd, _ in ready:
            poll.unregister(fd)
            yield watched.pop(fd), now


def eventually(condition: Callable[[], bool], within_s: float = 5.0) -> bool:
    deadline = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True


def machine(device: str) -> dict[str, Any]:
    """Describe this machine as far as the figures depend on it."""
    handle = pynvml.nvmlDeviceGetHandleByUUID(device)
    found: dict[str, Any] = {
        "gpu": pynvml.nvmlDeviceGetName(handle),
        "memory_mib": pynvml.nvmlDeviceGetMemoryInfo(handle).total // MIB,
        "gpus": pynvml.nvmlDeviceGetCount(),
        "driver": pynvml.nvmlSystemGetDriverVersion(),
        "cuda": pynvml.nvmlSystemGetCudaDriverVersion() / 1000,
        "kernel": platform.release(),
        "cpus": os.cpu_count(),
        "python": platform.python_version(),
    }
    try:
        found["persistence_mode"] = bool(pynvml.nvmlDeviceGetPersistenceMode(handle))
    except pynvml.NVMLError as error:
        found["persistence_mode"] = str(error)
    for package in ("torch", "triton", "cuda-bindings", "nvidia-ml-py", "numpy"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = None
    return found
