"""Where a node's sockets and process records are: found for clients, made safe for ``start``.

Order: ``--runtime-dir``, ``SHADOWSUP_RUNTIME_DIR``, the config's ``node.runtime_dir`` (``start`` only), then ``NODE`` in the first
usable of ``/run/shadowsup`` (root), ``$XDG_RUNTIME_DIR/shadowsup`` and ``/tmp/shadowsup-UID``.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shadowsup.supervisor.errors import ExitCode, NotRunning, SupervisorError

VARIABLE = "SHADOWSUP_RUNTIME_DIR"
CONTROL_SOCKET = "control.sock"
EVENTS_SOCKET = "events.sock"
READING_CONTROL_SOCKET = "control-ro.sock"
READING_EVENTS_SOCKET = "events-ro.sock"
"""For the members of ``node.group``; there only when the config names one."""
NODE_RECORD = "node.json"
PROCESSES = "processes.json"

MAX_SOCKET_PATH = 107
"""Bytes: sockaddr_un.sun_path has 108 with the final NUL (unix(7))."""

MARKS = (CONTROL_SOCKET, NODE_RECORD, PROCESSES)
SHARED = Path("/run/shadowsup")
"""Where the nodes of root are. Other users may look for those that are shared with a group of theirs."""
"""A folder with one of these is, or was, a node's."""


@dataclass(frozen=True)
class Base:
    """A folder that has runtime directories, one for each node. ``path / NODE`` is one."""

    path: Path
    world: bool = False
    """Its parent is open to every user (/tmp)."""


@dataclass(frozen=True)
class Found:
    """A runtime directory for a client. ``explicit``: the user named it. ``others``: further ones there are."""

    path: Path
    explicit: bool
    others: tuple[Path, ...] = ()


def bases(environ: Mapping[str, str]) -> tuple[Base, ...]:
    """Return the folders to look in, in order; the first is where a new node of this user goes."""
    found = []
    if os.geteuid() == 0:
        found.append(Base(SHARED))
    xdg = environ.get("XDG_RUNTIME_DIR")
    if xdg and Path(xdg).is_absolute():
        found.append(Base(Path(xdg) / "shadowsup"))
    found.append(Base(Path(f"/tmp/shadowsup-{os.geteuid()}"), world=True))
    return tuple(found)


def for_start(node: str, *, explicit: Path | None, configured: Path | None, environ: Mapping[str, str]) -> Path:
    """Return the absolute path of the runtime directory of ``node``; it need not exist.

    A node that lives in one of the later bases is found there, so that a changed environment does not start it twice.
    """
    if explicit is not None:
        return explicit.absolute()
    if environ.get(VARIABLE):
        return Path(environ[VARIABLE]).absolute()
    if configured is not None:
        return configured.absolute()
    candidates = [base.path / node for base in bases(environ)]
    for path in candidates:
        if serving(path):
            return path
    for base, path in zip(bases(environ), candidates, strict=True):
        if base.world or _usable(base.path.parent):
            return path
    return candidates[-1]


def find(*, explicit: Path | None, environ: Mapping[str, str]) -> Found:
    """Return the runtime directory that a client means.

    One node that serves is taken before any that left only files. Whether anything serves the result is for the caller to see.

    Raises:
        NotRunning: there is none.
        SupervisorError: several nodes (exit code 2), or a folder that is not safe to use.
    """
    if explicit is not None or environ.get(VARIABLE):
        return Found((explicit or Path(environ[VARIABLE])).absolute(), explicit=True)
    there: list[Path] = []
    own = bases(environ)
    for base in own if os.geteuid() == 0 else (*own, Base(SHARED)):
        if base.world and not _is_ours(base.path):
            continue  # anyone could have made it
        with contextlib.suppress(OSError):
            there += sorted(path for path in base.path.iterdir() if _is_nodes(path))
    living = [path for path in there if serving(path)]
    chosen = living or there
    if not chosen:
        looked = ", ".join(str(base.path) for base in bases(environ))
        raise NotRunning("no node is running", f"looked in {looked}; start one with shadowsup start CONFIG, or name its --runtime-dir")
    if len(chosen) > 1:
        state = "are running" if living else "have left files"
        raise SupervisorError(
            f"{len(chosen)} nodes {state}: {', '.join(str(path) for path in chosen)}",
            f"name one with --runtime-dir or {VARIABLE}",
            exit_code=ExitCode.USAGE,
        )
    return Found(chosen[0], explicit=False, others=tuple(path for path in there if path != chosen[0]))


def _is_nodes(path: Path) -> bool:
    try:
        return any((path / mark).exists() for mark in MARKS)
    except PermissionError:  # another group's
        return False


def serving(path: Path) -> bool:
    """Tell whether a process listens on the control socket (also one that is stopped or hangs)."""
    try:
        with connected(path):
            return True
    except BlockingIOError:
        return True  # its queue is full: it does not accept, but it is there
    except OSError:
        return False


def connected(path: Path) -> socket.socket:
    """Return a socket that is connected to the control socket of ``path``, or to the one for reading where only that lets us in.

    Raises:
        OSError: BlockingIOError: its queue is full; PermissionError: neither lets us in; others: nobody listens.
    """
    try:
        return _connected(path / CONTROL_SOCKET)
    except PermissionError:
        try:
            return _connected(path / READING_CONTROL_SOCKET)
        except FileNotFoundError:
            raise PermissionError(f"{path / CONTROL_SOCKET}: permission denied") from None


def _connected(path: Path) -> socket.socket:
    probe = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        probe.connect(str(path))
    except BaseException:
        probe.close()
        raise
    return probe


