"""Whole process trees: who belongs to an engine, and ending all of them without touching anyone else."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

from shadowsup.supervisor.identity import Identity

TAG_NAME = "SHADOWSUP_ENGINE"
FENCE_TIMEOUT_S = 5.0


def tag(node: str, engine: str, instance: str) -> str:
    """Return the value of `TAG_NAME` for a process: ``NODE/NAME.K/instance`` (``instance``: unique for each start of a node)."""
    return f"{node}/{engine}/{instance}"


@dataclass(frozen=True, kw_only=True)
class Member:
    """One process of a tree. ``pidfd`` is owned by whoever got the member. ``why``: ``leader|tag|group|session|descendant|seen``."""

    identity: Identity
    pidfd: int
    comm: str
    why: str


@dataclass(frozen=True, kw_only=True)
class ShmFile:
    """A file in /dev/shm, by inode: the name may be someone else's by now."""

    path: Path
    inode: int


class Tree:
    """The processes of one engine, from its leader. Remembers what it has seen, so that a daemonised helper stays known."""

    def __init__(self, *, tag: str, leader: Identity, pgid: int) -> None: ...

    def observe(self) -> None:
        """Look at /proc once (some ms) and remember the members and their /dev/shm files. Call every second or so while it lives."""

    def kill(self, *, number: int = 9) -> Killed:
        """Signal every member, again until a look finds no new one (bounded). Blocking, some 10 ms: run in a thread."""
        raise NotImplementedError


class Killed:
    """The pidfds of every member that was signalled. Close it."""

    members: tuple[Member, ...]
    shm: tuple[ShmFile, ...]

    async def gone(self, timeout_s: float = FENCE_TIMEOUT_S) -> tuple[Member, ...]:
        """Wait until all are gone. Returns the survivors after ``timeout_s`` (D state): empty is a fence."""
        raise NotImplementedError

    def close(self) -> None: ...


def kill_tree(*, tag: str, pgid: int, leader: Identity) -> Killed:
    """One-shot `Tree.kill`."""
    raise NotImplementedError


def shm_of(pids: Iterable[int]) -> set[ShmFile]:
    """Return the files in /dev/shm that these processes have mapped or open."""
    raise NotImplementedError


def unlink_shm(files: Collection[ShmFile]) -> list[Path]:
    """Unlink those that are still the same file and that no living process uses. Returns what was removed. After the fence only."""
    raise NotImplementedError
