"""The keeper's connections: who may connect, what they send, what waits to be sent. Nothing here blocks, whatever a client does."""

from __future__ import annotations

import logging
import os
import selectors
import socket
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from shadowsup.memkeeper import protocol as p
from shadowsup.memkeeper.channel import Channel, ChannelClosed, OwnedFd
from shadowsup.wire import accepting, credentials

log = logging.getLogger("shadowsup.memkeeper")

_MAX_REQUEST = 16 * 1024 * 1024
"""Bytes. Manifests and fingerprints have some KB."""
_MAX_QUEUED = 256
"""Requests of one connection that may wait; an engine has one. The vault acknowledges as many deposits as it gets."""


class ProtocolError(Exception):
    """Raised when a peer does not keep to the protocol; its connection is closed, the others go on."""


@dataclass(eq=False)
class Connection:
    """One client. ``requests`` that are not worked on yet, oldest first."""

    number: int
    channel: Channel
    peer: str
    client: str = ""
    vault: bool = False
    requests: deque[p.ToKeeper] = field(default_factory=deque)
    busy: bool = False
    """A request is being worked on; its answer comes before the next one is looked at."""

    def __str__(self) -> str:
        return f"{self.client or 'unnamed client'} ({self.peer})"


class Hub:
    """Accepts, reads, writes, closes.

    Args:
        listener: bound and listening; stays the caller's.
        clock: monotonic seconds.
        on_request: called when ``connection.requests`` has grown.
        on_closed: called after a connection is closed from either side.
    """

    def __init__(
        self,
        listener: socket.socket,
        *,
        clock: Callable[[], float],
        on_request: Callable[[Connection], None],
        on_closed: Callable[[Connection], None],
    ) -> None:
        listener.setblocking(False)
        self.connections: dict[int, Connection] = {}
        self._listener = listener
        self._clock = clock
        self._on_request = on_request
        self._on_closed = on_closed
        self._count = 0
        self._accept_again: float | None = None
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        # Whoever wakes us may come when we have just closed it. Taken again by a signal handler of the thread that has it.
        self._wake_lock = threading.RLock()
        self._ended = False
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        self._selector.register(self._wake, selectors.EVENT_READ)

    def wake(self) -> None:
        """End a `select`, also one that has not begun. May be called from any thread and from a signal handler, and after the end."""
        with self._wake_lock:
            if not self._ended:
                os.eventfd_write(self._wake, 1)

    def select(self, until: float | None) -> None:
        """Wait for one round of events, until ``until`` on the clock (None: as long as it takes), and serve them."""
        deadlines = [at for at in (until, self._accept_again) if at is not None]
        for key, events in self._selector.select(max(0.0, min(deadlines) - self._clock()) if deadlines else None):
            if key.fileobj is self._listener:
                self._accept()
            elif key.fileobj == self._wake:
                os.eventfd_read(self._wake)
            elif key.data.number in self.connections:  # not closed by an earlier event of this round
                self._serve(key.data, events)
        if self._accept_again is not None and self._clock() >= self._accept_again:
            self._accept_again = None
            self._selector.register(self._listener, selectors.EVENT_READ)

    def send(self, connection: Connection, message: p.FromKeeper, fds: Sequence[OwnedFd] = ()) -> None:
        """Queue a message. A peer that is gone, or does not read, is closed; one that is closed gets nothing."""
        if connection.number not in self.connections:
            return
        try:
            connection.channel.send(p.encode(message), fds)
            self._watch(connection)
        except ChannelClosed as error:
            self.close(connection, str(error))

    def close(self, connection: Connection, why: str) -> None:
        """Close one connection. Idempotent."""
        if self.connections.pop(connection.number, None) is None:
            return
        log.info("%s: connection closed: %s", connection, why)
        self._selector.unregister(connection.channel.fileno())
        connection.channel.close()
        self._on_closed(connection)

    def close_all(self) -> None:
        """At the end; nobody is called back."""
        for connection in self.connections.values():
            connection.channel.close()
        self.connections.clear()
        self._selector.close()
        with self._wake_lock:
            self._ended = True
            os.close(self._wake)

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError as error:
            if error.errno in accepting.NO_ROOM:
                log.warning("cannot accept connections for %g s: %s", accepting.REST_S, error)
                self._selector.unregister(self._listener)
                self._accept_again = self._clock() + accepting.REST_S
            return  # otherwise the client is gone again
        who = credentials.peer(sock)
        if not who.ours:
            log.warning("refused a connection of uid %d (pid %d)", who.uid, who.pid)
            sock.close()
            return
        self._count += 1
        connection = Connection(self._count, Channel(sock, max_frame=_MAX_REQUEST), f"pid {who.pid}")
        self.connections[connection.number] = connection
        self._selector.register(sock, selectors.EVENT_READ, connection)

    def _serve(self, connection: Connection, events: int) -> None:
        try:
            if events & selectors.EVENT_WRITE:
                connection.channel.flush()
                self._watch(connection)
            if events & selectors.EVENT_READ:
                connection.requests.extend(map(p.decode_request, connection.channel.receive()))
                if len(connection.requests) > _MAX_QUEUED and not connection.vault:
                    raise ProtocolError("it sends requests without waiting for answers")
                if connection.channel.untaken > p.MAX_FDS and not connection.vault:
                    raise ProtocolError("it sends fds that no frame names")
        except (ChannelClosed, ProtocolError, msgspec.MsgspecError) as error:
            self.close(connection, str(error))
        else:
            self._on_request(connection)

    def _watch(self, connection: Connection) -> None:
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.channel.unsent else 0)
        self._selector.modify(connection.channel.fileno(), wanted, connection)
