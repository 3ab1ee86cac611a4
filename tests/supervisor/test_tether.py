"""The tether: an engine's death is known before its address space is taken apart."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from shadowsup.robust_mutex import RobustMutex
from shadowsup.supervisor.tether import Tether, left_its_memory, stuck

WAIT_S = 20.0

VICTIM = """
import sys, threading
from shadowsup.workers import tether
tether.hold(sys.argv[1])
threading.Thread(target=threading.Event().wait, daemon=True).start()
print("up", flush=True)
if sys.stdin.readline() == "fork\\n":
    import os
    if os.fork() == 0:
        threading.Event().wait()
    print("forked", flush=True)
    sys.stdin.readline()
"""


class Watched:
    """What the supervisor's loop is told, in order."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.changed = asyncio.Event()

    def tell(self, what: str) -> None:
        self.told.append(what)
        self.changed.set()

    async def until(self, told: list[str]) -> None:
        async with asyncio.timeout(WAIT_S):
            while self.told != told:
                self.changed.clear()
                await self.changed.wait()


@pytest.fixture
def victims() -> Iterator[list[subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []
    yield started
    for victim in started:
        if victim.poll() is None:
            os.killpg(victim.pid, signal.SIGKILL)
        victim.wait()
        for pipe in (victim.stdin, victim.stdout):
            assert pipe is not None
            pipe.close()


def start(victims: list[subprocess.Popen[str]], path: Path, code: str = VICTIM) -> subprocess.Popen[str]:
    victim = subprocess.Popen(
        [sys.executable, "-c", code, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    victims.append(victim)
    assert victim.stdout is not None and victim.stdout.readline() == "up\n"
    return victim


@pytest.mark.parametrize("how", ["kill", "exit"])
async def test_an_engines_end_is_told_and_that_its_memory_is_frozen(tmp_path: Path, victims: list[subprocess.Popen[str]], how: str) -> None:
    tether, watched = Tether(tmp_path / "tether"), Watched()
    victim = start(victims, tmp_path / "tether")
    tether.watch(victim.pid, lambda: watched.tell("died"), lambda: watched.tell("frozen"))
    if how == "kill":
        victim.kill()
    else:
        assert victim.stdin is not None
        victim.stdin.close()
    await watched.until(["died", "frozen"])


async def test_a_stopped_engine_is_not_dead(tmp_path: Path, victims: list[subprocess.Popen[str]]) -> None:
    tether, watched = Tether(tmp_path / "tether"), Watched()
    victim = start(victims, tmp_path / "tether")
    victim.send_signal(signal.SIGSTOP)
    tether.watch(victim.pid, lambda: watched.tell("died"), lambda: watched.tell("frozen"))
    assert not left_its_memory(victim.pid, 0.05)
    assert watched.told == []
    victim.kill()
    await watched.until(["died", "frozen"])


async def test_a_child_of_the_engine_does_not_hide_its_death(tmp_path: Path, victims: list[subprocess.Popen[str]]) -> None:
    tether, watched = Tether(tmp_path / "tether"), Watched()
    victim = start(victims, tmp_path / "tether")
    assert victim.stdin is not None and victim.stdout is not None
    victim.stdin.write("fork\n")
    victim.stdin.flush()
    assert victim.stdout.readline() == "forked\n"
    tether.watch(victim.pid, lambda: watched.tell("died"), lambda: watched.tell("frozen"))
    victim.kill()
    await watched.until(["died", "frozen"])
    os.killpg(victim.pid, signal.SIGKILL)


async def test_an_engine_that_never_takes_its_end_leaves_no_thread(tmp_path: Path) -> None:
    tether, watched = Tether(tmp_path / "tether"), Watched()
    before = set(threading.enumerate())
    tether.watch(os.getpid(), lambda: watched.tell("died"), lambda: watched.tell("frozen"))
    (waiter,) = set(threading.enumerate()) - before
    tether.over()
    await asyncio.to_thread(waiter.join, WAIT_S)
    assert not waiter.is_alive()
    assert watched.told == []


def test_a_tether_has_one_holder(tmp_path: Path, victims: list[subprocess.Popen[str]]) -> None:
    mutex = RobustMutex(str(tmp_path / "tether"), create=True)
    assert not mutex.held
    victim = start(victims, tmp_path / "tether")
    assert mutex.held
    second = RobustMutex(str(tmp_path / "tether"))
    with pytest.raises(OSError, match="trylock"):
        second.hold()
    second.close()
    victim.kill()
    assert mutex.wait_for_death()
    mutex.close()


@pytest.mark.parametrize("call", ["iterdir", "read_bytes"])
def test_a_look_that_fails_says_nothing_about_the_memory(monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    """Out of descriptors, nothing can be seen of a process that may still be writing."""

    def fail(path: Path) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(Path, call, fail)
    assert not left_its_memory(os.getpid(), 0.01)


KEPT = """
import ctypes, sys
print("up", flush=True)
sys.stdin.readline()
ctypes.CDLL(None).vfork()
while True:
    ctypes.CDLL(None).sleep(60)
"""
"""Who has called vfork(2) waits in the kernel (D state) for as long as the child neither ends nor executes anything."""


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


async def test_a_process_that_the_kernel_keeps_is_stuck(victims: list[subprocess.Popen[str]]) -> None:
    victim = start(victims, Path(), KEPT)
    assert victim.stdin is not None
    assert not await stuck(lambda: [victim.pid])
    victim.stdin.write("\n")
    victim.stdin.flush()
    async with asyncio.timeout(WAIT_S):
        while state(victim.pid) != "D":  # noqa: ASYNC110 - the kernel tells nobody
            await asyncio.sleep(0.01)
    assert await stuck(lambda: [os.getpid(), victim.pid])
    assert not await stuck(list)


async def test_what_waits_for_another_thread_of_its_own_is_not_stuck(victims: list[subprocess.Popen[str]]) -> None:
    """On their way out threads wait for each other in the kernel: for one that gets no processor, say."""
    other = "import threading, ctypes; threading.Thread(target=ctypes.CDLL(None).sleep, args=(60,), daemon=True).start()\n"
    victim = start(victims, Path(), other + KEPT)
    assert victim.stdin is not None
    victim.stdin.write("\n")
    victim.stdin.flush()
    async with asyncio.timeout(WAIT_S):
        while state(victim.pid) != "D":  # noqa: ASYNC110 - the kernel tells nobody
            await asyncio.sleep(0.01)
    assert not await stuck(lambda: [victim.pid])


async def test_a_process_that_is_not_let_run_is_not_stuck(tmp_path: Path, victims: list[subprocess.Popen[str]]) -> None:
    Tether(tmp_path / "tether").over()
    victim = start(victims, tmp_path / "tether")
    victim.send_signal(signal.SIGSTOP)
    assert not await stuck(lambda: [victim.pid])


async def test_what_has_left_its_memory_is_not_stuck_in_it(victims: list[subprocess.Popen[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shadowsup.supervisor.tether._waits_in_the_kernel", lambda task: True)
    victim = start(victims, Path(), KEPT)
    assert await stuck(lambda: [victim.pid])
    victim.kill()
    await asyncio.to_thread(os.waitid, os.P_PID, victim.pid, os.WEXITED | os.WNOWAIT)
    assert not await stuck(lambda: [victim.pid])
    await asyncio.to_thread(victim.wait)
    assert not await stuck(lambda: [victim.pid])


async def test_a_moment_in_the_kernel_is_not_being_stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = [frozenset({"7", "8"}), frozenset({"8", "9"}), frozenset({"9"})]
    monkeypatch.setattr("shadowsup.supervisor.tether._kept_by_the_kernel", lambda pids: looks.pop(0))
    assert not await stuck(lambda: [1])
    assert not looks


def test_a_tether_whose_engine_was_never_started_is_unmapped(tmp_path: Path) -> None:
    path = tmp_path / "tether"
    tether = Tether(path)
    assert str(path) in Path("/proc/self/maps").read_text()
    tether.over()
    tether.over()
    assert str(path) not in Path("/proc/self/maps").read_text()


FULL = """
set -e
mount -t tmpfs -o size=8k none "$1" || exit 77
head -c 8192 /dev/zero > "$1/rest"
exec "$2" -c 'import sys; from shadowsup.supervisor.tether import Tether; from pathlib import Path; Tether(Path(sys.argv[1]))' "$1/tether"
"""


def test_a_full_runtime_directory_is_an_error_and_not_the_end_of_the_supervisor(tmp_path: Path) -> None:
    command = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", FULL, "sh", str(tmp_path), sys.executable]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=False)
    except FileNotFoundError:
        pytest.skip("there is no unshare(1) here")
    if ended.returncode == 77 or ended.stderr.startswith("unshare:"):
        pytest.skip("mounts are not allowed here")
    assert "No space left on device" in ended.stderr
    assert ended.returncode == 1
