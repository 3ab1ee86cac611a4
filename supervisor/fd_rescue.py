"""Kept memory of a node that has lost supervisor and keeper at once, where no service manager has it: engines still hold it.

Whoever holds the fds holds the memory. An engine has those of its KV and ledger open and has weights mapped; what each of them is was left
in ``segments.json``. The kernel names a memfd after its segment, whose id has the keeper's generation in it, and lets a process of the same
user open it anew through /proc. So nothing is asked of the engines, which may be stopped or busy. Device memory has no such name: it is not
found here.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

from shadowsup.memkeeper.protocol import Kind, SegmentInfo, SegmentState
from shadowsup.memkeeper.vault import Vault
from shadowsup.supervisor import identity as ids
from shadowsup.supervisor.fd_store import Index
from shadowsup.supervisor.identity import Identity

_SIZE_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW

log = logging.getLogger("shadowsup.rescue")


def fill(vault: Vault, index: Index | None, engines: Collection[Identity], workers: Collection[str]) -> tuple[int, int]:
    """Give ``vault`` what living ``engines`` hold of the segments of ``workers``. Returns how many it has, and how many were not found.

    A set comes whole or not at all: bytes without their index are worth nothing.
    """
    wanted: dict[str, list[SegmentInfo]] = {}
    for info in index.segments if index is not None else ():
        ours = not set(workers).isdisjoint({info.manifest.worker, *info.workers})
        if ours and not info.superseded and (info.manifest.kind is not Kind.WEIGHTS or info.state is SegmentState.SEALED):
            wanted.setdefault(info.manifest.set_id, []).append(info)
    places: dict[str, tuple[Identity, Path]] = {}
    for engine in engines if wanted else ():
        for name, path in _memfds(engine.pid):
            places.setdefault(name, (engine, path))
    kept = missing = 0
    for infos in wanted.values():
        found = [(info, _open(info, *places[info.manifest.segment])) for info in infos if info.manifest.segment in places]
        if len(found) == len(infos) and all(fd is not None for _, fd in found):
            for info, fd in found:
                assert fd is not None
                vault.hold(info, fd)
            kept += len(infos)
        else:
            for _, fd in found:
                if fd is not None:
                    os.close(fd)
            missing += len(infos)
    if kept and index is not None:
        vault.generation = index.generation
    return kept, missing


def _memfds(pid: int) -> Iterator[tuple[str, Path]]:
    """Yield (segment, path to open) of what a process has open, then of what it has mapped."""
    for path in _entries(Path(f"/proc/{pid}/fd")):
        if name := _segment(path):
            yield name, path
    for path in _entries(Path(f"/proc/{pid}/map_files")):  # may need privileges that we do not have
        if name := _segment(path):
            yield name, path


def _entries(folder: Path) -> Iterable[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return ()


def _segment(path: Path) -> str:
    try:
        target = str(path.readlink())
    except OSError:
        return ""
    begin, end = "/memfd:shadowsup-", " (deleted)"
    return target[len(begin) : -len(end)] if target.startswith(begin) and target.endswith(end) else ""


def _open(info: SegmentInfo, engine: Identity, path: Path) -> int | None:
    """Open a segment anew; None: it is not there any more, or is not what its name says."""
    # Of sealed weights only a descriptor for reading can be mapped on every kernel.
    mode = os.O_RDONLY if info.manifest.kind is Kind.WEIGHTS else os.O_RDWR
    try:
        fd = os.open(path, mode | os.O_CLOEXEC)
    except OSError as error:
        log.warning("%s is held by pid %d and cannot be opened: %s", info.manifest.segment, engine.pid, error.strerror)
        return None
    with contextlib.suppress(OSError):
        sealed = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        needed = _SIZE_SEALS | (fcntl.F_SEAL_WRITE if info.manifest.kind is Kind.WEIGHTS else 0)
        # Alive still: so it was that engine's all the time, and no other process's that came by its pid.
        if ids.alive(engine) and os.fstat(fd).st_size == info.manifest.size and sealed & needed == needed:
            return fd
    os.close(fd)
    return None
