"""Filling memory takes long: what goes on meanwhile, and what may happen to whoever asked."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from keeper_tools import MODEL, OTHER, KeeperProcess, Raw, leases, publish, until

from shadowsup.memkeeper import protocol as p
from shadowsup.memkeeper.backends.host import HostBackend
from shadowsup.memkeeper.client import KeeperClient
from shadowsup.memkeeper.errors import KeeperError
from shadowsup.memkeeper.server import Keeper
from shadowsup.memkeeper.vault import Vault
from shadowsup.wire.framing import pack

Engine = Callable[[str], KeeperClient]


class SlowBackend(HostBackend):
    """Fills memory when it is told to."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.go_on = threading.Event()
        self.fds: list[int] = []
        self.fail = False

    def allocate(self, size: int, name: str, device: str) -> int:
        self.begun.set()
        assert self.go_on.wait(60)
        if self.fail:
            raise RuntimeError("the driver is in a bad mood")
        self.fds.append(super().allocate(size, name, device))
        return self.fds[-1]


@pytest.fixture
def slow(quick_keeper: Callable[..., Keeper]) -> SlowBackend:
    backend = SlowBackend()
    quick_keeper(backend)
    return backend


def test_others_are_served_meanwhile_and_who_wants_the_same_gets_the_same(slow: SlowBackend, engine: Engine) -> None:
    with ThreadPoolExecutor() as threads:
        first = threads.submit(engine("chat.1").get_kv, "chat", MODEL, [4096], 4096)
        assert slow.begun.wait(60)
        second = threads.submit(engine("chat.2").get_kv, "chat", MODEL, [4096], 4096)
        other = engine("code.1")
        assert other.list() == ()
        assert other.get_weights(OTHER) is None
        assert not first.done() and not second.done()
        slow.go_on.set()
        sets = [first.result(60), second.result(60)]
    assert [one.created for one in sets] == [True, False]
    assert sets[0].set_id == sets[1].set_id
    for one in sets:
        one.close()


def test_memory_for_a_client_that_died_meanwhile_is_given_back(slow: SlowBackend, engine: Engine, tmp_path: Path) -> None:
    gone = Raw(tmp_path / "keeper.sock", p.Hello(client="chat.1", pid=1))
    gone.read(p.Welcome)
    gone.send(p.GetKv(worker="chat", fingerprint=MODEL, device="host", kv_sizes=(4096,), ledger_size=4096))
    assert slow.begun.wait(60)
    gone.close()
    client = engine("chat.2")
    assert client.list() == ()  # the keeper has seen the end of the other connection
    slow.go_on.set()
    until(lambda: len(slow.fds) == 2 and not any(map(is_open_segment, slow.fds)))
    got = client.get_kv("chat", MODEL, [4096], 4096)
    assert got.created
    got.close()


def is_open_segment(fd: int) -> bool:
    try:
        return "memfd:shadowsup-" in str(Path(f"/proc/self/fd/{fd}").readlink())
    except OSError:
        return False


def test_a_backend_that_raises_anything_is_an_answer_and_no_end_of_the_keeper(slow: SlowBackend, engine: Engine) -> None:
    client = engine("chat.1")
    slow.fail = True
    slow.go_on.set()
    with pytest.raises(KeeperError, match="cannot create memory: the driver is in a bad mood"):
        client.get_kv("chat", MODEL, [4096], 4096)
    slow.fail = False
    client.get_kv("chat", MODEL, [4096], 4096).close()


async def test_a_vault_of_hundreds_of_sets_connects_and_restores(keeper: KeeperProcess, engine: Engine) -> None:
    """It acknowledges them all at once, which is no flood."""
    client = engine("chat.1")
    for number in range(300):
        (await asyncio.to_thread(client.get_kv, f"worker-{number}", MODEL, [4096], 4096)).close()
    vault = await Vault.connect(keeper.path)
    assert len(vault.segments()) == 600
    keeper.kill()
    await asyncio.wait_for(vault.lost.wait(), 60)
    keeper.start("--restore")
    await vault.restore()
    assert set((await asyncio.to_thread(leases, client)).values()) == {("chat.1",)}
    await vault.close()


def test_a_client_survives_a_keeper_that_talks_nonsense(tmp_path: Path, keeper: KeeperProcess) -> None:
    path = tmp_path / "odd.sock"
    with socket.socket(socket.AF_UNIX) as odd:
        odd.bind(str(path))
        odd.listen()
        client = KeeperClient(path, "chat.1", patience_s=10.0)
        for answer in (pack(b"\xc1"), b"\xff" * 8, b""):
            peer, _ = odd.accept()
            with peer:
                peer.sendall(answer)
    keeper.path.rename(path)  # now the real one listens there
    set_id = publish(client, b"x")
    assert leases(client) == {set_id: ("chat.1",)}
    client.close()


def test_a_keeper_may_be_told_to_end_while_it_ends_and_after(quick_keeper: Callable[..., Keeper]) -> None:
    keeper = quick_keeper()
    before = threading.active_count()
    while threading.active_count() == before:  # its thread has not ended yet
        keeper.stop()
    keeper.stop()
