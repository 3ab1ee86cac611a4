"""Whole process trees: who belongs to an engine, and ending all of them without touching anyone else.

A process belongs to an engine when one of these holds, and it started no earlier than the engine's leader:

- it is the leader, or was seen as a member before (same pid *and* start time);
- it is in the engine's control group, where it has one (`shadowsup.supervisor.cgroup`);
- its environment has the engine's tag (`TAG_NAME`), which exec'd programs inherit through any number of forks and sessions;
- it is in the leader's process group or session, and the number is still theirs: Linux does not hand out a pid that names a group,
  so while no *other* process has the leader's pid, its group is its group, whether the leader lives or not;
- its parent belongs.

An engine forked by a nursery shows the nursery's environment in /proc (fork keeps it), so for that engine the tag finds only what it
exec'd; what it forked and detached is known from `Tree.observe`, or is a stray child of the subreaper
(`shadowsup.supervisor.subreaper`). Every rule is a line in `Tree._find`.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from shadowsup.supervisor import identity as ids
from shadowsup.supervisor.cgroup import Cgroup
from shadowsup.supervisor.holders import pids
from shadowsup.supervisor.identity import Identity, Stat
from shadowsup.supervisor.proc_reads import bounded_reads
from shadowsup.supervisor.shm import ShmFile, shm_of, unlink_shm

__all__ = ["FENCE_TIMEOUT_S", "TAG_NAME", "Killed", "Member", "ShmFile", "Tree", "kill_tree", "shm_of", "tag", "unlink_shm"]

TAG_NAME = "SHADOWSUP_ENGINE"
"""Environment variable that marks every process of an engine."""

FENCE_TIMEOUT_S = 5.0
"""How long SIGKILL may take to end a tree before its survivors count as unkillable. Healthy GPU processes take up to 0.2 s."""

UNREAD_ROUNDS, UNREAD_PAUSE_S = 3, 0.05
"""How often it is looked again because somebody's environment could not be read in time. On a busy machine it can be a moment later; for
a process that hangs in the kernel nobody waits longer."""
MAX_ROUNDS = 50
MAX_KILL_S = 2.0
"""A tree that still grows after so much killing is not ended by more of it; `Killed.complete` is False then."""


def tag(node: str, engine: str, instance: str) -> str:
    """Return the value of `TAG_NAME` for a process: ``NODE/NAME.K/instance`` (``instance``: unique for each start of a node)."""
    return f"{node}/{engine}/{instance}"


@dataclass(frozen=True, kw_only=True)
class Member:
    """One process of a tree. ``pidfd`` belongs to the `Killed` it is in. ``why``: ``leader|seen|cgroup|tag|group|session|descendant``."""

    identity: Identity
    pidfd: int
    comm: str
    why: str

    def __str__(self) -> str:
        stat = ids.read_stat(self.identity.pid)
        state = f", state {stat.state}" if stat is not None and stat.start_time == self.identity.start_time else ""
        return f"pid {self.identity.pid} ({self.comm}{state})"


class Tree:
    """The processes of one engine. Remembers what it has seen, so that a helper which detached itself stays known.

    Args:
        tag: value of `TAG_NAME` in its environment; empty: not tagged.
        leader: its first process.
        pgid: its process group; only a group that the leader leads counts (another one would not be the engine's own).
        spare: leaders of other trees below this one (a nursery's engines): they, their sessions and their children are left alone.
        cgroup: the folder of the control group that only its processes are in.
    """

    def __init__(self, *, tag: str, leader: Identity, pgid: int, spare: Collection[Identity] = (), cgroup: Path | None = None) -> None:
        self.leader = leader
        self._tag = f"{TAG_NAME}={tag}".encode() if tag else b""
        self._group = pgid if pgid == leader.pid else 0
        self._spare = frozenset(spare)
        self.cgroup = Cgroup(cgroup) if cgroup is not None else None
        self._seen: set[Identity] = {leader}
        self._unread = 0
        """Processes whose environment could not be read at the last look."""
        self.shm: set[ShmFile] = set()
        """Files in /dev/shm that members had open or mapped when they were looked at."""

    def observe(self) -> tuple[Stat, ...]:
        """Look once, remember the members and their /dev/shm files, and return the living members.

        Some ms, some tens with large engines: call it off the loop's thread, every few seconds and before an orderly stop.
        """
        found = self._find(_table(self.leader.start_time))
        # Those that are gone are of no interest any more, and there may be many: a server that starts a process for each request.
        self._seen = {self.leader, *(_identity(stat) for stat, _ in found.values())}
        self.shm = {file for file in self.shm if file.path.exists()} | shm_of(found)
        return tuple(stat for stat, _ in found.values())

    @property
    def seen(self) -> frozenset[Identity]:
        """The members as of the last look; its leader always."""
        return frozenset(self._seen)

    def kill(self, number: int = signal.SIGKILL) -> Killed:
        """Signal every member once, and look again until there is no new one (a fork may have raced the signal). Bounded.

        Blocking, some ms a look: call it off the loop's thread, after `Child.signal_group` has dealt the first blow.

        Raises:
            OSError: a process could not be opened (out of fds). Who had been found by then is signalled.
        """
        signalled: dict[Identity, Member] = {}
        try:
            complete = self._strike_all(signalled, number)
        except BaseException:
            for member in signalled.values():
                os.close(member.pidfd)
            raise
        return Killed(tuple(signalled.values()), frozenset(self.shm), complete=complete)

    def _strike_all(self, signalled: dict[Identity, Member], number: int) -> bool:
        """Returns whether the last look found nobody new."""
        deadline = time.monotonic() + MAX_KILL_S
        unread = 0
        for _ in range(MAX_ROUNDS):
            new = False
            for stat, why in self._find(_table(self.leader.start_time)).values():
                identity = _identity(stat)
                self._seen.add(identity)
                if identity in signalled:
                    continue
                member = _strike(stat, why, number)
                if member is not None:
                    signalled[identity] = member
                    new = True
            if number == signal.SIGKILL and self.cgroup is not None:
                self.cgroup.kill()  # also who is being forked just now
            if not new and (not self._unread or unread == UNREAD_ROUNDS):
                return True
            if not new:
                unread += 1
                time.sleep(UNREAD_PAUSE_S)
            if time.monotonic() > deadline:
                break
        return False

    def _find(self, table: dict[int, Stat]) -> dict[int, tuple[Stat, str]]:
        """Return the living members among ``table``: pid → (stat, why)."""
        untouchable = _untouchable()
        spared = {identity.pid for identity in self._spare if (stat := table.get(identity.pid)) and _identity(stat) == identity}
        candidates = {
            pid: stat
            for pid, stat in table.items()
            if not stat.dead and pid not in untouchable and pid not in spared and stat.session not in spared
        }
        group = self._group if self._group_is_ours() else 0
        grouped = self.cgroup.pids() if self.cgroup is not None else frozenset()
        found: dict[int, tuple[Stat, str]] = {}
        unknown: dict[int, Identity] = {}
        for pid, stat in candidates.items():
            identity = _identity(stat)
            if identity == self.leader:
                found[pid] = (stat, "leader")
            elif identity in self._seen:
                found[pid] = (stat, "seen")
            elif pid in grouped:
                found[pid] = (stat, "cgroup")
            elif group and stat.pgid == group:
                found[pid] = (stat, "group")
            elif group and stat.session == group:
                found[pid] = (stat, "session")
            elif self._tag:
                unknown[pid] = identity
        read = _environs(unknown)
        self._unread = len(unknown) - len(read)
        for pid, variables in read.items():
            if self._tag in variables:
                found[pid] = (candidates[pid], "tag")
        grown = True
        while grown:
            children = {
                pid: (stat, "descendant")
                for pid, stat in candidates.items()
                if pid not in found and stat.ppid in found and stat.start_time >= found[stat.ppid][0].start_time
            }
            found |= children
            grown = bool(children)
        return found

    def _group_is_ours(self) -> bool:
        """False when the leader's pid belongs to another process now: then a group of that number is that one's."""
        stat = ids.read_stat(self._group) if self._group else None
        return stat is None or stat.start_time == self.leader.start_time


class Killed:
    """Everyone who was signalled, by pidfd. Owns the pidfds: `close` it."""

    def __init__(self, members: tuple[Member, ...], shm: frozenset[ShmFile], *, complete: bool) -> None:
        self.members = members
        self.shm = shm
        self.complete = complete
        """False: new members still appeared when the bound was reached."""

    async def gone(self, timeout_s: float = FENCE_TIMEOUT_S) -> tuple[Member, ...]:
        """Wait until all are gone. Returns the survivors after ``timeout_s`` (D state); none of them is a fence."""
        loop = asyncio.get_running_loop()
        left = {member.pidfd: member for member in self.members}
        empty = asyncio.Event()

        def ended(pidfd: int) -> None:
            loop.remove_reader(pidfd)
            del left[pidfd]
            if not left:
                empty.set()

        for pidfd in left:
            loop.add_reader(pidfd, ended, pidfd)
        try:
            if left:
                async with asyncio.timeout(timeout_s):
                    await empty.wait()
        except TimeoutError:
            pass
        finally:
            for pidfd in left:
                loop.remove_reader(pidfd)
        return tuple(left.values())

    def close(self) -> None:
        """Close the pidfds. Idempotent."""
        members, self.members = self.members, ()
        for member in members:
            os.close(member.pidfd)


def kill_tree(*, tag: str, pgid: int, leader: Identity, spare: Collection[Identity] = (), cgroup: Path | None = None) -> Killed:
    """Note the tree's /dev/shm files and kill it: `Tree.observe` and `Tree.kill` in one. Blocking."""
    tree = Tree(tag=tag, leader=leader, pgid=pgid, spare=spare, cgroup=cgroup)
    tree.observe()
    return tree.kill()


def tagged(prefix: str) -> Iterable[tuple[Identity, str]]:
    """Yield every living process whose tag starts with ``prefix`` (``NODE/``), with its tag: for `doctor` and after an adoption."""
    start = f"{TAG_NAME}={prefix}".encode()
    table = {stat.pid: _identity(stat) for stat in _table(0).values() if not stat.dead and stat.pid != os.getpid()}
    for pid, variables in _environs(table).items():
        for variable in variables:
            if variable.startswith(start):
                yield table[pid], variable.partition(b"=")[2].decode(errors="replace")
                break


def _strike(stat: Stat, why: str, number: int) -> Member | None:
    pidfd = ids.open_identity(_identity(stat))
    if pidfd is None:
        return None
    try:
        signal.pidfd_send_signal(pidfd, number)
    except ProcessLookupError:
        os.close(pidfd)
        return None
    except PermissionError:
        # It runs as another user now (setuid): it stays a member, so that the fence says that it is still there.
        pass
    return Member(identity=_identity(stat), pidfd=pidfd, comm=stat.comm, why=why)


def _identity(stat: Stat) -> Identity:
    return Identity(pid=stat.pid, start_time=stat.start_time, boot_id=ids.boot_id())


def _table(since: int) -> dict[int, Stat]:
    """Return every process that started at ``since`` (ticks) or later, by pid."""
    found = {}
    for pid in pids():
        stat = ids.read_stat(pid)
        if stat is not None and stat.start_time >= since:
            found[pid] = stat
    return found


def _untouchable() -> set[int]:
    """Return ourselves and our ancestors: whatever a rule says, these are nobody's members."""
    found = {1}
    pid = os.getpid()
    while pid > 1 and pid not in found:
        found.add(pid)
        stat = ids.read_stat(pid)
        pid = stat.ppid if stat is not None else 1
    return found


def _environs(processes: Mapping[int, Identity]) -> dict[int, list[bytes]]:
    """Return the environment of each process that lets it be read (one that hangs in the kernel may not)."""
    by_identity = {identity: pid for pid, identity in processes.items()}
    return {by_identity[identity]: found for identity, found in bounded_reads(by_identity, _environ).items()}


def _environ(identity: Identity) -> list[bytes]:
    try:
        with open(f"/proc/{identity.pid}/environ", "rb") as file:
            return file.read().split(b"\0")
    except OSError:  # gone, or another user's: then it carries no tag of ours
        return []
