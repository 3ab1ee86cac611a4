"""A node: everything that `shadowsup start` runs, brought up in order, kept up, and taken down in order.

The shell around the policies. Who decides what: `policy`; one worker: `node_worker`; scribe, keeper, nurseries, gateway: `node_parts`.
"""

from __future__ import annotations

import asyncio
import dataclasses
import enum
import logging
import os
import secrets
import signal
import socket
import time
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any

import msgspec
import zmq

from shadowsup.errors import ShadowsupError
from shadowsup.memkeeper.errors import KeeperError
from shadowsup.memkeeper.vault import Vault
from shadowsup.supervisor import (
    adoption,
    cgroup,
    device_memory,
    figures,
    gpu_holders,
    node_record,
    node_setup,
    replan,
    status,
    verbs,
    voice,
)
from shadowsup.supervisor.adoption import Adoption
from shadowsup.supervisor.beats import GATEWAY, BeatRouter
from shadowsup.supervisor.config import LoadedConfig, NodeConfig
from shadowsup.supervisor.control import ControlServer, Reading
from shadowsup.supervisor.engine_process import TAIL_WAIT_S, Host
from shadowsup.supervisor.errors import ExitCode, SupervisorError
from shadowsup.supervisor.gpu_desk import GpuDesk
from shadowsup.supervisor.journal import Journal
from shadowsup.supervisor.node_parts import GatewayPart, KeeperPart, NurseryPart, ScribePart, port_of
from shadowsup.supervisor.node_sensor import SensorPart, Troubles, learn_overheads
from shadowsup.supervisor.node_worker import WorkerOwner, tell_when_up
from shadowsup.supervisor.part_process import Part, PartHost
from shadowsup.supervisor.paths import NodePaths, write_private
from shadowsup.supervisor.policy import messages as m
from shadowsup.supervisor.policy.model import NurseryState
from shadowsup.supervisor.protocol import SCHEMA
from shadowsup.supervisor.recovery import RecoveryBook
from shadowsup.supervisor.registry import Mark, Registry
from shadowsup.supervisor.reload import Reloader
from shadowsup.supervisor.routing import RouteTable
from shadowsup.supervisor.scribe_client import ScribeClient
from shadowsup.supervisor.sd_notify import ServiceManager
from shadowsup.supervisor.service import Service
from shadowsup.supervisor.subreaper import Reaper
from shadowsup.supervisor.tally import Tally
from shadowsup.wire.engine import GatewayBeat, Report, Routes
from shadowsup.wire.gateway import GatewaySpec
from shadowsup.wire.sensor import GpuNews, SensorBeat

PART_START_S = 30.0
STOP_MARGIN_S = 30.0
"""Beyond a worker's stop timeout: what its engines' ends have bounds for, each. Nothing waits for ever."""
OBSERVE_S = 5.0
"""One engine's tree is looked at this often, in turn."""

