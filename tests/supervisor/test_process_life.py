"""One supervised process: how it starts, how its end is seen, how it is signalled."""

from __future__ import annotations

import asyncio
import os
import signal
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from shadowsup.supervisor import identity as ids
from shadowsup.supervisor.errors import SupervisorError
from shadowsup.supervisor.process import Child, Lifeline, SpawnPlan, collect, terminate, watched_pids

ENV = {"PATH": os.environ["PATH"]}


def plan(*argv: str, **more: object) -> SpawnPlan:
    return SpawnPlan(what="test", argv=argv, env=ENV, **more)  # type: ignore[arg-type]


def python(code: str, **more: object) -> SpawnPlan:
    return plan(sys.executable, "-c", code, **more)


async def output_of(code: str, **more: object) -> str:
    read, write = os.pipe()
    child = Child.spawn(python(code, stdout=write, **more))
    os.close(write)
    try:
        with os.fdopen(read) as pipe:
            text = await asyncio.to_thread(pipe.read)
        assert await child.wait() == 0
        return text
    finally:
        child.close()


@pytest.mark.parametrize(("code", "expected"), [("raise SystemExit(7)", 7), ("import os; os.kill(os.getpid(), 11)", -11)])
async def test_exit_status_and_signal_are_told_apart(code: str, expected: int) -> None:
    child = Child.spawn(python(code))
    seen: list[int | None] = []
    child.on_exit = seen.append
    assert child.alive
    assert child.pid in watched_pids()
    assert await child.wait() == expected
    assert seen == [expected]
    assert not child.alive
    assert child.pid not in watched_pids()
    assert ids.of(child.pid) is None, "it is reaped"
    assert not child.signal(signal.SIGTERM)
    child.close()
    child.close()


async def test_lifeline_eof_and_exit_are_each_reported_once() -> None:
    lifeline = Lifeline()
    child = Child.spawn(plan("sleep", "60"), lifeline)
    events: asyncio.Queue[str] = asyncio.Queue()
    child.on_lifeline_eof = lambda: events.put_nowait("eof")
    child.on_exit = lambda code: events.put_nowait(f"exit {code}")
    child.signal(signal.SIGKILL)
    await child.lost()
    assert {await events.get(), await events.get()} == {"eof", "exit -9"}
    assert events.empty()
    child.close()


async def test_closed_lifeline_of_a_living_process_is_a_sign_of_death_and_bytes_are_not() -> None:
    lifeline = Lifeline()
    code = f"import os, time; os.write({lifeline.theirs}, b'x'); os.close({lifeline.theirs}); time.sleep(60)"
    child = Child.spawn(python(code, stdout=None), lifeline)
    await child.lost()
    assert child.alive
    child.signal(signal.SIGKILL)
    assert await child.wait() == -9
    child.close()


async def test_child_runs_in_its_own_session_without_core_dumps_and_with_default_signals() -> None:
    code = """
import os, resource, signal
status = dict(line.split(':', 1) for line in open('/proc/self/status').read().splitlines())
print(os.getsid(0) == os.getpid() == os.getpgrp(), resource.getrlimit(resource.RLIMIT_CORE)[0])
print(int(status['SigBlk'], 16), sorted(os.listdir('/proc/self/fd'))[:3], os.readlink('/proc/self/fd/0'))
"""
    before = signal.getsignal(signal.SIGHUP)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    leaked = os.open("/dev/null", os.O_RDONLY)
    os.set_inheritable(leaked, True)
    try:
        lines = (await output_of(code)).splitlines()
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        ignored = await output_of("import signal; print(open('/proc/self/status').read().split('SigIgn:')[1].split()[0])")
        fds = await output_of("import os; print(len(os.listdir('/proc/self/fd')))")
    finally:
        os.close(leaked)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})
        signal.signal(signal.SIGHUP, before)
    assert lines[0] == "True 0"
    assert lines[1].startswith("0 ")
    assert lines[1].endswith("/dev/null")
    assert not int(ignored, 16) & 1 << signal.SIGHUP - 1
    assert int(fds) == 4, "0, 1, 2 and that of the listing"


async def test_sigpipe_ends_a_child_that_is_not_python() -> None:
    read, write = os.pipe()
    child = Child.spawn(plan("yes", stdout=write))
    os.close(write)
    os.close(read)
    assert await child.wait() == -signal.SIGPIPE
    child.close()


async def test_named_fds_keep_their_number_and_the_environment_is_all_there_is() -> None:
    read, write = os.pipe()
    os.set_inheritable(write, False)
    child = Child.spawn(python(f"import os; os.write({write}, repr(sorted(os.environ)).encode())", pass_fds=(write,)))
    os.close(write)
    with os.fdopen(read) as pipe:
        names = await asyncio.to_thread(pipe.read)
    await child.wait()
    child.close()
    assert "PATH" in names
    assert "HOME" not in names


async def test_working_folder_and_priority_are_set(tmp_path: Path) -> None:
    assert (await output_of("import os; print(os.getcwd())", cwd=tmp_path)).strip() == str(tmp_path)
    assert (await output_of("import os, time; print(os.nice(0))", nice=0)).strip() == "0"
    child = Child.spawn(plan("sleep", "60", nice=7))
    assert os.getpriority(os.PRIO_PROCESS, child.pid) == 7
    if os.geteuid() == 0:
        assert child.renice(0)
        assert os.getpriority(os.PRIO_PROCESS, child.pid) == 0
    child.signal(signal.SIGKILL)
    await child.wait()
    assert not child.renice(0)
    child.close()


