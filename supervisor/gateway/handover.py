"""The gateway's listening sockets for a supervisor that finds it running: with them it can replace the gateway, and the port is never free.

A Unix socket in the runtime directory. Whoever connects, of the same user, gets one message with all of them, and nothing more.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Sequence
from pathlib import Path

from shadowsup.supervisor.gateway import private_socket
from shadowsup.wire import credentials

_MOST = 64
"""Listening sockets at most: one for each address of a host name."""

log = logging.getLogger(__name__)


class Handover:
    """Serves ``sockets`` at ``path`` until `close`. Needs a running loop.

    Raises:
        OSError: nothing can be bound there.
    """

    def __init__(self, path: Path, sockets: Sequence[socket.socket]) -> None:
        self._path = path
        self._sockets = sockets
        self._loop = asyncio.get_running_loop()
        self._listener = private_socket.listen(path, socket.SOCK_STREAM)
        self._loop.add_reader(self._listener.fileno(), self._accept)

    def close(self) -> None:
        """Idempotent. The path is left: a successor may have bound it by now."""
        if self._listener.fileno() >= 0:
            self._loop.remove_reader(self._listener.fileno())
            self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # gone again, or it does not read: it falls back on binding anew
            peer, _ = self._listener.accept()
            with peer:
                who = credentials.peer(peer)
                if not who.ours:
                    log.warning("refused the listening sockets to uid %d", who.uid)
                    return
                peer.setblocking(False)
                socket.send_fds(peer, [b"s"], [sock.fileno() for sock in self._sockets])


def fetch(path: Path, timeout_s: float) -> list[socket.socket]:
    """Return duplicates of the listening sockets of the gateway that serves ``path``; [] where none answers in ``timeout_s``."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(timeout_s)
        try:
            sock.connect(str(path))
            word, fds, _, _ = socket.recv_fds(sock, 1, _MOST, socket.MSG_CMSG_CLOEXEC)
        except OSError:
            return []
    found = [socket.socket(fileno=fd) for fd in fds]
    for each in found:
        each.setblocking(False)
    return found if word else []
