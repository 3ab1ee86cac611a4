"""Process trees: every member is found and ended, nobody else is touched, nothing is waited for for ever."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import sys
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from shadowsup.supervisor import identity as ids
from shadowsup.supervisor import proc_reads
from shadowsup.supervisor import tree as trees
from shadowsup.supervisor.identity import Identity
from shadowsup.supervisor.process import Child, SpawnPlan
from shadowsup.supervisor.subreaper import Reaper, become_subreaper, children
from shadowsup.supervisor.tree import TAG_NAME, Tree, kill_tree, shm_of, unlink_shm

# Prints the pid of each process it makes, on one pipe, and then waits for ever. `say(pid)` is atomic.
PREAMBLE = """
import os, signal, subprocess, sys, time
def say(what='ready', pid=None): os.write(1, f'{what} {os.getpid() if pid is None else pid}\\n'.encode())
def rest():
    while True: time.sleep(3600)
def detach(then):
    'Double fork and setsid, the way a daemon does.'
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            then()
            rest()
        os._exit(0)
    os.wait()
"""


class Engine:
    """A tree under test: its child, and the pids it told."""

    def __init__(self, child: Child, tag: str, pipe: asyncio.StreamReader) -> None:
        self.child, self.tag, self._pipe = child, tag, pipe
        self.told: dict[str, Identity] = {}

    async def hear(self, *names: str) -> None:
        while not set(names) <= self.told.keys():
            name, pid = (await self._pipe.readline()).decode().split()
            identity = ids.of(int(pid))
            assert identity is not None
            self.told[name] = identity

    def tree(self) -> Tree:
        return Tree(tag=self.tag, leader=self.child.identity, pgid=self.child.pgid)


@pytest.fixture
async def start() -> AsyncIterator[Callable[..., object]]:
    """Start an engine from code; whatever is left of it at the end is killed."""
    become_subreaper()
    before = set(children())
    engines: list[tuple[Engine, asyncio.ReadTransport]] = []
    reaper = Reaper(grace_s=0.01)
    reaper.start()

    async def start(code: str, tag: str | None = None) -> Engine:
        read, write = os.pipe()
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader()
        transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(read, "rb"))
        tag = f"test/chat.{len(engines) + 1}/{os.getpid()}" if tag is None else tag
        env = {"PATH": os.environ["PATH"], TAG_NAME: tag}
        child = Child.spawn(SpawnPlan(what="engine", argv=[sys.executable, "-c", PREAMBLE + code], env=env, stdout=write))
        os.close(write)
        engine = Engine(child, tag, reader)
        engines.append((engine, transport))
        return engine

    yield start
    left: list[Identity] = []
    for engine, transport in engines:
        left += [engine.child.identity, *engine.told.values()]
        transport.close()
    for identity in left:
        pidfd = ids.open_identity(identity)
        if pidfd is not None:
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            os.close(pidfd)
    for engine, _ in engines:
        await engine.child.wait()
        engine.child.close()
    reaper.close()
    for pid in set(children()) - before:
        await asyncio.to_thread(os.waitid, os.P_PID, pid, os.WEXITED)


async def kill(tree: Tree) -> tuple[set[int], tuple[trees.Member, ...], bool]:
    killed = await asyncio.to_thread(tree.kill)
    try:
        return {member.identity.pid for member in killed.members}, await killed.gone(), killed.complete
    finally:
        killed.close()


async def test_children_go_with_a_leader_that_was_killed_before(start) -> None:  # type: ignore[no-untyped-def]
    """P01."""
    engine = await start("say('leader')\nfor n in range(3):\n    if os.fork() == 0:\n        say(f'child{n}'); rest()\nrest()")
    await engine.hear("leader", "child0", "child1", "child2")
    engine.child.signal(signal.SIGKILL)
    assert await engine.child.wait() == -9
    orphans = {engine.told[f"child{n}"] for n in range(3)}
    assert all(map(ids.alive, orphans))
    pids, survivors, complete = await kill(engine.tree())
    assert pids == {identity.pid for identity in orphans}
    assert survivors == ()
    assert complete
    assert not any(map(ids.alive, orphans))


async def test_helper_that_daemonised_by_exec_is_found_by_its_tag(start) -> None:  # type: ignore[no-untyped-def]
    engine = await start(
        "detach(lambda: say('helper', subprocess.Popen(['sleep', '3600'], start_new_session=True).pid))\nsay('leader'); rest()"
    )
    await engine.hear("helper", "leader")
    stat = ids.read_stat(engine.told["helper"].pid)
    assert stat is not None
    assert engine.child.pgid not in (stat.pgid, stat.session)
    engine.child.signal(signal.SIGKILL)
    await engine.child.wait()
    pids, survivors, _ = await kill(engine.tree())
    assert engine.told["helper"].pid in pids
    assert survivors == ()


async def test_untagged_helper_that_detached_is_known_because_it_was_seen(start) -> None:  # type: ignore[no-untyped-def]
    """Its environment is gone (as after setproctitle), its group and session are its own, its parent dies: only memory helps."""
    code = """
