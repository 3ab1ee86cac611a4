"""Files of a dying process are closed by descending number, so a lifeline must have the highest."""

from __future__ import annotations

import os
import resource
import socket
from pathlib import Path

import pytest

from shadowsup.workers.lifeline import Lifeline


def numbers(target: str = "") -> list[int]:
    """Return the open descriptors, of ``target`` only where that is given."""
    found = []
    for entry in Path("/proc/self/fd").iterdir():
        try:
            if target in (there := str(entry.readlink())) and "/proc/" not in there:
                found.append(int(entry.name))
        except OSError:  # the descriptor of the listing itself
            continue
    return found


@pytest.fixture
def pair() -> tuple[socket.socket, int]:
    ours, theirs = socket.socketpair()
    return ours, theirs.detach()


def test_a_renewed_line_has_a_higher_number_than_what_is_open_and_what_comes(pair: tuple[socket.socket, int]) -> None:
    ours, fd = pair
    target = str(Path(f"/proc/self/fd/{fd}").readlink())
    line = Lifeline(fd)
    for _ in range(2):
        line.renew()
        later = [os.open(os.devnull, os.O_RDONLY) for _ in range(100)]
        assert numbers(target) == [max(numbers())]
        for opened in later:
            os.close(opened)
    line.close()
    assert numbers(target) == []
    ours.close()


def test_a_process_at_its_limit_keeps_its_line(pair: tuple[socket.socket, int]) -> None:
    ours, fd = pair
    line = Lifeline(fd)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(numbers()) + 30, hard))
    try:
        opened = []
        while len(opened) < 28:
            opened.append(os.open(os.devnull, os.O_RDONLY))
        line.renew()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for number in opened:
            os.close(number)
    ours.setblocking(False)
    with pytest.raises(BlockingIOError):
        ours.recv(1)
    line.close()
    assert ours.recv(1) == b""
    ours.close()
