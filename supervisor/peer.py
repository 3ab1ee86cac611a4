"""A connection to one of the node's own servers (scribe, nursery) on the asyncio loop: frames and fds in, frames and fds out."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Sequence
from pathlib import Path

from shadowsup.memkeeper.channel import Channel, ChannelClosed, OwnedFd
from shadowsup.supervisor.errors import SupervisorError

_RETRY_S = 0.02


class Peer:
    """Owns the socket. Callbacks run on the loop.

    Args:
        sock: connected.
        on_frame: one payload; takes the fds that belong to it with ``take_fds`` of this object.
        on_lost: called once, with the reason, when the connection ends by itself (not by `close`). It is closed then.
    """

    def __init__(self, sock: socket.socket, on_frame: Callable[[bytes], None], on_lost: Callable[[str], None]) -> None:
        self._channel = Channel(sock)
        self._on_frame = on_frame
        self._on_lost = on_lost
        self._loop = asyncio.get_running_loop()
        self._closed = False
        self._loop.add_reader(self._channel.fileno(), self._readable)

    def send(self, payload: bytes, fds: Sequence[OwnedFd] = ()) -> None:
        """Queue one frame. On a connection that is gone it goes nowhere: `on_lost` has said so, or is about to."""
        if self._closed:
            return
        try:
            self._channel.send(payload, fds)
        except ChannelClosed as error:
            self._loop.call_soon(self._lose, str(error))
            return
        if self._channel.unsent:
            self._loop.add_writer(self._channel.fileno(), self._writable)

    def take_fds(self, count: int) -> list[int]:
        """Return the next ``count`` fds that arrived; they are the caller's.

        Raises:
            ChannelClosed: there are fewer; let it pass out of ``on_frame``.
        """
        return self._channel.take_fds(count)

    def close(self) -> None:
        """Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._loop.remove_reader(self._channel.fileno())
        self._loop.remove_writer(self._channel.fileno())
        self._channel.close()

    def _readable(self) -> None:
        try:
            for payload in self._channel.receive():
                if not self._closed:
                    self._on_frame(payload)
        except (ChannelClosed, ValueError) as error:  # ValueError: a message that is none (msgspec)
            self._lose(str(error))

    def _writable(self) -> None:
        try:
            self._channel.flush()
        except ChannelClosed as error:
            self._lose(str(error))
            return
        if not self._channel.unsent:
            self._loop.remove_writer(self._channel.fileno())

    def _lose(self, reason: str) -> None:
        if not self._closed:
            self.close()
            self._on_lost(reason)


async def dial(path: Path, what: str, timeout_s: float) -> socket.socket:
    """Connect to a Unix socket that may be about to appear.

    Raises:
        SupervisorError: nobody answers there within ``timeout_s``, or nobody can.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_s
    while True:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.setblocking(False)
        try:
            async with asyncio.timeout_at(deadline):
                await loop.sock_connect(sock, str(path))
            return sock
        except (FileNotFoundError, ConnectionRefusedError, BlockingIOError, TimeoutError) as error:
            sock.close()
            if loop.time() + _RETRY_S > deadline:
                raise SupervisorError(f"{what} does not answer at {path} ({timeout_s:g} s)") from error
            # There is no event to wait for: the socket file may be made and removed by anyone.
            await asyncio.sleep(_RETRY_S)
        except OSError as error:
            sock.close()
            raise SupervisorError(f"cannot reach {what} at {path}: {error.strerror or error}") from error
        except BaseException:
            sock.close()
            raise
