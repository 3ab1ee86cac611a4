"""One process of the node that is not an engine: stopped while it comes up, run where it cannot be recorded."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Coroutine, Sequence
from pathlib import Path
from typing import Any

import pytest

from shadowsup.memkeeper.errors import KeeperError
from shadowsup.supervisor import identity as ids
from shadowsup.supervisor import node_parts
from shadowsup.supervisor.identity import Identity
from shadowsup.supervisor.journal import Journal
from shadowsup.supervisor.part_process import Part, PartHost
from shadowsup.supervisor.paths import NodePaths
from shadowsup.supervisor.policy.part import PartSettings, PartState
from shadowsup.supervisor.registry import Entry, Registry


class Sleeper(Part):
    """Runs `sleep`; its output is opened when the test says so."""

    def __init__(self, host: PartHost) -> None:
        super().__init__(host, PartSettings(name="sleeper", backoff_s=(600.0,)))
        self.asked = asyncio.Event()
        self.may_spawn = asyncio.Event()
        self.ended = asyncio.Event()

    def changed(self) -> None:
        if self.state is PartState.BACKOFF:
            self.ended.set()

    def argv(self, ready_fd: int) -> Sequence[str]:
        return ["bash", "-c", f"echo >&{ready_fd}; exec sleep 600"]

    async def output(self) -> int:
        self.asked.set()
        await self.may_spawn.wait()
        return os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)


class Recorded(Registry):
    """Remembers everyone who was ever to be recorded."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.seen: list[Identity] = []

    def record(self, entry: Entry) -> None:
        self.seen.append(entry.identity)
        super().record(entry)


class Stubborn:
    """A vault whose keeper does not answer at first."""

    def __init__(self, refusals: int) -> None:
        self.refusals = refusals
        self.lost = asyncio.Event()
        self.lost.set()

    async def restore(self) -> None:
        if self.refusals:
            self.refusals -= 1
            raise KeeperError("no answer")
        self.lost.clear()


@pytest.fixture
async def part(tmp_path: Path) -> AsyncIterator[Sleeper]:
    tasks: set[asyncio.Task[None]] = set()

    def run_task(work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        tasks.add(task)
        return task

    paths = NodePaths(runtime=tmp_path, state=tmp_path)
    host = PartHost(paths=paths, journal=Journal(None), registry=Recorded(paths.processes), scribe=None, run_task=run_task)  # type: ignore[arg-type]
    made = Sleeper(host)
    yield made
    await made.stop()
    made.close()
    await asyncio.gather(*tasks, return_exceptions=True)


def recorded(part: Sleeper) -> list[Identity]:
    assert isinstance(part.host.registry, Recorded)
    return part.host.registry.seen


async def test_a_stop_while_it_is_being_started_waits_for_what_comes_of_that(part: Sleeper) -> None:
    part.start()
    await part.asked.wait()
    stopping = asyncio.ensure_future(part.stop())
    part.may_spawn.set()
    await stopping
    (identity,) = recorded(part)
    assert not ids.alive(identity)
    assert part.host.registry.entries == ()
    assert part.state is PartState.STOPPED


async def test_a_part_that_cannot_be_recorded_is_ended_and_tried_again_later(part: Sleeper) -> None:
    part.host.paths.processes.mkdir()  # a list that no file can be renamed over
    part.may_spawn.set()
    part.start()
    await part.ended.wait()
    assert part.state is PartState.BACKOFF
    (identity,) = recorded(part)
    assert not ids.alive(identity)


async def test_a_vault_that_lost_a_living_keeper_tries_until_it_is_connected(part: Sleeper, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_parts, "RECONNECT_S", 0.001)
    keeper = node_parts.KeeperPart(part.host, "host")
    keeper.policy.want(0.0)
    part.may_spawn.set()
    part.start()
    await part.started(10.0)
    keeper.child, vault = part.child, Stubborn(refusals=3)
    keeper.vault = vault  # type: ignore[assignment]
    await keeper._reconnect()
    assert not vault.lost.is_set()
    keeper.child = None
