"""One run of ``bench chaos`` while it goes on: strike, wait until the node is whole again, note what that took."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from shadowsup.supervisor.bench import chaos_faults as faults
from shadowsup.supervisor.bench.chaos_faults import Kind, Strike
from shadowsup.supervisor.bench.chaos_load import Load
from shadowsup.supervisor.bench.node import Node
from shadowsup.supervisor.errors import SupervisorError

BURST = 0.2
"""Share of the faults that the next one follows before the node is whole again."""
BURST_S = 0.4
"""How soon, at most."""
ABSENCE_S = 0.5
"""How long a killed supervisor is away, at most, before the next one is started."""
LOOK_S = 0.02
PARTS = frozenset({"memkeeper", "gateway", "nursery", "scribe", "sensor"})
REST_S = 5.5
"""A part that ends sooner after its start is made to wait before it is started again (`policy.part`), up to 15 s."""
TIRED = 0.02
"""How often one is struck all the same."""


@dataclass(kw_only=True)
class Fault:
    """A strike and what came of it. Milliseconds from the strike."""

    strike: Strike
    settled_ms: float | None = None
    detected_ms: float | None = None
    """Until the node's verdict over the struck active engine."""


@dataclass(kw_only=True)
class Run:
    """One run while it goes on."""

    node: Node
    worker: str
    rng: random.Random
    load: Load
    kinds: Sequence[Kind]
    settle_timeout_s: float
    done: list[Fault]
    recoveries: dict[str, dict[str, Any]] = field(default_factory=dict)
    """By the engine that was succeeded."""
    _rested_s: dict[str, float] = field(default_factory=dict)
    """Target → since when it is back."""

    async def status(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the node's status and the worker's part of it."""
        found = await self.node.status()
        return found, next(each for each in found["workers"] if each["name"] == self.worker)

    async def fault(self) -> None:
        """Strike once, at a moment drawn by lot; wait until the node is whole, unless this is one that the next follows at once."""
        moves = self.rng.randrange(0, 12)
        for _ in range(moves):
            await self.load.moves(1.0)
        await asyncio.sleep(self.rng.uniform(0.0, 0.01))
        made = await self._strike()
        if made is None:
            await asyncio.sleep(LOOK_S)
            return
        self.done.append(made)
        if made.strike.kind.lonely or self.rng.random() >= BURST:
            await self.settle()
        else:
            await asyncio.sleep(self.rng.uniform(0.0, BURST_S))

    async def _strike(self) -> Fault | None:
        status, worker = await self.status()
        kind = self._kind()
        if kind is None:
            return None
        active = next((engine for engine in worker["engines"] if engine["role"] == "active" and engine["pid"]), None)
        pids = faults.pids_of(status, worker, settled=kind.stops)
        if "gateway" in kind.targets:
            self.load.gateway_dies()
        at_s = time.monotonic()
        hit = faults.strike(kind, pids, self.rng)
        if not hit:
            return None
        engine = active["id"] if active is not None and "active" in hit else None
        fault = Fault(strike=Strike(number=len(self.done) + 1, kind=kind, at_s=at_s, pids=hit, engine=engine))
        if "supervisor" in hit:
            await self.node.process.wait()
            await asyncio.sleep(self.rng.uniform(0.0, ABSENCE_S))
            await self.node.launch()
        return fault

    def _kind(self) -> Kind | None:
        """Draw a kind that may be struck now; None: not one of them yet."""
        pending = [fault for fault in self.done if fault.settled_ms is None]
        now_s, kinds = time.monotonic(), []
        for kind in self.kinds:
            tired = any(now_s - self._rested_s.get(target, 0.0) < REST_S for target in kind.targets if target in PARTS)
            if not (kind.lonely and pending) and (not tired or self.rng.random() < TIRED):
                kinds.append(kind)
        return self.rng.choice(kinds) if kinds else None

    async def settle(self) -> None:
        """Wait until the node is whole again and note how long each fault that waited took.

        Raises:
            SupervisorError: it does not become so.
        """
        pending = [fault for fault in self.done if fault.settled_ms is None]
        deadline_s = time.monotonic() + self.settle_timeout_s
        while True:
            wrong = await self._missing(pending)
            if wrong is None:
                break
            if time.monotonic() > deadline_s:
                raise SupervisorError(f"{wrong}, {self.settle_timeout_s:.0f} s after fault {pending[-1].strike.number if pending else 0}")
            await asyncio.sleep(LOOK_S)
        for fault in pending:
            self._rested_s |= dict.fromkeys(fault.strike.pids, time.monotonic())
            fault.settled_ms = (time.monotonic() - fault.strike.at_s) * 1e3
        await self._collect(pending)

    async def _missing(self, pending: Sequence[Fault]) -> str | None:
        if self.node.process.returncode is not None:
            raise SupervisorError(f"the supervisor ended with {self.node.process.returncode}: {self.node.tail()}")
        try:
            status, worker = await self.status()
        except SupervisorError as error:  # it is just being started
            return error.message
        except StopIteration:
            return "the worker is not there yet"
        return faults.missing(status, worker, [fault.strike for fault in pending])

    async def _collect(self, pending: Sequence[Fault]) -> None:
        """Read what the node has noted since the last look: it keeps it for a while only."""
        for record in (await self.node.call("recoveries"))["recoveries"]:
            self.recoveries[record["from_engine"]] = record
        if not any(fault.strike.engine for fault in pending):
            return
        events = (await self.node.call("events", limit=400))["events"]
        verdicts = {event["engine"]: event["mono_s"] for event in events if event["event"] == "engine.verdict"}
        for fault in pending:
            seen_s = verdicts.get(fault.strike.engine)
            if seen_s is not None:
                fault.detected_ms = (seen_s - fault.strike.at_s) * 1e3


def context(done: Sequence[Fault], since_s: float) -> dict[str, Any]:
    """Return what went on from ``since_s`` (monotonic) on, for a stream that came out wrong."""
    struck = [f"{fault.strike.number} {fault.strike.kind.value}" for fault in done if fault.strike.at_s >= since_s - 1.0]
    return {"faults": struck[-8:]}
