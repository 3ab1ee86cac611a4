"""``node.group``: its members may read what goes on, and nothing else. Real sockets, and where we are root a real other user."""

from __future__ import annotations

import asyncio
import grp
import os
import shutil
import stat
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import zmq
from other_user import as_nobody, needs_root

from shadowsup.supervisor import runtime_dir
from shadowsup.supervisor.client import ControlClient, call, follow_events
from shadowsup.supervisor.config.loader import loads
from shadowsup.supervisor.control import READING_VERBS, ControlServer, Reading
from shadowsup.supervisor.errors import NotRunning, SupervisorError
from shadowsup.supervisor.journal import Journal
from shadowsup.supervisor.paths import NodePaths, write_private
from shadowsup.supervisor.scribe_file import LogFile

GROUP = 4_242_424
"""The group of the sockets where we are root; otherwise our own."""


@pytest.fixture
def group() -> int:
    return GROUP if os.geteuid() == 0 else os.getegid()


@pytest.fixture
def folder(group: int) -> Iterator[Path]:
    # Not below pytest's own folder: no other user may enter that.
    base = Path(tempfile.mkdtemp(prefix="shadowsup-group-"))
    base.chmod(0o711)
    try:
        yield runtime_dir.create(base / "node", group=group)
    finally:
        shutil.rmtree(base)


class Server:
    def __init__(self, folder: Path, group: int) -> None:
        self.ordered: list[str] = []
        self.journal = Journal(None)
        verbs: dict[str, Callable[[dict[str, Any]], Any]] = {
            "status": lambda _: {"state": "running"},
            "stop": lambda _: self.ordered.append("stop"),
            "events": lambda a: {"events": [{"n": e.n, "event": e.event} for e in self.journal.since(a.get("since"))]},
        }
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        paths = NodePaths(runtime=folder, state=folder)
        reading = Reading(control=paths.control_ro, events=paths.events_ro, group=group)
        self.control = ControlServer(self.context, paths.control, paths.events, verbs, reading=reading)
        self.journal.publish = self.control.publish


@pytest_asyncio.fixture
async def server(folder: Path, group: int) -> AsyncIterator[Server]:
    made = Server(folder, group)
    yield made
    await made.control.close()
    made.context.term()


def modes(folder: Path) -> dict[str, str]:
    return {path.name: f"{stat.S_IMODE(path.stat().st_mode):04o}" for path in folder.iterdir()}


async def test_only_the_sockets_for_reading_are_the_groups(server: Server, folder: Path, group: int) -> None:
    assert f"{stat.S_IMODE(folder.stat().st_mode):04o}" == "0750"
    assert folder.stat().st_gid == group
    assert modes(folder) == {"control.sock": "0600", "events.sock": "0600", "control-ro.sock": "0660", "events-ro.sock": "0660"}
    assert (folder / "control-ro.sock").stat().st_gid == group


@needs_root
async def test_a_member_reads_and_follows_events_and_cannot_order(server: Server, folder: Path, group: int) -> None:
    def member() -> Any:
        with ControlClient(folder, 10.0) as client:
            read = client.call("status")
            first = next(follow_events(client, None))
            with pytest.raises(SupervisorError, match="stop is an order") as refusal:
                client.call("stop")
            return read, first["event"], refusal.value.hint

    server.journal.add("engine.gone")
    read, event, hint = await asyncio.to_thread(as_nobody, member, [group])
    assert (read, event) == ({"state": "running"}, "engine.gone")
    assert "root" in hint
    assert server.ordered == []


@needs_root
async def test_a_member_cannot_open_what_takes_orders(server: Server, folder: Path, group: int) -> None:
    def member() -> None:
        for name in ("control.sock", "events.sock"):
            with pytest.raises(PermissionError):
                runtime_dir._connected(folder / name)
        with pytest.raises(PermissionError):
            (folder / "mine").touch()
        with pytest.raises(PermissionError):
            (folder / "node.json").read_bytes()

    write_private(folder / "node.json", b"{}")
    await asyncio.to_thread(as_nobody, member, [group])


