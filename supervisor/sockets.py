"""The one port outside: listening TCP sockets, and errors that say who has the port."""

from __future__ import annotations

import socket


def listen(address: str, *, backlog: int = 1024) -> list[socket.socket]:
    """Bind and listen on ``HOST:PORT`` (``[::1]:8000``, ``localhost:0``, ``:8000`` = every interface).

    Returns one socket for each address that the host name has, non-blocking and not inheritable; port 0 is the same free port on all.

    Raises:
        SupervisorError: not an address, taken (names the holder), not ours, or not permitted.
    """
    raise NotImplementedError


def free_port(host: str = "127.0.0.1") -> int:
    """Return a port that was free just now (``port: auto``): the process that is told it may still lose it."""
    raise NotImplementedError
