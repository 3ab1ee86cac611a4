"""A world for the worker policy: carries out the actions on imaginary engines, keeps the clock, checks the invariants after each event."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec

from shadowsup.supervisor.policy import messages as m
from shadowsup.supervisor.policy.invariants import validate
from shadowsup.supervisor.policy.model import Ending, How, NurseryState, WorkerSettings
from shadowsup.supervisor.policy.past import Past
from shadowsup.supervisor.policy.suspicion import Look
from shadowsup.supervisor.policy.worker import WorkerPolicy
from shadowsup.supervisor.protocol import Recovery
from shadowsup.wire.engine import Beat, EngineState, Failed, Fence, FirstToken, Phase, Promote, Promoted, Release, Stop


@dataclass
class Body:
    """An imaginary engine process."""

    id: str
    spawned: bool = False
    state: EngineState = EngineState.LOADING
    epoch: int = 0
    kv_set: int = 0
    step: int = 0
    inflight: int = 0
    frozen: bool = False
    killed: bool = False
    stopping: bool = False
    revision: str = ""
    gpus: tuple[str, ...] | None = None
    stopped: bool = False
    """By SIGSTOP, as the kernel says."""
    ran: float = 0.0
    waits: float = 0.0
    """Of each second: how much of it its threads run, and wait for a processor."""
    front_stopped: bool = False
    front_ran: float = 0.0
    front_waits: float = 0.0
    """Likewise, of the server in front."""


@dataclass
class World:
    settings: WorkerSettings = field(default_factory=lambda: WorkerSettings(name="chat"))
    nursery: NurseryState = NurseryState.READY
    now_s: float = 1000.0
    obeys: bool = True
    """Engines that are told to stop, or killed, end at once."""
    layouts: dict[str, str] = field(default_factory=dict)
    """Revision → what its engines' KV looks like; those of one layout share a set."""

    def __post_init__(self) -> None:
        self.policy = WorkerPolicy(self.settings, nursery=self.nursery)
        self.bodies: dict[str, Body] = {}
        self.actions: list[m.WorkerAction] = []
        self.recoveries: list[Recovery] = []
        self.done: list[Recovery] = []
        self.promotions: list[tuple[str, Promote]] = []
        self.spawns: list[m.Spawn] = []
        self.keeper: dict[str, int] = {}
        """Layout → the set that the keeper gives out for it."""
        self.sets = 0
        self.tidied: list[str] = []
        self.header = (0, 0)
        """(epoch, owner) in the ledger that has been owned last."""
        self.header_set = 0
        self.freed = 0
        self.adopted = False
        self.examined: list[str] = []
        self._later: list[m.WorkerEvent] = []

    # --- events -------------------------------------------------------------------------------------------------------------------

    def tell(self, event: m.WorkerEvent) -> list[m.WorkerAction]:
        actions = self.policy.handle(event, self.now_s)
        self._carry_out(actions)
        self._settle()
        return actions

    def _settle(self) -> None:
        """Deliver what the actions led to."""
        while self._later:
            event = self._later.pop(0)
            match event:
                case m.Died(engine=name) if name in self.bodies:
                    self.bodies[name].frozen = True
                case m.Gone(engine=name):
                    if self.bodies.pop(name, None) is None:
                        continue
                case _:
                    pass
            self._carry_out(self.policy.handle(event, self.now_s))

    def run(self) -> None:
        self.tell(m.RunWorker())

    def advance(self, seconds: float) -> None:
        """Let time pass, with a tick at each deadline."""
        end_s = self.now_s + seconds
        while self.policy.deadline_s <= end_s:
            self.now_s = max(self.now_s, self.policy.deadline_s)
            self.tell(m.Tick())
        self.now_s = end_s
        self.tell(m.Tick())

    def beat(
        self, engine: str, state: EngineState | None = None, *, phase: Phase | None = None, step: int | None = None, **more: Any
    ) -> None:
        body = self.bodies[engine]
        said = state or body.state
        pid = more.pop("pid", 100)
        if not (body.state is EngineState.PARKED and said in (EngineState.LOADING, EngineState.WARMING)):  # a lie changes nothing
            body.state = said
        body.step = body.step if step is None else step
        beat = Beat(
            engine=engine,
            pid=pid,
            sent_s=self.now_s,
            state=said,
            phase=phase or (Phase.IDLE if body.state is EngineState.ACTIVE else Phase.LOADING),
            epoch=body.epoch,
            step=body.step,
            inflight=body.inflight,
            queued=0,
            last_step_s=self.now_s,
            tokens_total=0,
            kv_set=f"set-{body.kv_set}",
            **more,
        )
        self._carry_out(self.policy.beat(beat, self.now_s))
        self._settle()

    def lose_the_supervisor(self, *, with_keeper: bool = False) -> None:
        """A new policy finds what is there. ``with_keeper``: and a keeper that has nothing."""
        old = self.policy
        if with_keeper:
            self.keeper.clear()
        self.adopted = True
        engines = tuple(self._found(body, old.engines[body.id].ending) for body in self.bodies.values())
        self.policy = WorkerPolicy(old.settings, nursery=old.nursery)
        epoch, owner = self.header
        found = m.Adopt(
            engines=engines,
            seq=old.last_seq,
            epoch=max(epoch, old.epoch),
            owner=owner if epoch >= old.epoch else 0,
            kv_set=f"set-{self._kept_set(old.settings.revision)}" if self.keeper else "",
            desired=old.desired,
            cold_start_s=old.cold_start_s,
            past=msgspec.json.decode(msgspec.json.encode(old.past), type=Past),
        )
        self.tell(found)

    def _kept_set(self, revision: str) -> int:
        """Of the sets that the keeper has: the one that was owned last, else the one that an engine of these settings would get."""
        if self.header_set in self.keeper.values():
            return self.header_set
        return self.keeper.get(self.layouts.get(revision, ""), max(self.keeper.values()))

    def _found(self, body: Body, ending: Ending | None) -> m.FoundEngine:
        serves = body.state in (EngineState.ACTIVE, EngineState.DRAINING)
        beat = Beat(
            engine=body.id,
            pid=100,
            sent_s=self.now_s,
            state=body.state,
            phase=Phase.IDLE,
            epoch=body.epoch if serves else 0,
            step=body.step,
            inflight=body.inflight,
            queued=0,
            last_step_s=self.now_s,
            tokens_total=0,
            ordered=body.epoch,
            kv_set="" if body.state in (EngineState.LOADING, EngineState.WARMING) else f"set-{body.kv_set}",
            fenced=False,
        )
        alive = not body.frozen
        return m.FoundEngine(
            id=body.id,
            seq=int(body.id.rpartition(".")[2]),
            how=How.COLD,
            pid=100,
            spawned_s=self.now_s,
            alive=alive,
            beat=beat if alive else None,
            ending=ending,
            revision=body.revision,
        )

    def park(self, engine: str) -> None:
        self.beat(engine, EngineState.PARKED, phase=Phase.PARKED)

    def promoted(self, engine: str, epoch: int | None = None) -> None:
        body = self.bodies[engine]
        body.state = EngineState.ACTIVE
        body.epoch = body.epoch if epoch is None else epoch
        if body.epoch > self.header[0]:
            self.header, self.header_set = (body.epoch, int(engine.rpartition(".")[2])), body.kv_set
        report = Promoted(engine=engine, epoch=body.epoch, header_s=0, map_s=0, index_s=0, blocks_kept=7, blocks_dropped=1)
        self.tell(m.Reported(report))
        if engine in self.bodies and engine in self.policy.engines and not self.policy.engines[engine].dying:
            self.beat(engine)

    def first_token(self, engine: str) -> None:
        body = self.bodies[engine]
        body.step += 1
        self.tell(m.Reported(FirstToken(engine=engine, epoch=body.epoch, sent_s=self.now_s, resumed=3)))

    def fail(self, engine: str, message: str = "broken", *, fatal: bool = False, stage: str = "load") -> None:
        self.tell(m.Reported(Failed(engine=engine, stage=stage, message=message, fatal=fatal)))

    def die(self, engine: str, status: int = -9) -> None:
        """All at once: EOF, then every process gone."""
        self.freeze(engine)
        self.gone(engine, status)

    def freeze(self, engine: str) -> None:
        if engine in self.bodies and not self.bodies[engine].frozen:
            self.bodies[engine].frozen = True
            self.tell(m.Died(engine, frozen=True))

    def gone(self, engine: str, status: int = -9, output: tuple[str, ...] = ()) -> None:
        if self.bodies.pop(engine, None) is not None:
            self.tell(m.Gone(engine, status, output))

    def serve(self, shadows: int | None = None) -> None:
        """From nothing to healthy."""
        self.run()
        first = self.spawns[-1].engine
        self.park(first)
        self.promoted(first)
        for _ in range(self.settings.shadows if shadows is None else shadows):
            self.park(self.spawns[-1].engine)
        self.now_s += 0.5

    # --- actions ------------------------------------------------------------------------------------------------------------------

    def _carry_out(self, actions: list[m.WorkerAction]) -> None:
        self.actions += actions
        for action in actions:
            match action:
                case m.Spawn():
                    self.spawns.append(action)
                    assert action.engine not in self.bodies
                    kv_set = self._get_kv(action.revision, beside=action.beside, gpus=action.gpus)
                    self.bodies[action.engine] = Body(
                        action.engine, spawned=True, kv_set=kv_set, revision=action.revision, gpus=action.gpus
                    )
                    self._later.append(m.Spawned(action.engine, 100 + action.seq))
                case m.Send(engine=name, order=Promote() as order):
                    self._promote(name, order)
                case m.Send(engine=name, order=Stop() | Release()):
                    self._end(name, 0)
                case m.Send(engine=name, order=Fence() as order):
                    owners = [b for b in self.bodies.values() if b.id != name and 0 < b.epoch < order.epoch]
                    assert not [b for b in owners if b.kv_set == self.bodies[name].kv_set], "fenced while a former owner lives"
                case m.Signal(engine=name):
                    self._end(name, -15)
                case m.Examine(engine=name, front=front):
                    self.examined.append(name)
                    body = self.bodies.get(name)
                    if body is not None:
                        stopped, ran, waits = body.stopped, body.ran, body.waits
                        if front:
                            stopped, ran, waits = body.front_stopped, body.front_ran, body.front_waits
                        look = Look(at_s=self.now_s, stopped=stopped, ran_s=ran * self.now_s, waited_s=waits * self.now_s)
                        self._later.append(m.Examined(name, look))
                case m.KillTree(engine=name):
                    if name in self.bodies:
                        self.bodies[name].killed = True
                    self._end(name, -9)
                case m.Record(recovery=recovery, done=done):
                    if recovery not in self.recoveries:
                        self.recoveries.append(recovery)
                    if done:
                        self.done.append(recovery)
                case m.FreeMemory():
                    self.freed += 1
                    self.keeper.clear()
                case m.TidyMemory(keep=keep):
                    self.tidied.append(keep)
                    held = {f"set-{body.kv_set}" for body in self.bodies.values()}
                    assert held <= {keep}, f"freed while in use: {held}"
                    self.keeper = {layout: kv_set for layout, kv_set in self.keeper.items() if f"set-{kv_set}" == keep}
        validate(self.policy)

    def _get_kv(self, revision: str, *, fresh: bool = False, beside: bool = False, gpus: tuple[str, ...] | None = None) -> int:
        """What the keeper answers to an engine with these settings, on these devices."""
        layout = self.layouts.get(revision, "") + ",".join(gpus or ())
        if fresh or layout not in self.keeper:
            self.sets += 1
            self.keeper = {**(self.keeper if beside else {}), layout: self.sets}
        return self.keeper[layout]

    def _promote(self, name: str, order: Promote) -> None:
        body = self.bodies[name]
        rollout = self.policy.rollout
        if rollout is not None and rollout.open and body.revision != self.policy.settings.revision:
            fit = [e for e in self.policy.engines.values() if e.parked and e.revision == self.policy.settings.revision]
            assert not fit, f"{name} was promoted though {fit} has the settings in force"
        assert all(order.epoch > earlier.epoch for _, earlier in self.promotions), "two successors in one epoch"
        self.promotions.append((name, order))
        if order.keep_kv:
            writers = [b for b in self.bodies.values() if b.id != name and b.epoch > 0 and b.kv_set == body.kv_set]
            assert all(b.frozen for b in writers), "promoted before every former owner was frozen"
            # After an adoption it is not known of a dead engine that it never was an owner.
            assert order.fenced or writers or self.adopted, "reserve blocks for no reason"
            if order.fenced:
                assert not writers, "said to be fenced, but a former owner lives"
        else:
            body.kv_set = self._get_kv(body.revision, fresh=True, gpus=body.gpus)
        body.epoch = order.epoch
        body.state = EngineState.PROMOTING

    def _end(self, name: str, status: int) -> None:
        if self.obeys and name in self.bodies:
            self._later.append(m.Died(name, frozen=True))
            self._later.append(m.Gone(name, status))

    def sent(self, kind: type) -> list[m.Send]:
        return [a for a in self.actions if isinstance(a, m.Send) and isinstance(a.order, kind)]

    def announced(self, event: str) -> list[m.Announce]:
        return [a for a in self.actions if isinstance(a, m.Announce) and a.event == event]
