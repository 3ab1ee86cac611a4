"""One engine's processes: spawned cold or forked by a nursery, watched, killed as a tree, and cleaned up after.

It knows nothing of workers and epochs: it reports what happens as policy events and does what it is told.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from shadowsup.errors import ShadowsupError
from shadowsup.supervisor.cgroup import Cgroup, NodeCgroup
from shadowsup.supervisor.devices import environment
from shadowsup.supervisor.errors import SupervisorError
from shadowsup.supervisor.identity import Identity
from shadowsup.supervisor.inner_end import InnerEnd
from shadowsup.supervisor.nursery_client import NurseryClient
from shadowsup.supervisor.oom import OomCounter
from shadowsup.supervisor.paths import NodePaths, write_private
from shadowsup.supervisor.policy import messages as m
from shadowsup.supervisor.policy.model import How
from shadowsup.supervisor.process import Child, Ended, Lifeline, SpawnPlan
from shadowsup.supervisor.registry import Entry, Registry
from shadowsup.supervisor.scribe_client import ScribeClient
from shadowsup.supervisor.tether import Tether, stuck
from shadowsup.supervisor.tree import TAG_NAME, Tree, tag, unlink_shm
from shadowsup.wire.engine import SPEC_VARIABLE, EngineSpec

REFILL_NICE = 10
"""A shadow that loads in the background leaves the processors to the streams."""
STATUS_WAIT_S = 0.1
"""How long the end of a forked engine waits for its exit status from the nursery, after everything is gone."""
TAIL_LINES = 20
TAIL_WAIT_S = 3.0
"""How long the end of an engine that has not served waits for its last lines: they are all that says why."""
RETRY_KILL_S = 1.0
RETRY_LOOK_S = 0.05

log = logging.getLogger("shadowsup.engine")


@dataclass(frozen=True, kw_only=True)
class Host:
    """What an engine process needs of its node. ``instance``: unique for each start of the node, see `tree.tag`."""

    node: str
    instance: str
    paths: NodePaths
    scribe: ScribeClient
    registry: Registry
    spawn_task: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]
    cgroup: NodeCgroup | None = None
    """Where engines have control groups of their own; None: they have none."""
    oom: OomCounter = field(default_factory=OomCounter)


@dataclass(frozen=True, kw_only=True)
class Launch:
    """How one engine is started. ``spec``: for engines with kept memory; ``argv``: for others, and for those that are started by a command
    line of their own (`SPEC_VARIABLE` tells it where the spec is)."""

    worker: str
    env: Mapping[str, str]
    argv: Sequence[str] = ()
    spec: EngineSpec | None = None
    python: str = sys.executable
    cwd: Path | None = None
    log_max_size: int = 64 << 20
    log_keep: int = 5
    front: bool = False
    """Its first process is a server in front of the one that keeps lifeline and tether (vLLM): the death of either is the engine's, and
    the memory is frozen when the other has left it."""
    ranks: int = 0
    """So many processes beside that one write to the memory, each with a tether of its own: the memory is frozen when all have left it."""
    data: Mapping[str, str] = field(default_factory=dict)
    """Goes into the list of processes, for a supervisor that adopts the engine."""


def placed(launch: Launch, gpus: tuple[str, ...] | None, *, verify: bool, hurry: bool = False, gentle: bool = False) -> Launch:
    """Return ``launch`` for other devices than the config's (None: for the same). ``verify``: every byte of weights is checked. ``hurry``:
    clients wait for it. ``gentle``: nobody does, and another one serves."""
    spec, env = launch.spec, dict(launch.env)
    if gpus is not None:
        env |= environment(gpus)
        spec = msgspec.structs.replace(spec, gpus=gpus) if spec is not None else None
    if verify and spec is not None:
        spec = msgspec.structs.replace(spec, verify="full")
    if (hurry or gentle) and spec is not None:
        spec = msgspec.structs.replace(spec, hurry=hurry, gentle=gentle)
    data = launch.data if gpus is None else {**launch.data, "gpus": ",".join(gpus)}
    return replace(launch, env=env, spec=spec, data=data)


class EngineProcess:
    """One engine. ``tell`` takes its events: `Spawned` or `SpawnFailed`, then `Died`, `Frozen` and exactly one `Gone`."""

    def __init__(self, host: Host, engine: str, launch: Launch, tell: Callable[[m.WorkerEvent], None]) -> None:
        self.id = engine
        self.wants_tail = True
        """Whether its last lines are worth waiting for when it ends."""
        self._host = host
        self._launch = launch
        self._tell = tell
        self._tag = tag(host.node, engine, host.instance)
        self._has_lifeline = launch.spec is not None
        self._entry: Entry | None = None
        self._child: Child | Ended | None = None
        self._tree: Tree | None = None
        self._tether: Tether | None = None
        self._front: Tether | None = None
        """Of the first process, where that is a server in front."""
        self._inner = InnerEnd() if launch.front else None
        """Of the process behind that server that died first: the one with the step loop, or one of its ranks."""
        self._ranks: list[Tether] = []
        self._writing = 1 + launch.ranks
        """Processes that have not left the memory yet."""
        self._frozen = False
        self._up = False
        self._nice = False
        self._group: Path | None = None
        self._ending: asyncio.Task[None] | None = None
        self._status = asyncio.Event()

    @property
    def pid(self) -> int | None:
        return self._child.pid if self._child is not None else None

    # --- start ------------------------------------------------------------------------------------------------------------------

    async def start(self, how: How, nursery: NurseryClient | None, *, refill: bool) -> None:
        """Start the process; the outcome is told as `Spawned` or `SpawnFailed`."""
        # Not on the loop: the kernel changes one group at a time, and moving a process waits for every processor, tens of ms.
        cgroup = await asyncio.to_thread(self._host.cgroup.engine, self.id) if self._host.cgroup is not None else None
        if not await self._come_up(how, nursery, refill, cgroup):
            if cgroup is not None:
                await asyncio.to_thread(cgroup.remove)
        elif cgroup is not None and self._child is not None:
            await asyncio.to_thread(cgroup.add, self._child.pid)  # what it has forked by now is found by the other rules

    async def _come_up(self, how: How, nursery: NurseryClient | None, refill: bool, cgroup: Cgroup | None) -> bool:
        try:
            child = await self._start(how, nursery)
        except ShadowsupError as error:
            self._tell(m.SpawnFailed(self.id, how, error.message, error.hint))
            return False
        except OSError as error:
            self._tell(m.SpawnFailed(self.id, how, error.strerror or str(error), "see `shadowsup doctor`"))
            return False
        data = {"how": how.value, "refill": str(int(refill)), "spawned_s": f"{time.monotonic():.3f}", **self._launch.data}
        if cgroup is not None:
            data["cgroup"] = str(cgroup.path)
        entry = Entry(identity=child.identity, what="engine", engine=self.id, tag=self._tag, pgid=child.pid, data=data)
        try:
            self._host.registry.record(entry)
        except SupervisorError as error:
            # A later supervisor would not find it and start a second one.
            child.signal_group(signal.SIGKILL)
            child.close()
            self._tell(m.SpawnFailed(self.id, how, error.message, error.hint))
            return False
        self._nice = refill and child.renice(REFILL_NICE)
        self._group = self._host.oom.watch(child.pid)
        self._tell(m.Spawned(self.id, child.pid))
        self._watch(child, entry)
        return True

    def adopt(self, entry: Entry) -> None:
        """Watch the processes that another supervisor started. Nothing is told but what happens from now on.

        The far end of its lifeline has died with that supervisor: the tether, whose file is still there, and the pidfd tell of its end.
        """
        self._has_lifeline = False
        self._tag = entry.tag
        self._nice = entry.data.get("refill") == "1"
        self._group = self._host.oom.watch(entry.identity.pid)
        child: Child | Ended
        try:
            child = Child.adopt(entry.identity, what=f"engine {self.id}")
        except SupervisorError:
            child = Ended(entry.identity)
        if self._launch.spec is not None and child.alive:
            try:
                self._tether = Tether(self._host.paths.tether(self.id), made=True)
                self._front = Tether(self._host.paths.front(self.id), made=True) if self._launch.front else None
                self._ranks = [Tether(path, made=True) for path in self._rank_paths()]
            except OSError as error:
                log.warning("%s has no tether, its pidfd tells of its end: %s", self.id, error)
        self._watch(child, entry)

    def note(self, **data: str) -> None:
        """Add to what an adopting supervisor will know. Raises SupervisorError: it cannot be written."""
        entry = self._entry
        if entry is not None and not data.items() <= entry.data.items():
            self._entry = msgspec.structs.replace(entry, data={**entry.data, **data})
            self._host.registry.record(self._entry)

    def _watch(self, child: Child | Ended, entry: Entry) -> None:
        """Callbacks after `Spawned`: what they tell must come after it. Nothing can have been missed, they run on the loop's next turn."""
        self._child = child
        self._entry = entry
        self._tree = Tree(tag=self._tag, leader=child.identity, pgid=child.pid, cgroup=entry.cgroup)
        child.on_lifeline_eof = self._eof
        child.on_exit = self._exited
        child.on_status = lambda _: self._status.set()
        for writer in (self._tether, *self._ranks):
            if writer is not None:
                writer.watch(child.pid, partial(self._main_thread_died, writer), self._left_memory)
        if self._front is not None:
            self._front.watch(child.pid, self._front_died, lambda: None)

    async def _start(self, how: How, nursery: NurseryClient | None) -> Child:
        launch, host = self._launch, self._host
        output = await host.scribe.open(
            self.id, source=self.id, path=host.paths.log(launch.worker), max_size=launch.log_max_size, keep=launch.log_keep
        )
        try:
            env = {**launch.env, TAG_NAME: self._tag}
            lifeline = Lifeline() if launch.spec is not None else None
            spec = self._tethered(launch.spec) if launch.spec is not None else None
            if how is How.NURSERY and spec is not None and lifeline is not None:
                return await self._fork(spec, env, output, lifeline, nursery)
            argv = list(launch.argv)
            if spec is not None and lifeline is not None:
                path = host.paths.spec(self.id)
                spec = msgspec.structs.replace(spec, lifeline_fd=lifeline.theirs)
                write_private(path, msgspec.json.format(msgspec.json.encode(spec)))
                argv = argv or [launch.python, "-m", "shadowsup.workers.main", str(path)]
                env[SPEC_VARIABLE] = str(path)
            plan = SpawnPlan(what=f"engine {self.id}", argv=argv, env=env, cwd=launch.cwd, stdout=output, stderr=output)
            return Child.spawn(plan, lifeline)
        finally:
            os.close(output)

    def _tethered(self, spec: EngineSpec) -> EngineSpec:
        path = self._host.paths.tether(self.id)
        try:
            self._tether = Tether(path)
            self._front = Tether(self._host.paths.front(self.id)) if self._launch.front else None
            self._ranks = [Tether(path) for path in self._rank_paths()]
        except OSError as error:
            log.warning("%s has no tether, its lifeline tells of its end: %s", self.id, error)
            return spec
        front = str(self._host.paths.front(self.id)) if self._front is not None else ""
        return msgspec.structs.replace(spec, tether=str(path), front_tether=front, rank_tethers=tuple(map(str, self._rank_paths())))

    def _rank_paths(self) -> list[Path]:
        return [self._host.paths.rank(self.id, rank) for rank in range(self._launch.ranks)]

    async def _fork(
        self, spec: EngineSpec, env: Mapping[str, str], output: int, lifeline: Lifeline, nursery: NurseryClient | None
    ) -> Child:
        try:
            if nursery is None:
                raise ShadowsupError("there is no nursery")
            forked = await nursery.fork(spec, env=env, stdout=output, stderr=output, lifeline=lifeline.theirs)
        except BaseException:
            lifeline.close()
            raise
        return Child.adopt(forked.identity, what=f"engine {self.id}", pidfd=forked.pidfd, lifeline=lifeline)

    # --- orders -----------------------------------------------------------------------------------------------------------------

    def signal(self, number: int) -> None:
        """Send a signal to the leader."""
        if self._child is not None:
            self._child.signal(number)

    def hurry(self) -> None:
        """Give it back its normal priority: somebody waits for it now."""
        if self._nice and self._child is not None:
            self._nice = False
            self._child.renice(0)

    def told_status(self, returncode: int) -> None:
        """The nursery has reaped it."""
        if self._child is not None:
            self._child.exited(returncode)

    def kill_tree(self) -> None:
        """SIGKILL to everything of it, until nothing is left. The first blow falls before this returns."""
        if self._child is None:
            return
        self._child.signal_group(signal.SIGKILL)
        if self._ending is None:
            self._ending = self._host.spawn_task(self._end(self._child))
            if self._launch.spec is not None:
                self._host.spawn_task(self._look_whether_stuck(self._child.pid))

    async def gone(self) -> None:
        """Wait for the end of its leader."""
        if self._child is not None:
            await self._child.wait()

    async def observe(self) -> None:
        """Look at its tree once, so that what it detaches later stays known."""
        if self._tree is not None and self._ending is None:
            try:
                await asyncio.to_thread(self._tree.observe)
            except OSError as error:  # out of descriptors: the next look comes
                log.warning("%s could not be looked at: %s", self.id, error)

    @property
    def members(self) -> frozenset[Identity]:
        """The processes of its tree when that was looked at last, some seconds ago; dead ones may be among them."""
        return self._tree.seen if self._tree is not None else frozenset()

    def came_up(self) -> None:
        """It has parked, and has opened what it works with: the next look in turn may come too late to find that. Idempotent."""
        if not self._up:
            self._up = True
            self._host.spawn_task(self.observe())

    def discard(self) -> None:
        """Remove its files and stop watching; after `Gone` (or `SpawnFailed`)."""
        paths = self._host.paths
        paths_of = (paths.spec, paths.link, paths.staged, paths.tether, paths.front)
        for path in (*(of(self.id) for of in paths_of), *self._rank_paths()):
            path.unlink(missing_ok=True)
        if self._launch.front:
            shutil.rmtree(paths.files(self.id), ignore_errors=True)
        for tether in (self._tether, self._front, *self._ranks):
            if tether is not None:
                tether.over()
        if self._inner is not None:
            self._inner.close()
        self._entry = None
        if self._child is not None:
            self._host.registry.forget(self._child.identity)
            self._child.close()

    # --- the end ----------------------------------------------------------------------------------------------------------------

    def _main_thread_died(self, of: Tether) -> None:
        if self._inner is not None:
            self._inner.died(of.owner)
        if not self._frozen:
            self._tell(m.Died(self.id))

    def _front_died(self) -> None:
        if self._inner is not None:
            self._inner.outer_died()
        if not self._frozen:
            self._tell(m.Died(self.id))

    def _left_memory(self) -> None:
        """One of those that write has left it; whoever never took its tether is waited for by the lifeline, which all of them hold."""
        self._writing -= 1
        if not self._frozen and not self._writing:
            self._frozen = True
            self._tell(m.Frozen(self.id))

    async def _look_whether_stuck(self, leader: int) -> None:
        def writers() -> list[int]:
            owners = [tether.owner for tether in (self._tether, *self._ranks) if tether is not None]
            return [] if self._frozen else [owner or leader for owner in owners] or [leader]

        if await stuck(writers) and not self._frozen:
            self._tell(m.Stuck(self.id))

    def _eof(self) -> None:
        if self._frozen:
            return
        self._frozen = True
        self._tell(m.Died(self.id, frozen=True))

    def _exited(self, returncode: int | None) -> None:
        # Without a lifeline (command engines, adopted ones) the exit is all there is; with one, EOF of the last holder says that nobody
        # writes.
        self._frozen = self._frozen or not (self._has_lifeline or self._launch.front)
        self._tell(m.Died(self.id, returncode, frozen=self._frozen))

    async def _end(self, child: Child | Ended) -> None:
        tree = self._tree
        assert tree is not None
        while True:
            try:
                killed = await asyncio.to_thread(tree.kill)
            except OSError as error:  # out of descriptors, mostly; whoever waits for the fence needs another try
                log.warning("%s: its processes could not be looked for: %s", self.id, error)
            else:
                try:
                    left = await killed.gone()
                finally:
                    killed.close()
                if not left and killed.complete and not child.alive:
                    break
                if left:
                    log.warning("%s: still there after SIGKILL: %s", self.id, ", ".join(map(str, left)))
            child.signal_group(signal.SIGKILL)
            if child.alive:
                try:
                    async with asyncio.timeout(RETRY_KILL_S):
                        await child.wait()
                except TimeoutError:
                    continue
            else:  # a member that cannot be ended, or a failed look: not at once again
                await asyncio.sleep(RETRY_LOOK_S)
        self._frozen = True
        output = await self._last_words(child)
        kills = tree.cgroup.oom_kills() if tree.cgroup is not None else None
        status = child.returncode
        if self._inner is not None and self._inner.first and (inner := self._inner.status()) is not None:
            status = inner
        if kills is not None:
            oom = kills > 0
        else:  # what counts memory is a group that it shares with others
            oom = status in (-signal.SIGKILL, None) and self._host.oom.struck(self._group)
        self._tell(m.Gone(self.id, status, output, oom=oom))
        # After the fence only, and not on its way: files in /dev/shm that no living process uses.
        removed = await asyncio.to_thread(unlink_shm, killed.shm)
        if removed:
            log.info("%s: removed %s", self.id, ", ".join(map(str, removed)))
        if tree.cgroup is not None:
            await asyncio.to_thread(tree.cgroup.remove)

    async def _last_words(self, child: Child | Ended) -> tuple[str, ...]:
        if child.returncode is None:
            try:
                async with asyncio.timeout(STATUS_WAIT_S):
                    await self._status.wait()
            except TimeoutError:
                pass
        if not self.wants_tail:
            return ()
        try:
            async with asyncio.timeout(TAIL_WAIT_S):
                return tuple(await self._host.scribe.tail(self.id, TAIL_LINES))
        except (TimeoutError, ShadowsupError):
            return ()
