"""Identities: a pid, its start time and the boot."""

from __future__ import annotations

import os
import signal
import subprocess
import time

from shadowsup.supervisor import identity as ids


def test_identity_of_a_living_process_is_alive_and_stable() -> None:
    me = ids.of(os.getpid())
    assert me is not None
    assert me == ids.of(os.getpid())
    assert ids.alive(me)


def test_command_name_with_parentheses_and_spaces_is_parsed() -> None:
    stat = ids.read_stat(os.getpid())
    assert stat is not None
    before = stat.comm
    try:
        with open("/proc/self/comm", "w") as file:
            file.write("a) R (b")
        stat = ids.read_stat(os.getpid())
        assert stat is not None
        assert stat.comm == "a) R (b"
        assert stat.ppid == os.getppid()
    finally:
        with open("/proc/self/comm", "w") as file:
            file.write(before)


def test_zombie_is_not_alive_and_a_reaped_process_has_no_identity() -> None:
    process = subprocess.Popen(["true"])
    identity = ids.of(process.pid)
    assert identity is not None
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert ids.of(process.pid) == identity
    assert not ids.alive(identity)
    process.wait()
    assert ids.of(process.pid) is None
    assert ids.open_identity(identity) is None


def test_same_pid_with_another_start_or_boot_is_a_stranger() -> None:
    me = ids.of(os.getpid())
    assert me is not None
    recycled = ids.Identity(pid=me.pid, start_time=me.start_time - 1, boot_id=me.boot_id)
    rebooted = ids.Identity(pid=me.pid, start_time=me.start_time, boot_id="another")
    for other in (recycled, rebooted):
        assert not ids.alive(other)
        assert ids.open_identity(other) is None


def test_pidfd_of_a_dying_process_is_an_fd_or_gone_never_an_error() -> None:
    """P09: Two thousand processes are opened by pid while they die and are reaped by the kernel behind our back."""
    # Ignored SIGCHLD: the kernel reaps at once, so the open meets every stage of dying.
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    opened = gone = 0
    started = time.monotonic()
    try:
        for turn in range(2000):
            pid = os.posix_spawn("/bin/true" if turn % 2 else "/bin/sleep", ["x", "60"], {})
            if turn % 2 == 0:
                os.kill(pid, signal.SIGKILL)
            while (pidfd := ids.open_pidfd(pid)) is not None:
                os.close(pidfd)
                opened += 1
                if opened % 50 == 0:
                    os.sched_yield()
            gone += 1
    finally:
        signal.signal(signal.SIGCHLD, before)
    assert gone == 2000
    assert opened > 0
    assert time.monotonic() - started < 60