helper = subprocess.Popen(['sleep', '3600'], start_new_session=True, env={})
say('helper', helper.pid); say('leader'); rest()
"""
    engine = await start(code)
    await engine.hear("helper", "leader")
    tree = engine.tree()
    seen = await asyncio.to_thread(tree.observe)
    assert {stat.pid for stat in seen} == {engine.child.pid, engine.told["helper"].pid}
    engine.child.signal(signal.SIGKILL)
    await engine.child.wait()
    assert (await kill(engine.tree()))[0] == set(), "nothing says that it belongs"
    assert Reaper().strays() == [engine.told["helper"]], "but it is known as nobody's"
    pids, survivors, _ = await kill(tree)
    assert pids == {engine.told["helper"].pid}
    assert survivors == ()


async def test_members_that_are_gone_are_not_remembered_for_ever(start) -> None:  # type: ignore[no-untyped-def]
    engine = await start("say('leader')\nif os.fork() == 0: say('child'); rest()\nrest()")
    await engine.hear("leader", "child")
    tree = engine.tree()
    await asyncio.to_thread(tree.observe)
    assert tree._seen == {engine.child.identity, engine.told["child"]}
    os.kill(engine.told["child"].pid, signal.SIGKILL)
    pidfd = os.pidfd_open(engine.told["child"].pid)
    await asyncio.to_thread(select.select, [pidfd], [], [])
    os.close(pidfd)
    await asyncio.to_thread(tree.observe)
    assert tree._seen == {engine.child.identity}


async def test_strangers_and_siblings_survive(start) -> None:  # type: ignore[no-untyped-def]
    """P10."""
    engine = await start("say('leader')\nif os.fork() == 0: say('child'); rest()\nrest()")
    sibling = await start("say('leader'); rest()")
    longer = await start("say('leader'); rest()", tag=f"{engine.tag}0")
    for each in (engine, sibling, longer):
        await each.hear("leader")
    await engine.hear("child")
    pids, survivors, _ = await kill(engine.tree())
    assert pids == {engine.child.pid, engine.told["child"].pid}
    assert survivors == ()
    assert ids.alive(sibling.child.identity)
    assert ids.alive(longer.child.identity)


async def test_group_that_is_not_the_engines_own_is_no_proof(start) -> None:  # type: ignore[no-untyped-def]
    engine = await start("say('leader'); rest()")
    await engine.hear("leader")
    pids, _, _ = await kill(Tree(tag=engine.tag, leader=engine.child.identity, pgid=os.getpgrp()))
    assert pids == {engine.child.pid}


async def test_group_of_a_recycled_pid_is_a_strangers(start) -> None:  # type: ignore[no-untyped-def]
    stranger = await start("say('leader')\nif os.fork() == 0: say('child'); rest()\nrest()")
    await stranger.hear("leader", "child")
    leader = stranger.child.identity
    earlier = Identity(pid=leader.pid, start_time=leader.start_time - 1, boot_id=leader.boot_id)
    assert (await kill(Tree(tag="", leader=earlier, pgid=leader.pid)))[0] == set()
    assert ids.alive(leader)


async def test_engines_of_a_nursery_are_spared_when_it_goes(start) -> None:  # type: ignore[no-untyped-def]
    code = """
say('leader')
if os.fork() == 0:
    os.setsid(); say('engine')
    if os.fork() == 0: say('loader')
    rest()