SENSOR_LOOK_S = 2.0
"""How often the age of the sensor's readings is looked at."""

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
        self.nurseries: list[NurseryPart] = []
        self.nursery_plans: dict[int, node_setup.NurseryPlan] = {}
        """By number."""
        self.scribe: ScribePart | None = None
        self.keeper: KeeperPart | None = None
        self.gateway: GatewayPart | None = None
        self.sensor: SensorPart | None = None
        self.gpus: list[dict[str, Any]] = []
        self.plans = node_setup.Plan()
        """What runs, but for what is just being rolled out."""
        self._troubles = Troubles(self.gpu_notice, self.gpu_cleared)
        self.tells_events = False
        """The reporter is told events, too, as `voice.EventLine`."""
        self.listen = port_of(sockets)
        self._sockets = sockets
        self._overheads = device_memory.Overheads(paths.overheads)
        self._overhead_keys: dict[str, dict[str, str]] = {}
        self._baselines: dict[str, int] = {}
        self.report = self._report = reporter
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
        self.desk = GpuDesk(self.gpus, self.workers, self.journal, self.registry)
        self.reloads = Reloader(self, config_text)
        self._tally = Tally()
        self.journal.watch, self.recoveries.on_done = self._tally.event, self._tally.recovery
        client = ScribeClient(paths.scribe)
        self.part_host = PartHost(paths=paths, journal=self.journal, registry=self.registry, scribe=client, run_task=self.run_task)
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
        self._report(f"stopping ({why})")
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
            plans = await node_setup.plan(config, self.paths, self.host.scribe, self._adapters, self._report)
            self.write_plan(plans)
        else:
            plans = replan.replan(config, self.paths, self.host.scribe, found.record)
        self.gpus, self._baselines, self._overhead_keys = plans.gpus, plans.baselines, plans.overhead_keys
        self.desk.gpus = self.gpus
        if found is not None:
            self.desk.resume({entry.engine for entry in found.entries if entry.what == "engine"})
        self.plans = plans
        if self.gpus and found is None:
            await self._name_gpu_holders()
        self._report(f"listening on {self.listen}")
        self.scribe = ScribePart(self.part_host)
        self._begin(self.scribe)
        await self.scribe.started(PART_START_S)
        spec = GatewaySpec(
            node=config.node.name,
            runtime_dir=str(self.paths.runtime),
            listen_fds=(),
            beat_endpoint=self.beats.endpoint,
            api_key_file=str(config.gateway.api_key_file) if config.gateway.api_key_file else None,
            max_inflight=config.gateway.max_inflight,
            handover=str(self.paths.handover),
            retune=str(self.paths.retune),
        )
        self.gateway = GatewayPart(self.part_host, self._sockets, spec, self.beats)
        self._begin(self.gateway)
        if self.gpus:
            self.sensor = SensorPart(self.part_host, [gpu["uuid"] for gpu in self.gpus], self.beats.endpoint, self._gpu_news)
            self._begin(self.sensor)
            self.run_task(self._watch_sensor(self.sensor))
        if plans.backend is not None:
            self.keeper = KeeperPart(self.part_host, plans.backend, plans.keeper_gpus, on_change=self._service.vault_changed)
            self._take_memory_back(self.keeper)
            adopted = self._begin(self.keeper)
        nurseries = [self.nursery(nursery) for nursery in plans.nurseries]
        if self.keeper is not None and (found is None or adopted):
            await self._part_started(self.keeper)
            self._report(f"memkeeper is running ({self.keeper.vault.backend if self.keeper.vault else '?'} memory)")
        for plan in plans.workers:
            part = nurseries[plan.nursery] if plan.nursery is not None else None
            owner = self.own(plan, part)
            if found is None:
                self.begin_worker(owner)
        if found is not None:
            await adoption.take_over(self, found)
            self.recoveries.settle()
            self._routes.publish()
        for owner in self.workers.values():
            self.run_task(tell_when_up(owner, self.listen, self._report))
        await self._part_started(self.gateway)
        self.state = NodeState.RUNNING
        self._service.ready()
        self.journal.add("node.running", f"node {config.node.name} is running, gateway on {self.listen}")
        self._report(f"gateway is running on {self.listen}")
        self.run_task(self._observe())
        self.run_task(figures.publish(self, self._tally))

    def nursery(self, plan: node_setup.NurseryPlan) -> NurseryPart:
        """Return the nursery that ``plan`` describes; it is started, or adopted, where there is none."""
        for number, known in self.nursery_plans.items():
            if known == plan:
                return next(part for part in self.nurseries if part.label == str(number))
        number = plan.number if plan.number is not None else max(self.nursery_plans, default=-1) + 1
        part = NurseryPart(
            self.part_host,
            number,
            engine=plan.engine,
            preload=plan.preload,
            python=plan.python,
            env=plan.env,
            on_state=self._nursery_changed,
            on_exited=self._engine_reaped,
        )
        self.nurseries.append(part)
        self.nursery_plans[number] = dataclasses.replace(plan, number=number)
        self._begin(part)
        return part

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

    def _begin(self, part: Part) -> bool:
        """Have a part run: adopt its process where there is one, start one where there is none. Returns whether there was one."""
        entry = self._found.part(part.what, part.label) if self._found is not None else None
        if entry is None:
            part.start()
        else:
            part.adopt(entry)
        return entry is not None

    def _take_memory_back(self, keeper: KeeperPart) -> None:
        """Of memory that outlived supervisor and keeper: the keeper is given it before it serves anyone."""
        count = keeper.preload(lambda vault: self._service.fill(vault, [worker.name for worker in self.config.workers]))
        if count and self._found is None:
            for name, mark in self._marks.items():
                self.registry.set_mark(name, mark)
        if count:
            self.journal.add("keeper.kept", f"{count} segments were kept by the service manager")
        elif self._found is not None and self._found.part("keeper") is None:
            self._rescue_memory(keeper, self._found)

    def _rescue_memory(self, keeper: KeeperPart, found: Adoption) -> None:
        """Supervisor and keeper have died together: what engines hold of the memory is given to the next keeper."""
        engines = [entry.identity for entry in found.entries if entry.what == "engine" and found.lives(entry)]
        names = [worker.name for worker in self.config.workers]
        missing = 0

        def fill(vault: Vault) -> int:
            nonlocal missing
            count, missing = self._service.rescue(vault, engines, names)
            return count

        if count := keeper.preload(fill):
            self.journal.add("keeper.rescued", f"{count} segments were taken back from the engines that hold them")
        if missing:
            text = f"{missing} segments cannot be taken back: engines go on with them, and those that come later start with fresh memory"
            self.journal.add("keeper.lost", text, level="warning", data={"segments": missing})

    def begin_worker(self, owner: WorkerOwner) -> None:
        """Have a worker run of which no engine does; with the memory that is left of it, if any is."""
        vault, kept = self.keeper.vault if self.keeper is not None else None, self.registry.mark(owner.name)
        if vault is None or kept == Mark():
            owner.put(m.RunWorker())
        else:
            owner.adopt(adoption.facts_of_memory(owner.name, kept, vault), ())

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

    async def _part_started(self, part: KeeperPart | GatewayPart) -> None:
        try:
            await part.started(PART_START_S)
        except SupervisorError as error:
            words = [error.message, await self.last_words(part.name)]
            raise SupervisorError("\n".join(filter(None, words)), f"its output is in {self.paths.log(part.name)}") from None

    async def _name_gpu_holders(self) -> None:
        """Say who else uses this node's GPUs, before anything of it does."""
        used = {uuid for worker in self.config.workers for uuid in (*worker.gpus, *worker.spares)}
        wanted = [gpu for gpu in self.gpus if gpu["uuid"] in used or str(gpu["index"]) in used] or self.gpus
        for line in (await asyncio.to_thread(gpu_holders.look, wanted)).lines():
            self._report(f"warning: {line}")
            self.journal.add("gpu.held", line, level="warning")

    async def last_words(self, stream: str) -> str:
        """Return the last lines of a stream of output; empty when there are none to be had."""
        try:
            async with asyncio.timeout(TAIL_WAIT_S):
                return "\n".join(await self.host.scribe.tail(stream, 10))
        except (TimeoutError, ShadowsupError):
            return ""

    # --- the end ----------------------------------------------------------------------------------------------------------------

    async def _take_down(self) -> None:
        """In order: no new request, then who uses the memory, then who keeps it, then who writes the logs."""
        self.state = NodeState.STOPPING
        grace_s = max((worker.stop.timeout for worker in self.config.workers), default=10.0)
        if self.gateway is not None:
            await self.gateway.drain(grace_s, self._hurry)
            self._report("gateway has stopped")
            self.gateway.close_sockets()
        else:
            for sock in self._sockets:
                sock.close()
        for owner in self.workers.values():
            owner.put(m.StopWorker(hurry=self._hurry.is_set()))
        for owner in self.workers.values():
            policy = owner.policy
            bound_s = policy.settings.stop_timeout_s + STOP_MARGIN_S
            if await owner.until(lambda: policy.settled, bound_s):  # noqa: B023 (awaited before the next turn)
                self._report(f"worker {owner.name} has stopped")
            else:
                left = ", ".join(policy.engines)
                self.journal.add("worker.stuck", f"{owner.name} did not stop: {left} left", level="error", worker=owner.name)
                self._report(f"worker {owner.name} did not stop: {left} left")
        if self.sensor is not None:
            await self.sensor.stop()
        for nursery in self.nurseries:
            await nursery.stop()
        if self.keeper is not None:
            await self.keeper.stop()
            await self.keeper.close_vault()
            self._report("memkeeper has stopped")
        self._service.stopped()
        if self.scribe is not None:
            self.scribe.retire()
            await self.host.scribe.close(stop=True)
            await self.scribe.stop()
        self.journal.add("node.stopped", f"node {self.config.node.name} has stopped")
        await self._close()

    async def _leave(self) -> None:
        """Let go of everything and end nothing: the adoption has failed, and what serves shall go on."""
        self._report("what was found is left as it is, and serves on")
        for part in (self.scribe, self.keeper, self.gateway, self.sensor, *self.nurseries):
            if part is not None:
                part.policy.wanted = False
        if self.keeper is not None:
            await self.keeper.close_vault()
        await self.host.scribe.close()
        for sock in self._sockets:
            sock.close()
        await self._close()

    async def _close(self) -> None:
        for owner in self.workers.values():
            owner.close()
        for part in (self.scribe, self.keeper, self.gateway, self.sensor, *self.nurseries):
            if part is not None:
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
            first = self.gateway is not None and self.gateway.take_beat(report)
            if first and not self._adopting:
                self._routes.publish()
                figures.send(self, self._tally)
            return first
        if isinstance(report, SensorBeat):
            if self.sensor is None or not self.sensor.owns(report):
                return False  # of a predecessor
            self.desk.saw(report.gpus)
            self._troubles.take(report)
            for reading in report.gpus:
                self.gpu_used(reading.uuid, reading.util / 100 if reading.util is not None else None)
            return self.sensor.take_beat(report)
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
            self._report(voice.EventLine(event.decode()))

    # --- what workers ask for ---------------------------------------------------------------------------------------------------

    def quarantine(self, gpus: tuple[str, ...], by: str, why: str) -> None:
        """Keep every worker off these GPUs."""
        self.desk.quarantine(gpus, by, why)

    def release(self, by: str) -> None:
        """What kept GPUs out of use under this name is over."""
        self.desk.release(by)

    # --- what a sensor tells ----------------------------------------------------------------------------------------------------

    def gpu_notice(self, notice: m.GpuNotice) -> None:
        """A GPU is in trouble: every worker that has it, as one of its own or as a spare, is told."""
        if not self.desk.is_loss(notice):
            return
        for owner in self.workers.values():
            owner.put(m.GpuWarned(notice))

    def gpu_cleared(self, uuid: str, kind: m.GpuTrouble | None = None) -> None:
        """That trouble is over."""
        for owner in self.workers.values():
            owner.put(m.GpuCleared(uuid, kind))

    def gpu_used(self, uuid: str, util: float | None) -> None:
        """Utilisation of a GPU, 0.0 to 1.0; None: unknown. Cheap: it may be called several times a second."""
        for owner in self.workers.values():
            owner.gpu_used(uuid, util)

    def free_memory(self, worker: str) -> None:
        self.run_task(self._free(worker))

    def tidy_memory(self, worker: str, keep: str) -> None:
        """Free what only engines of ``worker`` used that are gone. ``keep``: its KV set in use."""
        if self.keeper is not None:
            self.run_task(self.keeper.tidy(worker, keep))

    async def _free(self, worker: str) -> None:
        if self.keeper is None or not self.keeper.policy.wanted:
            return
        try:
            await self.keeper.free(worker)
        except (KeeperError, TimeoutError) as error:
            self.journal.add("keeper.free_failed", f"memory of {worker} was not freed: {error}", level="warning", worker=worker)

    def routes_changed(self) -> None:
        self._routes.changed()

    def _send_routes(self, routes: Routes) -> None:
        # A gateway that is being adopted knows more than we do until all workers are.
        if self.gateway is not None and self.gateway.beat is not None and not self._adopting:
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

    async def _watch_sensor(self, sensor: SensorPart) -> None:
        while True:
            await asyncio.sleep(SENSOR_LOOK_S)
            sensor.end_if_silent(time.monotonic())
            if sensor.stale(time.monotonic()):
                continue
            kept = status.kept_by_device(self.keeper)
            for uuid, size in learn_overheads(sensor, self.workers, self._overhead_keys, self._baselines, kept, self._overheads).items():
                words = f"an engine takes {device_memory.gib(size)} of GPU {uuid} beside weights and KV"
                self.journal.add("gpu.overhead", words, data={"gpu_uuid": uuid, "bytes": size})

    def _gpu_news(self, news: GpuNews) -> None:
        index = next((gpu["index"] for gpu in self.gpus if gpu["uuid"] == news.uuid), "?")
        data = {"gpu_uuid": news.uuid, "number": news.number}
        self.journal.add(f"gpu.{news.kind.value}", f"GPU {index} ({news.uuid}): {news.text}", level="warning", data=data)

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


