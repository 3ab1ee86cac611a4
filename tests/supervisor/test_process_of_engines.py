"""One engine's processes: started, and ended whatever goes wrong on the way."""

from __future__ import annotations

import asyncio
import errno
import os
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


class NoScribe:
    """Output goes nowhere, and none is remembered."""

    async def open(self, stream: str, **_: object) -> int:
        return os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)

    async def tail(self, stream: str, lines: int) -> list[str]:
        raise SupervisorError("no scribe")


class Watched:
    """An engine process and what it tells."""

    def __init__(self, folder: Path) -> None:
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
        launch = Launch(worker="chat", env={"PATH": os.environ["PATH"]}, argv=["sleep", "600"])
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
