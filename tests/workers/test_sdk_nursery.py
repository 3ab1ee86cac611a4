"""The fork server as a real process: its children are fresh processes, and neither side needs the other to live on."""

from __future__ import annotations

import array
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import pytest
from sdk_world import PATIENCE_S, Gateway, World, environment, run_streams, submit

from shadowsup.wire import framing
from shadowsup.wire import nursery as wire
from shadowsup.wire.engine import EngineSpec, EngineState
from shadowsup.wire.nursery import Clone, Exited, Fork, Forked, ForkRefused, Quit, Ready

Message = TypeVar("Message", bound=wire.FromNursery)


class Client:
    """The supervisor's end."""

    def __init__(self, path: str) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.connect(path)
        self._unpacker = framing.Unpacker()
        self._messages: list[wire.FromNursery] = []
        self.fds: list[int] = []
        self.ready = self.expect(Ready)

    def next(self) -> wire.FromNursery | None:
        while not self._messages:
            assert select.select([self.socket], [], [], PATIENCE_S)[0], "the nursery says nothing"
            data, ancillary, _, _ = self.socket.recvmsg(1 << 16, socket.CMSG_SPACE(64))
            for _, _, content in ancillary:
                fds = array.array("i")
                fds.frombytes(content)
                self.fds += fds
            if not data:
                return None
            self._messages += [wire.decode_answer(payload) for payload in self._unpacker.feed(data)]
        return self._messages.pop(0)

    def expect(self, kind: type[Message]) -> Message:
        message = self.next()
        assert isinstance(message, kind), message
        return message

    def fork(self, spec: EngineSpec, fds: tuple[int, int, int], env: dict[str, str] | None = None) -> None:
        frame = framing.pack(wire.encode(Fork(number=spec.seq, spec=spec, env=env or {"PATH": os.environ["PATH"]})))
        self.socket.sendmsg([frame], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))])

    def send(self, message: wire.ToNursery) -> None:
        self.socket.sendall(framing.pack(wire.encode(message)))

    def close(self) -> None:
        self.socket.close()
        for fd in self.fds:
            os.close(fd)


@dataclass
class Born:
    """A child and what is left of it here."""

    forked: Forked
    pidfd: int
    lifeline: socket.socket
    output: int

    def read(self) -> str:
        """Everything it printed; returns when it and all that has its stdout are gone."""
        chunks = []
        while chunk := os.read(self.output, 1 << 16):
            chunks.append(chunk)
        return b"".join(chunks).decode()

    def close(self) -> None:
        os.close(self.pidfd)
        os.close(self.output)
        self.lifeline.close()


@dataclass
class Nurseries:
    world: World
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    clients: list[Client] = field(default_factory=list)
    born: list[Born] = field(default_factory=list)

    def start(self, *options: str, preload: str = "fake_engine", env: dict[str, str] | None = None) -> Client:
        path = str(self.world.path / f"nursery.{len(self.processes)}.sock")
        ready, theirs = os.pipe()
        command = [sys.executable, "-m", "shadowsup.workers.nursery", "--socket", path, "--preload", preload]
        command += ["--ready-fd", str(theirs), *options]
        self.processes.append(subprocess.Popen(command, pass_fds=[theirs], env={**environment(), **(env or {})}))
        os.close(theirs)
        byte = os.read(ready, 1)
        os.close(ready)
        assert byte == b"1", "the nursery did not come up"
        return self.connect(path)

    def connect(self, path: str) -> Client:
        client = Client(path)
        self.clients.append(client)
        return client

    def fork(self, client: Client, seq: int, env: dict[str, str] | None = None, **changes: Any) -> Born:
        lifeline, theirs = socket.socketpair()
        output, stdout = os.pipe()
        client.fork(self.world.spec(seq, **changes), (theirs.fileno(), stdout, stdout), env)
        theirs.close()
        os.close(stdout)
        forked = client.expect(Forked)
        born = Born(forked, client.fds.pop(0), lifeline, output)
        self.born.append(born)
        return born

    def close(self) -> None:
        for born in self.born:
            try:
                signal.pidfd_send_signal(born.pidfd, signal.SIGKILL)
            except ProcessLookupError:
                pass
            select.select([born.pidfd], [], [], PATIENCE_S)
            born.close()
        for client in self.clients:
            client.close()
        for process in self.processes:
            process.kill()
            process.wait()


