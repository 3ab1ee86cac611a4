"""The faults of ``bench chaos``: which process is struck how, and what must be there again afterwards."""

from __future__ import annotations

import enum
import importlib.util
import os
import random
import signal
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import psutil

from shadowsup.supervisor.errors import ExitCode, SupervisorError

Status = dict[str, Any]


class Kind(str, enum.Enum):
    """What is struck. All get SIGKILL, but for the kinds that stop."""

    ACTIVE = "active"
    SHADOW = "shadow"
    BOTH = "active+shadow"
    STOPPED = "stopped active"
    STOPPED_SHADOW = "stopped shadow"
    KEEPER = "memkeeper"
    KEEPER_ACTIVE = "memkeeper+active"
    SUPERVISOR = "supervisor"
    SUPERVISOR_ACTIVE = "supervisor+active"
    GATEWAY = "gateway"
    NURSERY = "nursery"
    NURSERY_ACTIVE = "nursery+active"
    SPARE = "spare"
    COLD = "nursery+spare+active"
    """Nobody is left to fork a successor."""
    SCRIBE = "scribe"
    SENSOR = "sensor"

    @property
    def stops(self) -> bool:
        """The process gets SIGSTOP: it is there, and does nothing any more."""
        return self in (Kind.STOPPED, Kind.STOPPED_SHADOW)

    @property
    def targets(self) -> tuple[str, ...]:
        return tuple(self.value.removeprefix("stopped ").split("+"))

    @property
    def lonely(self) -> bool:
        """No other fault may follow before everything is back: two processes that stand in for each other would be away at once."""
        return "supervisor" in self.targets or "gateway" in self.targets


@dataclass(frozen=True, kw_only=True)
class Strike:
    """What was done. ``pids``: by target; ``engine``: id of the active engine if it was struck."""

    number: int
    kind: Kind
    at_s: float
    pids: dict[str, int]
    engine: str | None


def chosen(names: Sequence[str]) -> list[Kind]:
    """Return the kinds named (by value; ``-`` and ``_`` stand for a blank); all for none.

    Raises:
        SupervisorError: (usage) there is none of this name.
    """
    by_name = {kind.value: kind for kind in Kind}
    found = []
    for name in names:
        kind = by_name.get(name.strip().replace("-", " ").replace("_", " "))
        if kind is None:
            raise SupervisorError(f"there is no kind of fault named {name!r}", f"there are {', '.join(by_name)}", exit_code=ExitCode.USAGE)
        found.append(kind)
    return found or list(Kind)


def possible(kinds: Iterable[Kind], status: Status, worker: Status) -> list[Kind]:
    """Return those that this node has processes for."""
    there = {"active", "gateway", "scribe", "memkeeper"}
    if importlib.util.find_spec("shadowsup.supervisor.adoption") is not None:  # a supervisor that takes over what another has left
        there.add("supervisor")
    if worker["shadows"]:
        there.add("shadow")
    if status["nursery"]:
        there |= {"nursery", "spare"}
    if status["sensor"]["pid"]:
        there.add("sensor")
    return [kind for kind in kinds if there.issuperset(kind.targets)]


def pids_of(status: Status, worker: Status, *, settled: bool = False) -> dict[str, int]:
    """Return the pid of every target that lives now. ``settled``: engines only once they serve or are parked.

    One that is stopped while it loads is given a minute by the node, as long as an import may hold the GIL: not to be waited for each time.
    """
    found = {"supervisor": status["node"]["pid"]}
    for part in ("memkeeper", "gateway", "scribe", "sensor"):
        found[part] = status[part]["pid"]
    for nursery in status["nursery"][:1]:
        found["nursery"] = nursery["pid"]
        found["spare"] = spare_of(nursery["pid"], (engine["pid"] for each in status["workers"] for engine in each["engines"]))
    for role in ("active", "shadow"):
        engines = [engine for engine in worker["engines"] if engine["role"] == role and engine["pid"]]
        found[role] = next((engine["pid"] for engine in engines if not settled or engine["state"] in ("active", "parked")), None)
    return {target: pid for target, pid in found.items() if pid}


def spare_of(nursery: int | None, engines: Iterable[int | None]) -> int | None:
    """Return the pid of a nursery's spare: its child that is no engine. None: there is none just now."""
    if not nursery:
        return None
    known = set(engines)
    try:
        children = psutil.Process(nursery).children()
    except psutil.Error:
        return None
    spares = []
    for child in children:
        try:
            if child.pid not in known and child.status() != psutil.STATUS_ZOMBIE:
                spares.append(child.pid)
        except psutil.Error:
            continue
    return spares[0] if len(spares) == 1 else None


def strike(kind: Kind, pids: dict[str, int], rng: random.Random) -> dict[str, int]:
    """Strike every target of ``kind`` in an order drawn by lot; return whom it hit. A target that is just being replaced is left out."""
    targets = [target for target in kind.targets if target in pids]
    rng.shuffle(targets)
    hit = {}
    for target in targets:
        try:
            os.kill(pids[target], signal.SIGSTOP if kind.stops else signal.SIGKILL)
        except ProcessLookupError:
            continue
        hit[target] = pids[target]
    return hit


def missing(status: Status, worker: Status, struck: Iterable[Strike]) -> str | None:
    """Return what is not as it should be after ``struck``, for people; None when the node is whole and has replaced whoever was struck."""
    if worker["state"] != "healthy":
        return f"worker {worker['name']} is {worker['state']} {worker.get('reason') or ''}".rstrip()
    parts = {name: status[name] for name in ("memkeeper", "gateway", "scribe")}
    parts |= {f"nursery-{number}": nursery for number, nursery in enumerate(status["nursery"])}
    if status["sensor"]["pid"]:
        parts["sensor"] = status["sensor"]
    for name, part in parts.items():
        if part["state"] != "running":
            return f"{name} is {part['state']}"
    now = pids_of(status, worker)
    for one in struck:
        for target, pid in one.pids.items():
            if pid in now.values():
                return f"{target} (pid {pid}), struck by fault {one.number}, is still there"
    return None
