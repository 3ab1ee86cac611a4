"""``reload``: requests, what they mean, which of them is carried out, and the config that is in force.

One reload runs at a time. One that arrives before anything has handed over takes its place (what both want alike goes on); one that
arrives later waits, and of those that wait only the newest is kept. How one is carried out: `reload_run`.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from shadowsup.errors import ShadowsupError
from shadowsup.memkeeper.protocol import Kind
from shadowsup.supervisor import changes, device_memory, devices
from shadowsup.supervisor.config import LoadedConfig, NodeConfig, WorkerConfig, load
from shadowsup.supervisor.config.loader import loads
from shadowsup.supervisor.errors import ExitCode, SupervisorError
from shadowsup.supervisor.node_worker import WorkerOwner
from shadowsup.supervisor.policy.command import CommandPolicy
from shadowsup.supervisor.protocol import (
    SCHEMA,
    KvFate,
    ReloadAnswer,
    ReloadPlan,
    ReloadProgress,
    ReloadState,
    Revision,
)
from shadowsup.supervisor.reload_run import Interrupted, Run
from shadowsup.supervisor.revisions import Revisions, put_back

if TYPE_CHECKING:
    from shadowsup.supervisor.node import Node

SETTLE_S = 0.2
"""Saves within this time are one."""

log = logging.getLogger("shadowsup.reload")


@dataclass(frozen=True)
class _Order:
    """A reload that was accepted. ``origin``: ``reload | undo``."""

    n: int
    loaded: LoadedConfig
    origin: str
    summary: str


class Reloader:
    """The reloads of one node. ``text``: of the config it runs with; empty: not known."""

    def __init__(self, node: Node, text: str) -> None:
        self._node = node
        self.revisions = Revisions(node.paths.state / "revisions")
        if text:
            self.revisions.begin(text, node.config_path)
        self.progress: ReloadProgress | None = None
        self._n = 0
        self._pending: _Order | None = None
        self._run: Run | None = None
        self._task: asyncio.Task[None] | None = None
        self._planning = asyncio.Lock()

    # --- asking -----------------------------------------------------------------------------------------------------------------

    @property
    def current(self) -> str:
        """Id of the revision in force; empty: unknown."""
        return self.revisions.current.id if self.revisions.current is not None else ""

    def status(self) -> dict[str, Any]:
        """Return ``config`` and ``reload`` of `status`."""
        now, before = self.revisions.current, self.revisions.previous
        config = {
            "revision": now.id if now is not None else "",
            "path": self._node.config_path,
            "since": now.ts if now is not None else None,
            "previous": before.id if before is not None else None,
        }
        progress, run = self.progress, self._run
        if progress is not None and run is not None:
            progress.state = run.state
            progress.workers = run.stages()
            waits_for = run.waits_for()
            if run.preparing:
                progress.state = ReloadState.WAITING if waits_for else progress.state
                progress.message = waits_for
        return {"config": config, "reload": None if progress is None else msgspec.to_builtins(progress)}

    def history(self) -> dict[str, Any]:
        """Return the answer to ``revisions``."""
        return {"schema": SCHEMA, "current": self.current, "revisions": msgspec.to_builtins(self.revisions.all)}

    async def request(self, arguments: Mapping[str, Any]) -> Any:
        """Answer ``reload``.

        Raises:
            ConfigError: the config is not valid; nothing was changed.
            SupervisorError: it cannot be applied to this node, or not now.
        """
        expected = arguments.get("expect")
        if expected and expected != self.current:
            raise SupervisorError(f"revision {self.current} is in force, not {expected}", "look at what was changed, then reload again")
        async with self._planning:  # in the order in which they came
            loaded, origin = await asyncio.to_thread(self._read, arguments)
            plan = await self._plan(loaded, text=loaded.text if origin == "undo" else "")
            return msgspec.to_builtins(self._decide(loaded, origin, plan, only_plan=bool(arguments.get("plan"))))

    def _decide(self, loaded: LoadedConfig, origin: str, plan: ReloadPlan, *, only_plan: bool) -> ReloadAnswer:
        node = self._node
        if only_plan:
            return ReloadAnswer(state="planned", plan=plan, message=plan.refused or plan.summary)
        if plan.refused:
            raise SupervisorError(f"nothing was changed: {plan.refused}", plan.hint, exit_code=ExitCode.USAGE)
        if node.stopping:
            raise SupervisorError(f"node {node.config.node.name} is stopping", "start it again with the new config")
        if not node.running:
            raise SupervisorError(f"node {node.config.node.name} is still starting", "reload when its gateway runs")
        if plan.nothing and self._run is None and self._pending is None:
            return ReloadAnswer(state="nothing", plan=plan, message="nothing changes")
        self._n += 1
        order = _Order(self._n, loaded, origin, plan.summary)
        run, waiting = self._run, self._pending
        self._pending = order
        if waiting is not None:
            self._superseded(waiting.n, order)
        queued = run is not None and not run.preparing
        if run is not None and run.preparing:
            run.interrupted.set()
        if queued and self.progress is not None:
            self.progress.queued = True
            node.journal.add("reload.queued", f"reload {order.n} waits for the end of reload {self.progress.n}", data={"n": order.n})
        elif run is None:
            self.progress = ReloadProgress(n=order.n, summary=plan.summary, started_ts=round(time.time(), 3))
        if self._task is None or self._task.done():
            self._task = node.run_task(self._work())
        return ReloadAnswer(n=order.n, state="queued" if queued else "started", plan=plan, message=plan.summary)

    def _read(self, arguments: Mapping[str, Any]) -> tuple[LoadedConfig, str]:
        node = self._node
        wanted = arguments.get("to")
        if arguments.get("undo") or wanted:
            if arguments.get("config") or arguments.get("text") is not None:
                raise SupervisorError("undo and to name a revision, so there is no config to read", exit_code=ExitCode.USAGE)
            revision = self.revisions.find(str(wanted)) if wanted else self.revisions.previous
            if revision is None:
                raise SupervisorError("no earlier revision of the config is kept: there is nothing to undo", exit_code=ExitCode.USAGE)
            return loads(self.revisions.text(revision), Path(revision.path), shown=f"{revision.id} of {revision.path}"), "undo"
        path = Path(str(arguments.get("config") or node.config_path))
        text = arguments.get("text")
        return (load(path) if text is None else loads(str(text), path, shown=str(path))), "reload"

    # --- what it means ----------------------------------------------------------------------------------------------------------

    async def _plan(self, loaded: LoadedConfig, *, text: str = "") -> ReloadPlan:
        look = await self._look(loaded.config)
        found = changes.compare(self._node.config, loaded.config, look, _hidden(loaded))
        refused, hint = changes.refusal(found)
        return ReloadPlan(
            current=self.current,
            path=str(loaded.path),
            summary=changes.summary(found),
            refused=refused,
            hint=hint,
            changes=found,
            text=text,
        )

    async def _look(self, wanted: NodeConfig) -> changes.Look:
        """Look at the GPUs, where a worker that may get new engines has some."""
        node = self._node
        gpus: tuple[devices.Gpu, ...] = ()
        if any(worker.gpus for worker in wanted.workers):
            gpus = await asyncio.to_thread(devices.read_gpus)
        kept = node.parts.keeper.segments() if node.parts.keeper is not None else []
        overheads = device_memory.Overheads(node.paths.overheads)

        def look(worker: WorkerConfig, kv: KvFate) -> changes.Room:
            owner = node.workers.get(worker.name)
            took_s = owner.policy.cold_start_s if owner is not None else None
            if owner is not None and isinstance(owner.policy, CommandPolicy):
                return changes.Room(False, took_s, "without kept memory there is no shadow")
            mine = devices.resolve(worker.gpus, gpus) if worker.gpus else ()
            for gpu in mine:
                need = overheads.get(device_memory.Overheads.key(worker, gpu)) or device_memory.ENGINE_OVERHEAD
                if kv is KvFate.NEW:
                    if worker.kv.size is None:
                        return changes.Room(False, took_s, "its KV takes all that is left of the GPU, and the present KV has that")
                    need += worker.kv.size // len(mine)
                    weights = (s.manifest for s in kept if s.manifest.kind is Kind.WEIGHTS and worker.name in s.workers)
                    need += sum(manifest.size for manifest in weights if manifest.device == gpu.uuid)
                free = gpu.memory - gpu.used
                if need > free:
                    words = (
                        f"one engine more needs {device_memory.gib(need)} of GPU {gpu.index}, {device_memory.gib(max(0, free))} are free"
                    )
                    return changes.Room(False, took_s, words)
            return changes.Room(True, took_s)

        return look

    # --- carrying out -----------------------------------------------------------------------------------------------------------

    async def _work(self) -> None:
        while self._pending is not None and not self._node.stopping:
            order = self._pending
            await asyncio.sleep(SETTLE_S)
            if self._pending is not order:
                continue
            self._pending = None
            try:
                await self._carry_out(order)
            finally:
                self._run = None
        if self._pending is None:
            self._collect()

    async def _carry_out(self, order: _Order) -> None:
        node = self._node
        began_s = time.monotonic()
        # Planned anew: what was in force when it was asked for may not be any more.
        plan = await self._plan(order.loaded)
        progress = self.progress = ReloadProgress(n=order.n, summary=plan.summary, started_ts=round(time.time(), 3))
        run = self._run = Run(node, order.loaded.config, plan.changes)
        node.journal.add("reload.started", f"reload {order.n}: {plan.summary}", data={"n": order.n, "path": str(order.loaded.path)})
        node.report(f"reload: {plan.summary}")
        try:
            if plan.refused:
                raise SupervisorError(plan.refused, plan.hint)
            await run.prepare()
            await run.commit()
        except Interrupted:
            follower = self._pending
            if node.stopping or follower is None:
                self._end(progress, ReloadState.FAILED, "the node stops")
                return
            await run.take_back("a newer reload takes its place", follower.loaded.config)
            self._superseded(order.n, follower)
            self._end(progress, ReloadState.SUPERSEDED, f"reload {follower.n} took its place")
            return
        except Exception as error:
            if not isinstance(error, ShadowsupError):
                log.exception("reload %d", order.n)
            why = error.message if isinstance(error, ShadowsupError) else f"{type(error).__name__}: {error}"
            await run.take_back(f"another part of the reload failed: {why.partition(chr(10))[0]}")
            why = run.failure() or why
            data = {"n": order.n, "revision": self.current}
            text = f"reload {order.n} was taken back, revision {self.current} stays in force: {why}"
            node.journal.add("reload.failed", text, level="error", data=data)
            node.report(f"reload failed, and was taken back: {why}")
            self._end(progress, ReloadState.FAILED, why)
            return
        await run.finish()
        await self._in_force(order, progress, began_s)

    async def _in_force(self, order: _Order, progress: ReloadProgress, began_s: float) -> None:
        node, loaded, before = self._node, order.loaded, self.revisions.current
        node.config_path = str(loaded.path)
        self._record()
        said = ""
        if order.origin == "undo" and before is not None:
            with contextlib.suppress(SupervisorError):
                former = self.revisions.text(before)
                said = await asyncio.to_thread(put_back, loaded.path, loaded.text, instead_of=former)
        revision: Revision = await asyncio.to_thread(self.revisions.add, loaded.text, str(loaded.path), order.origin)
        text = f"revision {revision.id} of the config is in force after {time.monotonic() - began_s:.1f} s"
        node.journal.add("reload.done", f"reload {order.n}: {text}", data={"n": order.n, "revision": revision.id})
        node.report(text)
        progress.revision = revision.id
        self._end(progress, ReloadState.DONE, "; ".join(filter(None, [text, said])))

    def _end(self, progress: ReloadProgress, state: ReloadState, message: str) -> None:
        run = self._run
        if run is not None:
            progress.workers = run.stages()
        self._run = None
        progress.state, progress.message, progress.ended_ts, progress.queued = state, message, round(time.time(), 3), False

    def _superseded(self, n: int, by: _Order) -> None:
        self._node.journal.add("reload.superseded", f"reload {by.n} takes the place of reload {n}", data={"n": n, "by": by.n})

    def _record(self) -> None:
        """Leave on disk what runs now, for clients and for a supervisor that adopts the node."""
        node = self._node
        plan = dataclasses.replace(node.plans, workers=[], nurseries=[])
        for worker in node.config.workers:
            owner = node.workers.get(worker.name)
            if owner is not None:
                number = next((i for i, part in enumerate(node.parts.nurseries) if part is owner.nursery), None)
                plan.workers.append(owner.plan(number))
        plan.nurseries = [node.parts.nursery_plans[int(part.label)] for part in node.parts.nurseries]
        node.plans = plan
        try:
            node.write_plan(plan)
            node.write_record()
        except (SupervisorError, OSError) as error:
            # It runs, and an adoption would go on with what it was before.
            node.journal.add("reload.not_recorded", f"the new config is in force, but not recorded: {error}", level="error")

    # --- what is left over ------------------------------------------------------------------------------------------------------

    def _collect(self) -> None:
        """When the last engines with other settings are gone: forget how they were made, and end nurseries that nobody needs."""
        self._node.run_task(self._collect_when_settled())

    async def _collect_when_settled(self) -> None:
        node = self._node

        def settled(owner: WorkerOwner) -> Callable[[], bool]:
            return lambda: all(e.revision == owner.policy.settings.revision for e in owner.policy.engines.values()) or self._busy

        for owner in list(node.workers.values()):
            await owner.until(settled(owner))
        if self._busy or node.stopping:
            return
        for owner in node.workers.values():
            owner.lines = {owner.policy.settings.revision: owner.line}
        used = {id(owner.nursery) for owner in node.workers.values()}
        for part in [part for part in node.parts.nurseries if id(part) not in used]:
            node.parts.nurseries.remove(part)
            del node.parts.nursery_plans[int(part.label)]
            await part.stop()
            part.close()

    @property
    def _busy(self) -> bool:
        return self._run is not None or self._pending is not None


def _hidden(loaded: LoadedConfig) -> frozenset[tuple[str, str]]:
    """Return (worker, dotted key) of the values that came from a variable with a secret name."""
    workers = loaded.config.workers
    found = set()
    for path in loaded.secrets:
        if len(path) > 2 and path[0] == "workers" and isinstance(path[1], int) and path[1] < len(workers):
            found.add((workers[path[1]].name, ".".join(map(str, path[2:]))))
    return frozenset(found)