@pytest.fixture
def nurseries(world: World) -> Iterator[Nurseries]:
    made = Nurseries(world)
    try:
        yield made
    finally:
        made.close()


def test_forks_an_engine_that_serves_like_any_other(world: World, nurseries: Nurseries) -> None:
    client = nurseries.start()
    assert (client.ready.threads, client.ready.children) == (1, ())
    born = nurseries.fork(client, 1)
    assert (born.forked.engine, born.forked.number) == ("chat.1", 1)
    stat = Path(f"/proc/{born.forked.pid}/stat").read_text()
    assert int(stat.rsplit(")", 1)[1].split()[19]) == born.forked.start_time
    world.supervisor.expect(lambda report: getattr(report, "state", None) is EngineState.PARKED)
    world.supervisor.promote("chat.1", 1)
    gateway = Gateway(world.spec(1).link_socket)
    world.gateways.append(gateway)
    assert run_streams(gateway, [submit("a", "hello", max_tokens=8)])["a"].finish_reason == "length"
    signal.pidfd_send_signal(born.pidfd, signal.SIGKILL)
    assert born.lifeline.recv(1) == b"", "the nursery keeps no copy of the lifeline"
    assert client.expect(Exited).status == -signal.SIGKILL
    assert "parked" in born.read()


@pytest.mark.parametrize("called", [True, False])
def test_a_spare_takes_the_nurserys_place_or_ends_with_its_line(nurseries: Nurseries, called: bool) -> None:
    client = nurseries.start()
    line, theirs = socket.socketpair()
    frame = framing.pack(wire.encode(Clone(number=1)))
    with open(os.devnull, "wb") as sink:
        fds = array.array("i", (theirs.fileno(), sink.fileno(), sink.fileno()))
        client.socket.sendmsg([frame], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)])
    theirs.close()
    spare = client.expect(Forked)
    pidfd = client.fds.pop(0)
    assert spare.engine == ""
    again = nurseries.connect(client.socket.getpeername())
    assert again.ready.children == (), "a spare is no engine"
    nurseries.processes[0].kill()
    nurseries.processes[0].wait()
    ready, ready_theirs = os.pipe()
    if called:
        socket.send_fds(line, [b"g"], [ready_theirs])
    os.close(ready_theirs)
    line.close()
    if called:
        assert os.read(ready, 1) == b"1"
        successor = nurseries.connect(client.socket.getpeername())
        assert (successor.ready.pid, successor.ready.import_s) == (spare.pid, client.ready.import_s), "nothing was imported again"
        born = nurseries.fork(successor, 1)
        assert born.forked.engine == "chat.1"
        successor.send(Quit())
    assert select.select([pidfd], [], [], PATIENCE_S)[0], "the spare did not end"
    os.close(pidfd)
    os.close(ready)


PROBE = """
import json, os, random, signal, sys
def create():
    import numpy
    print(json.dumps({
        "fds": {int(fd): os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{fd}")},
        "env": dict(os.environ), "random": random.random(), "numpy": float(numpy.random.rand()),
        "sid": os.getsid(0) == os.getpid(), "core": __import__("resource").getrlimit(4), "comm": open("/proc/self/comm").read().strip(),
        "handlers": [str(signal.getsignal(n)) for n in (signal.SIGUSR1, signal.SIGCHLD)], "argv0": sys.stdin.read(),
    }))
    raise SystemExit(0)
"""


