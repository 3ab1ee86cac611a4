"""One reload, carried out: prepare beside what serves, hand over, finish, or take it all back.

All or nothing: no worker hands over before every changed one has an engine with the new settings parked, and the old engines go only when
all the new ones have proved themselves. What a single worker does is its policy's (`policy.rolling`); here it is done for all together.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import logging
import socket
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from shadowsup.errors import ShadowsupError
from shadowsup.supervisor import node_setup
from shadowsup.supervisor.config import NodeConfig, WorkerConfig
from shadowsup.supervisor.config.revision import revision_of
from shadowsup.supervisor.errors import SupervisorError
from shadowsup.supervisor.node_parts import NURSERY_READY_S, NurseryPart, close_sockets, port_of
from shadowsup.supervisor.node_worker import Line, WorkerOwner, tell_when_up
from shadowsup.supervisor.policy import messages as m
from shadowsup.supervisor.policy.command import CommandPolicy
from shadowsup.supervisor.policy.model import NurseryState, WorkerState
from shadowsup.supervisor.policy.rollout import RollOut, Stage
from shadowsup.supervisor.protocol import Change, Consequence, ReloadState
from shadowsup.supervisor.recipe import settings
from shadowsup.wire.gateway import Retune

if TYPE_CHECKING:
    from shadowsup.supervisor.node import Node

T = TypeVar("T")

END_MARGIN_S = 30.0
"""Beyond a worker's stop timeout, for one that is removed."""
TAKE_BACK_S = 120.0
"""Beyond the time that a start may take: then it is said that taking back is not done yet, and it goes on by itself."""

log = logging.getLogger("shadowsup.reload")


class Interrupted(Exception):
    """Raised when a newer reload has come, or the node stops, before anything has handed over."""


class ReloadFailed(ShadowsupError):
    """Raised when a reload cannot be completed: everything is, or is being, taken back."""


@dataclass
class _Changed:
    """A worker that gets new engines. ``gap``: there is no room for one more."""

    owner: WorkerOwner
    wanted: WorkerConfig
    plan: node_setup.WorkerPlan
    gap: bool

    @property
    def revision(self) -> str:
        return self.plan.recipe.settings_revision

    @property
    def rollout(self) -> RollOut | None:
        """Its roll-out, once the order for it was taken."""
        found = self.owner.policy.rollout
        return found if found is not None and self.owner.idle and found.target.revision == self.revision else None

    def at(self, *stages: Stage) -> bool:
        return self.rollout is not None and self.rollout.stage in stages


