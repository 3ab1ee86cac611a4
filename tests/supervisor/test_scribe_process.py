"""The scribe as a process: nobody who prints ever waits, whatever happens to supervisor, scribe, log file or disk."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from shadowsup.supervisor import scribe as scribes
from shadowsup.supervisor.errors import SupervisorError
from shadowsup.supervisor.process import Child, SpawnPlan
from shadowsup.supervisor.scribe_client import ScribeClient, StreamStats

ENV = {"PATH": os.environ["PATH"], "PYTHONPATH": os.environ.get("PYTHONPATH", "")}


class Node:
    """A scribe, its client and the processes that print."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.socket = folder / "scribe.sock"
        self.client = ScribeClient(self.socket)
        self.children: list[Child] = []
        self.ended: asyncio.Queue[str] = asyncio.Queue()
        self.lost: asyncio.Queue[str] = asyncio.Queue()
        self.listen_to(self.client)

    def listen_to(self, client: ScribeClient) -> None:
        client.on_ended = self.ended.put_nowait
        client.on_lost = self.lost.put_nowait

    def log(self, name: str) -> Path:
        return self.folder / "logs" / f"{name}.log"

    async def start_scribe(self) -> Child:
        read, write = os.pipe()
        argv = [sys.executable, "-m", "shadowsup.supervisor.scribe", "--socket", str(self.socket), "--ready-fd", str(write)]
        child = Child.spawn(SpawnPlan(what="scribe", argv=argv, env=ENV, pass_fds=(write,), stderr=2))
        self.children.append(child)
        os.close(write)
        assert await asyncio.to_thread(os.read, read, 1) == b"1"
        os.close(read)
        return child

    async def connect(self) -> None:
        await self.client.connect()

    async def new_supervisor(self) -> None:
        """Forget everything, as a restarted supervisor has."""
        await self.client.close()
        self.client = ScribeClient(self.socket)
        self.listen_to(self.client)
        await self.client.connect()

    async def print(self, stream: str, *argv: str, log: Path | None = None, **limits: int) -> Child:
        worker = stream.partition(".")[0]
        write = await self.client.open(stream, source=stream, path=log or self.log(worker), **limits)  # type: ignore[arg-type]
        child = Child.spawn(SpawnPlan(what=stream, argv=argv, env=ENV, stdout=write, stderr=write))
        os.close(write)
        self.children.append(child)
        return child

    async def shell(self, stream: str, script: str, **more: int) -> Child:
        return await self.print(stream, "sh", "-c", script, **more)

    async def stats(self, stream: str) -> StreamStats:
        return next(each for each in await self.client.stats() if each.stream == stream)

    async def close(self) -> None:
        await self.client.close()
        for child in self.children:
            child.signal_group(signal.SIGKILL)
            await child.wait()
            child.close()


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[Node]:
    node = Node(tmp_path)
    await node.start_scribe()
    await node.connect()
    yield node
    await node.close()


def unmarked(text: str) -> list[str]:
    """Return the lines without time; the form of each is checked."""
    found = []
    for line in text.splitlines():
        match = re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z (\S+ \| .*)", line)
        assert match, line
        found.append(match[1])
    return found


async def stopped(node: Node) -> None:
    """Stop the scribe in order, so that everything is in the files."""
    await node.client.close(stop=True)
    assert await node.children[0].wait() == 0


async def test_output_of_two_engines_goes_to_one_marked_file(node: Node) -> None:
    await node.shell("chat.1", "echo one; echo err >&2; printf unfinished")
    assert await node.ended.get() == "chat.1"
    await node.shell("chat.2", "echo two")
    assert await node.ended.get() == "chat.2"
    assert await node.client.tail("chat.1", 2) == ["err", "unfinished"]
    assert await node.client.tail("chat.2") == ["two"]
    with pytest.raises(SupervisorError, match=r"no stream chat\.9"):
        await node.client.tail("chat.9")
    await stopped(node)
    assert unmarked(node.log("chat").read_text()) == ["chat.1 | one", "chat.1 | err", "chat.1 | unfinished", "chat.2 | two"]
    assert not node.socket.exists()


async def test_tail_has_what_was_printed_just_now(node: Node) -> None:
    write = await node.client.open("chat.1", source="chat.1", path=node.log("chat"))
    for number in range(20):
        os.write(write, b"line %d\nhalf" % number)
        assert (await node.client.tail("chat.1", 2)) == [f"{'half' * bool(number)}line {number}", "half"]
    os.close(write)


async def test_name_that_comes_again_continues_its_stream(node: Node) -> None:
    for number in range(3):
        await node.shell("gateway", f"echo {number}")
        assert await node.ended.get() == "gateway"
    assert await node.client.tail("gateway") == ["0", "1", "2"]


