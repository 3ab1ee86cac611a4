"""A control group (v2) for each engine, where we may make them: its processes cannot leave it, and one write kills them all.

https://docs.kernel.org/admin-guide/cgroup-v2.html. It is an addition: where there is none, process groups, the child subreaper and the tag
in the environment find the processes (`tree`), and they are asked with a cgroup, too. Every function takes the root of the file system
that it looks into, so that tests can lay out one of their own.

We may make groups below our own when it was delegated to us: by systemd (``Delegate=yes``, which marks it), or because nobody else manages
groups here (root without systemd). The memory controller, whose ``memory.events`` tells of OOM kills, can be switched on only where our
own group has no process in it, which is so with ``DelegateSubgroup=`` in the unit; without it a cgroup finds and kills, and tells nothing.
"""

from __future__ import annotations

import contextlib
import logging
import os
from pathlib import Path, PurePosixPath

ROOT = Path("/")
FOLDER = "shadowsup-{node}-{instance}"
_DELEGATED = ("user.delegate", "trusted.delegate")
"""Extended attributes by which systemd marks a group that it has given away (systemd.resource-control(5), CGROUP_DELEGATION)."""

log = logging.getLogger("shadowsup.cgroup")


class Cgroup:
    """The group of one engine."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def add(self, pid: int) -> bool:
        """Move a process, with all its threads, into the group. Returns whether it is there: it may be gone."""
        try:
            (self.path / "cgroup.procs").write_text(f"{pid}\n")
        except OSError as error:
            log.info("pid %d is not in %s: %s", pid, self.path.name, error.strerror)
            return False
        return True

    def pids(self) -> frozenset[int]:
        """Return the processes in it and below; zombies are none of them. Empty when there is no such group (any more)."""
        found: set[int] = set()
        try:
            below = [self.path, *(path for path in self.path.rglob("*") if path.is_dir())]
        except OSError:
            return frozenset()
        for folder in below:
            with contextlib.suppress(OSError, ValueError):
                found |= {int(word) for word in (folder / "cgroup.procs").read_text().split()}
        return frozenset(found - {0})  # 0: of another pid namespace

    def kill(self) -> bool:
        """SIGKILL to every process in it and below, those too that are being forked at this moment. Returns whether the kernel took it."""
        try:
            (self.path / "cgroup.kill").write_text("1\n")
        except OSError:  # before Linux 5.14, or gone
            return False
        return True

    def oom_kills(self) -> int | None:
        """Return how many of its processes the kernel has killed for want of memory; None where it does not tell."""
        with contextlib.suppress(OSError, ValueError):
            for line in (self.path / "memory.events").read_text().splitlines():
                name, _, count = line.partition(" ")
                if name == "oom_kill":
                    return int(count)
        return None

    def remove(self) -> bool:
        """Remove it, with what was made below it. Returns False while processes, zombies too, are in it."""
        try:
            for folder in sorted((path for path in self.path.rglob("*") if path.is_dir()), reverse=True):
                folder.rmdir()
            self.path.rmdir()
            with contextlib.suppress(OSError):  # others are in it
                self.path.parent.rmdir()
        except FileNotFoundError:
            return True
        except OSError:
            return False
        return True


class NodeCgroup:
    """The group below which a node's engines have theirs."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def engine(self, engine: str) -> Cgroup | None:
        """Make the group of an engine; None where that fails: the engine runs without."""
        path = self.path / engine
        for again in (True, False):
            try:
                self.path.mkdir(exist_ok=True)
                self._count_memory()
                path.mkdir(exist_ok=True)
                return Cgroup(path)
            except OSError as error:
                if not (again and isinstance(error, FileNotFoundError)):  # the last engine's end has just removed the folder above
                    log.info("%s runs without a control group of its own: %s", engine, error)
                    break
        return None

    def _count_memory(self) -> None:
        # EBUSY where processes are in the group above, EINVAL where it has no memory controller: then nobody tells of OOM kills.
        with contextlib.suppress(OSError):
            (self.path.parent / "cgroup.subtree_control").write_text("+memory\n")
            (self.path / "cgroup.subtree_control").write_text("+memory\n")


def find(node: str, instance: str, *, root: Path = ROOT, uid: int | None = None) -> NodeCgroup | None:
    """Return where the engines of a node may have their groups; None: there is no cgroup v2 here, or it is not ours to change."""
    own = own_group(root)
    if own is None:
        return None
    uid = os.geteuid() if uid is None else uid
    name = FOLDER.format(node=node, instance=instance)
    if _marked(own.parent) and os.access(own.parent, os.W_OK):  # DelegateSubgroup=: the group that was given to us is the one above ours
        return NodeCgroup(own.parent / name)
    return NodeCgroup(own / name) if _may_change(own, root, uid) else None


def own_group(root: Path = ROOT) -> Path | None:
    """Return the folder of the cgroup (v2) that this process is in."""
    mount = _mount(root)
    if mount is None:
        return None
    point, top = mount
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return None
    ours = next((line.removeprefix("0::") for line in lines if line.startswith("0::")), None)
    if ours is None:
        return None
    try:
        below = PurePosixPath(ours).relative_to(top)
    except ValueError:  # outside what is mounted here (a container that was not given a namespace of its own)
        return None
    folder = point / below
    return folder if folder.is_dir() else None


def _mount(root: Path) -> tuple[Path, str] | None:
    """Return where cgroup2 is mounted, and which group is at the top of it (proc_pid_mountinfo(5))."""
    try:
        lines = (root / "proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        fields, _, rest = line.partition(" - ")
        words = fields.split(" ")
        if rest.split(" ")[0] == "cgroup2" and len(words) > 4:
            return root / words[4].lstrip("/"), words[3]
    return None


def _may_change(folder: Path, root: Path, uid: int) -> bool:
    if not os.access(folder, os.W_OK) or not (folder / "cgroup.procs").exists():
        return False
    if uid != 0:
        return folder.stat().st_uid == uid and os.access(folder / "cgroup.procs", os.W_OK)
    # sd_booted(3): without systemd nobody else makes groups here.
    return not (root / "run/systemd/system").is_dir() or _marked(folder)


def _marked(folder: Path) -> bool:
    """Tell whether systemd has marked the group as given away."""
    for name in _DELEGATED:
        with contextlib.suppress(OSError):
            if os.getxattr(folder, name) == b"1":
                return True
    return False
