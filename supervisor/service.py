"""This node as a service: what it tells the manager that started it (systemd, mostly), and what that keeps for it. Or nobody's service."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from shadowsup.memkeeper.vault import Vault
from shadowsup.supervisor import fd_rescue
from shadowsup.supervisor.fd_store import FdStore, Index, Nobody
from shadowsup.supervisor.identity import Identity
from shadowsup.supervisor.sd_notify import ServiceManager

LOOK_S = 5.0
"""Between two looks at what `systemctl status` shows, where no watchdog wants to hear more often."""
SIGNS = 3.0
"""Signs of life in the time in which the watchdog wants one."""


class Service:
    """Without a manager nothing is told or kept but on disk what the vault's segments are.

    Args:
        runtime: where the index of the stored memory is.
        index: what was stored, as it was read before the runtime directory was cleaned.
    """

    def __init__(self, manager: ServiceManager | None, runtime: Path, index: Index | None = None) -> None:
        self._manager = manager
        self._store = FdStore(manager if manager is not None else Nobody(), runtime)
        self._index = index
        self._said = ""

    @property
    def managed(self) -> bool:
        """Whether a manager has started this process."""
        return self._manager is not None

    def take_sockets(self) -> list[socket.socket]:
        """Return the gateway's listening sockets that were kept."""
        return self._store.take_sockets()

    def keep_sockets(self, sockets: Sequence[socket.socket]) -> None:
        self._store.keep_sockets(sockets)

    def fill(self, vault: Vault, workers: Collection[str]) -> int:
        """Put into ``vault`` what was kept of the memory of these workers. Returns the number of segments."""
        return self._store.fill(vault, self._index, workers)

    def rescue(self, vault: Vault, engines: Collection[Identity], workers: Collection[str]) -> tuple[int, int]:
        """As `shadowsup.supervisor.fd_rescue.fill`."""
        return fd_rescue.fill(vault, self._index, engines, workers)

    def vault_changed(self, vault: Vault) -> None:
        self._store.changed(vault)

    def ready(self) -> None:
        if self._manager is not None:
            self._manager.ready()

    def stopping(self) -> None:
        if self._manager is not None:
            self._manager.stopping()

    def stopped(self) -> None:
        """The node's memory is free, and nobody listens: nothing is to be kept."""
        self._store.clear()

    async def tend(self, describe: Callable[[], str]) -> None:
        """Be alive, on the loop that does the work, and say how things stand, for as long as this runs."""
        manager = self._manager
        if manager is None:
            return
        pause_s = min(LOOK_S, manager.watchdog_s / SIGNS if manager.watchdog_s is not None else LOOK_S)
        while True:
            if manager.watchdog_s is not None:
                manager.alive()
            text = describe()
            if text != self._said:
                self._said = text
                manager.status(text)
            await asyncio.sleep(pause_s)

    def close(self) -> None:
        """Idempotent."""
        self._store.close()
        if self._manager is not None:
            self._manager.close()