async def test_streams_outlive_the_supervisor_and_are_taken_over(node: Node) -> None:
    child = await node.shell("chat.1", "echo before; echo after")
    await node.ended.get()
    assert await child.wait() == 0
    write = await node.client.open("chat.2", source="chat.2", path=node.log("chat"), max_size=12345, keep=2, tail_lines=7)
    os.write(write, b"first\n")
    await node.new_supervisor()
    os.write(write, b"second\n")
    assert await node.client.tail("chat.2") == ["first", "second"]
    assert await node.client.tail("chat.1") == ["before", "after"]
    assert {each.stream: each.ended for each in await node.client.stats()} == {"chat.1": True, "chat.2": False}
    # The pipe itself was taken over: it outlives this scribe as well.
    node.children[0].signal(signal.SIGKILL)
    await node.lost.get()
    os.write(write, b"third\n")
    await node.start_scribe()
    await node.connect()
    assert await node.client.tail("chat.2") == ["third"]
    os.close(write)
    assert await node.ended.get() == "chat.2"


async def test_killed_scribe_is_replaced_and_nobody_who_prints_notices(node: Node) -> None:
    go_read, go_write = os.pipe()
    os.set_blocking(go_read, False)
    code = f"""
import os
number = 0
while True:
    print('line', number := number + 1, flush=True)
    try:
        os.read({go_read}, 1)
        break
    except BlockingIOError:
        pass
print('last', flush=True)
"""
    write = await node.client.open("chat.1", source="chat.1", path=node.log("chat"))
    child = Child.spawn(SpawnPlan(what="chat.1", argv=[sys.executable, "-c", code], env=ENV, stdout=write, pass_fds=(go_read,)))
    node.children.append(child)
    os.close(write)
    os.close(go_read)
    for _ in range(3):
        while not await node.client.tail("chat.1"):
            pass
        scribe = [each for each in node.children if each.what == "scribe"][-1]
        scribe.signal(signal.SIGKILL)
        await node.lost.get()
        with pytest.raises(SupervisorError, match="no scribe"):
            await node.client.stats()
        await node.start_scribe()
        await node.connect()
    os.close(go_write)
    assert await child.wait() == 0, "no broken pipe"
    assert await node.ended.get() == "chat.1"
    assert (await node.client.tail("chat.1", 1)) == ["last"]


async def test_pipe_opened_without_a_scribe_is_handed_over_later(node: Node) -> None:
    node.children[0].signal(signal.SIGKILL)
    await node.lost.get()
    child = await node.shell("chat.1", "echo waiting")
    assert await child.wait() == 0
    await node.start_scribe()
    await node.connect()
    assert await node.ended.get() == "chat.1"
    assert await node.client.tail("chat.1") == ["waiting"]


async def test_removed_log_file_comes_back_with_the_next_line(node: Node) -> None:
    """P16."""
    write = await node.client.open("chat.1", source="chat.1", path=node.log("chat"))
    os.write(write, b"before\n")
    await node.client.tail("chat.1")
    while not node.log("chat").exists():
        await asyncio.to_thread(os.sched_yield)
    node.log("chat").unlink()
    os.write(write, b"after\n")
    os.close(write)
    await node.ended.get()
    await stopped(node)
    assert unmarked(node.log("chat").read_text())[-1] == "chat.1 | after"


async def test_full_disk_blocks_nobody_and_is_counted(node: Node) -> None:
    """P16."""
    child = await node.print("chat.1", "head", "-c", "3000000", "/dev/zero", log=Path("/dev/full"))
    assert await child.wait() == 0
    assert await node.ended.get() == "chat.1"
    await node.shell("other.1", "echo fine")
    await node.ended.get()
    while (stats := await node.stats("chat.1")).dropped < 3_000_000:
        pass
    assert stats.received == 3_000_000
    await stopped(node)
    assert unmarked(node.log("other").read_text()) == ["other.1 | fine"]


async def test_disk_that_hangs_blocks_nobody_and_is_counted(node: Node, tmp_path: Path) -> None:
    """P16: A FIFO without a reader stands in for it: the open does not return."""
    fifo = tmp_path / "hung.log"
    os.mkfifo(fifo)
    child = await node.print("chat.1", "head", "-c", "30000000", "/dev/zero", log=fifo)
    assert await child.wait() == 0
    assert await node.ended.get() == "chat.1"
    stats = await node.stats("chat.1")
    assert stats.received == 30_000_000
    assert stats.dropped > 20_000_000
    assert "nothing for" in stats.error
    other = await node.shell("other.1", "echo fine")
    assert await other.wait() == 0
    assert await node.client.tail("other.1") == ["fine"]
    # The disk comes back: what is left is written, and says what is missing.
    text = await asyncio.to_thread(fifo.read_bytes)
    assert text.count(b"\0") > 1_000_000


