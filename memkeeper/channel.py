"""One end of a keeper connection: frames and the fds that come with them, over a non-blocking Unix stream socket.

The kernel hands fds over with the first byte of the message they were sent with, or together with earlier bytes, never later. So they
are queued in order of arrival, and a frame that names N segments takes the next N.
"""

from __future__ import annotations

import array
import contextlib
import errno
import os
import socket
from collections import deque
from collections.abc import Sequence

from shadowsup.memkeeper.protocol import MAX_FDS
from shadowsup.wire.framing import MAX_FRAME, FrameError, Unpacker, pack

_CHUNK = 256 * 1024
_FD_SPACE = socket.CMSG_SPACE(MAX_FDS * array.array("i").itemsize)
_RETRY = {errno.EAGAIN, errno.EINTR, errno.ENOBUFS, errno.ETOOMANYREFS}
"""ETOOMANYREFS: more fds of this user are in flight than RLIMIT_NOFILE allows (net/unix/scm.c); they go when the peers have read."""


class ChannelClosed(Exception):
    """Raised when the peer is gone, or must be treated as gone; the message says why."""


class OwnedFd:
    """An fd that is closed with its last reference, so that one queued for sending outlives whoever queued it."""

    __slots__ = ("_fd",)

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def fileno(self) -> int:
        return self._fd

    def detach(self) -> int:
        """Return the fd, which is the caller's now."""
        fd, self._fd = self._fd, -1
        return fd

    def close(self) -> None:
        """Close now, whoever still refers to it. Idempotent."""
        if self._fd >= 0:
            os.close(self.detach())

    def __del__(self) -> None:
        self.close()


class Channel:
    """Owns ``sock`` and every fd that arrived and was not taken.

    Attributes:
        backlog: bytes that may wait for a peer that does not read; beyond it the peer counts as gone.
    """

    def __init__(self, sock: socket.socket, backlog: int = 4 * 1024 * 1024, max_frame: int = MAX_FRAME) -> None:
        """``max_frame``: bytes of one frame of the peer; it may announce no longer one."""
        sock.setblocking(False)
        self._sock = sock
        self.backlog = backlog
        self._unpacker = Unpacker(max_frame)
        self._fds: deque[int] = deque()
        self._out: deque[tuple[memoryview, Sequence[OwnedFd]]] = deque()
        self._out_bytes = 0

    def fileno(self) -> int:
        return self._sock.fileno()

    @property
    def unsent(self) -> int:
        """Bytes that wait until the socket is writable (then call `flush`)."""
        return self._out_bytes

    def receive(self) -> list[bytes]:
        """Read what there is and return the frames it completes.

        Raises:
            ChannelClosed: end of stream, a frame that is none, or fds that this process has no room for.
        """
        try:
            data, ancillary, flags, _ = self._sock.recvmsg(_CHUNK, _FD_SPACE, socket.MSG_CMSG_CLOEXEC)
        except OSError as error:
            if error.errno in _RETRY:
                return []
            raise ChannelClosed(str(error)) from None
        for level, kind, content in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                fds = array.array("i")
                fds.frombytes(content[: len(content) - len(content) % fds.itemsize])
                self._fds.extend(fds)
        if flags & socket.MSG_CTRUNC:
            raise ChannelClosed("fds were lost: this process is at its limit of open files")
        if not data:
            raise ChannelClosed("the peer closed the connection")
        try:
            return list(self._unpacker.feed(data))
        except FrameError as error:
            raise ChannelClosed(str(error)) from None

    @property
    def untaken(self) -> int:
        """How many fds have arrived that no frame has taken."""
        return len(self._fds)

    def take_fds(self, count: int) -> list[int]:
        """Return the next ``count`` fds; they are the caller's now.

        Raises:
            ChannelClosed: fewer have arrived, so the peer breaks the protocol.
        """
        if count > len(self._fds):
            raise ChannelClosed(f"the peer named {count} fds and sent {len(self._fds)}")
        return [self._fds.popleft() for _ in range(count)]

    def send(self, payload: bytes, fds: Sequence[OwnedFd] = ()) -> None:
        """Queue one frame with at most `MAX_FDS` fds, and send what the socket takes now.

        Raises:
            ChannelClosed: the peer is gone, or does not read.
        """
        frame = pack(payload)
        self._out.append((memoryview(frame), fds))
        self._out_bytes += len(frame)
        self.flush()
        if self._out_bytes > self.backlog:
            raise ChannelClosed(f"the peer does not read: {self._out_bytes} bytes wait for it")

    def flush(self) -> None:
        """Send what the socket takes now.

        Raises:
            ChannelClosed: the peer is gone.
        """
        while self._out:
            view, fds = self._out[0]
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd.fileno() for fd in fds]))] if fds else []
            try:
                sent = self._sock.sendmsg([view], rights, socket.MSG_NOSIGNAL)
            except OSError as error:
                if error.errno in _RETRY:
                    return
                raise ChannelClosed(str(error)) from None
            self._out_bytes -= sent
            if sent == len(view):
                self._out.popleft()
            else:  # the fds went with the first byte
                self._out[0] = (view[sent:], ())

    def shutdown(self) -> None:
        """End the connection for both sides; the fd stays until `close`, so that another thread that polls it sees the end."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket and the fds that nobody took. Idempotent."""
        while self._fds:
            os.close(self._fds.popleft())
        self._out.clear()
        self._out_bytes = 0
        self._sock.close()