def test_children_are_fresh(world: World, nurseries: Nurseries) -> None:
    (world.path / "sdk_probe.py").write_text(PROBE)
    client = nurseries.start("--max-threads", "1", env={"PYTHONPATH": f"{world.path}:{environment()['PYTHONPATH']}", "OF_NURSERY": "1"})
    kept = nurseries.fork(client, 9)  # a sibling whose descriptors must not be inherited
    seen = []
    for seq in (1, 2):
        born = nurseries.fork(client, seq, kind="sdk_probe:create", env={"ONLY": "this", "OMP_NUM_THREADS": "1"})
        line = next(line for line in born.read().splitlines() if line.startswith("{"))
        seen.append(json.loads(line))
        assert client.expect(Exited).status == 1  # an engine that leaves by itself has failed
    for one in seen:
        assert one["env"] == {"ONLY": "this", "OMP_NUM_THREADS": "1"}
        assert one["sid"] and one["core"] == [0, 0] and one["comm"].startswith("chat.")
        assert one["handlers"] == [str(signal.Handlers.SIG_DFL)] * 2
        links = {int(fd): to for fd, to in one["fds"].items()}
        assert links[0] == "/dev/null" and links[1] == links[2] and links[1].startswith("pipe:")
        listening = [to for fd, to in links.items() if fd > 2 and to.startswith("pipe:")]
        assert not listening, "no pipe of a sibling"
    assert seen[0]["random"] != seen[1]["random"] and seen[0]["numpy"] != seen[1]["numpy"]
    assert kept.forked.pid != os.getpid()


def test_a_child_keeps_what_the_gpus_driver_has_open_and_nothing_else(tmp_path: Path) -> None:
    """NVML uses its descriptors again, in a child too."""
    code = """
import os, socket, sys
from pathlib import Path
from shadowsup.workers import fork_child
folder = Path(sys.argv[1])
fork_child.DRIVER_FILES = str(folder / "nvidia")
for name in ("nvidiactl", "nvidia0", "other"):
    (folder / name).touch()
opened = {name: os.open(folder / name, os.O_RDWR) for name in ("nvidiactl", "nvidia0", "other")}
out, life = os.dup(1), os.pipe()[0]
assert fork_child.take_descriptors(fork_child.Inheritance(life, out, out)) == life
left = {int(entry.name) for entry in Path("/proc/self/fd").iterdir() if os.path.exists(entry)}
print(left == {0, 1, 2, life, opened["nvidiactl"], opened["nvidia0"]}, sorted(left), opened, flush=True)
os._exit(0)
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, env=environment(), timeout=PATIENCE_S
    )
    assert done.stdout.startswith("True"), done


def test_a_new_supervisor_is_told_who_lives_and_who_has_died_meanwhile(world: World, nurseries: Nurseries) -> None:
    first = nurseries.start()
    path = first.socket.getpeername()
    living, dying = nurseries.fork(first, 1), nurseries.fork(first, 2)
    first.socket.shutdown(socket.SHUT_RDWR)
    signal.pidfd_send_signal(dying.pidfd, signal.SIGKILL)
    select.select([dying.pidfd], [], [], PATIENCE_S)
    second = nurseries.connect(path)
    exited = [one.engine for one in second.ready.children if one.engine == "chat.2"]
    assert [one.engine for one in second.ready.children if one.engine not in exited] == ["chat.1"]
    assert second.ready.children[0].start_time == living.forked.start_time
    assert second.expect(Exited).engine == "chat.2"


def test_the_newest_supervisor_wins(nurseries: Nurseries) -> None:
    first = nurseries.start()
    second = nurseries.connect(first.socket.getpeername())
    assert first.next() is None
    assert nurseries.fork(second, 1).forked.engine == "chat.1"


def test_engines_outlive_their_nursery(world: World, nurseries: Nurseries) -> None:
    client = nurseries.start()
    born = nurseries.fork(client, 1)
    world.supervisor.expect(lambda report: getattr(report, "state", None) is EngineState.PARKED)
    nurseries.processes[0].kill()
    nurseries.processes[0].wait()
    assert world.supervisor.promote("chat.1", 1).epoch == 1
    assert not select.select([born.pidfd], [], [], 0)[0]


@pytest.mark.parametrize("how", ["quit", "sigterm"])
def test_leaves_with_status_0_and_removes_its_socket(nurseries: Nurseries, how: str) -> None:
    client = nurseries.start()
    path = Path(client.socket.getpeername())
    if how == "quit":
        client.send(Quit())
    else:
        nurseries.processes[0].terminate()
    assert nurseries.processes[0].wait(PATIENCE_S) == 0
    assert not path.exists()


def test_refuses_to_fork_with_threads_and_says_why(world: World, nurseries: Nurseries) -> None:
    (world.path / "sdk_threaded.py").write_text("import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n")
    client = nurseries.start(preload="sdk_threaded", env={"PYTHONPATH": f"{world.path}:{environment()['PYTHONPATH']}"})
    lifeline, theirs = socket.socketpair()
    with lifeline, theirs:
        client.fork(world.spec(1), (theirs.fileno(), 1, 2))
        theirs.close()
        refused = client.expect(ForkRefused)
        assert "2 threads" in refused.message and "cold spawn" in refused.hint
        assert lifeline.recv(1) == b"", "its copies are closed"


def test_a_fork_that_fails_is_answered(world: World, nurseries: Nurseries) -> None:
    (world.path / "sdk_nofork.py").write_text(
        "import os, errno\ndef fork():\n    raise BlockingIOError(errno.EAGAIN, 'try again')\nos.fork = fork\n"
    )
    client = nurseries.start(preload="sdk_nofork", env={"PYTHONPATH": f"{world.path}:{environment()['PYTHONPATH']}"})
    client.fork(world.spec(1), (0, 1, 2))
    refused = client.expect(ForkRefused)
    assert "try again" in refused.message


def test_nonsense_ends_the_connection_not_the_nursery(nurseries: Nurseries) -> None:
    client = nurseries.start()
    path = client.socket.getpeername()
    client.socket.sendall(framing.pack(b"\xc1"))
    assert client.next() is None
    assert nurseries.connect(path).ready.threads == 1


def test_a_missing_module_is_said_before_anything_is_served(world: World) -> None:
    command = [sys.executable, "-m", "shadowsup.workers.nursery", "--socket", str(world.path / "n.sock"), "--preload", "no_such_module"]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 2
    assert "no_such_module" in done.stderr and "Traceback" not in done.stderr


SETS = """
import os
os.environ["SDK_SET"] = "by the import"
def create():
    print("sees", os.environ.get("SDK_SET"), os.environ.get("SDK_GIVEN"), flush=True)
    raise SystemExit(0)
