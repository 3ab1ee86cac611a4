"""The gateway's routing table: which engines serve a worker, in which epoch, and what to tell clients of one that does not."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable

from shadowsup.supervisor.config.model import EngineKind
from shadowsup.supervisor.node_worker import WorkerOwner
from shadowsup.supervisor.paths import NodePaths
from shadowsup.supervisor.policy.command import CommandPolicy
from shadowsup.supervisor.policy.worker import WorkerPolicy
from shadowsup.wire.engine import Route, Routes, WorkerRoute

VLLM_METRICS = "/metrics"


class RouteTable:
    """Built anew from the policies for each change, and sent whole.

    Args:
        workers: returns the owners, in the order of the config.
        send: sends the table; called on the loop.
    """

    def __init__(self, paths: NodePaths, workers: Callable[[], Iterable[WorkerOwner]], send: Callable[[Routes], None]) -> None:
        self._paths = paths
        self._workers = workers
        self._send = send
        self._version = 0
        self._due = False

    def changed(self) -> None:
        """Send it, once for all that changes in this turn of the loop."""
        if not self._due:
            self._due = True
            asyncio.get_running_loop().call_soon(self.publish)

    def publish(self) -> None:
        """Send it now."""
        self._due = False
        self._version += 1
        self._send(Routes(version=self._version, workers=tuple(self._route(owner) for owner in self._workers())))

    def _route(self, owner: WorkerOwner) -> WorkerRoute:
        policy, config = owner.policy, owner.recipe.config
        upstream = policy.upstream if isinstance(policy, CommandPolicy) else ""
        if config.engine is EngineKind.VLLM and isinstance(policy, WorkerPolicy):
            active = policy.active
            if active is not None and active.promoted_s is not None and active.live:
                upstream = f"unix:{self._paths.link(active.id)}"
        return WorkerRoute(
            worker=owner.name,
            served_name=config.public_name,
            kind="http" if isinstance(policy, CommandPolicy) else "held" if config.engine is EngineKind.VLLM else "link",
            state=policy.state.value,
            epoch=policy.epoch,
            engines=tuple(Route(engine=engine.id, socket=str(self._paths.link(engine.id))) for engine in policy.routable()),
            upstream=upstream,
            metrics=VLLM_METRICS if config.engine is EngineKind.VLLM else config.metrics or "",
            give_up_after_s=policy.give_up_after_s,
            deaths=policy.deaths(time.monotonic()) if isinstance(policy, WorkerPolicy) else (),
            admits=policy.paused_s is None if isinstance(policy, WorkerPolicy) else True,
            reason=policy.reason.partition("\n")[0],  # clients are not shown an engine's output
        )
