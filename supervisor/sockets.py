"""The one port outside: listening TCP sockets, and errors that say who has the port."""

from __future__ import annotations

import errno
import os
import socket
from pathlib import Path

from shadowsup.supervisor.errors import SupervisorError
from shadowsup.supervisor.holders import Holder, holders, user_name

BACKLOG = 1024

_LISTEN = "0A"  # TCP_LISTEN of include/net/tcp_states.h, as /proc/net/tcp prints it


def parse_address(address: str) -> tuple[str, int]:
    """Split ``HOST:PORT`` (``[::1]:8000``, ``localhost:0``); no host = every interface, returned as ``""``.

    Raises:
        SupervisorError: it is not of that form.
    """
    host, colon, port = address.rpartition(":")
    if not colon or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise SupervisorError(f"{address!r} is not an address to listen on", "write HOST:PORT, for example 127.0.0.1:8000 or [::1]:8000")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise SupervisorError(f"{address!r} is not an address to listen on", f"put an IPv6 address in brackets: [{host}]:{port}")
    return host, int(port)


def listen(address: str, *, backlog: int = BACKLOG) -> list[socket.socket]:
    """Bind and listen on ``HOST:PORT`` (`parse_address`).

    Returns one socket for each address that the host name has, non-blocking and not inheritable; port 0 is the same free port on all.

    Raises:
        SupervisorError: not an address, taken (names the holder), not this machine's, or not permitted.
    """
    host, port = parse_address(address)
    try:
        found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except socket.gaierror as error:
        raise SupervisorError(f"cannot listen on {address}: {host} has no address ({error.strerror})") from error
    except UnicodeError as error:
        raise SupervisorError(f"cannot listen on {address}: {host} is not a host name") from error
    addresses = list(dict.fromkeys((family, place[0]) for family, _, _, _, place in found if family in (socket.AF_INET, socket.AF_INET6)))
    sockets: list[socket.socket] = []
    failed: tuple[OSError, str] | None = None
    try:
        for family, name in addresses:
            try:
                sockets.append(_listen_on(family, str(name), port, backlog))
                port = sockets[0].getsockname()[1]
            except OSError as error:
                # A machine may have a name for an address family that it has switched off: one that works is enough.
                if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                    raise _explain(error, str(name), port) from error
                failed = (error, str(name))
        if not sockets and failed is not None:
            raise _explain(failed[0], failed[1], port) from failed[0]
    except BaseException:
        for each in sockets:
            each.close()
        raise
    return sockets


def free_port(host: str = "127.0.0.1") -> int:
    """Return a port that was free just now (``port: auto``): whoever is told of it may still lose it, and is then started again.

    Raises:
        SupervisorError: the host is not this machine's.
    """
    (sock, *more) = listen(f"[{host}]:0" if ":" in host else f"{host}:0", backlog=1)
    port: int = sock.getsockname()[1]
    for each in (sock, *more):
        each.close()
    return port


def holders_of_port(port: int) -> tuple[list[Holder], str]:
    """Return who listens on a TCP port, and where nobody can be named, what is known: the user, and what it takes to see more."""
    users: dict[str, int] = {}
    for table in ("tcp", "tcp6"):
        try:
            lines = Path(f"/proc/net/{table}").read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            fields = line.split()
            if fields[3] == _LISTEN and int(fields[1].rpartition(":")[2], 16) == port:
                users[f"socket:[{fields[9]}]"] = int(fields[7])
    if not users:
        return [], ""
    found, complete = holders(users.__contains__)
    if found or complete:
        return found, ""
    names = ", ".join(sorted({user_name(uid) for uid in users.values()}))
    return [], f"a process of user {names}; only root can see which (sudo ss -ltnp sport = :{port})"


def _listen_on(family: int, host: str, port: int, backlog: int) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        # Connections of an earlier run in TIME_WAIT must not keep the port. Two listeners are refused all the same: the second by listen().
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.bind((host, port))
        sock.listen(backlog)
        sock.setblocking(False)
    except BaseException:
        sock.close()
        raise
    return sock


def _explain(error: OSError, host: str, port: int) -> SupervisorError:
    where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    start = f"cannot listen on {where}"
    match error.errno:
        case errno.EADDRINUSE:
            found, unseen = holders_of_port(port)
            who = "; ".join(map(str, found)) or unseen or "a process that has gone since, or one outside this network namespace"
            return SupervisorError(f"{start}: the port is taken by {who}", "stop it, or set gateway.listen to another port")
        case errno.EADDRNOTAVAIL | errno.EAFNOSUPPORT:
            return SupervisorError(f"{start}: this machine has no address {host}", "see `ip address`; 127.0.0.1 and 0.0.0.0 always work")
        case errno.EACCES | errno.EPERM:
            first = _first_free_port()
            user = user_name(os.geteuid())
            return SupervisorError(f"{start}: user {user} may not bind a port below {first}", f"use a port from {first} on")
    return SupervisorError(f"{start}: {error.strerror or error}")


def _first_free_port() -> int:
    try:
        return int(Path("/proc/sys/net/ipv4/ip_unprivileged_port_start").read_text())
    except (OSError, ValueError):
        return 1024
