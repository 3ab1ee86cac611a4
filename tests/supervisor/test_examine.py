"""A look at real processes: stopped, computing, asleep; and what the kernel counts of OOM kills."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from shadowsup.supervisor import identity as ids
from shadowsup.supervisor.examine import look
from shadowsup.supervisor.oom import OomCounter
from shadowsup.supervisor.policy.detector import Kind
from shadowsup.supervisor.policy.suspicion import Explanation, Suspicion


def explained(pid: int) -> Explanation:
    """Return what two looks a quarter of a second apart say."""
    suspicion = Suspicion(time.monotonic(), Kind.SILENT, None)
    suspicion.take(look(pid))
    os.sched_yield()
    began = time.monotonic()
    while time.monotonic() < began + 0.25:
        time.sleep(0.01)  # the interval is what is measured
    suspicion.take(look(pid))
    return suspicion.explain()


def test_a_stopped_a_computing_and_a_sleeping_process_are_told_apart() -> None:
    spinning = subprocess.Popen([sys.executable, "-c", "print('up', flush=True)\nwhile True: pass"], stdout=subprocess.PIPE)
    sleeping = subprocess.Popen(["sleep", "60"])
    try:
        assert spinning.stdout is not None and spinning.stdout.readline()
        assert explained(spinning.pid) in (Explanation.RUNNING, Explanation.STARVED)
        assert explained(sleeping.pid) is Explanation.ASLEEP
        spinning.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, spinning.pid, os.WSTOPPED | os.WNOWAIT)
        assert explained(spinning.pid) is Explanation.STOPPED
    finally:
        for process in (spinning, sleeping):
            process.kill()
            process.wait()
        if spinning.stdout is not None:
            spinning.stdout.close()
    assert look(sleeping.pid) is None
    assert explained(sleeping.pid) is Explanation.UNKNOWN


def test_each_oom_kill_of_a_group_is_blamed_on_one_death(tmp_path: Path) -> None:
    proc, root = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "7").mkdir(parents=True)
    (proc / "7" / "cgroup").write_text("0::/node/engines\n")
    group = root / "node" / "engines"
    group.mkdir(parents=True)
    events = group / "memory.events"
    events.write_text("low 0\noom 4\noom_kill 3\n")
    counter = OomCounter(root, proc)
    watched = counter.watch(7)
    assert watched == events
    assert not counter.struck(watched)
    events.write_text("low 0\noom 5\noom_kill 4\n")
    assert counter.struck(watched)
    assert not counter.struck(watched)
    assert counter.watch(8) is None
    assert not counter.struck(None)


def test_without_cgroup_v2_nothing_is_blamed_on_it(tmp_path: Path) -> None:
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "cgroup").write_text("5:memory:/docker/abc\n")
    assert OomCounter(tmp_path, tmp_path).watch(7) is None


def test_a_process_whose_child_is_stopped_counts_as_stopped_and_one_with_another_of_its_pid_does_not() -> None:
    child = subprocess.Popen(["sleep", "60"])
    try:
        identity = ids.of(child.pid)
        assert identity is not None
        found = look(os.getpid(), others=[identity])
        assert found is not None and not found.stopped
        child.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WNOWAIT)
        found = look(os.getpid(), others=[identity])
        assert found is not None and found.stopped
        earlier = ids.Identity(pid=identity.pid, start_time=identity.start_time - 1, boot_id=identity.boot_id)
        found = look(os.getpid(), others=[earlier])
        assert found is not None and not found.stopped
    finally:
        child.kill()
        child.wait()
