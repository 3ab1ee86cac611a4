"""A node: everything that `shadowsup start` runs, brought up in order, kept up, and taken down in order.

The shell around the policies. Who decides what: `policy`; one worker: `node_worker`; scribe, keeper, nurseries, gateway: `node_parts`, and
all of them together: `part_set`; kept memory: `node_memory`; GPUs: `node_gpus`; the end: `node_end`. `node_run` makes a node and runs it.
"""

from __future__ import annotations

import asyncio
import enum
import logging
import os
import secrets
import socket
import time
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

import msgspec
import zmq

from shadowsup.supervisor import (
    adoption,
    cgroup,
    device_memory,
    figures,
    node_end,
    node_record,
    node_setup,
    replan,
    verbs,
    voice,
)
from shadowsup.supervisor.adoption import Adoption
from shadowsup.supervisor.beats import GATEWAY, BeatRouter
from shadowsup.supervisor.config import NodeConfig
from shadowsup.supervisor.control import ControlServer, Reading
from shadowsup.supervisor.engine_process import Host
from shadowsup.supervisor.errors import ExitCode, SupervisorError
from shadowsup.supervisor.gpu_desk import GpuDesk
from shadowsup.supervisor.journal import Journal
from shadowsup.supervisor.node_gpus import GpuWatch
from shadowsup.supervisor.node_memory import KeptMemory
from shadowsup.supervisor.node_parts import KeeperPart, NurseryPart, ScribePart, port_of
from shadowsup.supervisor.node_worker import WorkerOwner, tell_when_up
from shadowsup.supervisor.part_process import PartHost
from shadowsup.supervisor.part_set import PART_START_S, PartSet
from shadowsup.supervisor.paths import NodePaths, write_private
from shadowsup.supervisor.policy import messages as m
from shadowsup.supervisor.policy.model import NurseryState
from shadowsup.supervisor.protocol import SCHEMA
from shadowsup.supervisor.recovery import RecoveryBook
from shadowsup.supervisor.registry import Mark, Registry
from shadowsup.supervisor.reload import Reloader
from shadowsup.supervisor.routing import RouteTable
from shadowsup.supervisor.scribe_client import ScribeClient
from shadowsup.supervisor.service import Service
from shadowsup.supervisor.subreaper import Reaper
from shadowsup.supervisor.tally import Tally
from shadowsup.wire.engine import GatewayBeat, Report, Routes
from shadowsup.wire.sensor import SensorBeat

OBSERVE_S = 5.0
"""One engine's tree is looked at this often, in turn."""

log = logging.getLogger("shadowsup.node")


class NodeState(str, enum.Enum):
    STARTING = "starting"
    RUNNING = "running"
    STOPPING = "stopping"


