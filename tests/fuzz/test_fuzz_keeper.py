"""The keeper under a client that speaks nearly its protocol: it refuses or hangs up, serves the others, and keeps no file and no memory."""

from __future__ import annotations

import os
import socket
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from fuzz_tools import of_union, open_fds, payloads, resident
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from keeper_tools import Raw

from shadowsup.memkeeper import protocol as p
from shadowsup.memkeeper.__main__ import listen
from shadowsup.memkeeper.allocation import Allocator
from shadowsup.memkeeper.backends import load_backend
from shadowsup.memkeeper.channel import ChannelClosed, OwnedFd
from shadowsup.memkeeper.server import Keeper
from shadowsup.wire import framing

FDS = 64
"""Descriptors that sets may stay behind with: the newest KV set of each worker and each sealed fingerprint that was made."""
MEMORY = 1 << 30
"""Bytes of this process, in which the keeper is a thread; what hypothesis remembers is some hundred MB of it in a long run."""


@pytest.fixture(scope="module")
def keeper() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="shadowsup-fuzz-") as folder:
        path = Path(folder) / "keeper.sock"
        listener = listen(path)
        server = Keeper(listener, Allocator(load_backend("host")), ack_s=0.5)
        thread = threading.Thread(target=server.run)
        thread.start()
        try:
            yield path
            assert thread.is_alive()
        finally:
            server.stop()
            thread.join(10.0)
            listener.close()


hellos = st.builds(p.Hello, client=st.just("chat.1"), pid=st.just(1), vault=st.just(False)).map(p.encode)
requests = payloads(of_union(p.ToKeeper))
frames = st.tuples(requests, st.integers(0, 2), st.booleans())
"""(payload, fds sent along, whether its length is right)."""


def free(path: Path) -> int:
    """As the supervisor: free every set. Returns how many there were."""
    vault = Raw(path, p.Hello(client="supervisor", pid=os.getpid(), vault=True))
    try:
        vault.read(p.Welcome)
        vault.send(p.ListSegments())
        listed = vault.read(p.Answer)
        assert isinstance(listed, p.Answer)
        sets = {info.manifest.set_id for info in listed.segments}
        for set_id in sets:
            vault.send(p.Free(set_id=set_id))
            vault.read(p.Answer)
        return len(sets)
    finally:
        vault.close()


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(first=st.one_of(hellos, requests), rest=st.lists(frames, max_size=5))
def test_a_client_that_breaks_the_protocol_hurts_nobody(keeper: Path, first: bytes, rest: list[tuple[bytes, int, bool]]) -> None:
    before = open_fds()
    bad = Raw(keeper)
    try:
        for payload, fds, whole in [(first, 0, True), *rest]:
            frame = framing.pack(payload) if whole else len(payload).to_bytes(2, "big") + payload
            passed = [OwnedFd(os.open("/dev/null", os.O_RDONLY)) for _ in range(fds)]
            ancillary = (
                [(socket.SOL_SOCKET, socket.SCM_RIGHTS, b"".join(fd.fileno().to_bytes(4, "little") for fd in passed))] if fds else []
            )
            bad.sock.settimeout(5.0)
            bad.sock.sendmsg([frame], ancillary)
    except OSError:
        pass  # it has hung up
    finally:
        bad.close()
    good = Raw(keeper, p.Hello(client="chat.2", pid=os.getpid()))
    try:
        assert isinstance(good.read(p.Welcome), p.Welcome)
        good.send(p.ListSegments())
        listed = good.read(p.Answer)
    except ChannelClosed as error:
        raise AssertionError("the keeper hung up on a good client") from error
    finally:
        good.close()
    assert isinstance(listed, p.Answer)
    if len(listed.segments) > FDS // 2:
        free(keeper)
    assert open_fds() <= before + FDS
    assert resident() < MEMORY


def test_after_all_that_nothing_is_left(keeper: Path) -> None:
    free(keeper)
    assert free(keeper) == 0