"""


def test_children_have_the_variables_that_the_imports_have_set(world: World, nurseries: Nurseries) -> None:
    (world.path / "sdk_sets.py").write_text(SETS)
    path = f"{world.path}:{environment()['PYTHONPATH']}"
    client = nurseries.start(preload="sdk_sets", env={"PYTHONPATH": path})
    given = {"PYTHONPATH": path, "SDK_GIVEN": "by the config"}
    assert "sees by the import by the config\n" in nurseries.fork(client, 1, given, kind="sdk_sets:create").read()


MATMUL = """
import torch
def create():
    a = torch.randn(64, 64)
    print("sum", float((a @ torch.linalg.inv(a)).trace().round()), torch.get_num_threads(), float(torch.rand(1)))
    raise SystemExit(0)
"""


@pytest.mark.model
def test_twenty_children_in_a_row_compute_with_their_own_threads(world: World, nurseries: Nurseries) -> None:
    (world.path / "sdk_matmul.py").write_text(MATMUL)
    client = nurseries.start(preload="transformers", env={"PYTHONPATH": f"{world.path}:{environment()['PYTHONPATH']}"})
    assert client.ready.threads == 1
    drawn = set()
    for seq in range(1, 22):
        env = {"OMP_NUM_THREADS": "2" if seq == 1 else "1"}
        born = nurseries.fork(client, seq, kind="sdk_matmul:create", env=env)
        line = next(line for line in born.read().splitlines() if line.startswith("sum"))
        _, trace, threads, random = line.split()
        assert (float(trace), threads) == (64.0, env["OMP_NUM_THREADS"])
        drawn.add(random)
        client.expect(Exited)
    assert len(drawn) == 21