if os.fork() == 0: say('own'); rest()
rest()
"""
    nursery = await start(code)
    await nursery.hear("leader", "engine", "loader", "own")
    tree = Tree(tag=nursery.tag, leader=nursery.child.identity, pgid=nursery.child.pgid, spare=[nursery.told["engine"]])
    pids, _, _ = await kill(tree)
    assert pids == {nursery.child.pid, nursery.told["own"].pid}
    assert ids.alive(nursery.told["engine"])
    assert ids.alive(nursery.told["loader"])


async def test_tree_that_forks_all_the_time_is_ended(start) -> None:  # type: ignore[no-untyped-def]
    code = """
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
say('leader')
while True:
    if os.fork() == 0:
        time.sleep(0.02)
        os._exit(0) if os.fork() else time.sleep(0.02)
        os._exit(0)
    time.sleep(0.001)
"""
    engine = await start(code)
    await engine.hear("leader")
    _, survivors, complete = await kill(engine.tree())
    assert survivors == ()
    assert complete
    assert (await kill(engine.tree()))[0] == set()


async def test_member_that_cannot_be_killed_is_named_after_the_deadline(start, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    """P06."""
    engine = await start("say('leader'); rest()")
    await engine.hear("leader")
    # A D state cannot be had for the asking: signal 0 stands in for a SIGKILL that does not arrive.
    killed = await asyncio.to_thread(engine.tree().kill, 0)
    (survivor,) = await killed.gone(timeout_s=0.05)
    assert survivor.identity == engine.child.identity
    assert str(survivor).startswith(f"pid {engine.child.pid} (python")
    assert any(f"state {state}" in str(survivor) for state in "SRD")
    killed.close()
    killed.close()


async def test_one_call_kills_and_notes_shared_memory(start) -> None:  # type: ignore[no-untyped-def]
    """P31: Fifty named segments of a killed tree are removed, a file that a stranger has open is not."""
    name = f"shadowsup-test-{os.getpid()}"
    code = f"""
from multiprocessing import shared_memory, resource_tracker
import mmap
resource_tracker.register = lambda *a: None
kept = [shared_memory.SharedMemory(create=True, size=4096, name='{name}-%d' % n) for n in range(50)]
shared = open('/dev/shm/{name}-shared', 'rb')
model = open('/dev/shm/{name}-models/model', 'rb')
say('leader'); rest()
"""
    shared, foreign = Path(f"/dev/shm/{name}-shared"), Path(f"/dev/shm/{name}-foreign")
    shared.write_bytes(b"x")
    folder = Path(f"/dev/shm/{name}-models")
    folder.mkdir()
    model = folder / "model"
    model.write_bytes(b"x")
    foreign.write_bytes(b"x")
    with shared.open("rb"):
        engine = await start(code)
        await engine.hear("leader")
        assert shared in {file.path for file in shm_of([engine.child.pid])}
        killed = await asyncio.to_thread(kill_tree, tag=engine.tag, pgid=engine.child.pgid, leader=engine.child.identity)
        assert await killed.gone() == ()
        killed.close()
        recreated = Path(f"/dev/shm/{name}-7")
        recreated.unlink()
        recreated.write_bytes(b"somebody else's by now")
        removed = await asyncio.to_thread(unlink_shm, killed.shm)
    left = sorted(path.name for path in Path("/dev/shm").glob(f"{name}*"))
    for path in (shared, foreign, recreated, model):  # a model on a RAM disk is there as it was
        path.unlink()
    folder.rmdir()
    assert left == [f"{name}-7", f"{name}-foreign", f"{name}-models", f"{name}-shared"]
    assert len(removed) == 49


async def test_semaphores_of_a_killed_process_are_found_though_nobody_else_has_opened_them(start) -> None:  # type: ignore[no-untyped-def]
    """P31: who makes one has it mapped under a name that is gone at once."""
    name = f"shadowsup-test-{os.getpid()}"
    code = f"""