class Run:
    """Carries one reload out. `prepare`, `commit`, `finish` in this order; after a failure `take_back`."""

    def __init__(self, node: Node, wanted: NodeConfig, changes: Iterable[Consequence]) -> None:
        self.state = ReloadState.WAITING
        self.interrupted = asyncio.Event()
        self.wanted = wanted
        self._node = node
        self._running = node.config
        self._changes = {change.name: change for change in changes if change.section == "worker"}
        self._gateway = next((change for change in changes if change.section == "gateway"), None)
        self._changed: list[_Changed] = []
        self._added: list[WorkerOwner] = []
        self._first: dict[str, str] = {}
        """Added worker → its first engine."""
        self._in_place: list[tuple[WorkerOwner, Line, Line]] = []
        """Owner, what it had, what it has now."""
        self._sockets: list[socket.socket] = []
        """Listening on the new address, not yet the gateway's."""
        self._left: list[socket.socket] = []
        """Of the old address, until it is sure that they are not wanted again."""
        self._retuned = False

    @property
    def preparing(self) -> bool:
        """Nothing that serves was touched: a newer reload may take its place."""
        return self.state in (ReloadState.WAITING, ReloadState.PREPARING)

    def stages(self) -> dict[str, str]:
        """Return how far each worker is that is not kept as it is."""
        found = {each.owner.name: each.rollout.stage.value if each.rollout else Stage.WAITING.value for each in self._changed}
        return found | {owner.name: (Stage.READY if _serves(owner) else Stage.STARTING).value for owner in self._added}

    def waits_for(self) -> str:
        """Return what a worker waits for, for people; empty: nothing."""
        reasons = [f"{each.owner.name}: {each.rollout.reason}" for each in self._changed if each.rollout and each.at(Stage.WAITING)]
        return "; ".join(reason for reason in reasons if not reason.endswith(": "))

    # --- prepare ----------------------------------------------------------------------------------------------------------------

    async def prepare(self) -> None:
        """Have everything ready beside what serves.

        Raises:
            Interrupted: it is not wanted any more.
            ShadowsupError: it cannot be had. Either way `take_back` is to follow.
        """
        self.state = ReloadState.PREPARING
        node, kinds = self._node, (Change.REPLACED, Change.GAP, Change.ADDED)
        if self._gateway is not None and self.wanted.gateway.listen != self._running.gateway.listen:
            self._sockets = await self._or_interrupted(asyncio.to_thread(node_setup.listen, self.wanted))
        workers = tuple(worker for worker in self.wanted.workers if self._changes[worker.name].change in kinds)
        if not workers:
            return
        partial = self.wanted.model_copy(update={"workers": workers})
        plans = await self._or_interrupted(node.plan_anew(partial))
        nurseries = await asyncio.gather(*(self._nursery(plan) for plan in plans.nurseries))
        for plan in plans.workers:
            part = nurseries[plan.nursery] if plan.nursery is not None else None
            if self._changes[plan.name].change is Change.ADDED:
                self._add(plan, part)
            else:
                self._begin(plan, part)
        everyone = [*(each.owner for each in self._changed), *self._added]
        ready, lost = (Stage.READY,), (Stage.TAKING_BACK, Stage.FAILED)
        await self._until(
            everyone,
            lambda: (
                (all(each.at(*ready) for each in self._changed) and all(map(_serves, self._added)))
                or any(each.at(*lost) for each in self._changed)
                or any(map(self._failed, self._added))
            ),
            interruptible=True,
        )
        for owner in self._added:
            if self._failed(owner):
                raise ReloadFailed(await self._why(owner))
        self._raise_failures()

    async def _why(self, owner: WorkerOwner) -> str:
        """Return why a worker that is new does not come up. The next try may have begun, and ended, already: what counts is the first."""
        policy, first = owner.policy, self._first[owner.name]
        why = f"{owner.name} does not come up: {policy.last_failure or policy.down_reason}"
        output = await self._node.parts.last_words(first) if "its last output" not in why else ""
        return f"{why}\nthe last output of {first}:\n{output}" if output else why

    async def _nursery(self, plan: node_setup.NurseryPlan) -> NurseryPart | None:
        """Return a nursery that runs; None: it does not come up, and neither will engines that are started without it, but they say why."""
        part = self._node.parts.nursery(plan)
        try:
            await self._or_interrupted(part.started(NURSERY_READY_S))
        except SupervisorError as error:
            log.warning("engines with the new settings are started without a nursery: %s", error)
            return None
        return part

    def _begin(self, plan: node_setup.WorkerPlan, part: NurseryPart | None) -> None:
        owner = self._node.workers[plan.name]
        if isinstance(owner.policy, CommandPolicy) == plan.keeps_memory:
            how = "with" if plan.keeps_memory else "without"
            hint = "give the new one another name, or restart the node"
            raise SupervisorError(f"{plan.name} would run {how} kept memory now: it cannot be replaced in place", hint)
        gap = self._changes[plan.name].change is Change.GAP
        each = _Changed(owner, plan.config, plan, gap)
        self._changed.append(each)
        owner.lines[each.revision] = Line(plan.recipe, part)
        state = NurseryState.READY if part is not None else NurseryState.NONE
        owner.put(m.RollOut(settings(plan.config, plan.gpus, plan.spares, each.revision), state, gap))

    def _add(self, plan: node_setup.WorkerPlan, part: NurseryPart | None) -> None:
        node = self._node
        known = node.workers.get(plan.name)  # a reload that this one has superseded was about to add it as well
        if known is None:
            first = node.registry.mark(plan.name).seq + 1  # there may have been one of this name: ids are not used again
            known = node.own(plan, part)
            node.memory.begin_worker(known)
            node.run_task(tell_when_up(known, node.listen, node.report))
            node.routes_changed()
            self._first[plan.name] = f"{plan.name}.{first}"
        self._added.append(known)

    # --- commit -----------------------------------------------------------------------------------------------------------------

    async def commit(self) -> None:
        """Hand over.

        Raises:
            ShadowsupError: something has not proved itself; `take_back` is to follow.
        """
        self.state = ReloadState.HANDING_OVER
        for each in self._changed:
            each.owner.put(m.CommitRollOut())
        owners = [each.owner for each in self._changed]
        lost = (Stage.TAKING_BACK, Stage.FAILED)
        await self._until(
            owners,
            lambda: all(each.at(Stage.PROVEN) for each in self._changed) or any(each.at(*lost) for each in self._changed),
        )
        self._raise_failures()
        for worker in self.wanted.workers:
            if self._changes[worker.name].change is Change.IN_PLACE:
                self._reconfigure(self._node.workers[worker.name], worker)
        if self._gateway is not None:
            await self._retune(self.wanted, self._sockets)
            self._retuned = True
        self._node.routes_changed()

    def _reconfigure(self, owner: WorkerOwner, wanted: WorkerConfig) -> None:
        before = owner.line
        recipe = copy.copy(before.recipe)
        recipe.config = wanted
        after = Line(recipe, before.nursery)
        self._in_place.append((owner, before, after))
        self._use(owner, after)

    def _use(self, owner: WorkerOwner, line: Line) -> None:
        now = owner.policy.settings
        owner.lines[now.revision] = line
        owner.put(m.Reconfigure(settings(line.recipe.config, now.gpus, now.spares, now.revision)))

    async def _retune(self, config: NodeConfig, sockets: list[socket.socket]) -> None:
        node, section = self._node, config.gateway
        if node.parts.gateway is None:
            return
        keys = str(section.api_key_file) if section.api_key_file else None
        left = await node.parts.gateway.retune(Retune(api_key_file=keys, max_inflight=section.max_inflight), sockets)
        if sockets:
            self._sockets, self._left = [], left
            node.listen = port_of(sockets)
            node.keep_sockets(sockets)

    # --- finish -----------------------------------------------------------------------------------------------------------------

    async def finish(self) -> None:
        """Retire what is old. Nothing is taken back from here on."""
        self.state = ReloadState.FINISHING
        node = self._node
        for each in self._changed:
            each.owner.put(m.FinishRollOut())
        node.config = self.wanted
        close_sockets(self._left)
        gone = [node.workers[name] for name, change in self._changes.items() if change.change is Change.REMOVED and name in node.workers]
        await asyncio.gather(*(self._remove(owner) for owner in gone))
        _sort(node.workers, self.wanted)
        node.routes_changed()

    async def _remove(self, owner: WorkerOwner) -> None:
        """Let it finish what it has, within its stop timeout, and end it."""
        policy = owner.policy
        if policy.refusal(m.DrainWorker()) is None:
            owner.put(m.DrainWorker())
            await owner.until(lambda: policy.settled, policy.settings.stop_timeout_s)
        await self._drop(owner)

    async def _drop(self, owner: WorkerOwner, *, hurry: bool = False) -> None:
        policy = owner.policy
        owner.put(m.StopWorker(hurry=hurry))
        if not await owner.until(lambda: policy.settled, policy.settings.stop_timeout_s + END_MARGIN_S):
            left = ", ".join(policy.engines)
            self._node.journal.add("worker.stuck", f"{owner.name} did not stop: {left} left", level="error", worker=owner.name)
            return  # it stays in sight
        owner.close()
        self._node.workers.pop(owner.name, None)
        self._node.routes_changed()

    # --- take back --------------------------------------------------------------------------------------------------------------

    async def take_back(self, reason: str, keep: NodeConfig | None = None) -> None:
        """Undo all that was done. ``keep``: the config of a reload that follows at once; what it wants alike goes on."""
        self.state = ReloadState.TAKING_BACK
        close_sockets(self._sockets)
        undone = [each for each in self._changed if not _wants_alike(keep, each.wanted)]
        for each in undone:
            each.owner.put(m.TakeBack(reason))
        for owner, before, _ in self._in_place:
            self._use(owner, before)
        if self._retuned:
            sockets, self._left = self._left, []
            with contextlib.suppress(SupervisorError):  # it is being replaced, then
                await self._retune(self._running, sockets)
                close_sockets(self._left)
        dropped = [owner for owner in self._added if not _wants_alike(keep, owner.recipe.config)]
        await asyncio.gather(*(self._drop(owner, hurry=True) for owner in dropped))
        bound_s = max([each.owner.policy.settings.startup_s for each in undone], default=0.0) + TAKE_BACK_S
        with contextlib.suppress(TimeoutError, Interrupted):
            async with asyncio.timeout(bound_s):
                await self._until([each.owner for each in undone], lambda: all(each.at(Stage.FAILED, Stage.DONE) for each in undone))
        self._node.routes_changed()

    def failure(self) -> str:
        """Return why it failed, with the last output of what failed; empty when no worker is to blame."""
        blamed = [each for each in self._changed if each.rollout is not None and each.rollout.blamed]
        found = [f"{each.rollout.reason}" for each in blamed if each.rollout is not None]
        return "\n".join(found)

    def _raise_failures(self) -> None:
        for each in self._changed:
            if each.rollout is not None and each.at(Stage.TAKING_BACK, Stage.FAILED):
                raise ReloadFailed(each.rollout.reason or f"{each.owner.name} does not take the new settings")

    def _failed(self, owner: WorkerOwner) -> bool:
        """Say whether a worker that is new has not come up at the first try, and has said why."""
        policy = owner.policy
        if not owner.idle or self._first.get(owner.name) in policy.engines:
            return False
        return policy.state is WorkerState.DOWN or bool(policy.last_failure)

    # --- waiting ----------------------------------------------------------------------------------------------------------------

    async def _until(self, owners: list[WorkerOwner], condition: Callable[[], bool], *, interruptible: bool = False) -> None:
        while not condition():
            if self._node.stopping or (interruptible and self.interrupted.is_set()):
                raise Interrupted
            waits: list[asyncio.Future[Any]] = [asyncio.ensure_future(owner.changed.wait()) for owner in owners]
            waits.append(asyncio.ensure_future(self._node.until_stopping()))
            if interruptible:
                waits.append(asyncio.ensure_future(self.interrupted.wait()))
            try:
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for wait in waits:
                    wait.cancel()
                await asyncio.gather(*waits, return_exceptions=True)

    async def _or_interrupted(self, work: Coroutine[Any, Any, T]) -> T:
        doing = asyncio.ensure_future(work)
        interrupted = [asyncio.ensure_future(self.interrupted.wait()), asyncio.ensure_future(self._node.until_stopping())]
        try:
            await asyncio.wait([doing, *interrupted], return_when=asyncio.FIRST_COMPLETED)
            if not doing.done():
                raise Interrupted
            return doing.result()
        finally:
            for each in (doing, *interrupted):
                each.cancel()
            await asyncio.gather(doing, *interrupted, return_exceptions=True)


def _sort(owners: dict[str, WorkerOwner], config: NodeConfig) -> None:
    """Put the owners in the order of the config; those that it does not have come last."""
    place = {worker.name: number for number, worker in enumerate(config.workers)}
    ordered = sorted(owners.items(), key=lambda item: place.get(item[0], len(place)))
    owners.clear()
    owners.update(ordered)


def _serves(owner: WorkerOwner) -> bool:
    return owner.idle and owner.policy.state in (WorkerState.HEALTHY, WorkerState.DEGRADED)


def _wants_alike(config: NodeConfig | None, worker: WorkerConfig) -> bool:
    found = next((each for each in config.workers if each.name == worker.name), None) if config is not None else None
    return found is not None and revision_of(found) == revision_of(worker)
