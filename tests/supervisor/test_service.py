"""A node as a service: what it tells its manager, and memory that outlives supervisor and keeper because the manager holds it."""

from __future__ import annotations

import asyncio
import configparser
import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from node_world import WAIT_S, FakeNode, worker
from service_world import Manager, ServiceNode

from shadowsup.supervisor.sd_notify import ServiceManager

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[Manager]:
    made = Manager(tmp_path / "notify")
    yield made
    made.close()


def segments(node: ServiceNode) -> set[str]:
    return {one["segment"] for one in node.call("memory")["segments"]}


def kill(node: ServiceNode, *pids: int) -> None:
    node.close()
    others = [psutil.Process(pid) for pid in pids]
    node.process.kill()
    node.process.wait()
    for process in others:
        with contextlib.suppress(psutil.NoSuchProcess):  # a spare nursery ends with its supervisor
            process.kill()
    assert psutil.wait_procs(others, WAIT_S)[1] == []


def nothing_runs(node: ServiceNode) -> None:
    """Wait until no process of the node is left: what its dead had just forked ends by itself."""
    deadline = time.monotonic() + WAIT_S
    while left := node.processes():
        assert time.monotonic() < deadline, left
        time.sleep(0.05)  # nobody tells


def test_memory_outlives_supervisor_and_keeper_and_then_every_process(tmp_path: Path, manager: Manager) -> None:
    node = ServiceNode(tmp_path, [worker()], manager)
    try:
        node.healthy()
        expected = node.answer()
        manager.until(lambda: "READY=1" in manager.said and "STATUS=running: chat healthy" in manager.said)
        manager.until(lambda: manager.said.count("WATCHDOG=1") > 2)
        before = segments(node)
        manager.until(lambda: {f"vault.{name}" for name in before} == manager.segments())
        first = node.status()
        engines = {engine["id"]: engine["pid"] for engine in first["workers"][0]["engines"]}

        kill(node, first["memkeeper"]["pid"])
        node.process = node.start()
        node.healthy()
        node.until(lambda status: status["memkeeper"]["state"] == "running")
        second = node.status()
        assert {engine["id"]: engine["pid"] for engine in second["workers"][0]["engines"]} == engines
        assert second["memkeeper"]["pid"] != first["memkeeper"]["pid"]
        assert segments(node) == before
        # Whoever comes new gets the very memory from the new keeper: nobody is stale.
        os.kill(node.engine("active")["pid"], signal.SIGKILL)
        node.recovery(1)
        assert node.answer() == expected
        assert segments(node) == before
        assert len(node.healthy()["engines"]) == 2

        status = node.status()
        kill(node, *(int(line.split()[0]) for line in node.processes() if line.split()[0] != str(node.process.pid)))
        nothing_runs(node)
        node.process = node.start()
        node.healthy()
        assert segments(node) == before
        assert node.status()["workers"][0]["epoch"] > status["workers"][0]["epoch"]
        assert node.status()["gateway"]["listen"] == first["gateway"]["listen"]
        node.until(lambda _: (node.state / "logs" / "chat.log").read_text().count("blocks kept") == 3)
        assert node.answer() == expected

        assert node.stop() == 0
        manager.until(lambda: manager.store == {})
        assert "STOPPING=1" in manager.said
        assert node.processes() == []
        assert not node.runtime.exists()
    finally:
        node.close()
        with contextlib.suppress(ProcessLookupError):
            node.process.kill()
        node.process.wait()
        for line in node.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(line.split()[0]), signal.SIGKILL)


def test_no_child_sees_what_concerns_the_service_alone(manager: Manager) -> None:
    environ = {
        "NOTIFY_SOCKET": str(manager.path),
        "WATCHDOG_USEC": "2000000",
        "LISTEN_PID": str(os.getpid() + 1),
        "LISTEN_FDS": "3",
        "LISTEN_FDNAMES": "a:b:c",
        "PATH": "/bin",
    }
    service = ServiceManager.from_environment(environ)
    assert service is not None
    assert environ == {"PATH": "/bin"}
    assert service.fds == {}, "they are another process's"
    assert service.watchdog_s == 2.0
    service.close()
    assert ServiceManager.from_environment({}) is None
    assert ServiceManager.from_environment({"NOTIFY_SOCKET": "/no/such/socket"}) is None


