"""Who is at the other end of a Unix stream socket, as the kernel noted it when they connected (SO_PEERCRED)."""

from __future__ import annotations

import os
import socket
import struct
from typing import NamedTuple

_UCRED = struct.Struct("3i")
"""``struct ucred``: pid, uid, gid (include/linux/socket.h)."""


class Peer(NamedTuple):
    pid: int
    uid: int
    gid: int

    @property
    def ours(self) -> bool:
        """Whether it may use a socket of this node: the user that runs it, and root."""
        return self.uid in (os.geteuid(), 0)


def peer(sock: socket.socket) -> Peer:
    """Return the process that connected, or listens at, the other end of ``sock``."""
    return Peer(*_UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)))
