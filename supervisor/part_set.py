"""The parts of one node together: which there are, begun or adopted, waited for, and what they said last."""

from __future__ import annotations

import asyncio
import dataclasses
import socket
from collections.abc import Callable, Sequence

from shadowsup.errors import ShadowsupError
from shadowsup.supervisor.adoption import Adoption
from shadowsup.supervisor.beats import BeatRouter
from shadowsup.supervisor.config import NodeConfig
from shadowsup.supervisor.engine_process import TAIL_WAIT_S
from shadowsup.supervisor.errors import SupervisorError
from shadowsup.supervisor.node_parts import GatewayPart, KeeperPart, NurseryPart, ScribePart
from shadowsup.supervisor.node_sensor import SensorPart
from shadowsup.supervisor.node_setup import NurseryPlan
from shadowsup.supervisor.part_process import Part, PartHost
from shadowsup.supervisor.policy.model import NurseryState
from shadowsup.wire.gateway import GatewaySpec

PART_START_S = 30.0


class PartSet:
    """One for a node; it begins empty.

    Args:
        host: what each part needs of the node.
        found: what runs of this node already: a part that does is adopted.
        on_nursery: told of each change of a nursery.
        on_exited: told of each engine that a nursery has reaped, and of its status.

    Attributes:
        scribe, keeper, gateway, sensor: None while there is none.
        nurseries: in the order in which they were begun.
        nursery_plans: by number.
    """

    def __init__(
        self,
        host: PartHost,
        found: Adoption | None,
        *,
        on_nursery: Callable[[NurseryPart, NurseryState], None],
        on_exited: Callable[[str, int], None],
    ) -> None:
        self.host = host
        self.scribe: ScribePart | None = None
        self.keeper: KeeperPart | None = None
        self.gateway: GatewayPart | None = None
        self.sensor: SensorPart | None = None
        self.nurseries: list[NurseryPart] = []
        self.nursery_plans: dict[int, NurseryPlan] = {}
        self._found = found
        self._on_nursery = on_nursery
        self._on_exited = on_exited

    @property
    def all(self) -> list[Part]:
        """Every part that there is."""
        return [part for part in (self.scribe, self.keeper, self.gateway, self.sensor, *self.nurseries) if part is not None]

    def begin(self, part: Part) -> bool:
        """Have a part run: adopt its process where there is one, start one where there is none. Returns whether there was one."""
        entry = self._found.part(part.what, part.label) if self._found is not None else None
        if entry is None:
            part.start()
        else:
            part.adopt(entry)
        return entry is not None

    def nursery(self, plan: NurseryPlan) -> NurseryPart:
        """Return the nursery that ``plan`` describes; it is started, or adopted, where there is none."""
        for number, known in self.nursery_plans.items():
            if known == plan:
                return next(part for part in self.nurseries if part.label == str(number))
        number = plan.number if plan.number is not None else max(self.nursery_plans, default=-1) + 1
        part = NurseryPart(
            self.host,
            number,
            engine=plan.engine,
            preload=plan.preload,
            python=plan.python,
            env=plan.env,
            on_state=self._on_nursery,
            on_exited=self._on_exited,
        )
        self.nurseries.append(part)
        self.nursery_plans[number] = dataclasses.replace(plan, number=number)
        self.begin(part)
        return part

    def begin_gateway(self, config: NodeConfig, sockets: Sequence[socket.socket], beats: BeatRouter) -> GatewayPart:
        """Have a gateway listen on ``sockets``; they are its own from now on."""
        paths, section = self.host.paths, config.gateway
        spec = GatewaySpec(
            node=config.node.name,
            runtime_dir=str(paths.runtime),
            listen_fds=(),
            beat_endpoint=beats.endpoint,
            api_key_file=str(section.api_key_file) if section.api_key_file else None,
            max_inflight=section.max_inflight,
            handover=str(paths.handover),
            retune=str(paths.retune),
        )
        self.gateway = GatewayPart(self.host, sockets, spec, beats)
        self.begin(self.gateway)
        return self.gateway

    async def started(self, part: KeeperPart | GatewayPart) -> None:
        """Wait until a part runs.

        Raises:
            SupervisorError: it does not; the message has its last output.
        """
        try:
            await part.started(PART_START_S)
        except SupervisorError as error:
            words = [error.message, await self.last_words(part.name)]
            raise SupervisorError("\n".join(filter(None, words)), f"its output is in {self.host.paths.log(part.name)}") from None

    async def last_words(self, stream: str) -> str:
        """Return the last lines of a stream of output; empty when there are none to be had."""
        try:
            async with asyncio.timeout(TAIL_WAIT_S):
                return "\n".join(await self.host.scribe.tail(stream, 10))
        except (TimeoutError, ShadowsupError):
            return ""