@needs_root
async def test_a_stranger_is_told_that_he_may_not(server: Server, folder: Path) -> None:
    with pytest.raises(SupervisorError, match="no permission to talk to the node"):
        await asyncio.to_thread(as_nobody, lambda: call(folder, "status"))
    assert not await asyncio.to_thread(as_nobody, lambda: runtime_dir.serving(folder))


@needs_root
def test_a_member_finds_what_root_shares_and_nothing_else(folder: Path, group: int, monkeypatch: pytest.MonkeyPatch) -> None:
    shared = folder.parent / "shared"
    monkeypatch.setattr(runtime_dir, "SHARED", shared)
    for name, owner in (("aaa", GROUP + 1), ("team", group)):
        made = runtime_dir.create(shared / name, group=owner)
        (made / "node.json").touch()
    found = as_nobody(lambda: runtime_dir.find(explicit=None, environ={}), [group])
    assert (found.path, found.others) == (shared / "team", ())
    with pytest.raises(NotRunning):
        as_nobody(lambda: runtime_dir.find(explicit=None, environ={}))


async def test_an_order_over_the_socket_for_reading_is_refused_whoever_sends_it(server: Server, folder: Path) -> None:
    def ask(verb: str) -> bytes:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        dealer = context.socket(zmq.DEALER)
        dealer.setsockopt(zmq.LINGER, 0)
        try:
            dealer.connect(f"ipc://{folder / 'control-ro.sock'}")
            dealer.send(b'{"id":1,"verb":"%s"}' % verb.encode())
            return dealer.recv()
        finally:
            dealer.close()
            context.term()

    assert b'"running"' in await asyncio.to_thread(ask, "status")
    assert b"is an order" in await asyncio.to_thread(ask, "stop")
    assert server.ordered == []


async def test_the_nodes_user_keeps_the_socket_for_orders(server: Server, folder: Path) -> None:
    await asyncio.to_thread(call, folder, "stop")
    assert server.ordered == ["stop"]


async def test_a_message_beyond_the_bound_is_not_taken(server: Server, folder: Path) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.setsockopt(zmq.LINGER, 0)
    try:
        dealer.connect(f"ipc://{folder / 'control.sock'}")
        dealer.send(b'{"id":1,"verb":"%s"}' % (b"x" * 2_000_000))
        assert not await asyncio.to_thread(dealer.poll, 200)
        assert await asyncio.to_thread(call, folder, "status") == {"state": "running"}
    finally:
        dealer.close()
        context.term()


def test_every_verb_is_an_order_unless_it_is_named_as_reading() -> None:
    from shadowsup.supervisor import verbs

    table = verbs.table(object())  # type: ignore[arg-type]
    assert set(table) >= READING_VERBS
    assert not READING_VERBS & {"stop", "restart", "drain", "failover", "kill", "reload"}


def test_a_group_that_the_nodes_user_is_not_in_is_said_so(tmp_path: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("root may give a file to any group")
    other = next(each.gr_gid for each in grp.getgrall() if each.gr_gid not in (*os.getgroups(), os.getegid()))
    with pytest.raises(SupervisorError, match=r"not a member of node\.group"):
        runtime_dir.create(tmp_path / "node", group=other)


def test_logs_are_the_groups_to_read_when_there_is_one(tmp_path: Path, group: int) -> None:
    paths = NodePaths(runtime=tmp_path, state=tmp_path / "state")
    for shared, mode in ((None, 0o600), (group, 0o640), (None, 0o600)):
        paths.prepare(shared)
        file = LogFile(paths.log(f"chat-{mode}"), max_size=100, keep=1)
        assert file.write(b"x" * 60 + b"\n") == file.write(b"y" * 60 + b"\n") == 0
        file.close()
        for path in paths.logs.glob(f"chat-{mode}*"):
            assert stat.S_IMODE(path.stat().st_mode) == mode
            assert shared is None or path.stat().st_gid == shared
            path.unlink()


def test_the_group_comes_from_the_config(tmp_path: Path) -> None:
    name = grp.getgrgid(os.getegid()).gr_name
    worker = "{name: a, engine: command, command: [cat], ready: {http: /}}"
    text = f"version: 1\nnode: {{group: {name}}}\nworkers: [{worker}]\n"
    assert loads(text, tmp_path / "node.yaml", shown="node.yaml").config.node.gid == os.getegid()
