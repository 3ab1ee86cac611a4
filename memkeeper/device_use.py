"""Who uses a GPU's memory: what NVML says (asked in a child process, because NVML can hang or crash) and who holds its device files.

For messages to people when memory runs out, and for judging whether a GPU is free. Absolute figures by process, never differences.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

_DEVICE_FILE = re.compile(r"/dev/nvidia(\d+|ctl|-uvm|-caps/.*)\Z")
_abandoned: list[subprocess.Popen[bytes]] = []
"""Children that did not die when killed (uninterruptible in the driver); kept so that they are reaped when they do."""


@dataclass(frozen=True)
class Process:
    """``used``: bytes of device memory; None where NVML does not say (another PID namespace, MIG)."""

    pid: int
    name: str
    used: int | None


@dataclass(frozen=True, kw_only=True)
class DeviceUse:
    """``total`` and ``used`` in bytes. Memory that nobody but a descriptor holds counts as used and belongs to no process."""

    uuid: str
    total: int
    used: int
    processes: tuple[Process, ...]


class Unanswered(Exception):
    """Raised when a child did not answer in time, crashed, or reported a failure. The text says which."""


def run_bounded(command: Sequence[str], timeout_s: float) -> bytes:
    """Return what ``command`` prints. It never waits longer than ``timeout_s``, not even for a child that cannot be killed.

    Raises:
        Unanswered: no complete answer in time, or the child's exit status is not 0.
    """
    _abandoned[:] = [child for child in _abandoned if child.poll() is None]
    deadline = time.monotonic() + timeout_s
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert child.stdout is not None
    output = bytearray()
    with child.stdout as pipe:
        while True:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([pipe], [], [], left)[0]:
                _give_up(child)
                raise Unanswered(f"no answer in {timeout_s:g} s")
            chunk = os.read(pipe.fileno(), 65536)
            if not chunk:
                break
            output += chunk
    try:
        status = child.wait(max(0.1, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        _give_up(child)
        raise Unanswered(f"did not end in {timeout_s:g} s") from None
    if status != 0:
        raise Unanswered(f"ended with status {status}: {bytes(output[-300:]).decode(errors='replace').strip() or 'no output'}")
    return bytes(output)


def _give_up(child: subprocess.Popen[bytes]) -> None:
    child.kill()
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(0.2)
        return
    _abandoned.append(child)


def query(uuid: str, timeout_s: float = 3.0) -> DeviceUse:
    """Ask NVML about one device, in a child.

    Raises:
        Unanswered: NVML hangs, crashes, is not installed or does not know the device.
    """
    answer = run_bounded([sys.executable, "-m", "shadowsup.memkeeper.device_use", uuid], timeout_s)
    try:
        document = json.loads(answer)
        processes = tuple(Process(**process) for process in document.pop("processes"))
        return DeviceUse(**document, processes=processes)
    except (ValueError, TypeError, KeyError) as error:
        raise Unanswered(f"answer not understood: {error}") from error


def read(uuid: str, nvml: Any) -> DeviceUse:
    """Read one device through ``nvml`` (the module ``pynvml``, initialised). Raises whatever that raises."""
    handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    processes = tuple(
        Process(process.pid, process_name(process.pid), process.usedGpuMemory)
        for process in nvml.nvmlDeviceGetComputeRunningProcesses(handle)
    )
    return DeviceUse(uuid=uuid, total=memory.total, used=memory.used, processes=processes)


def process_name(pid: int) -> str:
    """Return the short name of a process, or ``gone``."""
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return "gone"


def device_file_holders(proc: Path = Path("/proc")) -> dict[int, str]:
    """Return pid → name of every process that has an NVIDIA device file open: forgotten children of a dead engine, too.

    Exported memory is a descriptor of such a file as well, so the keeper and the supervisor's vault are among them. Processes of other
    users are seen only by root.
    """
    holders = {}
    for entry in proc.iterdir():
        if not entry.name.isdigit():
            continue
        try:
            if any(_DEVICE_FILE.match(str(fd.readlink())) for fd in (entry / "fd").iterdir()):
                holders[int(entry.name)] = (entry / "comm").read_text().strip()
        except OSError:  # ended meanwhile, or not ours to look at
            continue
    return holders


def main() -> int:
    """Print the use of the device named by the first argument as JSON."""
    try:
        import pynvml

        pynvml.nvmlInit()
        print(json.dumps(asdict(read(sys.argv[1], pynvml))))
    except Exception as error:  # whatever it is, the parent wants one line of words
        print(f"{type(error).__name__}: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
