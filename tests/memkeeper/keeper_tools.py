"""What tests of the keeper do again and again."""

from __future__ import annotations

import mmap
import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from shadowsup.memkeeper import protocol as p
from shadowsup.memkeeper.channel import Channel, ChannelClosed
from shadowsup.memkeeper.client import HandleSet, KeeperClient

MODEL = p.Fingerprint(items=(("model", "small"), ("dtype", "float32")))
OTHER = p.Fingerprint(items=(("model", "other"),))


class KeeperProcess:
    """A keeper that can be killed and started again on the same socket."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def start(self, *options: str) -> None:
        ready, tell = os.pipe()
        command = [sys.executable, "-m", "shadowsup.memkeeper", "--socket", str(self.path), "--backend", "host", "--ready-fd", str(tell)]
        self.process = subprocess.Popen([*command, *options], pass_fds=[tell], stderr=subprocess.DEVNULL)
        os.close(tell)
        assert os.read(ready, 1) == b"1"
        os.close(ready)

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def terminate(self) -> int:
        assert self.process is not None
        self.process.terminate()
        return self.process.wait()

    def memfds(self) -> int:
        """Return how many segments the keeper process has open."""
        found = 0
        for entry in Path(f"/proc/{self.pid}/fd").iterdir():
            try:
                found += "memfd:shadowsup-" in str(entry.readlink())
            except OSError:
                continue
        return found


def publish(client: KeeperClient, content: bytes, fingerprint: p.Fingerprint = MODEL) -> str:
    """Publish one segment that begins with ``content``; return the set id."""
    assert client.get_weights(fingerprint) is None
    handles = client.create(fingerprint, [len(content)])
    with mmap.mmap(handles[0].fd, handles[0].manifest.size) as memory:
        memory[: len(content)] = content
    client.seal(handles.set_id, {"checksum": "c"})
    handles.close()
    return handles.set_id


def content(handles: HandleSet, size: int) -> bytes:
    """Return the first bytes of a set's first segment, and close it."""
    fd = handles[0].open_readonly()
    with mmap.mmap(fd, handles[0].manifest.size, prot=mmap.PROT_READ) as memory:
        found = memory[:size]
    socket.close(fd)
    handles.close()
    return found


def leases(client: KeeperClient) -> dict[str, tuple[str, ...]]:
    """Return set id → who leases it."""
    return {info.manifest.set_id: info.leases for info in client.list()}


def until(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    """Wait for what another process does and nothing announces."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        select.select([], [], [], 0.005)


class Raw:
    """A peer that speaks the protocol as it likes."""

    def __init__(self, path: Path, hello: p.Hello | None = None) -> None:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.connect(str(path))
        self.sock = sock
        self.channel = Channel(sock)
        self.received: list[p.FromKeeper] = []
        if hello is not None:
            self.send(hello)

    def send(self, message: p.ToKeeper) -> None:
        self.channel.send(p.encode(message))

    def read(self, kind: type[p.FromKeeper], timeout_s: float = 60.0) -> p.FromKeeper:
        """Return the next message of ``kind``; closes the fds that come."""
        while True:
            for at, message in enumerate(self.received):
                if isinstance(message, kind):
                    return self.received.pop(at)
            assert select.select([self.channel], [], [], timeout_s)[0], "nothing came"
            self.received += map(p.decode_answer, self.channel.receive())
            for fd in self.channel.take_fds(self.channel.untaken):
                socket.close(fd)

    def silent(self, timeout_s: float = 0.1) -> bool:
        return not self.received and not select.select([self.channel], [], [], timeout_s)[0]

    def closed_by_keeper(self, timeout_s: float = 60.0) -> bool:
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            select.select([self.channel], [], [], 0.1)
            try:
                self.channel.receive()
            except ChannelClosed:
                return True
        return False

    def close(self) -> None:
        self.channel.close()


def engine_process(path: Path, name: str, code: str) -> subprocess.Popen[str]:
    """Run ``code`` in a process with a client ``keeper`` and `MODEL`; it prints, then waits for its end."""
    prologue = (
        "import sys, os, mmap\n"
        "from shadowsup.memkeeper.client import KeeperClient\n"
        "from shadowsup.memkeeper.protocol import Fingerprint\n"
        f"MODEL = Fingerprint(items={MODEL.items!r})\n"
        f"keeper = KeeperClient({str(path)!r}, {name!r})\n"
        "say = lambda text: print(text, flush=True)\n"
    )
    return subprocess.Popen(
        [sys.executable, "-c", prologue + code + "\nsys.stdin.read()"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def said(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()