def socket_names(path: Path) -> tuple[str, str]:
    """Return the names of the control and the events socket that this user may open: the node's own, else those for reading."""
    if not os.access(path / CONTROL_SOCKET, os.W_OK) and os.access(path / READING_CONTROL_SOCKET, os.W_OK):
        return READING_CONTROL_SOCKET, READING_EVENTS_SOCKET
    return CONTROL_SOCKET, EVENTS_SOCKET


# --- making one -------------------------------------------------------------------------------------------------------------


def create(path: Path, *, group: int | None = None, longest_name: int = 32) -> Path:
    """Make the directory, mode 0700 (0750 with ``group``), or check that the one there is ours alone. Returns its absolute path.

    ``longest_name``: characters of the longest worker name, for the length of socket paths.

    Raises:
        SupervisorError: another user's, open to others, a link where anyone could have put it, or too long for sockets.
    """
    path = path.absolute()
    _check_length(path, longest_name)
    for ancestor in reversed(path.parents):
        _check_ancestor(ancestor)
    # /tmp/shadowsup-UID and /run/shadowsup are made too, closed to others; what lies above must be there.
    try:
        if not path.parent.is_dir():
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700)
        _check_own(path, group)
        if group is not None:
            _share(path, group)
    except PermissionError as error:
        raise SupervisorError(
            f"{path}: no permission to make the runtime directory ({error.filename})", "name another with --runtime-dir"
        ) from None
    except OSError as error:
        raise SupervisorError(f"{path}: cannot make the runtime directory: {error.strerror}", "name another with --runtime-dir") from None
    return path


def _share(path: Path, group: int) -> None:
    try:
        os.chown(path, -1, group)
    except PermissionError:
        raise SupervisorError(*not_of_group(group)) from None
    path.chmod(0o750)
    if path.parent == SHARED and path.parent.stat().st_uid == os.geteuid():
        path.parent.chmod(0o755)  # names of nodes are no secret; what is in them stays closed


def not_of_group(group: int) -> tuple[str, str]:
    """Return what to say when a file cannot be given to a group: message and hint."""
    import grp

    name = grp.getgrgid(group).gr_name
    return f"this user is not a member of node.group {name}", f"add it (usermod -aG {name} USER, then log in again), or name another group"


def _check_length(path: Path, longest_name: int) -> None:
    # The longest socket a node makes: {dir}/{role}-{NAME}.{K}.sock, with 8 bytes for the role and 6 digits for K.
    room = len(os.fsencode(path)) + len("/") + 8 + len("-") + longest_name + len(".") + 6 + len(".sock")
    if room > MAX_SOCKET_PATH:
        most = MAX_SOCKET_PATH - room + len(os.fsencode(path))
        raise SupervisorError(
            f"{path} is too long: its sockets would have {room} bytes, Linux allows {MAX_SOCKET_PATH}",
            f"name a runtime directory of at most {most} bytes with --runtime-dir or node.runtime_dir",
        )


def _check_ancestor(path: Path) -> None:
    """Refuse a folder or link that any user could have put there, in a folder that is open to everyone."""
    with contextlib.suppress(FileNotFoundError):
        status, above = path.lstat(), path.parent.lstat()
        if path == path.parent or not above.st_mode & 0o002:
            return
        if stat.S_ISLNK(status.st_mode):
            raise SupervisorError(
                f"{path} is a symbolic link in a folder that is open to everyone", "remove it, or name another --runtime-dir"
            )
        if status.st_uid not in (os.geteuid(), 0):
            raise SupervisorError(f"{path} belongs to another user (uid {status.st_uid})", "name another --runtime-dir")
        if status.st_mode & 0o002 and not status.st_mode & stat.S_ISVTX:
            raise SupervisorError(f"other users may write to {path} (mode {stat.S_IMODE(status.st_mode):04o})", f"chmod 700 {path}")


def _check_own(path: Path, group: int | None) -> None:
    status = path.lstat()
    if stat.S_ISLNK(status.st_mode):
        if path.parent.stat().st_mode & 0o002:
            raise SupervisorError(
                f"{path} is a symbolic link in a folder that is open to everyone", "remove it, or name another --runtime-dir"
            )
        status = path.stat()
    if not stat.S_ISDIR(status.st_mode):
        raise SupervisorError(f"{path} is there and is not a folder", "name another --runtime-dir")
    if status.st_uid != os.geteuid():
        raise SupervisorError(f"{path} belongs to another user (uid {status.st_uid})", "name another --runtime-dir")
    allowed = 0o700 if group is None or status.st_gid != group else 0o750
    if status.st_mode & 0o777 & ~allowed:
        raise SupervisorError(
            f"{path} is open to other users (mode {stat.S_IMODE(status.st_mode):04o})", f"chmod 700 {path}, if its content is yours"
        )


def _is_ours(path: Path) -> bool:
    try:
        status = path.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o022


def _usable(path: Path) -> bool:
    return path.is_dir() and os.access(path, os.W_OK | os.X_OK)


# --- what a node says about itself ------------------------------------------------------------------------------------------


def read_record(path: Path) -> dict[str, Any]:
    """Return what ``node.json`` says (``name``, ``pid``, ``state_dir``, …), also when the supervisor is gone; {} if nothing."""
    import json

    try:
        found = json.loads((path / NODE_RECORD).read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def clean(path: Path, keep: Iterable[str] = ()) -> None:
    """Remove what a node made in its runtime directory, and the directory if nothing else is in it.

    Only sockets, files of ours and folders below are removed; the caller has made sure that no process uses them.
    """
    import shutil

    kept = set(keep)
    with contextlib.suppress(FileNotFoundError):
        for entry in path.iterdir():
            if entry.name in kept:
                continue
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry, ignore_errors=True)
            else:
                entry.unlink(missing_ok=True)
        if not kept:
            with contextlib.suppress(OSError):
                path.rmdir()