def test_fds_are_taken_by_name_and_their_end_with_exec(manager: Manager, tmp_path: Path) -> None:
    with open(tmp_path / "one", "w+b") as one, open(tmp_path / "two", "w+b") as two:
        one.write(b"first")
        one.flush()
        manager.store = {"a": [os.dup(one.fileno())], "b": [os.dup(two.fileno()), os.dup(two.fileno())]}
    program = (
        "import os\n"
        "from shadowsup.supervisor.sd_notify import ServiceManager\n"
        "manager = ServiceManager.from_environment(os.environ)\n"
        "print({name: [os.path.basename(os.readlink(f'/proc/self/fd/{fd}')) for fd in fds] for name, fds in manager.fds.items()})\n"
        "print([os.get_inheritable(fd) for fds in manager.fds.values() for fd in fds])\n"
    )
    process = manager.run([sys.executable, "-c", program], stdout=subprocess.PIPE)
    out, _ = process.communicate(timeout=WAIT_S)
    assert out.decode().splitlines() == ["{'a': ['one'], 'b': ['two', 'two']}", "[False, False, False]"]


async def test_a_manager_that_does_not_read_holds_nobody_up_and_gets_all_of_it_later(tmp_path: Path) -> None:
    path = tmp_path / "busy"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver, open(os.devnull) as nothing:
        receiver.bind(str(path))
        service = ServiceManager(str(path))
        began_s = time.monotonic()
        for number in range(700):
            service.store(f"vault.{number}", nothing.fileno())
        assert time.monotonic() - began_s < 30.0
        receiver.setblocking(False)
        names = []
        while len(names) < 700:
            try:
                message, fds, _, _ = socket.recv_fds(receiver, 4096, 1)
            except BlockingIOError:
                await asyncio.sleep(0)  # lets it send more
                continue
            assert len(fds) == 1
            os.close(fds[0])
            names.append(message.decode().splitlines()[1])
        assert names == [f"FDNAME=vault.{number}" for number in range(700)]
        service.close()


class Terminal(FakeNode):
    """A node in the foreground, with SIGHUP as the terminal's shell has it or as nohup has it."""

    ignored = False

    def start(self) -> subprocess.Popen[bytes]:
        how = "IGN" if self.ignored else "DFL"
        program = f"import os, signal, sys; signal.signal(signal.SIGHUP, signal.SIG_{how}); os.execv(sys.executable, sys.argv[1:])"
        script = Path(__file__).with_name("node_world.py")
        argv = [sys.executable, "-c", program, sys.executable, str(script), str(self.config), str(self.runtime)]
        with self.output.open("ab") as sink:
            return subprocess.Popen(argv, stdout=sink, stderr=sink)


class Background(Terminal):
    ignored = True


def test_a_terminal_that_closes_stops_its_node_in_order(tmp_path: Path) -> None:
    node = Terminal(tmp_path, [worker()], "127.0.0.1:0")
    try:
        node.healthy()
        answer = node.ask(tokens=100)
        answer.reached(5)
        node.close()
        node.process.send_signal(signal.SIGHUP)
        assert node.process.wait(WAIT_S) == 0
        assert answer.done.wait(WAIT_S)
        assert not answer.error
        assert "SIGHUP" in node.output.read_text()
        assert node.processes() == []
    finally:
        node.stop()


def test_a_node_in_the_background_does_not_mind_a_hangup(tmp_path: Path) -> None:
    node = Background(tmp_path, [worker()], "127.0.0.1:0")
    try:
        node.healthy()
        node.process.send_signal(signal.SIGHUP)
        assert node.answer()
        assert node.process.poll() is None
    finally:
        assert node.stop() == 0


def test_the_unit_file_is_understood_and_says_what_adoption_needs() -> None:
    path = Path(__file__).parents[2] / "configs" / "systemd" / "shadowsup@.service"
    unit = configparser.ConfigParser(interpolation=None, strict=True)
    unit.optionxform = str  # type: ignore[assignment, method-assign]
    unit.read(path)
    service = unit["Service"]
    assert (service["Type"], service["KillMode"], service["Restart"], service["Delegate"]) == ("notify", "process", "always", "yes")
    assert service["RestartPreventExitStatus"].split() == ["0", "2", "100"]
    assert {"WatchdogSec", "FileDescriptorStoreMax", "FileDescriptorStorePreserve", "LimitNOFILE"} <= service.keys()
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        return
    done = subprocess.run([analyze, "verify", "--man=no", str(path)], capture_output=True, text=True, check=False)
    # Before systemd 254 the store goes with a stop, and lasts for restarts all the same; and OOM kills are not told.
    newer = ("FileDescriptorStorePreserve", "DelegateSubgroup")
    said = [line for line in done.stderr.splitlines() if path.name in line and not any(key in line for key in newer)]
    assert (done.returncode, said) == (0, [])
