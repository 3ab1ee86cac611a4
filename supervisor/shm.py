"""What a killed engine leaves in ``/dev/shm``: multiprocessing's segments and semaphores, which only an orderly exit unlinks.

A process that was killed has no mappings left to look at, so its files are noted while it lives (`Tree.observe`) and unlinked after the
fence, when nobody else uses them.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

from shadowsup.supervisor.holders import links_of, pids
from shadowsup.supervisor.proc_reads import bounded_reads, hanging

FOLDER = "/dev/shm/"
_DELETED = " (deleted)"


@dataclass(frozen=True, kw_only=True)
class ShmFile:
    """A file in /dev/shm, by device and inode too: the name may be someone else's by now."""

    path: Path
    device: int
    inode: int


def shm_of(of: Iterable[int]) -> set[ShmFile]:
    """Return the files in /dev/shm that these processes (pids) have mapped or open and that belong to our user.

    Processes that are gone or another user's count for nothing.
    """
    paths = set().union(*_paths_by_pid(of).values())
    return {file for file in map(_identify, paths) if file is not None}


def unlink_shm(files: Collection[ShmFile]) -> list[Path]:
    """Unlink those that are still the same file and that no process uses any more. Returns what was removed.

    After the fence only. A file that cannot be judged, because a process of another user may use it, is another user's too or stays.
    """
    if not files:
        return []
    used = _paths_by_pid(list(pids()))
    if hanging():
        return []  # a process that hangs in the kernel cannot be asked what it uses
    in_use = set().union(*used.values())
    removed = []
    for file in files:
        if str(file.path) in in_use or _identify(str(file.path)) != file:
            continue
        try:
            file.path.unlink()
        except OSError:
            continue
        removed.append(file.path)
    return sorted(removed)


def _paths_by_pid(of: Iterable[int]) -> dict[int, set[str]]:
    """Return pid → files, without those that are gone, another user's, or hang in the kernel."""
    return {pid: paths for (_, pid), paths in bounded_reads((("shm", pid) for pid in of), lambda key: _paths_or_none(key[1])).items()}


def _paths_or_none(pid: int) -> set[str]:
    try:
        return _paths_of(pid)
    except PermissionError:
        return set()


def _paths_of(pid: int) -> set[str]:
    found = {link for link in links_of(pid) if link.startswith(FOLDER)}
    nameless: set[int] = set()
    try:
        with open(f"/proc/{pid}/maps", "rb") as file:
            for line in file:
                at = line.find(b" /dev/shm/")
                if at >= 0:
                    path = os.fsdecode(line[at + 1 :].rstrip(b"\n"))
                    if path.endswith(_DELETED):
                        nameless.add(int(line.split(maxsplit=5)[4]))
                    found.add(path)
    except (FileNotFoundError, ProcessLookupError):
        pass
    if nameless:
        # sem_open maps a file under a name of its own, links it to the one that was asked for, and removes the first.
        with os.scandir(FOLDER) as entries:
            found.update(entry.path for entry in entries if entry.inode() in nameless)
    # shm_open and sem_open make no folders: what lies in one is somebody's own, a model on a RAM disk, say.
    return {path for path in found if not path.endswith(_DELETED) and "/" not in path[len(FOLDER) :]}


def _identify(path: str) -> ShmFile | None:
    try:
        stat = os.lstat(path)
    except OSError:
        return None
    if stat.st_uid != os.geteuid():
        return None
    return ShmFile(path=Path(path), device=stat.st_dev, inode=stat.st_ino)
