"""The processes that `gpu_facts.py` and the GPU tests start, look at and kill: ``gpu_child.py ROLE SOCKET_FD LIFELINE_FD LIFELINE_FD``.

Each speaks JSON lines over an inherited Unix socket; descriptors of memory come with them. Roles:

* ``exporter``: creates device memory as the keeper does (no context) and sends its descriptors, then waits to be killed.
* ``engine``: a process with a CUDA context that maps what it is sent and does what it is told (fill, digest, scribble, …).
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from shadowsup.memkeeper.backends import cuda_driver
from shadowsup.memkeeper.backends.cuda_driver import CudaDriver, DriverError, call
from shadowsup.workers.cuda_memory import Access, CudaMapper, DeviceRange

_KERNELS = rb"""
extern "C" __global__ void scribble(unsigned long long *base, unsigned long long words, unsigned long long for_ns) {
    unsigned long long begin, now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(begin));
    do {
        asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
        for (unsigned long long i = blockIdx.x * blockDim.x + threadIdx.x; i < words; i += gridDim.x * blockDim.x)
            ((volatile unsigned long long *)base)[i] = now;
    } while (now - begin < for_ns);
}
"""


class Peer:
    """One end of the socket: a JSON line a message, with descriptors."""

    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock
        self._buffer = b""
        self.fds: list[int] = []

    def send(self, message: dict[str, Any], fds: list[int] | None = None) -> None:
        data = json.dumps(message).encode() + b"\n"
        sent = socket.send_fds(self.socket, [data], fds or [])
        self.socket.sendall(data[sent:])

    def receive(self) -> dict[str, Any]:
        """Return the next message; its descriptors are appended to ``fds``. Raises EOFError when the other end is closed."""
        while b"\n" not in self._buffer:
            data, fds, _, _ = socket.recv_fds(self.socket, 65536, 253)
            self.fds += fds
            if not data:
                raise EOFError("the other process is gone")
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        message: dict[str, Any] = json.loads(line)
        if "error" in message:
            raise RuntimeError(message["error"])
        return message


def timed(action: Callable[[], Any]) -> tuple[float, Any]:
    """Return (seconds, result)."""
    start = time.perf_counter()
    result = action()
    return time.perf_counter() - start, result


def exporter(peer: Peer) -> None:
    init_s, _ = timed(cuda_driver.load)
    devices_s, devices = timed(CudaDriver().devices)
    peer.send({"init_s": init_s, "devices_s": devices_s, "device": devices[0].uuid})
    while True:
        order = peer.receive()
        create, export, fds = [], [], []
        kind = cuda_driver.load().CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        for _ in range(order["count"]):
            seconds, handle = timed(lambda: call("cuMemCreate", order["size"], cuda_driver.allocation(0), 0))  # noqa: B023
            create.append(seconds)
            seconds, fd = timed(lambda: int(call("cuMemExportToShareableHandle", handle, kind, 0)))  # noqa: B023
            export.append(seconds)
            fds.append(fd)
            call("cuMemRelease", handle)
        link = str(Path(f"/proc/self/fd/{fds[0]}").readlink())
        for start in range(0, len(fds), 250):
            peer.send({"create_s": create, "export_s": export, "link": link}, fds[start : start + 250])
            if start + 250 < len(fds):
                peer.receive()
        for fd in fds:
            os.close(fd)


class Engine:
    """A context on device 0, and the memory mapped in it."""

    def __init__(self, device: str) -> None:
        self.mapper = CudaMapper(device)
        handle = call("cuDeviceGet", self.mapper.ordinal)
        self.context_s, context = timed(lambda: call("cuDevicePrimaryCtxRetain", handle))
        call("cuCtxSetCurrent", context)
        self.spans: list[DeviceRange] = []
        self._scribble: Any = None

    def map(self, fds: list[int], sizes: list[int], access: str) -> dict[str, float]:
        """Map all descriptors one behind the other in a new range."""
        mapper, handles = self.mapper, []
        import_s, _ = timed(lambda: handles.extend(mapper.import_fd(fd) for fd in fds))
        reserve_s, span = timed(lambda: DeviceRange(mapper, sum(sizes)))
        map_s, _ = timed(lambda: span.map(zip(handles, sizes, strict=True), Access(access)))
        for handle in handles:
            mapper.release(handle)
        self.spans.append(span)
        return {"import_s": import_s, "reserve_s": reserve_s, "map_and_access_s": map_s}

    def fill(self, span: int, offset: int, size: int, value: int) -> dict[str, Any]:
        """Let the driver set bytes. ``refused``: the driver's error, empty when it did."""
        try:
            call("cuMemsetD8", self.spans[span].address + offset, value, size)
            call("cuCtxSynchronize")
        except DriverError as error:
            return {"refused": error.code}
        return {"refused": ""}

    def digest(self, span: int, offset: int, size: int) -> dict[str, Any]:
        data = self.mapper.copy_out(self.spans[span].address + offset, size)
        return {
            "digest": hashlib.blake2b(data, digest_size=16).hexdigest(),
            "distinct": np.unique(np.frombuffer(data, np.uint8)).tolist()[:8],
        }

    def access(self, span: int, access: str) -> dict[str, float]:
        return {"access_s": timed(lambda: self.spans[span].set_access(Access(access)))[0]}

    def reexport(self, fd: int) -> dict[str, str]:
        """Try to export an imported handle again."""
        kind = cuda_driver.load().CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        handle = self.mapper.import_fd(fd)
        try:
            call("cuMemExportToShareableHandle", handle, kind, 0)
        except DriverError as error:
            return {"refused": error.code}
        finally:
            self.mapper.release(handle)
        return {"refused": ""}

    def prepare(self) -> dict[str, Any]:
        """Compile the kernel."""
        from cuda.bindings import nvrtc

        def checked(result: Any) -> Any:
            if int(result[0]) != 0:
                raise RuntimeError(f"nvrtc: {result[0]}")
            return result[1] if len(result) > 1 else None

        attributes = cuda_driver.load().CUdevice_attribute
        major = call("cuDeviceGetAttribute", attributes.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, self.mapper.ordinal)
        minor = call("cuDeviceGetAttribute", attributes.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, self.mapper.ordinal)
        program = checked(nvrtc.nvrtcCreateProgram(_KERNELS, b"scribble.cu", 0, [], []))
        checked(nvrtc.nvrtcCompileProgram(program, 1, [f"--gpu-architecture=compute_{major}{minor}".encode()]))
        code = b" " * checked(nvrtc.nvrtcGetPTXSize(program))
        checked(nvrtc.nvrtcGetPTX(program, code))
        image = np.frombuffer(code, dtype=np.uint8)
        module = call("cuModuleLoadData", image.ctypes.data)
        self._scribble = call("cuModuleGetFunction", module, b"scribble")
        return {}

    def scribble(self, span: int, offset: int, size: int, for_s: float) -> dict[str, Any]:
        """Launch a kernel that writes the device's clock over and over ``size`` bytes for ``for_s``; returns at once."""
        values = (self.spans[span].address + offset, size // 8, int(for_s * 1e9))
        types = (ctypes.c_void_p, ctypes.c_ulonglong, ctypes.c_ulonglong)
        call("cuLaunchKernel", self._scribble, 32, 1, 1, 256, 1, 1, 0, 0, (values, types), 0)
        return {}

    def fork(self) -> dict[str, Any]:
        """Fork a child that keeps every descriptor and does nothing, as a forgotten data loader does."""
        pid = os.fork()
        if pid == 0:
            signal.pause()
        return {"pid": pid}

    def synchronize(self) -> dict[str, Any]:
        """``error``-free is ``state`` empty; else the name of what the context died of."""
        try:
            call("cuCtxSynchronize")
        except DriverError as error:
            return {"state": error.code}
        return {"state": ""}


def engine(peer: Peer) -> None:
    first = peer.receive()
    holes = [os.open("/dev/null", os.O_RDONLY) for _ in range(16)]  # low numbers that are free again once CUDA has its descriptors
    this = Engine(first["device"])
    for hole in holes:
        os.close(hole)
    peer.send({"pid": os.getpid(), "context_s": this.context_s})
    kept: list[int] = []
    while True:
        order = peer.receive()
        verb = order.pop("do")
        fds, peer.fds = peer.fds, []
        if verb == "lifelines":
            kept += [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, least) for fd, least in zip(fds, order["least"], strict=True)]
            for fd in fds:
                os.close(fd)
            peer.send({"numbers": kept, "cuda": _cuda_descriptors()})
            continue
        if verb == "map":
            order["fds"] = fds
        elif verb == "reexport":
            order["fd"] = fds[0]
        result = getattr(this, verb)(**order)
        for fd in fds:
            os.close(fd)
        peer.send(result or {})


def _cuda_descriptors() -> list[int]:
    """Return the numbers of the descriptors of device files."""
    found = []
    for entry in Path("/proc/self/fd").iterdir():
        try:
            if str(entry.readlink()).startswith("/dev/nvidia"):
                found.append(int(entry.name))
        except OSError:  # the one that the listing itself has
            continue
    return sorted(found)


def main() -> None:
    peer = Peer(socket.socket(fileno=int(sys.argv[2])))
    for least, given in zip((3, 950), sys.argv[3:], strict=True):
        fcntl.fcntl(int(given), fcntl.F_DUPFD_CLOEXEC, least)
        os.close(int(given))
    try:
        {"exporter": exporter, "engine": engine}[sys.argv[1]](peer)
    except EOFError:
        pass
    except Exception as error:
        peer.send({"error": f"{type(error).__name__}: {error}"})
        raise


if __name__ == "__main__":
    main()
