"""The OS edge of the checks: everything that they look at goes through here, so that tests can be any machine."""

from __future__ import annotations

import functools
import json
import os
import platform
import resource
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from shadowsup.memkeeper.backends.host_memory import Available, available
from shadowsup.memkeeper.device_use import Unanswered, run_bounded
from shadowsup.supervisor.holders import Holder, describe, holders, pids

PROBE_S = 20.0
"""NVML and the driver's start take a second; without persistence mode some seconds for each GPU more."""
ASK_S = 10.0
"""Another interpreter, or a command that prints its version."""
UNLIMITED = resource.RLIM_INFINITY


@dataclass(frozen=True, kw_only=True)
class Space:
    """A file system. Bytes."""

    total: int
    free: int


@dataclass(frozen=True, kw_only=True)
class Package:
    """An installed distribution. ``cuda``: of a PyTorch, the CUDA version that it was built for, empty for a CPU build."""

    version: str
    cuda: str | None = None


class Machine(Protocol):
    """What checks may ask. Nothing here raises but where it says so."""

    @property
    def environ(self) -> Mapping[str, str]: ...

    @property
    def python(self) -> tuple[str, str]:
        """Version and path of this interpreter."""

    @property
    def root(self) -> bool:
        """Whether this is the superuser, who sees everybody's processes."""

    def kernel(self) -> tuple[str, tuple[str, ...]]:
        """Return the kernel's release, and what a node needs of it that is refused here."""

    def read(self, path: str) -> str | None:
        """Return a text file, None when it cannot be read."""

    def names(self, path: str) -> tuple[str, ...]:
        """Return the names in a folder, none when it cannot be read."""

    def writable(self, path: str) -> bool:
        """Whether this user may write there (it exists)."""

    def space(self, path: str) -> Space | None:
        """Return the file system that ``path``, or the nearest folder above it that exists, is on."""

    def limit(self, which: int) -> tuple[int, int]:
        """Return the soft and hard limit ``resource.RLIMIT_*``; `UNLIMITED` for none."""

    def memory(self) -> Available | None: ...

    def processes(self) -> Sequence[tuple[int, str]]:
        """Return pid and short name (15 characters) of every process."""

    def device_holders(self) -> tuple[Sequence[Holder], bool]:
        """Return who has an NVIDIA device file open, and whether every process could be looked into."""

    def who(self, pid: int) -> Holder: ...

    def port_error(self, address: str) -> str:
        """Return why nobody can listen on HOST:PORT, naming the holder; empty when one can."""

    def probe(self, what: str) -> dict[str, Any]:
        """Ask NVML (``nvml``) or the driver (``cuda``) in a child; see `probe`.

        Raises:
            Unanswered: it hangs or crashes.
        """

    def output(self, command: Sequence[str]) -> str:
        """Return what a command prints; empty when there is no such command or it fails."""

    def packages(self, python: str | None, names: Sequence[str]) -> dict[str, Package] | None:
        """Return which distributions an interpreter (None: this one) has; None when it cannot be asked."""


_ASK = """
import importlib.metadata, importlib.util, json, pathlib, re, sys
found = {}
for name in sys.argv[1:]:
    try:
        found[name] = {"version": importlib.metadata.version(name)}
    except importlib.metadata.PackageNotFoundError:
        continue
    if name == "torch":
        spec = importlib.util.find_spec("torch")
        file = pathlib.Path(spec.origin).with_name("version.py") if spec and spec.origin else None
        text = file.read_text() if file and file.is_file() else ""
        match = re.search(r"^cuda\\b[^=]*=\\s*(?:'([^']*)'|None)", text, re.MULTILINE)
        if match:
            found[name]["cuda"] = match[1] or ""
print(json.dumps(found))
"""


class ThisMachine:
    """The real one. Answers that cost something are kept."""

    @property
    def environ(self) -> Mapping[str, str]:
        return os.environ

    @property
    def python(self) -> tuple[str, str]:
        return platform.python_version(), sys.executable

    @property
    def root(self) -> bool:
        return os.geteuid() == 0

    def kernel(self) -> tuple[str, tuple[str, ...]]:
        refused = []
        for name, test in (("pidfd_open", _pidfd), ("sealed memfd", _memfd), ("OFD locks", _ofd_lock)):
            try:
                test()
            except (OSError, AttributeError) as error:
                refused.append(f"{name} ({getattr(error, 'strerror', None) or error})")
        return platform.release(), tuple(refused)

    def read(self, path: str) -> str | None:
        try:
            return Path(path).expanduser().read_text(errors="replace")
        except OSError:
            return None

    def names(self, path: str) -> tuple[str, ...]:
        try:
            return tuple(sorted(entry.name for entry in Path(path).expanduser().iterdir()))
        except OSError:
            return ()

    def writable(self, path: str) -> bool:
        return os.access(Path(path).expanduser(), os.W_OK)

    def space(self, path: str) -> Space | None:
        folder = Path(path).expanduser().absolute()
        while not folder.exists() and folder != folder.parent:
            folder = folder.parent
        try:
            found = os.statvfs(folder)
        except OSError:
            return None
        return Space(total=found.f_blocks * found.f_frsize, free=found.f_bavail * found.f_frsize)

    def limit(self, which: int) -> tuple[int, int]:
        return resource.getrlimit(which)

    def memory(self) -> Available | None:
        try:
            return available()
        except (OSError, KeyError, ValueError):
            return None

    @functools.cache  # noqa: B019 (there is one for each run of the command)
    def processes(self) -> Sequence[tuple[int, str]]:
        return [(pid, name.strip()) for pid in pids() if (name := self.read(f"/proc/{pid}/comm")) is not None]

    @functools.cache  # noqa: B019
    def device_holders(self) -> tuple[Sequence[Holder], bool]:
        return holders(lambda link: link.startswith("/dev/nvidia"))

    def who(self, pid: int) -> Holder:
        return describe(pid)

    def port_error(self, address: str) -> str:
        from shadowsup.supervisor.errors import SupervisorError
        from shadowsup.supervisor.sockets import listen

        try:
            for sock in listen(address, backlog=1):
                sock.close()
        except SupervisorError as error:
            return error.message
        return ""

    @functools.cache  # noqa: B019
    def probe(self, what: str) -> dict[str, Any]:
        try:
            found = json.loads(run_bounded([sys.executable, "-m", "shadowsup.supervisor.doctor.probe", what], PROBE_S))
        except ValueError as error:
            raise Unanswered(f"its answer is not understood: {error}") from error
        if not isinstance(found, dict):
            raise Unanswered("its answer is not understood")
        return found

    def output(self, command: Sequence[str]) -> str:
        try:
            return run_bounded(command, ASK_S).decode(errors="replace").strip()
        except (Unanswered, OSError):
            return ""

    def packages(self, python: str | None, names: Sequence[str]) -> dict[str, Package] | None:
        try:
            # -I: the folder that one happens to be in must not be taken for an installation.
            found = json.loads(run_bounded([python or sys.executable, "-I", "-c", _ASK, *names], ASK_S))
            return {name: Package(**facts) for name, facts in found.items()}
        except (Unanswered, OSError, ValueError, TypeError):
            return None


def _pidfd() -> None:
    os.close(os.pidfd_open(os.getpid()))


def _memfd() -> None:
    import fcntl

    fd = os.memfd_create("shadowsup-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE)
    finally:
        os.close(fd)


def _ofd_lock() -> None:
    import fcntl
    import struct

    fd = os.memfd_create("shadowsup-doctor", os.MFD_CLOEXEC)
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, struct.pack("hhqqi", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0))
    finally:
        os.close(fd)