def run(loaded: LoadedConfig, runtime_dir: Any, *, reporter: Callable[[str], None], adapters: Mapping[str, str] | None = None) -> int:
    """Run the node that ``loaded`` describes in the foreground until it is stopped; return the exit code.

    Raises:
        SupervisorError: it is supervised already, parts of it are alive, or it could not be brought up.
    """
    with node_setup.claimed(runtime_dir, loaded.config) as claim:
        node_setup.prepare_process()
        found = claim.found
        service = Service(ServiceManager.from_environment(os.environ), claim.paths.runtime, claim.index)
        sockets = service.take_sockets()
        if claim.listened != claim.config.gateway.listen:  # kept for another address
            while sockets:
                sockets.pop().close()
        if not sockets:
            sockets = node_setup.listen(claim.config) if found is None else found.sockets(node_setup.bind)
        return asyncio.run(_run(loaded, claim, sockets, service, reporter, adapters))


async def _run(
    loaded: LoadedConfig,
    claim: node_setup.Claim,
    sockets: list[socket.socket],
    service: Service,
    reporter: Callable[[str], None],
    adapters: Mapping[str, str] | None,
) -> int:
    found = claim.found
    path = str(Path(loaded.path).absolute()) if found is None else found.record.config_path
    with voice.apart(reporter) as say:
        if found is not None:
            found.tell(loaded, say)
        text = loaded.text if found is None or claim.config == loaded.config else ""
        node = Node(
            claim.config,
            claim.paths,
            reporter=say,
            sockets=sockets,
            adapters=adapters,
            config_path=path,
            config_text=text,
            found=found,
            service=service,
            marks=claim.marks,
        )
        node.tells_events = getattr(reporter, "wants_events", False)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, node.request_stop, signal.Signals(number).name)
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as nohup and `start -d` have it
            loop.add_signal_handler(signal.SIGHUP, node.hung_up)
        return await node.serve()
