"""The engine's end of the link to the gateway: a Unix socket that one gateway at a time is connected to.

A step's events are one frame. The step thread sends it itself when nothing waits before it, so that no thread switch lies between a token
and its client; what the socket does not take at once is buffered and sent by the link thread. A gateway that stops reading is
disconnected when the buffer is full: it never blocks a step. The newest connection wins. With each change of it the inbox is told
(`LinkChanged`) and forgets the requests of the one before: their clients are gone, or they will be submitted anew. Connections are
numbered, so that no event of such a request goes to the next one.
"""

from __future__ import annotations

import selectors
import socket
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from shadowsup.wire import accepting, credentials, framing
from shadowsup.wire import link as wire
from shadowsup.workers.doorbell import Doorbell
from shadowsup.workers.errors import WorkerError

MAX_BUFFER = 64 * 1024 * 1024
"""Bytes that may wait for a gateway that reads slowly."""

_CHUNK = 1024 * 1024


@dataclass(frozen=True, slots=True)
class LinkChanged:
    """What came before this was sent by a gateway that is gone, what follows comes from connection ``number`` (0: none)."""

    number: int


Incoming = wire.ToEngine | LinkChanged


@dataclass(eq=False, slots=True)
class _Peer:
    number: int
    socket: socket.socket
    unpacker: framing.Unpacker
    waiting: deque[memoryview]
    waiting_bytes: int = 0
    given_up: bool = False


