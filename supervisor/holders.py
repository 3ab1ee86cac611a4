"""Who holds a file, device or socket open, in words: by looking through ``/proc/*/fd``."""

from __future__ import annotations

import os
import pwd
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

COMMAND_CHARS = 120


@dataclass(frozen=True, kw_only=True)
class Holder:
    """One process that has it open. ``command``: its command line, cut to `COMMAND_CHARS`; ``user``: name, or number without one."""

    pid: int
    command: str
    user: str

    def __str__(self) -> str:
        return f"pid {self.pid} ({self.command}), user {self.user}"


def pids() -> Iterator[int]:
    """Yield the pid of every process that is listed now."""
    with os.scandir("/proc") as entries:
        for entry in entries:
            if entry.name.isdigit():
                yield int(entry.name)


def links_of(pid: int) -> Iterator[str]:
    """Yield what each fd of a process refers to: a path, ``socket:[inode]``, ``pipe:[inode]``.

    Raises:
        PermissionError: it is another user's.
    """
    try:
        entries = list(Path(f"/proc/{pid}/fd").iterdir())
    except (FileNotFoundError, ProcessLookupError):
        return
    for entry in entries:
        try:
            yield str(entry.readlink())
        except (FileNotFoundError, ProcessLookupError):
            continue


def holders(match: Callable[[str], bool]) -> tuple[list[Holder], bool]:
    """Return the processes with an fd that ``match`` accepts, and whether every process could be looked into.

    ``match`` gets what `links_of` yields, e.g. ``lambda link: link.startswith("/dev/nvidia")``.
    """
    found, complete = [], True
    for pid in pids():
        try:
            if any(match(link) for link in links_of(pid)):
                found.append(describe(pid))
        except PermissionError:
            complete = False
    return found, complete


def describe(pid: int) -> Holder:
    """Return who a process is, as far as it can be seen."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            command = file.read(4096).rstrip(b"\0").replace(b"\0", b" ").decode(errors="replace")
        user = user_name(Path(f"/proc/{pid}").stat().st_uid)
    except OSError:
        return Holder(pid=pid, command="gone", user="?")
    return Holder(pid=pid, command=command[:COMMAND_CHARS] or "no command line", user=user)


def user_name(uid: int) -> str:
    """Return the name of a user, the number where it has none."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)
