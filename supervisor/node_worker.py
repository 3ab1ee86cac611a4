"""The owner of one worker: takes its events one at a time, asks the policy, carries out what it says."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from shadowsup.supervisor.beats import BeatRouter
from shadowsup.supervisor.engine_process import EngineProcess, Host, placed
from shadowsup.supervisor.errors import SupervisorError
from shadowsup.supervisor.examine import look
from shadowsup.supervisor.journal import Journal
from shadowsup.supervisor.node_parts import NurseryPart
from shadowsup.supervisor.node_setup import WorkerPlan
from shadowsup.supervisor.policy import messages as m
from shadowsup.supervisor.policy.command import CommandPolicy
from shadowsup.supervisor.policy.model import PLANNED, NurseryState, WorkerState
from shadowsup.supervisor.policy.worker import WorkerPolicy
from shadowsup.supervisor.recipe import CommandRecipe, KeptRecipe, Recipe
from shadowsup.supervisor.recovery import RecoveryBook
from shadowsup.supervisor.registry import Entry, Mark
from shadowsup.supervisor.since import Since
from shadowsup.wire.engine import Beat, EngineState, GatewayBeat, Hurry, Promote, Report, Stop
from shadowsup.wire.sensor import SensorBeat

if TYPE_CHECKING:
    from shadowsup.supervisor.gpu_desk import GpuDesk
    from shadowsup.supervisor.node_memory import KeptMemory

log = logging.getLogger("shadowsup.worker")


@dataclass(frozen=True)
class Line:
    """How engines of one revision of the settings are made. ``nursery``: forks them; None: they are all spawned cold."""

    recipe: Recipe
    nursery: NurseryPart | None = None


class Surroundings(Protocol):
    """What a worker's owner uses of its node."""

    host: Host
    beats: BeatRouter
    journal: Journal
    recoveries: RecoveryBook
    desk: GpuDesk
    memory: KeptMemory

    @property
    def stopping(self) -> bool: ...

    def routes_changed(self) -> None: ...

    def run_task(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]: ...


