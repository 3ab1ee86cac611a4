"""Ends of processes that are not our children: how they ended, and that one which is just dying is gone and no error."""

from __future__ import annotations

import asyncio
import contextlib
import os
import platform
import select
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from shadowsup.supervisor import exit_status
from shadowsup.supervisor import identity as ids
from shadowsup.supervisor.errors import SupervisorError
from shadowsup.supervisor.process import Child

PARENT = """
import os, sys, time
pid = os.fork()
if pid == 0:
    sys.stdin.readline()
    os._exit(3)
print(pid, flush=True)
if sys.argv[1] == "reaps":
    os.waitpid(pid, 0)
    print("reaped", flush=True)
time.sleep(600)
"""


@contextlib.contextmanager
def grandchild(*, reaped: bool) -> Iterator[tuple[int, ids.Identity, subprocess.Popen[str]]]:
    """Yield (pidfd, identity, its parent) of a process that exits with status 3 when its parent's stdin has a line."""
    command = [sys.executable, "-c", PARENT, "reaps" if reaped else "leaves"]
    parent = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None and parent.stdin is not None
    pid = int(parent.stdout.readline())
    identity = ids.of(pid)
    assert identity is not None
    pidfd = os.pidfd_open(pid)
    try:
        yield pidfd, identity, parent
    finally:
        os.close(pidfd)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        parent.kill()
        parent.communicate()


def ended(pidfd: int) -> None:
    poller = select.poll()
    poller.register(pidfd, select.POLLIN)
    assert poller.poll(30_000)


@pytest.mark.parametrize("number", [None, signal.SIGKILL, signal.SIGSEGV])
@pytest.mark.parametrize("reaped", [False, True])
def test_the_end_of_a_process_of_somebody_else_is_known(number: signal.Signals | None, reaped: bool) -> None:
    with grandchild(reaped=reaped) as (pidfd, identity, parent):
        assert exit_status.of(pidfd, identity) is None, "it lives"
        assert parent.stdin is not None and parent.stdout is not None
        if number is None:
            parent.stdin.write("\n")
            parent.stdin.flush()
        else:
            signal.pidfd_send_signal(pidfd, number)
        ended(pidfd)
        if reaped:
            assert parent.stdout.readline() == "reaped\n"
        release = tuple(int(part) for part in platform.release().split(".")[:2])
        known = not reaped or release >= (6, 15)
        assert exit_status.of(pidfd, identity) == (None if not known else 3 if number is None else -number)


async def test_p09_a_process_that_dies_while_it_is_adopted_is_gone_or_its_end_is_told() -> None:
    """The kernel reaps these behind our back, so that the adoption meets every stage of dying."""
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    told = gone = 0
    try:
        for turn in range(300):
            pid = os.posix_spawn("/bin/true", ["true"], {})
            identity = ids.of(pid)
            if identity is None:
                gone += 1
                continue
            if turn % 3:
                await asyncio.sleep(0)
            try:
                child = Child.adopt(identity, what="a process")
            except SupervisorError as error:
                assert "gone" in error.message
                gone += 1
                continue
            async with asyncio.timeout(30.0):
                assert await child.wait() in (0, None)
            assert not child.signal(signal.SIGTERM)
            child.close()
            told += 1
    finally:
        signal.signal(signal.SIGCHLD, before)
    assert told + gone == 300
    assert told > 0
