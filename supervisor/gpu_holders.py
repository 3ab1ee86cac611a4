"""Who holds the GPUs of a node before it starts: a run that was killed, a forked data loader, somebody else's job (P01, P05).

Two lists are asked. NVML's, in a child that may hang, has what has a context; who merely has the device file open (a child forked after
the device was opened) is not in it, keeps the memory all the same, and is found by looking through ``/proc/*/fd``. Nobody is ended for it:
what is not this node's is named, with what to do.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shadowsup.memkeeper.device_use import Unanswered, run_bounded
from shadowsup.supervisor import identity as ids
from shadowsup.supervisor.holders import Holder, describe, links_of, pids
from shadowsup.supervisor.proc_reads import bounded_reads
from shadowsup.supervisor.tree import TAG_NAME

DEVICE = "/dev/nvidia"
_TIMEOUT_S = 15.0
_WATCHERS = frozenset({"nvidia-persistenced", "nv-hostengine", "dcgm-exporter", "nvidia-smi", "nvtop", "nvitop"})
"""They have every device open, and use none."""

Run = Callable[[Sequence[str], float], bytes]


@dataclass(kw_only=True)
class Held:
    """Who holds one GPU. ``memory``: bytes by NVML, None where it does not say."""

    gpu: str
    holder: Holder
    memory: int | None = None
    tag: str = ""
    """Of an engine of some node: ``NODE/NAME.K/instance``."""

    def __str__(self) -> str:
        size = f", {self.memory / 1e9:.1f} GB" if self.memory else ""
        if self.tag:
            node, engine, _ = (self.tag.split("/") + ["", ""])[:3]
            return f"{self.gpu} is held by engine {engine} of node {node}: {self.holder}{size}"
        return f"{self.gpu} is held by {self.holder}{size}"

    @property
    def remedy(self) -> str:
        if self.tag:
            return f"if that node no longer runs: kill {self.holder.pid}; otherwise shadowsup stop, in its runtime directory"
        return f"kill {self.holder.pid}, if nobody needs it; it takes memory and time from this node's engines"


@dataclass(kw_only=True)
class Found:
    """``unseen``: how many processes could not be looked into. ``note``: what else the result lacks, for people."""

    held: list[Held] = field(default_factory=list)
    unseen: int = 0
    note: str = ""

    def lines(self) -> list[str]:
        """Return it for people, one line each."""
        said = [f"{each}; {each.remedy}" for each in self.held]
        if self.note:
            said.append(self.note)
        if self.unseen and os.geteuid() != 0:
            said.append(f"{self.unseen} processes of other users cannot be looked into: whether they hold a GPU, only root can see")
        return said


def look(
    gpus: Sequence[Mapping[str, Any]],
    ours: Collection[int] = (),
    *,
    run: Run = run_bounded,
    device: str = DEVICE,
    driver: Path = Path("/proc/driver/nvidia/gpus"),
) -> Found:
    """Look who holds ``gpus`` (``uuid``, ``index``, ``name`` of each). Blocking, at most some seconds.

    Args:
        ours: pids that are this node's, and not named.
        device: what the names of the device files begin with. ``driver``: the driver's folder in /proc.
    """
    found = Found()
    names = {str(gpu["uuid"]): f"GPU {gpu['index']} ({gpu['name']})" for gpu in gpus}
    using = _by_nvml(names, run, found)
    minors = _minors(driver)
    by_minor = {minors[uuid]: uuid for uuid in names if uuid in minors}
    for uuid, pid in sorted({*using, *_by_files(by_minor, names, device, found)}, key=lambda pair: (list(names).index(pair[0]), pair[1])):
        holder = describe(pid)
        program = holder.command.split(" ")[0].rpartition("/")[2]
        if pid in ours or program in _WATCHERS or holder.command == "gone":
            continue
        found.held.append(Held(gpu=names[uuid], holder=holder, memory=using.get((uuid, pid)), tag=_tag(pid)))
    return found


def _by_nvml(names: Mapping[str, str], run: Run, found: Found) -> dict[tuple[str, int], int | None]:
    try:
        answer = json.loads(run([sys.executable, "-m", "shadowsup.supervisor.doctor.probe", "nvml"], _TIMEOUT_S))
        return {
            (gpu["uuid"], int(process["pid"])): process["used"]
            for gpu in answer.get("gpus", ())
            for process in gpu.get("processes", ())
            # In a container NVML tells the host's pids: those that are nobody here say nothing.
            if gpu.get("uuid") in names and ids.read_stat(int(process["pid"])) is not None
        }
    except (Unanswered, ValueError, TypeError, KeyError, AttributeError) as error:
        found.note = f"NVML does not say who uses the GPUs ({error}); those that have a device file open are named all the same"
        return {}


def _by_files(by_minor: Mapping[int, str], names: Mapping[str, str], device: str, found: Found) -> set[tuple[str, int]]:
    holding = set()
    for pid in pids():
        try:
            links = set(links_of(pid))
        except PermissionError:
            found.unseen += 1
            continue
        for link in links:
            minor = link.removeprefix(device).removesuffix(" (deleted)")
            if link.startswith(device) and minor.isdigit() and int(minor) in by_minor:
                holding.add((by_minor[int(minor)], pid))
    return holding


def _minors(driver: Path) -> dict[str, int]:
    """Return UUID → number of the device file, as the driver tells."""
    found = {}
    try:
        folders = list(driver.iterdir())
    except OSError:
        return {}
    for folder in folders:
        try:
            lines = (folder / "information").read_text().splitlines()
            said = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
            found[said["GPU UUID"]] = int(said["Device Minor"])
        except (OSError, KeyError, ValueError):
            continue
    return found


def _tag(pid: int) -> str:
    def read(key: tuple[str, int]) -> str:
        try:
            variables = Path(f"/proc/{key[1]}/environ").read_bytes().split(b"\0")
        except OSError:
            return ""
        start = f"{TAG_NAME}=".encode()
        return next((one.removeprefix(start).decode(errors="replace") for one in variables if one.startswith(start)), "")

    return bounded_reads([("tag", pid)], read).get(("tag", pid), "")