async def test_what_cannot_be_started_is_explained(tmp_path: Path) -> None:
    not_executable = tmp_path / "plain"
    not_executable.write_text("x")
    bad_shebang = tmp_path / "script"
    bad_shebang.write_text("#!/no/such/interpreter\n")
    garbage = tmp_path / "garbage"
    garbage.write_text("neither script nor ELF")
    for path in (bad_shebang, garbage):
        path.chmod(stat.S_IRWXU)
    cases = [
        (plan("no-such-program-here"), "there is no program no-such-program-here on PATH"),
        (plan("/no/such/program"), "there is no program /no/such/program"),
        (plan(str(not_executable)), "may not be executed"),
        (plan(str(bad_shebang)), "the interpreter that"),
        (plan(str(garbage)), "not a program for this machine"),
        (plan("true", cwd=tmp_path / "nowhere"), "there is no folder"),
        (plan("true", "x" * 10_000_000), "too long"),
        (plan("true", "a\0b"), "null byte"),
        (plan(), "its command is empty"),
    ]
    for wrong, words in cases:
        with pytest.raises(SupervisorError) as caught:
            Child.spawn(wrong, Lifeline())
        assert words in str(caught.value)
        assert "cannot start test" in str(caught.value)


async def test_spawning_off_the_main_thread_is_refused() -> None:
    with pytest.raises(RuntimeError, match="main thread"):
        await asyncio.to_thread(Child.spawn, plan("true"))
    assert threading.active_count() >= 1


async def test_adopted_process_is_watched_and_its_status_comes_from_whoever_reaps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shadowsup.supervisor.exit_status.of", lambda pidfd, identity: None)  # a kernel that does not tell
    process = await asyncio.to_thread(subprocess.Popen, [sys.executable, "-c", GRANDCHILD], stdout=subprocess.PIPE)
    assert process.stdout is not None
    pid = int(process.stdout.readline())
    identity = ids.of(pid)
    assert identity is not None
    child = Child.adopt(identity, what="engine")
    late: list[int] = []
    exits: list[int | None] = []
    child.on_status = late.append
    child.on_exit = exits.append
    assert child.signal(signal.SIGKILL)
    assert await child.wait() is None
    child.exited(-9)
    child.exited(0)
    assert (exits, late, child.returncode) == ([None], [-9], -9)
    child.close()
    process.communicate()


GRANDCHILD = """
import os, time
pid = os.fork()
if pid == 0:
    time.sleep(60)
    os._exit(0)
print(pid, flush=True)
os.waitpid(pid, 0)
"""


async def test_status_that_the_nursery_told_first_is_part_of_the_exit() -> None:
    child = Child.spawn(plan("sleep", "60"))
    exits: list[int | None] = []
    child.on_exit = exits.append
    child.exited(-15)
    child.signal(signal.SIGKILL)
    assert await child.wait() == -15
    assert exits == [-15]
    assert collect(child.pidfd) == -9, "it was ours to reap all the same"
    child.close()


async def test_adopting_what_is_gone_says_so() -> None:
    process = subprocess.Popen(["true"])
    identity = ids.of(process.pid)
    process.wait()
    assert identity is not None
    with pytest.raises(SupervisorError, match="is gone"):
        Child.adopt(identity, what="engine", lifeline=Lifeline())


async def test_group_is_signalled_after_its_leader_was_reaped() -> None:
    read, write = os.pipe()
    child = Child.spawn(python("import os\nif os.fork(): os._exit(0)\nos.write(1, b'x'); import time; time.sleep(60)", stdout=write))
    os.close(write)
    assert await asyncio.to_thread(os.read, read, 1) == b"x"
    assert await child.wait() == 0
    assert ids.of(child.pid) is None
    assert child.signal_group(signal.SIGKILL)
    assert await asyncio.to_thread(os.read, read, 1) == b"", "the fork held the other end"
    os.close(read)
    child.close()
    assert not child.signal_group(signal.SIGKILL)


async def test_group_kill_spares_a_process_of_another_group() -> None:
    bystander = Child.spawn(plan("sleep", "60"))
    child = Child.spawn(plan("sleep", "60"))
    assert child.signal_group(signal.SIGKILL)
    assert await child.wait() == -9
    assert bystander.alive
    assert ids.alive(bystander.identity)
    assert await terminate(bystander, timeout_s=10) == -15
    child.close()
    bystander.close()


async def test_stop_escalates_to_sigkill_and_says_so() -> None:
    """P22."""
    read, write = os.pipe()
    code = "import os, signal, time; signal.signal(15, signal.SIG_IGN); os.write(1, b'x'); time.sleep(60)"
    child = Child.spawn(python(code, stdout=write))
    os.close(write)
    await asyncio.to_thread(os.read, read, 1)
    os.close(read)
    escalations: list[float] = []
    started = time.monotonic()
    assert await terminate(child, timeout_s=0.05, escalated=lambda: escalations.append(time.monotonic())) == -9
    assert len(escalations) == 1
    assert escalations[0] - started >= 0.05
    child.close()


async def test_process_that_survives_sigkill_is_not_waited_for_for_ever() -> None:
    child = Child.spawn(plan("sleep", "60"))
    real, child.signal_group = child.signal_group, lambda number: True  # type: ignore[method-assign]
    child_signal, child.signal = child.signal, lambda number: True  # type: ignore[method-assign]
    with pytest.raises(TimeoutError):
        await terminate(child, timeout_s=0.0, kill_timeout_s=0.05)
    child.signal, child.signal_group = child_signal, real  # type: ignore[method-assign]
    child.signal(signal.SIGKILL)
    await child.wait()
    child.close()
