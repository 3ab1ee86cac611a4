"""Real keeper processes, and a keeper on a thread where a test needs short times."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from keeper_tools import KeeperProcess

from shadowsup.memkeeper.allocation import Allocator
from shadowsup.memkeeper.backends.base import Backend
from shadowsup.memkeeper.backends.host import HostBackend
from shadowsup.memkeeper.client import KeeperClient
from shadowsup.memkeeper.server import Keeper


@pytest.fixture
def keeper(tmp_path: Path) -> Iterator[KeeperProcess]:
    keeper = KeeperProcess(tmp_path / "keeper.sock")
    keeper.start()
    yield keeper
    if keeper.process is not None and keeper.process.poll() is None:
        keeper.kill()


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Callable[[str], KeeperClient]]:
    """Returns a client by its engine id."""
    clients: list[KeeperClient] = []

    def connect(name: str) -> KeeperClient:
        clients.append(KeeperClient(tmp_path / "keeper.sock", name, patience_s=60.0))
        return clients[-1]

    yield connect
    for client in clients:
        client.close()


@pytest.fixture
def quick_keeper(tmp_path: Path) -> Iterator[Callable[..., Keeper]]:
    """Starts a keeper on a thread of this process, with options of `Keeper`."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(tmp_path / "keeper.sock"))
    listener.listen()
    running: list[tuple[Keeper, threading.Thread]] = []

    def start(backend: Backend | None = None, **options: Any) -> Keeper:
        keeper = Keeper(listener, Allocator(backend or HostBackend()), **options)
        thread = threading.Thread(target=keeper.run)
        thread.start()
        running.append((keeper, thread))
        return keeper

    yield start
    for keeper, thread in running:
        keeper.stop()
        thread.join()
    listener.close()