from multiprocessing import get_context, resource_tracker, synchronize
import itertools
resource_tracker.register = lambda *a: None
numbers = itertools.count()
synchronize.SemLock._make_name = staticmethod(lambda: '/{name}-%d' % next(numbers))
locks = [get_context('spawn').Lock() for _ in range(3)]
say('leader'); rest()
"""
    engine = await start(code)
    await engine.hear("leader")
    names = {Path(f"/dev/shm/sem.{name}-{number}") for number in range(3)}
    assert all(path.exists() for path in names)
    killed = await asyncio.to_thread(kill_tree, tag=engine.tag, pgid=engine.child.pgid, leader=engine.child.identity)
    assert await killed.gone() == ()
    killed.close()
    assert set(await asyncio.to_thread(unlink_shm, killed.shm)) == names
    assert not any(path.exists() for path in names)


async def test_tagged_processes_of_a_node_are_listed(start) -> None:  # type: ignore[no-untyped-def]
    engine = await start("say('leader'); rest()")
    await engine.hear("leader")
    assert (engine.child.identity, engine.tag) in list(trees.tagged("test/"))
    assert list(trees.tagged("no-such-node/")) == []


async def test_orphan_is_reaped_with_its_status_and_supervised_children_are_not() -> None:
    become_subreaper()
    orphans: asyncio.Queue[tuple[int, int]] = asyncio.Queue()
    reaper = Reaper(on_orphan=lambda identity, code: orphans.put_nowait((identity.pid, code)), grace_s=0.01)
    reaper.start()
    read, write = os.pipe()
    code = "import os\npid = os.fork()\nif pid: os.write(1, str(pid).encode()); os._exit(3)\nimport signal; signal.pause()"
    child = Child.spawn(SpawnPlan(what="engine", argv=[sys.executable, "-c", code], env={}, stdout=write))
    os.close(write)
    orphan = int(await asyncio.to_thread(os.read, read, 100))
    os.close(read)
    assert await child.wait() == 3
    assert [identity.pid for identity in reaper.strays()] == [orphan]
    os.kill(orphan, signal.SIGTERM)
    assert await asyncio.wait_for(orphans.get(), 10) == (orphan, -15)
    assert children() == []
    # A status that subprocess waits for is left to it for the grace period.
    slow = Reaper(on_orphan=lambda identity, code: orphans.put_nowait((identity.pid, code)), grace_s=30)
    reaper.close()
    slow.start()
    process = await asyncio.create_subprocess_exec("sh", "-c", "exit 9")
    assert await process.wait() == 9
    assert orphans.empty()
    slow.close()
    slow.close()
    child.close()


async def test_engine_of_a_dead_nursery_is_ours_to_reap() -> None:
    become_subreaper()
    read, write = os.pipe()
    code = "import os\npid = os.fork()\nif pid: os.write(1, str(pid).encode())\nimport signal; signal.pause()"
    nursery = Child.spawn(SpawnPlan(what="nursery", argv=[sys.executable, "-c", code], env={}, stdout=write))
    os.close(write)
    identity = ids.of(int(await asyncio.to_thread(os.read, read, 100)))
    os.close(read)
    assert identity is not None
    engine = Child.adopt(identity, what="engine")
    nursery.signal(signal.SIGKILL)
    await nursery.wait()
    engine.signal(signal.SIGTERM)
    assert await engine.wait() == -15
    nursery.close()
    engine.close()


async def test_a_member_whose_environment_is_read_late_is_found_all_the_same(start, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    """P06: a read that was slow once is made again; one that hangs for ever is not waited for."""
    engine = await start("say('leader')\ndetach(lambda: (os.execv('/bin/sh', ['sh', '-c', 'echo helper $$; exec sleep 3600'])))\nrest()")
    await engine.hear("leader", "helper")
    release, slow = threading.Event(), threading.Event()
    read = trees._environ

    def late(identity: Identity) -> list[bytes]:
        if identity.pid == engine.told["helper"].pid and not release.is_set():
            slow.set()
            release.wait()
        return read(identity)

    def pause(seconds: float) -> None:
        release.set()
        for thread in list(proc_reads._hung.values()):
            thread.join(10.0)

    monkeypatch.setattr(trees, "_environ", late)
    monkeypatch.setattr(trees.time, "sleep", pause)
    killed = await asyncio.to_thread(engine.tree().kill)
    try:
        assert slow.is_set()
        assert engine.told["helper"] in {member.identity for member in killed.members}
        assert killed.complete
        assert await killed.gone() == ()
    finally:
        killed.close()
