"""A service manager as systemd is one: a datagram socket that takes messages and fds, a store of fds, and what a start passes on."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from node_world import WAIT_S, FakeNode

BASE = 200
"""Where the fds to pass on are put before they become 3, 4, …"""


class Manager:
    """Close it: it holds what it was given."""

    def __init__(self, path: Path, watchdog_s: float = 0.6) -> None:
        self.path = path
        self.watchdog_s = watchdog_s
        self.said: list[str] = []
        self.store: dict[str, list[int]] = {}
        self._changed = threading.Condition()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(path))
        self._thread = threading.Thread(target=self._receive, daemon=True)
        self._thread.start()

    def _receive(self) -> None:
        while True:
            message, fds, _, _ = socket.recv_fds(self._socket, 4096, 8, socket.MSG_CMSG_CLOEXEC)
            lines = message.decode().splitlines()
            if lines == ["quit"]:
                return
            values = dict(line.partition("=")[::2] for line in lines)
            with self._changed:
                self.said += lines
                if "FDSTORE" in values:
                    self.store.setdefault(values["FDNAME"], []).extend(fds)
                elif "FDSTOREREMOVE" in values:
                    for fd in self.store.pop(values["FDNAME"], []):
                        os.close(fd)
                self._changed.notify_all()

    def until(self, condition: Callable[[], bool]) -> None:
        with self._changed:
            assert self._changed.wait_for(condition, WAIT_S), (self.said[-20:], sorted(self.store))

    def segments(self) -> set[str]:
        return {name for name in self.store if name.startswith("vault.")}

    def run(self, argv: list[str], **options: Any) -> subprocess.Popen[bytes]:
        """Start a service: fds from 3 on, and the variables that go with them."""
        stored = [(name, fd) for name, fds in self.store.items() for fd in fds]
        places = [os.dup2(fd, BASE + number, inheritable=True) for number, (_, fd) in enumerate(stored)]
        moves = " ".join(f"{3 + number}<&{place}" for number, place in enumerate(places))
        script = f'export LISTEN_PID=$$ WATCHDOG_PID=$$; exec "$@" {moves} {" ".join(f"{place}<&-" for place in places)}'
        environment = {
            **os.environ,
            "NOTIFY_SOCKET": str(self.path),
            "WATCHDOG_USEC": str(int(self.watchdog_s * 1e6)),
            "LISTEN_FDS": str(len(stored)),
            "LISTEN_FDNAMES": ":".join(name for name, _ in stored),
        }
        try:
            return subprocess.Popen(["bash", "-c", script, "bash", *argv], env=environment, pass_fds=places, **options)
        finally:
            for place in places:
                os.close(place)

    def close(self) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.sendto(b"quit", str(self.path))
        self._thread.join(WAIT_S)
        self._socket.close()
        for fds in self.store.values():
            for fd in fds:
                os.close(fd)


class ServiceNode(FakeNode):
    """A node that a manager starts."""

    def __init__(self, folder: Path, workers: list[dict[str, Any]], manager: Manager) -> None:
        self.manager = manager
        super().__init__(folder, workers, "127.0.0.1:0")

    def start(self) -> subprocess.Popen[bytes]:
        with self.output.open("ab") as sink:
            script = Path(__file__).with_name("node_world.py")
            return self.manager.run([sys.executable, str(script), str(self.config), str(self.runtime)], stdout=sink, stderr=sink)
