"""Kept memory beyond the death of supervisor and keeper: the service manager holds duplicates of the vault's fds and the listening sockets.

A name is all that the manager keeps of an fd, so what the segments are is in ``segments.json``. It is written before the fds are stored:
what has an fd and no entry, or an entry and no fd, is nothing.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Collection, Sequence
from pathlib import Path

import msgspec

from shadowsup.memkeeper.protocol import SegmentInfo
from shadowsup.memkeeper.vault import Vault
from shadowsup.supervisor.paths import write_private
from shadowsup.supervisor.sd_notify import ServiceManager

FILE = "segments.json"
GATEWAY = "gateway"
_VAULT = "vault."
SETTLE_S = 0.05
"""Changes come in groups: a set with all its segments, the leases of an engine that has died."""

log = logging.getLogger("shadowsup.systemd")


class Index(msgspec.Struct, frozen=True, kw_only=True):
    """``generation``: of the keeper that the vault was connected to."""

    generation: int
    segments: tuple[SegmentInfo, ...]


def read_index(runtime: Path) -> Index | None:
    """Return what was stored, or None; what cannot be read is worth nothing and is no reason not to start."""
    try:
        return msgspec.json.decode((runtime / FILE).read_bytes(), type=Index)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.MsgspecError) as error:
        log.warning("what is in kept memory cannot be told apart: %s", error)
        return None


class Nobody:
    """There is no service manager. What the segments are is left on disk all the same, for `shadowsup.supervisor.fd_rescue`."""

    def __init__(self) -> None:
        self.fds: dict[str, list[int]] = {}

    def store(self, name: str, fd: int) -> None: ...

    def forget(self, name: str) -> None: ...


class FdStore:
    """Keeps the manager's store as the vault is. Needs a running loop from the first `changed` on."""

    def __init__(self, manager: ServiceManager | Nobody, runtime: Path) -> None:
        self._manager = manager
        self._runtime = runtime
        self._stored: set[str] = {name for name in manager.fds if name.startswith(_VAULT)}
        self._vault: Vault | None = None
        self._timer: asyncio.TimerHandle | None = None

    # --- what was kept ----------------------------------------------------------------------------------------------------------

    def take_sockets(self) -> list[socket.socket]:
        """Return the gateway's listening sockets that the manager has kept, non-blocking."""
        found = []
        for fd in self._manager.fds.pop(GATEWAY, []):
            sock = socket.socket(fileno=fd)
            sock.setblocking(False)
            found.append(sock)
        return found

    def fill(self, vault: Vault, index: Index | None, workers: Collection[str]) -> int:
        """Give ``vault`` the segments that were kept for one of ``workers``; let the manager forget the others. Returns how many it has."""
        kept = 0
        for info in index.segments if index is not None else ():
            name = _VAULT + info.manifest.segment
            fds = self._manager.fds.get(name)
            if fds and not set(workers).isdisjoint({info.manifest.worker, *info.workers}):
                vault.hold(info, os.dup(fds[0]))
                kept += 1
        if kept and index is not None:
            vault.generation = index.generation
        for name in list(self._manager.fds):
            if name.startswith(_VAULT):
                for fd in self._manager.fds.pop(name):
                    os.close(fd)
                if not vault.holds(name.removeprefix(_VAULT)):
                    self._stored.discard(name)
                    self._manager.forget(name)
        return kept

    # --- what is to be kept -----------------------------------------------------------------------------------------------------

    def keep_sockets(self, sockets: Sequence[socket.socket]) -> None:
        """Have these kept, and no others."""
        self._manager.forget(GATEWAY)
        for sock in sockets:
            self._manager.store(GATEWAY, sock.fileno())

    def changed(self, vault: Vault) -> None:
        """The vault has changed: store what is new and drop what is gone, a little later."""
        self._vault = vault
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(SETTLE_S, self._settle)

    def clear(self) -> None:
        """The node has stopped: its memory is to be free."""
        self._cancel()
        for name in [*sorted(self._stored), GATEWAY]:
            self._manager.forget(name)
        self._stored.clear()

    def close(self) -> None:
        """Idempotent."""
        self._cancel()

    def _cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _settle(self) -> None:
        self._timer = None
        vault = self._vault
        if vault is None:
            return
        segments = vault.segments()
        index = Index(generation=vault.generation, segments=tuple(segments))
        try:
            write_private(self._runtime / FILE, msgspec.json.encode(index))
        except OSError as error:
            log.warning("what is in memory cannot be left for another supervisor: %s", error)
            return
        present = {_VAULT + info.manifest.segment: info.manifest.segment for info in segments}
        for name in sorted(self._stored - present.keys()):
            self._manager.forget(name)
        for name in present.keys() - self._stored:
            self._manager.store(name, vault.fd(present[name]))
        self._stored = set(present)
