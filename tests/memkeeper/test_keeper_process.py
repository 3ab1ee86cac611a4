"""The keeper process: who may connect, what a bad peer can do (nothing), memory that is not there, start and end."""

from __future__ import annotations

import os
import resource
import socket
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from keeper_tools import MODEL, KeeperProcess, Raw, leases, publish, until

from shadowsup.memkeeper import protocol as p
from shadowsup.memkeeper.backends.host_memory import available
from shadowsup.memkeeper.channel import ChannelClosed
from shadowsup.memkeeper.client import KeeperClient
from shadowsup.memkeeper.errors import KeeperError, OutOfMemory
from shadowsup.wire.framing import MAX_FRAME, pack

Engine = Callable[[str], KeeperClient]


def open_fds(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def test_only_this_user_may_connect(keeper: KeeperProcess) -> None:
    assert stat.S_IMODE(keeper.path.stat().st_mode) == 0o600


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become another user")
def test_another_user_is_refused_even_where_the_file_system_lets_it_through(keeper: KeeperProcess, engine: Engine) -> None:
    for path in (keeper.path, keeper.path.parent):  # the folders above are not searched again: it is dialled from inside
        path.chmod(0o777)
    code = (
        "import os, socket, sys\nsock = socket.socket(socket.AF_UNIX)\nos.chdir(sys.argv[1])\n"
        "os.setgroups([])\nos.setgid(65534)\nos.setuid(65534)\nsock.connect('keeper.sock')\nprint(sock.recv(1))"
    )
    done = subprocess.run([sys.executable, "-c", code, str(keeper.path.parent)], capture_output=True, text=True)
    assert done.stdout == "b''\n", done.stderr
    assert engine("chat.1").list() == ()


@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        (MAX_FRAME + 1).to_bytes(4, "little"),
        pack(b"\xc1"),
        pack(b""),
        pack(p.encode(p.Answer())),
        pack(p.encode(p.ListSegments())),
        pack(p.encode(p.Hello(client="", pid=1))),
        pack(p.encode(p.Hello(client="chat.9", pid=1))) * 2,
        pack(p.encode(p.Hello(client="chat.9", pid=1))) + pack(p.encode(p.ListSegments())) * 2000,
    ],
    ids=["http", "too long", "no msgpack", "empty", "an answer", "no hello", "no name", "two hellos", "flood"],
)
def test_a_peer_that_breaks_the_protocol_loses_its_connection_and_no_other(keeper: KeeperProcess, engine: Engine, garbage: bytes) -> None:
    client = engine("chat.1")
    set_id = publish(client, b"x")
    with socket.socket(socket.AF_UNIX) as bad:
        bad.connect(str(keeper.path))
        bad.sendall(garbage)
        bad.settimeout(10)
        try:
            while bad.recv(65536):
                pass
        except ConnectionResetError:
            pass
    assert leases(client) == {set_id: ("chat.1",)}
    assert client.connected


def test_fds_that_nobody_asked_for_are_closed_with_the_connection(keeper: KeeperProcess, engine: Engine) -> None:
    other = engine("chat.1")
    assert other.list() == ()
    before = open_fds(keeper.pid)
    with socket.socket(socket.AF_UNIX) as bad, open("/dev/null") as null:
        bad.connect(str(keeper.path))
        socket.send_fds(bad, [pack(p.encode(p.Hello(client="chat.9", pid=1)))], [null.fileno()] * 20)
        bad.settimeout(10)
        assert bad.recv(100) == b""
    assert other.list() == ()
    until(lambda: open_fds(keeper.pid) <= before)


