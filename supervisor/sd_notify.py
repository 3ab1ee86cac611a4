"""The service manager's protocol: what a service tells it, the fds it keeps for the service, its watchdog (sd_notify(3), sd_listen_fds(3)).

A message is one datagram of ``NAME=value`` lines to the socket that ``NOTIFY_SOCKET`` names; fds travel with it. Without that variable
nobody listens and nothing is sent.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import logging
import os
import socket
from collections import deque
from collections.abc import MutableMapping, Sequence

_FIRST_FD = 3
"""SD_LISTEN_FDS_START."""
_VARIABLES = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID", "LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES", "LISTEN_PIDFDID")
_BACKLOG = 1000
"""Messages that may wait for a manager that does not read; then the oldest are dropped."""

log = logging.getLogger("shadowsup.systemd")


class ServiceManager:
    """The manager that has started this process. Nothing here waits, or raises: a service runs on whatever becomes of its manager.

    Attributes:
        watchdog_s: it wants `alive` at least this often; None: it has no watchdog.
        fds: what it kept for us, by name. They are the caller's, who takes them out.
    """

    def __init__(self, address: str, *, watchdog_s: float | None = None, fds: dict[str, list[int]] | None = None) -> None:
        """Raises OSError: nobody listens at ``address``."""
        self.watchdog_s = watchdog_s
        self.fds = fds or {}
        self._waiting: deque[tuple[bytes, int]] = deque()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        try:
            self._socket.setblocking(False)
            self._socket.connect("\0" + address[1:] if address.startswith("@") else address)
        except OSError:
            self._socket.close()
            raise

    @classmethod
    def from_environment(cls, environ: MutableMapping[str, str]) -> ServiceManager | None:
        """Return the manager that ``environ`` names, or None. What concerns this process alone is taken out of it: no child may see it."""
        found = {name: environ.pop(name) for name in _VARIABLES if name in environ}
        fds = received(found)
        address = found.get("NOTIFY_SOCKET", "")
        if not address:
            _close(fds)
            return None
        try:
            return cls(address, watchdog_s=watchdog_s(found), fds=fds)
        except OSError as error:
            log.warning("the service manager at %s cannot be told anything: %s", address, error)
            _close(fds)
            return None

    # --- what is told -----------------------------------------------------------------------------------------------------------

    def ready(self) -> None:
        self._tell("READY=1")

    def stopping(self) -> None:
        self._tell("STOPPING=1")

    def status(self, text: str) -> None:
        """``text``: one line for ``systemctl status``."""
        self._tell(f"STATUS={text.partition(chr(10))[0]}")

    def alive(self) -> None:
        """The watchdog's sign of life."""
        self._tell("WATCHDOG=1")

    def store(self, name: str, fd: int) -> None:
        """Have it keep a duplicate of ``fd``. ``name``: up to 255 characters, no colon, no control character."""
        # Without FDPOLL=0 it looks for events on the fd and drops one that has had its end.
        self._tell(f"FDSTORE=1\nFDNAME={name}\nFDPOLL=0", fd)

    def forget(self, name: str) -> None:
        """Have it close every fd of that name."""
        self._tell(f"FDSTOREREMOVE=1\nFDNAME={name}")

    def close(self) -> None:
        """Send what still can be sent at once. Idempotent."""
        if self._socket.fileno() < 0:
            return
        self._flush()
        self._unwatch()
        for _, fd in self._waiting:
            _drop(fd)
        self._waiting.clear()
        self._socket.close()
        _close(self.fds)
        self.fds = {}

    # --- sending ----------------------------------------------------------------------------------------------------------------

    def _tell(self, message: str, fd: int = -1) -> None:
        if self._socket.fileno() < 0:
            return
        if len(self._waiting) >= _BACKLOG:
            _drop(self._waiting.popleft()[1])
        self._waiting.append((message.encode(), os.dup(fd) if fd >= 0 else -1))
        self._flush()

    def _flush(self) -> None:
        while self._waiting:
            message, fd = self._waiting[0]
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))] if fd >= 0 else []
            try:
                self._socket.sendmsg([message], rights, socket.MSG_NOSIGNAL)
            except BlockingIOError:  # it is busy: its queue holds a few hundred messages, in a container ten
                self._watch()
                return
            except OSError as error:
                log.warning("the service manager was not told %s: %s", message.decode().partition("\n")[0], error)
            self._waiting.popleft()
            _drop(fd)
        self._unwatch()

    def _watch(self) -> None:
        if self._loop is None:
            with contextlib.suppress(RuntimeError):  # before the loop runs: the next message tries again
                self._loop = asyncio.get_running_loop()
                self._loop.add_writer(self._socket.fileno(), self._flush)

    def _unwatch(self) -> None:
        if self._loop is not None:
            self._loop.remove_writer(self._socket.fileno())
            self._loop = None


def received(environ: MutableMapping[str, str]) -> dict[str, list[int]]:
    """Return the fds that the manager has passed to this process, by name (close-on-exec from now on); {} when they are another's."""
    try:
        count = int(environ.get("LISTEN_FDS", "0")) if int(environ.get("LISTEN_PID", "0")) == os.getpid() else 0
    except ValueError:
        return {}
    names = environ.get("LISTEN_FDNAMES", "").split(":")
    found: dict[str, list[int]] = {}
    for number in range(count):
        fd = _FIRST_FD + number
        with contextlib.suppress(OSError):  # it is not open: then it is not ours either
            os.set_inheritable(fd, False)
            found.setdefault(names[number] if number < len(names) else "", []).append(fd)
    return found


def watchdog_s(environ: MutableMapping[str, str]) -> float | None:
    """Return how often the manager wants a sign of life; None: not from this process."""
    try:
        if int(environ.get("WATCHDOG_PID", os.getpid())) != os.getpid():
            return None
        period_s = int(environ["WATCHDOG_USEC"]) / 1e6
    except (KeyError, ValueError):
        return None
    return period_s if period_s > 0 else None


def _close(fds: dict[str, Sequence[int]] | dict[str, list[int]]) -> None:
    for each in fds.values():
        for fd in each:
            _drop(fd)


def _drop(fd: int) -> None:
    if fd >= 0:
        with contextlib.suppress(OSError):
            os.close(fd)
