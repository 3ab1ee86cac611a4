"""A machine made up for the doctor: what the checks would see on it, without any of it."""

from __future__ import annotations

import resource
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shadowsup.memkeeper.backends.host_memory import Available
from shadowsup.memkeeper.device_use import Unanswered
from shadowsup.supervisor.compat import SDK
from shadowsup.supervisor.doctor.machine import UNLIMITED, Package, Space
from shadowsup.supervisor.holders import Holder

GIB = 2**30
H200 = "GPU-11111111-2222-3333-4444-555555555555"


def gpu(index: int = 0, **changes: Any) -> dict[str, Any]:
    """Return what NVML says of an H200 that nobody uses."""
    return {
        "uuid": H200.replace("GPU-1", f"GPU-{index + 1}"),
        "index": index,
        "name": "NVIDIA H200",
        "total": 141 * GIB,
        "used": 0,
        "reserved": 600 * 2**20,
        "persistence": True,
        "compute_mode": 0,
        "mig": False,
        "instances": [],
        "processes": [],
        "mps": False,
    } | changes


def with_gpus(*gpus: dict[str, Any], driver: str = "580.159.03", cuda: int = 13000) -> dict[str, dict[str, Any]]:
    """Return the answers of both probes."""
    devices = [{"uuid": each["uuid"], "name": each["name"], "posix_fd": True, "export": ""} for each in gpus if "lost" not in each]
    return {"nvml": {"driver": driver, "cuda": cuda, "gpus": list(gpus)}, "cuda": {"version": cuda, "devices": devices}}


@dataclass
class FakeMachine:
    """Everything is as it should be, without a GPU. A probe that is an exception is raised."""

    environ: Mapping[str, str] = field(default_factory=dict)
    python: tuple[str, str] = ("3.12.3", "/usr/bin/python3")
    root: bool = False
    refused: tuple[str, ...] = ()
    files: dict[str, str] = field(default_factory=dict)
    folders: dict[str, tuple[str, ...]] = field(default_factory=lambda: {"/dev": ("shm",)})
    writes: set[str] = field(default_factory=set)
    spaces: dict[str, Space] = field(default_factory=dict)
    limits: dict[int, tuple[int, int]] = field(default_factory=dict)
    usable: int = 64 * GIB
    running: Sequence[tuple[int, str]] = ()
    holding: Sequence[Holder] = ()
    sees_all: bool = True
    taken: str = ""
    probes: dict[str, Any] = field(default_factory=lambda: {"nvml": {"absent": "NVML Shared Library Not Found"}})
    commands: dict[str, str] = field(default_factory=dict)
    lacking: tuple[str, ...] = ()
    """Of what the engine side needs."""
    installed: dict[str | None, dict[str, Package] | None] = field(default_factory=dict)

    def kernel(self) -> tuple[str, tuple[str, ...]]:
        return "6.8.0", self.refused

    def read(self, path: str) -> str | None:
        return self.files.get(path)

    def names(self, path: str) -> tuple[str, ...]:
        return self.folders.get(path, ())

    def writable(self, path: str) -> bool:
        return path in self.writes

    def space(self, path: str) -> Space | None:
        return self.spaces.get(path, Space(total=500 * GIB, free=400 * GIB))

    def limit(self, which: int) -> tuple[int, int]:
        return self.limits.get(which, (0, UNLIMITED) if which == resource.RLIMIT_CORE else (UNLIMITED, UNLIMITED))

    def memory(self) -> Available | None:
        return Available(kernel=self.usable, group=None, group_name="", margin=0)

    def processes(self) -> Sequence[tuple[int, str]]:
        return self.running

    def device_holders(self) -> tuple[Sequence[Holder], bool]:
        return self.holding, self.sees_all

    def who(self, pid: int) -> Holder:
        return Holder(pid=pid, command=f"program-{pid} --serve", user="anna")

    def port_error(self, address: str) -> str:
        return self.taken

    def probe(self, what: str) -> dict[str, Any]:
        answer = self.probes[what]
        if isinstance(answer, Unanswered):
            raise answer
        found: dict[str, Any] = answer
        return found

    def output(self, command: Sequence[str]) -> str:
        return self.commands.get(command[0], "")

    def packages(self, python: str | None, names: Sequence[str]) -> dict[str, Package] | None:
        sdk = {name: Package(version="1.0") for name in SDK if name not in self.lacking}
        default = {"torch": Package(version="2.13.0", cuda="13.0"), "transformers": Package(version="5.20.1")}
        there = self.installed.get(python, default)
        there = None if there is None else sdk | there
        return None if there is None else {name: there[name] for name in names if name in there}