class WorkerOwner:
    """One task for each worker. `put` may be called from anywhere on the loop, `ask` waits until the wish was taken.

    Args:
        nursery: forks this worker's engines; None: they are all spawned cold.
    """

    def __init__(
        self,
        name: str,
        node: Surroundings,
        policy: WorkerPolicy | CommandPolicy,
        recipe: Recipe,
        nursery: NurseryPart | None = None,
    ) -> None:
        self.name = name
        self.policy = policy
        self.lines: dict[str, Line] = {policy.settings.revision: Line(recipe, nursery)}
        """By revision of the settings: that in force, and during a roll-out the coming one."""
        self.engines: dict[str, EngineProcess] = {}
        self.changed = asyncio.Event()
        """Set, and replaced by a new one, after each event: for those who wait for a state."""
        self._node = node
        self.since = Since(time.monotonic())
        self._queue: asyncio.Queue[m.WorkerEvent] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._timer_s = float("inf")
        self._begun = False
        """It was told to run, or what ran was adopted: from then on it is known what is wanted."""
        self._task = node.run_task(self._own())

    def adopt(self, found: m.Adopt, entries: Sequence[Entry]) -> None:
        """Go on with the engines of another supervisor; in place of the first `RunWorker`. ``entries``: their processes."""
        living = {engine.id for engine in found.engines if engine.alive}
        watched = []
        for entry in entries:
            launch = self.recipe.adopt(entry.engine, int(entry.engine.rpartition(".")[2]), entry.data)
            process = EngineProcess(self._node.host, entry.engine, launch, self.put)
            self.engines[entry.engine] = process
            process.adopt(entry)
            if entry.engine in living:
                watched.append(process)
        self._begun = True
        self._carry_out(self.policy.handle(found, time.monotonic()))
        for process in watched:
            self._node.run_task(self.recipe.watch(process, self.put))

    @property
    def line(self) -> Line:
        """How engines with the settings in force are made."""
        return self.lines[self.policy.settings.revision]

    @property
    def recipe(self) -> Recipe:
        return self.line.recipe

    @property
    def nursery(self) -> NurseryPart | None:
        return self.line.nursery

    def plan(self, nursery: int | None) -> WorkerPlan:
        """Return what runs as the plan of a node has it. ``nursery``: number of its place there."""
        recipe = self.recipe
        assert isinstance(recipe, KeptRecipe | CommandRecipe)
        settings = self.policy.settings
        return WorkerPlan(config=recipe.config, recipe=recipe, gpus=settings.gpus, spares=settings.spares, nursery=nursery)

    @property
    def idle(self) -> bool:
        """Every event that was put has been taken."""
        return not self._queue.qsize()

    def nursery_changed(self, part: NurseryPart, state: NurseryState) -> None:
        """Tell the policy of a nursery that forks engines of this worker."""
        for revision, line in self.lines.items():
            if line.nursery is part:
                self.put(m.NurseryChanged(state, revision))

    # --- events -----------------------------------------------------------------------------------------------------------------

    def put(self, event: m.WorkerEvent) -> None:
        self._begun = self._begun or isinstance(event, m.RunWorker)
        if isinstance(event, m.Died):
            self._node.beats.drain()  # its last words, which say why, lie there before the news of its end
        self._queue.put_nowait(event)
        if not isinstance(event, m.Tick):
            self._node.beats.alert()

    def report(self, report: Report) -> bool:
        """Take what an engine of this worker said; return whether it was news. A beat without any ends here, in a few microseconds."""
        if isinstance(report, Beat):
            if report.engine not in self.policy.engines:
                # Forked by a nursery that died before it could answer: nobody will ever promote it, and it holds memory.
                self._node.beats.send(report.engine, Stop())
                return False
            if report.state is EngineState.PARKED and report.engine in self.engines:
                self.engines[report.engine].came_up()
            actions = self.policy.beat(report, time.monotonic()) if isinstance(self.policy, WorkerPolicy) else []
            if actions:
                self._carry_out(actions)
            else:
                self._set_timer()
            return bool(actions)
        if not isinstance(report, (GatewayBeat, SensorBeat)):
            self.put(m.Reported(report))
        return True

    def gpu_used(self, uuid: str, util: float | None) -> None:
        """Take a GPU's utilisation. It is looked at when something else is judged; an event is only that there is no work any more."""
        policy = self.policy
        if isinstance(policy, WorkerPolicy) and policy.loads.note(uuid, util, time.monotonic()) and uuid in policy.gpus:
            self.put(m.Tick())

    def wish(self, event: m.WorkerEvent) -> None:
        """Take an operator's wish.

        Raises:
            SupervisorError: it cannot be granted now; the policy says why.
        """
        refusal = self.policy.refusal(event)
        if refusal is not None:
            raise SupervisorError(*refusal)
        self.put(event)

    async def until(self, condition: Callable[[], bool], timeout_s: float | None = None) -> bool:
        """Wait until ``condition`` holds after an event of this worker. Returns whether it did in time."""
        try:
            async with asyncio.timeout(timeout_s):
                while self._queue.qsize() or not condition():
                    await self.changed.wait()
        except TimeoutError:
            return False
        return True

    def close(self) -> None:
        """End the owner. Its engines are its node's business by then."""
        if self._timer is not None:
            self._timer.cancel()
        self._task.cancel()

    async def _own(self) -> None:
        while True:
            event = await self._queue.get()
            try:
                actions = self.policy.handle(event, time.monotonic())
            except Exception:
                # A defect here must not end the supervision of this worker: the policy finds what is missing at the next event.
                log.exception("worker %s: %s could not be handled", self.name, event)
                actions = []
            self._carry_out(actions)

    # --- the clock --------------------------------------------------------------------------------------------------------------

    def _set_timer(self) -> None:
        due_s = self.policy.deadline_s
        if due_s == self._timer_s:
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._timer_s = due_s
        if due_s < float("inf"):
            self._timer = self._loop.call_at(due_s, self._tick)

    def _tick(self) -> None:
        due_s, self._timer_s, self._timer = self._timer_s, float("inf"), None
        if isinstance(self.policy, WorkerPolicy):
            if self.policy.postponed(now_s := time.monotonic()):
                self._set_timer()
                return
            self._node.beats.drain()  # no verdict on silence while something lies unread
            if self.policy.postponed(now_s):
                self._set_timer()
                return
        self.put(m.Tick(late_s=max(0.0, time.monotonic() - due_s)))

    # --- actions ----------------------------------------------------------------------------------------------------------------

    def _carry_out(self, actions: list[m.WorkerAction]) -> None:
        for action in actions:
            try:
                self._do(action)
            except Exception:
                # Each is said once: one that cannot be carried out must not take those behind it along (a fence, a promotion).
                log.exception("worker %s: %s could not be carried out", self.name, action)
        self.since.note(self.policy, time.monotonic())
        self._set_timer()
        self._mark()
        changed, self.changed = self.changed, asyncio.Event()
        changed.set()

    def _mark(self) -> None:
        """Leave on disk how far the worker has come. An end of the whole node is not what the operator wants of a worker."""
        if not self._begun:
            return
        policy, registry = self.policy, self._node.host.registry
        desired = registry.mark(self.name).desired if self._node.stopping else policy.desired.value
        cold_start_s = round(policy.cold_start_s or 0.0, 3)
        for engine, process in self.engines.items():
            record = self.policy.engines.get(engine)
            if record is not None and (ending := record.ending) is not None:
                try:
                    process.note(ending=ending.value)
                except SupervisorError as error:
                    log.warning("%s", error)
        registry.set_mark(
            self.name, Mark(seq=policy.last_seq, epoch=policy.epoch, desired=desired, cold_start_s=cold_start_s, past=policy.past)
        )

    def _do(self, action: m.WorkerAction) -> None:
        match action:
            case m.Send(engine=engine, order=order):
                if isinstance(order, Promote | Hurry) and engine in self.engines:
                    self.engines[engine].hurry()
                self._node.beats.send(engine, order)
            case m.Spawn():
                self._spawn(action)
            case m.Signal(engine=engine, signal=number):
                if engine in self.engines:
                    self.engines[engine].signal(number)
            case m.Examine(engine=engine, front=front):
                record = self.policy.engines.get(engine)
                pid = record.pid if record is not None else None
                if record is not None and record.vitals.beat is not None and not front:
                    pid = record.vitals.beat.pid  # the leader may be a server in front of it
                others = self.engines[engine].members if engine in self.engines else frozenset()
                self.put(m.Examined(engine, look(pid, others=others) if pid is not None else None))
            case m.KillTree(engine=engine):
                if engine in self.engines:
                    record = self.policy.engines.get(engine)
                    self.engines[engine].wants_tail = record is not None and not record.committed and record.stop is None
                    self.engines[engine].kill_tree()
            case m.Quarantine(engine=by, gpus=gpus, why=why):
                self._node.desk.quarantine(gpus, by, why)
            case m.Unquarantine(engine=by):
                self._node.desk.release(by)
            case m.Forget(engine=engine):
                process = self.engines.pop(engine, None)
                if process is not None:
                    process.discard()
                self._node.desk.release(engine)  # whichever GPU it held
            case m.Announce():
                self._announce(action)
            case m.Record():
                self._record(action)
            case m.FreeMemory():
                self._node.memory.free(self.name)
            case m.TidyMemory(keep=keep):
                self._node.memory.tidy(self.name, keep)
            case m.PublishRoutes():
                self._node.routes_changed()

    def _spawn(self, action: m.Spawn) -> None:
        line = self.lines.get(action.revision, self.line)
        try:
            launch = line.recipe.launch(action.engine, action.seq, beside=action.beside)
            launch = placed(launch, action.gpus, verify=action.verify, hurry=action.hurry, gentle=action.refill)
        except SupervisorError as error:
            self.put(m.SpawnFailed(action.engine, action.how, error.message, error.hint))
            return
        except Exception as error:
            log.exception("%s could not be launched", action.engine)
            self.put(m.SpawnFailed(action.engine, action.how, f"{type(error).__name__}: {error}"))
            return
        process = EngineProcess(self._node.host, action.engine, launch, self.put)
        self.engines[action.engine] = process
        self._node.run_task(self._start(process, action, line))

    async def _start(self, process: EngineProcess, action: m.Spawn, line: Line) -> None:
        client = line.nursery.client if line.nursery is not None else None
        try:
            await process.start(action.how, client, refill=action.refill)
        except Exception as error:
            # A defect, but an engine whose fate nobody tells the policy would be waited for until the start-up timeout.
            log.exception("%s could not be started", process.id)
            self.put(m.SpawnFailed(process.id, action.how, f"{type(error).__name__}: {error}"))
            return
        await line.recipe.watch(process, self.put)

    def _announce(self, action: m.Announce) -> None:
        policy = self.policy
        process = self.engines.get(action.engine or "")
        self._node.journal.add(
            action.event,
            action.message,
            level=action.level,
            worker=self.name,
            engine=action.engine,
            pid=process.pid if process is not None else None,
            epoch=action.epoch,
            data=action.data,
            gpu_uuid=",".join(policy.gpus if isinstance(policy, WorkerPolicy) else policy.settings.gpus) or None,
            reason=policy.reason.partition("\n")[0] or None if action.event == "worker.state" else None,
        )

    def _record(self, action: m.Record) -> None:
        recovery = action.recovery
        fresh = self._node.recoveries.note(recovery, done=action.done)
        if fresh:
            planned = recovery.cause.startswith(PLANNED)
            text = f"{recovery.from_engine} is {'succeeded' if planned else 'lost'}: {recovery.cause}"
            level = "info" if planned else "warning"
            self._node.journal.add(
                "recovery.started", text, level=level, worker=self.name, engine=recovery.from_engine, epoch=recovery.epoch
            )
        if action.done:
            parts = [f"{step} {value:.0f} ms" for step in _STEPS if (value := getattr(recovery, f"{step}_ms")) is not None]
            text = f"{recovery.kind}: {recovery.from_engine} → {recovery.to_engine}, {', '.join(parts)}"
            data = {"n": recovery.n, "kind": recovery.kind}
            self._node.journal.add("recovery.done", text, worker=self.name, engine=recovery.to_engine, epoch=recovery.epoch, data=data)


_STEPS = ("promote", "first_token", "fence", "refill")


async def tell_when_up(owner: WorkerOwner, listen: str, say: Callable[[str], None]) -> None:
    """Say when a worker first serves, and when it first is as healthy as it gets."""
    policy = owner.policy
    ends = (WorkerState.DOWN, WorkerState.STOPPED, WorkerState.STOPPING)
    serves = (WorkerState.HEALTHY, WorkerState.DEGRADED)
    await owner.until(lambda: policy.state in (*serves, *ends))
    if policy.state in serves:
        say(f"worker {owner.name} serves {owner.recipe.config.public_name} on {listen}")
        await owner.until(lambda: policy.state in (WorkerState.HEALTHY, *ends))
    if policy.state is WorkerState.HEALTHY:
        parked = f": {policy.settings.shadows} parked" if policy.settings.shadows else ""
        say(f"worker {owner.name} is healthy{parked}")
    elif policy.state is WorkerState.DOWN:
        say(f"worker {owner.name} is down: {policy.reason}")