class Node:
    """One node. Make it on its loop; `serve` runs it to its end.

    Args:
        config: checked.
        paths: its directories; the runtime directory exists and is locked.
        reporter: told of each step, for people.
        sockets: the gateway's listening sockets; owned from now on.
        adapters: engine name of the config → adapter that is run instead (tests).
        config_path: the file that ``config`` was read from, absolute, for clients.
        config_text: what that file said; empty: not known (it may have been changed since).
        found: what runs of this node already, to be adopted.
        service: what the node is to the manager that has started it.
        marks: how far the workers had come whose memory ``service`` may have.
    """

    def __init__(
        self,
        config: NodeConfig,
        paths: NodePaths,
        *,
        reporter: Callable[[str], None],
        sockets: list[socket.socket],
        adapters: Mapping[str, str] | None = None,
        config_path: str = "",
        config_text: str = "",
        found: Adoption | None = None,
        service: Service | None = None,
        marks: Mapping[str, Mark] | None = None,
    ) -> None:
        self.config = config
        self._service = service if service is not None else Service(None, paths.runtime)
        self._marks = marks or {}
        self._found = found
        self.config_path = config_path
        self.paths = paths
        self.state = NodeState.STARTING
        self.began_s = time.monotonic()
        self.workers: dict[str, WorkerOwner] = {}
        self.plans = node_setup.Plan()
        """What runs, but for what is just being rolled out."""
        self.tells_events = False
        """The reporter is told events, too, as `voice.EventLine`."""
        self.listen = port_of(sockets)
        self._sockets = sockets
        self.report = reporter
        self._adapters = dict(adapters or {})
        self._tasks: set[asyncio.Task[None]] = set()
        self._stop = asyncio.Event()
        self._hurry = asyncio.Event()
        self._routes = RouteTable(paths, self.workers.values, self._send_routes)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        self.journal = Journal(paths.state / "events.jsonl")
        self.recoveries = RecoveryBook(paths.state / "recoveries.jsonl", paths.runtime / "recoveries.json")
        self.registry = Registry(paths.processes)
        if found is not None:
            self.registry.resume()
            self.journal.resume(found.record.began_s)
            self.recoveries.resume(found.record.began_s)
        self.beats = BeatRouter(self._context, paths.beats, self._heard)
        reading = Reading(control=paths.control_ro, events=paths.events_ro, group=config.node.gid) if config.node.gid is not None else None
        self._control = ControlServer(self._context, paths.control, paths.events, verbs.table(self), reading=reading)
        self.journal.publish = self._published
        self.desk = GpuDesk([], self.workers, self.journal, self.registry)
        self.reloads = Reloader(self, config_text)
        self._tally = Tally()
        self.journal.watch, self.recoveries.on_done = self._tally.event, self._tally.recovery
        client = ScribeClient(paths.scribe)
        part_host = PartHost(paths=paths, journal=self.journal, registry=self.registry, scribe=client, run_task=self.run_task)
        self.parts = PartSet(part_host, found, on_nursery=self._nursery_changed, on_exited=self._engine_reaped)
        self.memory = KeptMemory(self.parts, self._service)
        self._gpu_watch = GpuWatch(self.parts, self.workers, self.desk, device_memory.Overheads(paths.overheads))
        instance = secrets.token_hex(4) if found is None else found.record.instance
        self.host = Host(
            node=config.node.name,
            instance=instance,
            paths=paths,
            scribe=client,
            registry=self.registry,
            spawn_task=self.run_task,
            cgroup=cgroup.find(config.node.name, instance),
        )
        self._reaper = Reaper()

    # --- life -------------------------------------------------------------------------------------------------------------------

    async def serve(self) -> int:
        """Bring everything up, serve until told to stop, take everything down. Returns the exit code.

        Raises:
            ShadowsupError: it could not be brought up; what was up is down again. What could not be adopted is left as it was found.
        """
        self._reaper.start()
        self.write_record()
        self._service.keep_sockets(self._sockets)
        self.run_task(self._service.tend(self.describe))
        try:
            starting = asyncio.create_task(self._start())
            stopping = asyncio.create_task(self._stop.wait())
            try:
                await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
                if self._found is not None and not starting.done():
                    await asyncio.wait({starting}, timeout=PART_START_S)  # what is not known yet could not be ended either
                if starting.done():
                    await starting
                    await stopping
            finally:
                for task in (starting, stopping):
                    task.cancel()
                await asyncio.gather(starting, stopping, return_exceptions=True)
        except BaseException:
            if self._found is None or self._stop.is_set():
                await self._take_down()
            else:
                await self._leave()
            raise
        await self._take_down()
        return ExitCode.DONE

    def request_stop(self, why: str) -> None:
        """Stop the node; a second request hurries."""
        if self._stop.is_set():
            self._hurry.set()
            for owner in self.workers.values():
                owner.put(m.StopWorker(hurry=True))
            return
        self._service.stopping()
        self.journal.add("node.stopping", f"node {self.config.node.name} is stopping: {why}")
        self.report(f"stopping ({why})")
        self._stop.set()

    def hung_up(self) -> None:
        """SIGHUP: the terminal is gone, and with it whoever watches this node. It must not be left without a supervisor."""
        if self._service.managed:
            self.journal.add("node.hangup", "SIGHUP is ignored: shadowsup reload applies a changed config", level="warning")
        else:
            self.request_stop("SIGHUP, the terminal was closed; start -d runs a node without one")

    @property
    def running(self) -> bool:
        """Every part is up."""
        return self.state is NodeState.RUNNING

    @property
    def stopping(self) -> bool:
        """A stop was asked for: nothing is started any more."""
        return self._stop.is_set() or self.state is NodeState.STOPPING

    def run_task(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run something in the background; what it raises is logged."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._task_done)
        return task

    def _task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a task failed", exc_info=error)

    async def _start(self) -> None:
        config, found = self.config, self._found
        if found is None:
            plans = await node_setup.plan(config, self.paths, self.host.scribe, self._adapters, self.report)
            self.write_plan(plans)
        else:
            plans = replan.replan(config, self.paths, self.host.scribe, found.record)
        self.desk.gpus = plans.gpus
        if found is not None:
            self.desk.resume({entry.engine for entry in found.entries if entry.what == "engine"})
        self.plans = plans
        if plans.gpus and found is None:
            await self._gpu_watch.name_holders(config.workers, self.report)
        self.report(f"listening on {self.listen}")
        scribe = self.parts.scribe = ScribePart(self.parts.host)
        self.parts.begin(scribe)
        await scribe.started(PART_START_S)
        gateway = self.parts.begin_gateway(config, self._sockets, self.beats)
        if plans.gpus:
            self._gpu_watch.begin(plans, self.beats.endpoint)
        keeper = None
        if plans.backend is not None:
            host, changed = self.parts.host, self._service.vault_changed
            keeper = self.parts.keeper = KeeperPart(host, plans.backend, plans.keeper_gpus, on_change=changed)
            self.memory.take_back(keeper, [worker.name for worker in config.workers], self._marks, found)
            adopted = self.parts.begin(keeper)
        nurseries = [self.parts.nursery(nursery) for nursery in plans.nurseries]
        if keeper is not None and (found is None or adopted):
            await self.parts.started(keeper)
            self.report(f"memkeeper is running ({keeper.vault.backend if keeper.vault else '?'} memory)")
        for plan in plans.workers:
            part = nurseries[plan.nursery] if plan.nursery is not None else None
            owner = self.own(plan, part)
            if found is None:
                self.memory.begin_worker(owner)
        if found is not None:
            await adoption.take_over(self, found)
            self.recoveries.settle()
            self._routes.publish()
        for owner in self.workers.values():
            self.run_task(tell_when_up(owner, self.listen, self.report))
        await self.parts.started(gateway)
        self.state = NodeState.RUNNING
        self._service.ready()
        self.journal.add("node.running", f"node {config.node.name} is running, gateway on {self.listen}")
        self.report(f"gateway is running on {self.listen}")
        self.run_task(self._observe())
        self.run_task(figures.publish(self, self._tally))

    def own(self, plan: node_setup.WorkerPlan, part: NurseryPart | None) -> WorkerOwner:
        """Return the owner of a worker that is new here. Nothing of it is started."""
        policy = plan.policy(_nursery_state(part))
        self.desk.introduce(policy)
        owner = self.workers[plan.name] = WorkerOwner(plan.name, self, policy, plan.recipe, part)
        return owner

    async def plan_anew(self, config: NodeConfig) -> node_setup.Plan:
        """Return the plan of workers that are to join those that run. Raises SupervisorError as `node_setup.plan`."""
        return await node_setup.plan(config, self.paths, self.host.scribe, self._adapters, self.report, room=False)

    def keep_sockets(self, sockets: list[socket.socket]) -> None:
        """The gateway listens on these from now on."""
        self._sockets = sockets
        self._service.keep_sockets(sockets)

    async def until_stopping(self) -> None:
        await self._stop.wait()

    def describe(self) -> str:
        """Return how the node stands, in one line."""
        workers = [f"{owner.name} {owner.policy.state.value}" for owner in self.workers.values()]
        return f"{self.state.value}: {', '.join(workers)}" if workers else self.state.value

    def write_plan(self, plans: node_setup.Plan) -> None:
        """Leave on disk what runs here, for a supervisor that adopts it.

        Raises:
            SupervisorError: it cannot be written. Nothing may be started then.
        """
        record = replan.record(self.config, plans, instance=self.host.instance, config_path=self.config_path, listen=self.listen)
        try:
            node_record.write(self.paths.runtime, record)
        except OSError as error:
            raise SupervisorError(f"cannot write the node's record: {error.strerror}", "is the runtime directory full?") from error

    # --- the end ----------------------------------------------------------------------------------------------------------------

    async def _take_down(self) -> None:
        self.state = NodeState.STOPPING
        grace_s = max((worker.stop.timeout for worker in self.config.workers), default=10.0)
        await node_end.take_down(self.parts, self.workers, self._sockets, self._service, self.report, grace_s=grace_s, hurry=self._hurry)
        self.journal.add("node.stopped", f"node {self.config.node.name} has stopped")
        await self._close()

    async def _leave(self) -> None:
        """The adoption has failed: let go of everything, and end nothing."""
        self.report("what was found is left as it is, and serves on")
        await node_end.let_go(self.parts, self._sockets)
        await self._close()

    async def _close(self) -> None:
        for owner in self.workers.values():
            owner.close()
        for part in self.parts.all:
            part.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._reaper.close()
        self.beats.close()
        await self._control.close()
        self._context.term()
        self.recoveries.close()
        self.journal.close()
        self._service.close()

    # --- what others tell -------------------------------------------------------------------------------------------------------

    def _heard(self, peer: str, report: Report) -> bool:
        if isinstance(report, GatewayBeat):
            gateway = self.parts.gateway
            first = gateway is not None and gateway.take_beat(report)
            if first and not self._adopting:
                self._routes.publish()
                figures.send(self, self._tally)
            return first
        if isinstance(report, SensorBeat):
            return self._gpu_watch.take_beat(report)
        worker = peer.rpartition(".")[0]
        if self._found is not None and self._found.wants(worker):
            self._found.heard(report)
            return True
        owner = self.workers.get(worker)
        return owner is not None and owner.report(report)

    def _nursery_changed(self, part: NurseryPart, state: NurseryState) -> None:
        for owner in self.workers.values():
            owner.nursery_changed(part, state)

    def _engine_reaped(self, engine: str, status_code: int) -> None:
        owner = self.workers.get(engine.rpartition(".")[0])
        process = owner.engines.get(engine) if owner is not None else None
        if process is not None:
            process.told_status(status_code)
        elif owner is not None:
            owner.put(m.Explained(engine, status_code))

    def _published(self, event: bytes) -> None:
        self._control.publish(event)
        if self.tells_events:
            self.report(voice.EventLine(event.decode()))

    def routes_changed(self) -> None:
        self._routes.changed()

    def _send_routes(self, routes: Routes) -> None:
        # A gateway that is being adopted knows more than we do until all workers are.
        gateway = self.parts.gateway
        if gateway is not None and gateway.beat is not None and not self._adopting:
            self.beats.send(GATEWAY, routes)

    @property
    def _adopting(self) -> bool:
        return self._found is not None and any(self._found.wants(worker.name) for worker in self.config.workers)

    async def _observe(self) -> None:
        """Look at one engine's tree in turn, so that what it detaches stays known (P04)."""
        while True:
            for engine in [e for owner in self.workers.values() for e in owner.engines.values()]:
                await engine.observe()
                await asyncio.sleep(OBSERVE_S)
            await asyncio.sleep(OBSERVE_S)

    def write_record(self) -> None:
        """Leave for clients where they find what."""
        record = {
            "schema": SCHEMA,
            "name": self.config.node.name,
            "pid": os.getpid(),
            "state_dir": str(self.paths.state),
            "logs_dir": str(self.paths.logs),
            "listen": self.listen,
            "config": self.config_path,
        }
        write_private(self.paths.record, msgspec.json.format(msgspec.json.encode(record)))


def _nursery_state(part: NurseryPart | None) -> NurseryState:
    if part is None:
        return NurseryState.NONE
    return NurseryState.READY if part.client is not None else NurseryState.STARTING