class LinkServer:
    """Listens at ``path`` (mode 0600) from `start` to `close`.

    Args:
        hello: what every gateway is told first.
        deliver: called on the link thread with what a gateway sent, in order, the messages of one frame together; must only hand it on and
            wake the step loop.
        max_buffer: bytes that may wait before a gateway is disconnected.

    Raises:
        WorkerError: the path is too long for a Unix socket or cannot be bound.
    """

    def __init__(
        self,
        path: str,
        *,
        hello: wire.Hello,
        deliver: Callable[[Sequence[Incoming]], None],
        log: Callable[[str], None] = lambda line: None,
        max_buffer: int = MAX_BUFFER,
    ) -> None:
        self._path = path
        self._deliver = deliver
        self._log = log
        self._max_buffer = max_buffer
        self._hello = hello
        self._listener = _listen(path)
        self._lock = threading.Lock()  # guards _peer, its buffer, and the order of frames
        self._peer: _Peer | None = None
        self._accepted = 0
        self._bell = Doorbell()
        self._selector = selectors.DefaultSelector()
        self._closing = False
        self._full = False
        """No descriptor was left for a connection: the selector would report it again at once, so the listener rests."""
        self._thread = threading.Thread(target=self._run, name="link", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def connected(self) -> bool:
        return self._peer is not None

    def set_hello(self, hello: wire.Hello) -> None:
        """Tell the gateway that is connected, and every later one."""
        with self._lock:
            self._hello = hello
            self._send_locked([hello])

    def send(self, events: Sequence[wire.FromEngine], to: int) -> bool:
        """Send ``events`` as one frame over connection number ``to``; never blocks. Returns False when that is not there any more."""
        with self._lock:
            return self._peer is not None and self._peer.number == to and self._send_locked(events)

    def close(self) -> None:
        """Disconnect, end the thread and remove the socket. What was given to `send` and not taken is lost. Idempotent."""
        if self._closing:
            return
        self._closing = True
        self._bell.ring()
        if self._thread.is_alive():
            self._thread.join()
        with self._lock:
            peer, self._peer = self._peer, None
        if peer is not None:
            peer.socket.close()
        self._listener.close()
        self._selector.close()
        self._bell.close()
        Path(self._path).unlink(missing_ok=True)

    # --- any thread, under the lock --------------------------------------------------------------------------------------------

    def _send_locked(self, events: Sequence[wire.FromEngine]) -> bool:
        peer = self._peer
        if peer is None or peer.given_up:
            return False
        try:
            frame = memoryview(framing.pack(wire.encode(events)))
        except framing.FrameError:
            if len(events) == 1:
                self._log(f"an event does not fit a frame and is lost: {type(events[0]).__name__}")
                return False
            half = len(events) // 2
            return self._send_locked(events[:half]) and self._send_locked(events[half:])
        if not peer.waiting:
            try:
                frame = frame[peer.socket.send(frame, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL) :]
            except BlockingIOError:
                pass
            except OSError:
                return False  # the link thread sees the same and says so
            if not frame:
                return True
        if peer.waiting_bytes + len(frame) > self._max_buffer:
            self._log(f"gateway does not read: {peer.waiting_bytes} bytes wait, disconnected")
            # Only shut down here: closing, and telling the inbox, is the link thread's part.
            peer.given_up = True
            _shut_down(peer.socket)
            return False
        peer.waiting.append(frame)
        peer.waiting_bytes += len(frame)
        self._bell.ring()
        return True

    # --- link thread -----------------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._bell.fd, selectors.EVENT_READ)
        while not self._closing:
            ready = self._selector.select(accepting.REST_S if self._full else None)
            if self._full and not ready:
                self._full = False
                self._selector.register(self._listener, selectors.EVENT_READ)
            for key, mask in ready:
                if key.fileobj is self._listener:
                    self._accept()
                elif isinstance(key.data, _Peer):
                    if key.data is self._peer and mask & selectors.EVENT_WRITE:
                        self._flush(key.data)
                    if key.data is self._peer and mask & selectors.EVENT_READ:
                        self._read(key.data)
                else:
                    self._bell.clear()
                    self._watch_writable()

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError as error:
            if error.errno in accepting.NO_ROOM:
                self._log(f"cannot accept connections: {error}")
                self._full = True
                self._selector.unregister(self._listener)
            return  # otherwise it is gone again, and dials again
        who = credentials.peer(connection)
        if not who.ours:
            self._log(f"refused a connection of uid {who.uid} (pid {who.pid})")
            connection.close()
            return
        connection.setblocking(False)
        with self._lock:
            before = self._peer
        if before is not None:
            self._log("a new gateway takes over the link")
            self._drop(before)
        self._accepted += 1
        peer = _Peer(self._accepted, connection, framing.Unpacker(), deque())
        self._selector.register(connection, selectors.EVENT_READ, peer)
        self._deliver([LinkChanged(peer.number)])
        with self._lock:  # from here on the step thread sends to it: the Hello has to be in front
            self._peer = peer
            self._send_locked([self._hello])

    def _drop(self, peer: _Peer) -> None:
        with self._lock:
            if self._peer is not peer:
                return
            self._peer = None
        self._selector.unregister(peer.socket)
        peer.socket.close()
        self._deliver([LinkChanged(0)])

    def _watch_writable(self) -> None:
        peer = self._peer
        if peer is not None and peer.waiting:
            self._selector.modify(peer.socket, selectors.EVENT_READ | selectors.EVENT_WRITE, peer)

    def _flush(self, peer: _Peer) -> None:
        with self._lock:
            while peer.waiting:
                chunk = peer.waiting[0]
                try:
                    sent = peer.socket.send(chunk, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
                except BlockingIOError:
                    return
                except OSError:
                    break  # reading finds the same
                peer.waiting_bytes -= sent
                if sent == len(chunk):
                    peer.waiting.popleft()
                else:
                    peer.waiting[0] = chunk[sent:]
        self._selector.modify(peer.socket, selectors.EVENT_READ, peer)

    def _read(self, peer: _Peer) -> None:
        try:
            data = peer.socket.recv(_CHUNK)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._drop(peer)
            return
        try:
            for payload in peer.unpacker.feed(data):
                self._deliver(wire.decode_to_engine(payload))
        except (framing.FrameError, msgspec.MsgspecError) as error:
            self._log(f"the gateway does not speak this protocol, disconnected: {error}")
            self._drop(peer)


def _listen(path: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        Path(path).unlink(missing_ok=True)  # engine ids are never used twice: what is there was left by a dead run
        listener.bind(path)
        Path(path).chmod(0o600)  # before listen: nobody can have connected
        listener.listen(16)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        reason = error.strerror or str(error)
        raise WorkerError(f"cannot listen at {path}: {reason}", "a Unix socket's path has at most 107 characters", fatal=True) from error
    return listener


def _shut_down(connection: socket.socket) -> None:
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass
