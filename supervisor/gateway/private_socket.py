"""A Unix socket that only this user may dial."""

from __future__ import annotations

import os
import socket
from pathlib import Path

BACKLOG = 4


def listen(path: Path, kind: socket.SocketKind) -> socket.socket:
    """Return a listening socket at ``path`` (0600) that never blocks; what lies there, of a process that is gone, is replaced.

    Raises:
        OSError: the path cannot be bound.
    """
    listener = socket.socket(socket.AF_UNIX, kind | socket.SOCK_NONBLOCK)
    before = os.umask(0o177)
    try:
        path.unlink(missing_ok=True)
        listener.bind(str(path))
        listener.listen(BACKLOG)
    except OSError:
        listener.close()
        raise
    finally:
        os.umask(before)
    return listener
