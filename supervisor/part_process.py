"""One process of the node that is not an engine: started, watched, replaced, stopped. What kind it is, `node_parts` says."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from shadowsup.errors import ShadowsupError
from shadowsup.supervisor.errors import SupervisorError
from shadowsup.supervisor.journal import Journal
from shadowsup.supervisor.paths import NodePaths
from shadowsup.supervisor.policy.model import exit_text
from shadowsup.supervisor.policy.part import Do, PartPolicy, PartSettings, PartState
from shadowsup.supervisor.process import KILL_TIMEOUT_S, Child, SpawnPlan, terminate
from shadowsup.supervisor.registry import Entry, Registry
from shadowsup.supervisor.scribe_client import ScribeClient

HOPELESS_RESTARTS = 2
"""A part that never served and ended this often after its first start will not serve: the node's start fails and says why."""

log = logging.getLogger("shadowsup.parts")


@dataclass(frozen=True, kw_only=True)
class PartHost:
    """What a part needs of its node. ``run_task`` keeps a reference to the task and logs what it raises."""

    paths: NodePaths
    journal: Journal
    registry: Registry
    scribe: ScribeClient
    run_task: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]


class Part:
    """Base of every part. A subclass says what to spawn (`plan`) and what to do before it counts as running (`connect`)."""

    what = "part"
    """Kind in the registry and in events: ``keeper``, ``gateway``, …"""
    label = ""
    """Tells several of a kind apart, in the registry."""

    def __init__(self, host: PartHost, settings: PartSettings) -> None:
        self.host = host
        self.policy = PartPolicy(settings)
        self.child: Child | None = None
        self.running = asyncio.Event()
        """Set while the part serves."""
        self._ran = False
        self._adopting = False
        self._hopeless = asyncio.Event()
        """Set when it has ended again and again and never served."""
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._bringing: asyncio.Task[None] | None = None
        self._generation = 0

    @property
    def name(self) -> str:
        return self.policy.settings.name

    @property
    def state(self) -> PartState:
        return self.policy.state

    @property
    def pid(self) -> int | None:
        return self.child.pid if self.child is not None else None

    # --- what a subclass says ---------------------------------------------------------------------------------------------------

    def argv(self, ready_fd: int) -> Sequence[str]:
        """Return the command line. ``ready_fd``: where the process writes a byte when it serves."""
        raise NotImplementedError

    def environment(self) -> dict[str, str]:
        return dict(os.environ)

    def pass_fds(self) -> tuple[int, ...]:
        """Return the fds that the process inherits under the same number, besides its ready fd."""
        return ()

    async def output(self) -> int:
        """Return an fd for stdout and stderr; it is closed after the spawn."""
        return await self.host.scribe.open(self.name, source=self.name, path=self.host.paths.log(self.name))

    async def wait_ready(self, ready_fd: int) -> None:
        """Wait until the process serves: by default for the byte on its ready fd."""
        await readable(ready_fd)
        if not os.read(ready_fd, 1):
            raise SupervisorError(f"the {self.name} ended before it served")

    async def connect(self) -> None:
        """Bring it into use. Raises ShadowsupError: it is killed and replaced."""

    async def take_over(self) -> None:
        """Bring one that another supervisor started into use. Raises ShadowsupError: it is killed and replaced."""
        await self.connect()

    def lost(self) -> None:
        """It is gone; nothing may be sent to it any more."""

    # --- life -------------------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Want it to run, from now on."""
        self._apply(self.policy.want(time.monotonic()))

    def adopt(self, entry: Entry) -> None:
        """Want it to run, from now on; it is there already. If it is not (any more), or cannot be brought into use, it is replaced."""
        try:
            child = Child.adopt(entry.identity, what=f"the {self.name}")
        except SupervisorError:
            self.host.registry.forget(entry.identity)
            self.start()
            return
        self.child = child
        child.on_exit = lambda status: self._exited(child, status)
        self._adopting = True
        self._generation += 1
        self._apply(self.policy.adopt(time.monotonic()))
        self._bringing = self.host.run_task(self._take_up(child, self.take_over(), self._generation))

    async def started(self, timeout_s: float) -> None:
        """Wait until it runs.

        Raises:
            SupervisorError: it does not; the message has its last output.
        """
        running, hopeless = asyncio.ensure_future(self.running.wait()), asyncio.ensure_future(self._hopeless.wait())
        try:
            await asyncio.wait({running, hopeless}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (running, hopeless):
                task.cancel()
            await asyncio.gather(running, hopeless, return_exceptions=True)
        if not self.running.is_set():
            raise SupervisorError(f"the {self.name} did not start: {self.policy.reason or 'no answer'}")

    def retire(self) -> None:
        """It may end from now on: nothing starts it again."""
        self._apply(self.policy.release(time.monotonic()))

    async def stop(self, *, signal_number: int = signal.SIGTERM, timeout_s: float = 5.0) -> None:
        """End it for good and wait until it is gone. Whoever wants it to finish something has told it before."""
        self.retire()
        child = self.child
        if child is not None:
            try:
                await terminate(child, signal_number=signal_number, timeout_s=timeout_s, escalated=self._escalated)
            except TimeoutError:
                self.host.journal.add(f"{self.what}.stuck", f"{self.name} does not end, even by SIGKILL", level="error", pid=child.pid)
        if self._bringing is not None:
            await asyncio.gather(self._bringing, return_exceptions=True)
        if self.child is not None:  # it was just being started, and is killed
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(KILL_TIMEOUT_S):
                    await self.child.wait()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._bringing is not None:
            self._bringing.cancel()

    def _escalated(self) -> None:
        self.host.journal.add(f"{self.what}.killed", f"{self.name} did not end in time: SIGKILL sent", level="warning", pid=self.pid)

    def _apply(self, actions: list[Do]) -> None:
        for action in actions:
            match action:
                case Do.SPAWN:
                    self._generation += 1
                    self._bringing = self.host.run_task(self._bring_up(self._generation))
                case Do.KILL:
                    if self.child is not None:
                        self.child.signal_group(signal.SIGKILL)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self.policy.deadline_s < float("inf"):
            self._timer = self._loop.call_at(self.policy.deadline_s, lambda: self._apply(self.policy.tick(time.monotonic())))

    async def _bring_up(self, generation: int) -> None:
        read_fd, write_fd = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            try:
                child = await self._spawn(write_fd)
            except (ShadowsupError, OSError) as error:
                self._ended(str(error))
                return
            finally:
                os.close(write_fd)
            self.child = child
            child.on_exit = lambda status: self._exited(child, status)
            try:
                self.host.registry.record(Entry(identity=child.identity, what=self.what, engine=self.label, pgid=child.pid))
            except SupervisorError as error:
                # A later supervisor would not find it and start a second one.
                log.error("the %s cannot be recorded and is ended: %s", self.name, error)
                child.signal_group(signal.SIGKILL)
                return
            if not self.policy.wanted:  # told to stop meanwhile
                child.signal_group(signal.SIGKILL)
                return
            await self._take_up(child, self._serve(read_fd), generation)
        finally:
            os.close(read_fd)

    async def _take_up(self, child: Child, serving: Coroutine[Any, Any, None], generation: int) -> None:
        """Wait until it serves, or is gone."""
        ready = asyncio.ensure_future(serving)
        gone = asyncio.ensure_future(child.wait())
        try:
            await asyncio.wait({ready, gone}, return_when=asyncio.FIRST_COMPLETED)
            if ready.done() and child.alive and generation == self._generation:
                failure = ready.exception()
                if failure is None:
                    self._serving(child)
                else:
                    log.warning("%s: %s", self.name, failure)
                    self.policy.reason = str(failure)
                    child.signal_group(signal.SIGKILL)
        finally:
            for task in (ready, gone):
                task.cancel()
            await asyncio.gather(ready, gone, return_exceptions=True)

    async def _spawn(self, write_fd: int) -> Child:
        output = await self.output()
        try:
            plan = SpawnPlan(
                what=f"the {self.name}",
                argv=self.argv(write_fd),
                env=self.environment(),
                pass_fds=(*self.pass_fds(), write_fd),
                stdout=output,
                stderr=output,
            )
            return Child.spawn(plan)
        finally:
            os.close(output)

    async def _serve(self, read_fd: int) -> None:
        await self.wait_ready(read_fd)
        await self.connect()

    def _serving(self, child: Child) -> None:
        again = self.policy.restarts > 0
        self._apply(self.policy.ready(time.monotonic()))
        self._ran = True
        self.running.set()
        adopted, self._adopting = self._adopting, False
        text = f"{self.name} is {'adopted' if adopted else 'back' if again else 'running'} (pid {child.pid})"
        self.host.journal.add(f"{self.what}.{'adopted' if adopted else 'running'}", text, pid=child.pid)
        self.changed()

    def _exited(self, child: Child, status: int | None) -> None:
        how = exit_text(status) or "status unknown"
        self.host.registry.forget(child.identity)
        pid = child.pid
        child.close()
        self.child = None
        self.running.clear()
        self._adopting = False
        self.lost()
        if self.policy.wanted:
            self.host.journal.add(f"{self.what}.gone", f"{self.name} (pid {pid}) is gone: {how}", level="warning", pid=pid)
        else:
            self.host.journal.add(f"{self.what}.stopped", f"{self.name} has stopped", pid=pid)
        self._ended(f"it ended with {how}")

    def _ended(self, why: str) -> None:
        self._apply(self.policy.ended(time.monotonic(), why))
        if not self._ran and self.policy.restarts >= HOPELESS_RESTARTS:
            self._hopeless.set()
        self.changed()

    def changed(self) -> None:
        """Its state has changed."""


async def readable(fd: int) -> None:
    """Wait until ``fd`` can be read (or is at its end)."""
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_reader(fd, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(fd)
