"""One engine's processes: started, and ended whatever goes wrong on the way."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from shadowsup.supervisor import identity as ids
from shadowsup.supervisor.engine_process import EngineProcess, Host, Launch
from shadowsup.supervisor.errors import SupervisorError
from shadowsup.supervisor.paths import NodePaths
from shadowsup.supervisor.policy import messages as m
from shadowsup.supervisor.policy.model import How
from shadowsup.supervisor.registry import Registry
from shadowsup.supervisor.tree import Killed, Tree
from shadowsup.wire.engine import EngineSpec, KvSpec

RANKS = """
import json, os, signal, sys
from shadowsup.workers import tether
spec = json.load(open(os.environ["SHADOWSUP_SPEC"]))
pids = []
for path in [*spec["rank_tethers"], spec["tether"]]:
    ready, done = os.pipe()
    pid = os.fork()
    if not pid:
        tether.hold(path)
        os.write(done, b"x")
        signal.pause()
    os.read(ready, 1)
    pids.append(pid)
open(sys.argv[1] + ".new", "w").write(" ".join(map(str, pids)))
os.rename(sys.argv[1] + ".new", sys.argv[1])
for pid in pids:
    os.waitpid(pid, 0)
signal.pause()
"""
"""A server in front of one that keeps the index, and of two ranks: all of them have the lifeline."""


class NoScribe:
    """Output goes nowhere, and none is remembered."""

    async def open(self, stream: str, **_: object) -> int:
        return os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)

    async def tail(self, stream: str, lines: int) -> list[str]:
        raise SupervisorError("no scribe")


class Watched:
    """An engine process and what it tells."""

    def __init__(self, folder: Path, launch: Launch | None = None) -> None:
        self.paths = NodePaths(runtime=folder, state=folder)
        self.tasks: set[asyncio.Task[None]] = set()
        self.told: asyncio.Queue[m.WorkerEvent] = asyncio.Queue()
        host = Host(
            node="test",
            instance="x",
            paths=self.paths,
            scribe=NoScribe(),  # type: ignore[arg-type]
            registry=Registry(self.paths.processes),
            spawn_task=self._task,
        )
        launch = launch or Launch(worker="chat", env={"PATH": os.environ["PATH"]}, argv=["sleep", "600"])
        self.process = EngineProcess(host, "chat.1", launch, self.told.put_nowait)

    def _task(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self.tasks.add(task)
        return task

    async def next(self, kind: type[m.WorkerEvent]) -> m.WorkerEvent:
        while True:
            event = await self.told.get()
            if isinstance(event, kind):
                return event


@pytest.fixture
async def engine(tmp_path: Path) -> AsyncIterator[Watched]:
    watched = Watched(tmp_path)
    yield watched
    await asyncio.gather(*watched.tasks)
    watched.process.discard()


async def test_an_end_goes_on_when_one_look_at_the_processes_fails(engine: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    await engine.process.start(How.COLD, None, refill=False)
    real: Callable[[Tree], Killed] = Tree.kill
    failures = [OSError(errno.EMFILE, os.strerror(errno.EMFILE))]

    def kill(tree: Tree) -> Killed:
        if failures:
            raise failures.pop()
        return real(tree)

    monkeypatch.setattr(Tree, "kill", kill)
    engine.process.kill_tree()
    async with asyncio.timeout(30):
        gone = await engine.next(m.Gone)
    assert gone == m.Gone("chat.1", -9, ())


async def test_an_engine_that_cannot_be_recorded_does_not_run(engine: Watched, tmp_path: Path) -> None:
    started = []
    record = Registry.record
    engine.paths.processes.mkdir()  # a list that no file can be renamed over

    def spy(self: Registry, entry: Any) -> None:
        started.append(entry.identity)
        record(self, entry)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Registry, "record", spy)
        await engine.process.start(How.COLD, None, refill=False)
    failed = await engine.next(m.SpawnFailed)
    assert isinstance(failed, m.SpawnFailed) and "cannot write" in failed.message
    (identity,) = started
    await asyncio.to_thread(os.waitid, os.P_PID, identity.pid, os.WEXITED)
    assert not ids.alive(identity)
    assert engine.process.pid is None


async def with_ranks(tmp_path: Path) -> tuple[Watched, list[int]]:
    """Start an engine of `RANKS`. Returns it, and the pids of its ranks and of what keeps the index."""
    spec = EngineSpec(
        node="test",
        worker="chat",
        engine="chat.1",
        seq=1,
        kind="vllm",
        model="m",
        served_name="chat",
        world=2,
        kv=KvSpec(size=0),
        runtime_dir=str(tmp_path),
        keeper_socket="",
        beat_endpoint="",
        link_socket="",
    )
    told = tmp_path / "pids"
    env = {name: os.environ[name] for name in ("PATH", "PYTHONPATH") if name in os.environ}
    argv = [sys.executable, "-c", RANKS, str(told)]
    watched = Watched(tmp_path, Launch(worker="chat", env=env, spec=spec, argv=argv, front=True, ranks=2))
    watched.paths.engines.mkdir()
    await watched.process.start(How.COLD, None, refill=False)
    async with asyncio.timeout(30):
        while not told.exists():  # noqa: ASYNC110 - another process makes it
            await asyncio.sleep(0.01)
    return watched, [int(pid) for pid in told.read_text().split()]


async def test_the_memory_is_frozen_when_the_last_rank_has_left_it(tmp_path: Path) -> None:
    watched, (*ranks, core) = await with_ranks(tmp_path)
    async with asyncio.timeout(30):
        os.kill(ranks[0], signal.SIGKILL)
        assert await watched.next(m.Died) == m.Died("chat.1")
        os.kill(core, signal.SIGKILL)
        assert await watched.next(m.Died) == m.Died("chat.1")
        while watched.process._writing > 1:  # noqa: ASYNC110 - a thread tells
            await asyncio.sleep(0.001)
        assert watched.told.empty()
        os.kill(ranks[1], signal.SIGKILL)
        await watched.next(m.Frozen)
        watched.process.kill_tree()
        await watched.next(m.Gone)
    await asyncio.gather(*watched.tasks)
    watched.process.discard()
    assert not list(watched.paths.engines.iterdir())


async def test_what_the_kernel_keeps_is_told_and_looked_for_in_all_that_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A look finds it stuck before it is frozen: what is told at once here takes 0.1 s."""
    looked: list[list[int]] = []

    async def stuck(pids: Callable[[], list[int]]) -> bool:
        watched.process._frozen = False  # it may be that already, where this thread did not run for some milliseconds
        looked.append(pids())
        return True

    watched, writers = await with_ranks(tmp_path)
    monkeypatch.setattr("shadowsup.supervisor.engine_process.stuck", stuck)
    async with asyncio.timeout(30):
        while [tether.owner for tether in (*watched.process._ranks, watched.process._tether) if tether is not None] != writers:  # noqa: ASYNC110 - a thread sees it
            await asyncio.sleep(0.01)
        watched.process.kill_tree()
        watched.process.kill_tree()
        assert await watched.next(m.Stuck) == m.Stuck("chat.1")
        await watched.next(m.Gone)
    await asyncio.gather(*watched.tasks)
    watched.process.discard()
    assert [sorted(pids) for pids in looked] == [sorted(writers)]