def test_a_client_that_does_not_read_is_disconnected_and_holds_nobody_up(keeper: KeeperProcess, engine: Engine) -> None:
    client = engine("chat.1")
    assert client.get_weights(MODEL) is None
    handles = client.create(MODEL, [4096] * 500)
    handles.close()
    slow = Raw(keeper.path, p.Hello(client="chat.9", pid=1))
    asked = 0
    with pytest.raises(ChannelClosed, match=r"Broken pipe|reset|closed"):
        while asked < 5000:
            slow.send(p.ListSegments())
            asked += 1
            if asked % 50 == 0:
                assert len(client.list()) == 500
    slow.close()
    assert len(client.list()) == 500


def test_more_memory_than_there_is_is_an_error_with_the_arithmetic(keeper: KeeperProcess, engine: Engine) -> None:
    client = engine("chat.1")
    publish(client, b"x" * 100_000)
    size = available().kernel + (1 << 30)
    before = available().kernel
    with pytest.raises(
        OutOfMemory, match=r"cannot create .* GiB of host memory: .* usable \(MemAvailable .* margin .*\)\. The keeper holds"
    ) as e:
        client.get_kv("chat", MODEL, [size // 2, size // 2], 4096)
    assert "weights of chat: 100.0 KiB, leased by chat.1" in e.value.message
    assert abs(available().kernel - before) < size // 4  # nothing was taken on the way
    client.get_kv("chat", MODEL, [4096], 4096).close()


def test_the_kernels_refusal_is_an_error_and_leaves_nothing_behind(keeper: KeeperProcess, engine: Engine) -> None:
    """The size limit of files stops fallocate itself, in the middle of a set."""
    client = engine("chat.1")
    resource.prlimit(keeper.pid, resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))
    with pytest.raises(OutOfMemory, match=r"the kernel refused 2\.0 MiB of host memory: File too large \(RLIMIT_FSIZE\)"):
        client.get_kv("chat", MODEL, [4096, 4096, 2 << 20], 4096)
    assert client.list() == () and keeper.memfds() == 0
    client.get_kv("chat", MODEL, [4096], 4096).close()


def test_a_publisher_whose_memory_does_not_fit_may_try_again(keeper: KeeperProcess, engine: Engine) -> None:
    client = engine("chat.1")
    assert client.get_weights(MODEL) is None
    with pytest.raises(OutOfMemory):
        client.create(MODEL, [available().kernel + (1 << 30)])
    handles = client.create(MODEL, [4096])
    client.seal(handles.set_id)
    handles.close()


def test_terminate_is_a_clean_end(keeper: KeeperProcess) -> None:
    assert keeper.terminate() == 0
    assert not keeper.path.exists()


def test_one_socket_has_one_keeper_and_a_dead_ones_is_taken_over(keeper: KeeperProcess) -> None:
    command = [sys.executable, "-m", "shadowsup.memkeeper", "--socket", str(keeper.path), "--backend", "host"]
    second = subprocess.run(command, capture_output=True, text=True)
    assert second.returncode == 1
    assert second.stderr.startswith("memkeeper: a keeper serves") and "Traceback" not in second.stderr
    keeper.kill()
    assert keeper.path.exists()
    keeper.start()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--socket", "/nonexistent/keeper.sock"], "cannot listen on"),
        (["--socket", "k", "--backend", "tape"], "unknown memory backend 'tape'"),
    ],
)
def test_a_keeper_that_cannot_start_says_why(options: list[str], words: str, tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-m", "shadowsup.memkeeper", *options], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 1 and words in done.stderr and "Traceback" not in done.stderr


def test_no_answer_in_time_is_an_error_and_the_late_answer_is_nobody_elses(keeper: KeeperProcess, engine: Engine) -> None:
    publisher, waiter = engine("chat.1"), engine("chat.2")
    assert publisher.get_weights(MODEL) is None
    with pytest.raises(KeeperError, match=r"did not answer in 0\.1 s"):
        waiter.get_weights(MODEL, timeout_s=0.1)
    assert waiter.list() == ()
    handles = publisher.create(MODEL, [4096])
    publisher.seal(handles.set_id)
    handles.close()
    assert leases(waiter) == {handles.set_id: ("chat.1",)}
