"""Other settings for a gateway that runs: limits, keys, and listening sockets, which come as descriptors. What is connected stays so.

A Unix socket in the runtime directory: one message with the sockets, one answer when they are in use, then the end of the connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import struct
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import msgspec

from shadowsup.supervisor.errors import SupervisorError
from shadowsup.supervisor.gateway import private_socket
from shadowsup.wire.gateway import Retune, Retuned

_UCRED = struct.Struct("3i")
"""``struct ucred``: pid, uid, gid."""
_MOST = 64
"""Listening sockets at most: one for each address of a host name."""
_SIZE = 65536

log = logging.getLogger(__name__)

Apply = Callable[[Retune, list[socket.socket]], Awaitable[None]]
"""Takes the settings into use; owns the sockets (none: those in use stay). Raises OSError or ValueError: nothing was changed."""


class RetuneServer:
    """Listens at ``path`` until `close`. Needs a running loop.

    Raises:
        OSError: nothing can be bound there.
    """

    def __init__(self, path: Path, apply: Apply) -> None:
        self._apply = apply
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._listener = private_socket.listen(path, socket.SOCK_SEQPACKET)
        self._loop.add_reader(self._listener.fileno(), self._accept)

    def close(self) -> None:
        """Idempotent. The path is left: a successor may have bound it by now."""
        if self._listener.fileno() >= 0:
            self._loop.remove_reader(self._listener.fileno())
            self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # gone again
            peer, _ = self._listener.accept()
            task = self._loop.create_task(self._serve(peer))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _serve(self, peer: socket.socket) -> None:
        with peer:
            peer.setblocking(False)
            _, uid, _ = _UCRED.unpack(peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
            if uid not in (os.geteuid(), 0):
                log.warning("refused other settings from uid %d", uid)
                return
            ready = asyncio.Event()
            self._loop.add_reader(peer.fileno(), ready.set)
            try:
                await ready.wait()
                data, fds, _, _ = socket.recv_fds(peer, _SIZE, _MOST, socket.MSG_CMSG_CLOEXEC)
            except OSError:
                return
            finally:
                self._loop.remove_reader(peer.fileno())
            sockets = [socket.socket(fileno=fd) for fd in fds]
            for each in sockets:
                each.setblocking(False)
            answer = Retuned()
            try:
                await self._apply(msgspec.json.decode(data, type=Retune), sockets)
            except (OSError, ValueError) as error:  # of msgspec, too
                for each in sockets:
                    each.close()
                answer = Retuned(error=str(error))
            with contextlib.suppress(OSError):
                peer.send(msgspec.json.encode(answer))


def retune(path: Path, settings: Retune, sockets: Sequence[socket.socket], timeout_s: float) -> None:
    """Have the gateway at ``path`` take ``settings`` and, where there are any, ``sockets`` instead of those it listens on. Blocking.

    Raises:
        SupervisorError: it does not answer, or cannot.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.settimeout(timeout_s)
        try:
            sock.connect(str(path))
            socket.send_fds(sock, [msgspec.json.encode(settings)], [each.fileno() for each in sockets])
            answer = msgspec.json.decode(sock.recv(_SIZE), type=Retuned)
        except (OSError, msgspec.MsgspecError) as error:
            raise SupervisorError(f"the gateway does not take other settings: {error}", "try again; its log may say why") from None
    if answer.error:
        raise SupervisorError(f"the gateway cannot take other settings: {answer.error}")
