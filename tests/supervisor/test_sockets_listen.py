"""The port outside: bound where it was asked, refused with the name of whoever has it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from shadowsup.supervisor import holders, sockets
from shadowsup.supervisor.errors import SupervisorError
from shadowsup.supervisor.sockets import free_port, holders_of_port, listen, parse_address

IPV6 = Path("/proc/net/if_inet6").exists()


def close(socks: list[socket.socket]) -> None:
    for sock in socks:
        sock.close()


@pytest.mark.parametrize(
    ("address", "expected"),
    [("127.0.0.1:8000", ("127.0.0.1", 8000)), ("[::1]:0", ("::1", 0)), (":80", ("", 80)), ("localhost:65535", ("localhost", 65535))],
)
def test_addresses(address: str, expected: tuple[str, int]) -> None:
    assert parse_address(address) == expected


@pytest.mark.parametrize("address", ["8000", "127.0.0.1", "host:", "host:http", "host:65536", "::1:80", "host:²"])
def test_what_is_not_an_address_is_said(address: str) -> None:
    with pytest.raises(SupervisorError, match="is not an address to listen on"):
        parse_address(address)


def test_socket_listens_and_is_neither_blocking_nor_inherited() -> None:
    (sock,) = listen("127.0.0.1:0")
    with socket.create_connection(sock.getsockname()):
        assert not sock.getblocking()
        assert not os.get_inheritable(sock.fileno())
    sock.close()


def test_name_with_several_addresses_gets_one_port_on_all(monkeypatch: pytest.MonkeyPatch) -> None:
    real = socket.getaddrinfo

    def getaddrinfo(host: str, port: int, **more: int) -> list[object]:
        return [each for name in ("127.0.0.1", "127.0.0.2", "127.0.0.1") for each in real(name, port, **more)]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    socks = listen("localhost:0")
    assert [sock.getsockname()[0] for sock in socks] == ["127.0.0.1", "127.0.0.2"]
    assert len({sock.getsockname()[1] for sock in socks}) == 1
    close(socks)


@pytest.mark.skipif(not IPV6, reason="no IPv6 here")
def test_every_interface_includes_ipv6() -> None:
    socks = listen(":0")
    assert {sock.family for sock in socks} == {socket.AF_INET, socket.AF_INET6}
    close(socks)
    socks = listen("[::1]:0")
    with socket.create_connection(("::1", socks[0].getsockname()[1])):
        pass
    close(socks)


def test_taken_port_names_pid_command_and_user_of_its_holder() -> None:
    """P24."""
    code = "import socket; s = socket.create_server(('127.0.0.1', 0)); print(s.getsockname()[1], flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", code, "stranger"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        port = int(holder.stdout.readline())
        with pytest.raises(SupervisorError) as caught:
            listen(f"127.0.0.1:{port}")
        assert f"cannot listen on 127.0.0.1:{port}: the port is taken by pid {holder.pid} (" in str(caught.value)
        assert "create_server" in str(caught.value)
        assert f"user {holders.user_name(os.geteuid())}" in str(caught.value)
        assert "gateway.listen" in caught.value.hint
        holder.communicate("\n")
    (sock,) = listen(f"127.0.0.1:{port}")
    sock.close()


def test_holder_that_only_root_can_see_is_named_by_its_user(monkeypatch: pytest.MonkeyPatch) -> None:
    (sock,) = listen("127.0.0.1:0")
    port = sock.getsockname()[1]

    def refused(pid: int) -> list[str]:
        raise PermissionError

    monkeypatch.setattr(holders, "links_of", refused)
    found, unseen = holders_of_port(port)
    assert found == []
    assert unseen.startswith(f"a process of user {holders.user_name(os.geteuid())}; only root can see which")
    sock.close()
    assert holders_of_port(port) == ([], "")


def test_foreign_address_is_said() -> None:
    with pytest.raises(SupervisorError, match=r"this machine has no address 192\.0\.2\.1"):
        listen("192.0.2.1:0")
    with pytest.raises(SupervisorError, match="has no address"):
        listen("no-such-host.invalid:0")


def test_forbidden_port_says_from_where_on_it_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(self: socket.socket, address: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(socket.socket, "bind", refused)
    with pytest.raises(SupervisorError, match=r"may not bind a port below \d+ \(use a port from \d+ on\)"):
        listen("127.0.0.1:80")


def test_of_eight_starts_at_once_exactly_one_wins() -> None:
    """P24."""
    port = free_port()
    code = f"""
import sys
from shadowsup.supervisor.sockets import listen
from shadowsup.supervisor.errors import SupervisorError
print('ready', flush=True)
sys.stdin.readline()
try:
    kept = listen('127.0.0.1:{port}')
    print('won', flush=True)
except SupervisorError as error:
    print(error, flush=True)
sys.stdin.readline()
"""
    starts = [subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(8)]
    for start in starts:
        assert start.stdout is not None
        assert start.stdout.readline() == "ready\n"
    for start in starts:
        assert start.stdin is not None
        start.stdin.write("go\n")
        start.stdin.flush()
    said = [start.stdout.readline().strip() for start in starts if start.stdout is not None]
    for start in starts:
        start.communicate("end\n")
    assert said.count("won") == 1
    winner = starts[said.index("won")].pid
    assert all(f"taken by pid {winner} (" in text for text in said if text != "won")


def test_free_port_is_free() -> None:
    port = free_port()
    (sock,) = listen(f"127.0.0.1:{port}")
    sock.close()
    assert sockets.free_port("127.0.0.2") > 0


def test_holders_of_a_file_are_found() -> None:
    with open("/dev/zero", "rb") as zero, subprocess.Popen(["sleep", "60"], stdin=zero) as sleeper:
        while not Path(f"/proc/{sleeper.pid}/cmdline").read_bytes():  # on its way through execve it has none for a moment
            pass
        found, _ = holders.holders("/dev/zero".__eq__)
        assert sleeper.pid in {holder.pid for holder in found}
        assert any(str(holder) == f"pid {sleeper.pid} (sleep 60), user {holders.user_name(os.geteuid())}" for holder in found)
        sleeper.kill()
    assert holders.describe(sleeper.pid).command == "gone"