async def test_flood_starves_neither_other_streams_nor_memory(node: Node) -> None:
    """P18."""
    scribe = node.children[0]
    flood = await node.print("chat.1", "yes", max_size=1 << 20, keep=2)
    write = await node.client.open("quiet.1", source="quiet.1", path=node.log("quiet"))
    slowest = 0.0
    first = (await node.stats("chat.1")).received
    while (await node.stats("chat.1")).received < first + 20_000_000:
        started = time.monotonic()
        matched = asyncio.ensure_future(node.client.watch("quiet.1", f"^{started}$"))
        os.write(write, f"{started}\n".encode())
        assert await matched == str(started)
        slowest = max(slowest, time.monotonic() - started)
    peak = int(re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{scribe.pid}/status").read_text())[1])  # type: ignore[index]
    assert flood.alive
    assert slowest < 10.0, "a few ms; behind 20 MB it would wait for ever"
    assert peak < 96 * 1024, "KiB"
    flood.signal(signal.SIGKILL)
    assert await node.ended.get() == "chat.1"
    os.close(write)
    await node.ended.get()
    await stopped(node)
    logs = {path.name: path.stat().st_size for path in node.log("chat").parent.glob("*.log*")}
    assert set(logs) == {"chat.log", "chat.log.1", "chat.log.2", "quiet.log"}
    assert all(size <= 1 << 20 for size in logs.values())


async def test_watch_goes_on_over_a_new_scribe_and_ends_with_its_stream(node: Node) -> None:
    write = await node.client.open("chat.1", source="chat.1", path=node.log("chat"))
    watch = asyncio.ensure_future(node.client.watch("chat.1", r"port (\d+)"))
    hopeless = asyncio.ensure_future(node.client.watch("chat.1", "never"))
    given_up = asyncio.ensure_future(node.client.watch("chat.1", "also never"))
    await node.client.stats()
    given_up.cancel()
    node.children[0].signal(signal.SIGKILL)
    await node.lost.get()
    await node.start_scribe()
    await node.connect()
    os.write(write, b"listening on port 8001\n")
    assert await watch == "listening on port 8001"
    with pytest.raises(SupervisorError, match="no regular expression"):
        await node.client.watch("chat.1", "(")
    os.close(write)
    with pytest.raises(SupervisorError, match="has ended without"):
        await hopeless
    with pytest.raises(SupervisorError, match="has ended without"):
        await node.client.watch("chat.1", "never")


async def test_sigterm_writes_what_is_in_the_pipes(node: Node) -> None:
    write = await node.client.open("chat.1", source="chat.1", path=node.log("chat"))
    await node.client.stats()
    node.children[0].signal(signal.SIGSTOP)
    os.write(write, b"last words\n")
    node.children[0].signal(signal.SIGTERM)
    node.children[0].signal(signal.SIGCONT)
    assert await node.children[0].wait() == 0
    os.close(write)
    assert unmarked(node.log("chat").read_text()) == ["chat.1 | last words"]
    assert not node.socket.exists()


async def test_stranger_that_talks_nonsense_is_cut_off_alone(node: Node) -> None:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(str(node.socket))
        sock.sendall(b"\x05\0\0\0hello")
        assert await asyncio.to_thread(sock.recv, 1) == b""
    assert await node.client.stats() == []


async def test_many_streams_are_taken_over_in_parts(node: Node) -> None:
    writes = [await node.client.open(f"s.{n}", source=f"s.{n}", path=node.log("s")) for n in range(300)]
    await node.client.stats()
    await node.new_supervisor()
    assert len(await node.client.stats()) == 300
    for number, write in enumerate(writes):
        os.write(write, b"%d\n" % number)
    assert await node.client.tail("s.299") == ["299"]
    assert await node.client.tail("s.0") == ["0"]
    for write in writes:
        os.close(write)
    assert {await node.ended.get() for _ in writes} == {f"s.{n}" for n in range(300)}


def test_scribe_without_streams_and_supervisor_goes_away(tmp_path: Path) -> None:
    # Looks at the clock: made, idle, with a connection however long it was, idle again.
    times = iter([0.0, 0.0, 1000.0, 1001.0 + scribes.IDLE_S])
    with scribes.listen(tmp_path / "scribe.sock") as listener, socket.socket(socket.AF_UNIX) as sock:
        sock.connect(str(tmp_path / "scribe.sock"))
        sock.shutdown(socket.SHUT_RDWR)
        scribes.Scribe(listener, lambda: next(times)).run()


async def test_no_scribe_to_connect_to_is_said(tmp_path: Path) -> None:
    client = ScribeClient(tmp_path / "nobody.sock")
    with pytest.raises(SupervisorError, match="does not answer"):
        await client.connect(timeout_s=0.05)
    with pytest.raises(SupervisorError, match="cannot reach"):
        await ScribeClient(tmp_path / ("x" * 200)).connect(timeout_s=0.05)
