"""What a worker is, from what its engines say that another supervisor has started. Pure: facts in, records out.

The facts come from four places, none of which is trusted alone: the list of processes (who there was), /proc (who lives), each living
engine's first beat (what it is), and the header of the ledger (who may write). The engine with the highest claim to an epoch is the
active one, alive or not; what claims an older epoch is a former owner and is ended; everybody else is as parked, or as far on the way,
as they say.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from shadowsup.supervisor.policy import messages as m
from shadowsup.supervisor.policy.model import Desired, Ending, EngineRecord, StopLadder
from shadowsup.wire.engine import Beat, EngineState, Phase, Role

DIED_ALONE = "engine process died while there was no supervisor"
SUCCEEDED = "another engine has succeeded it"
CUT_SHORT = "engine lost; the supervisor died in the middle of the recovery, and times count from its successor's start"
CONDEMNED = "its end had begun"

_CURRENT, _OTHER, _UNKNOWN = 1, 0, -1
"""Generations of KV sets, as `EngineRecord.kv_set` counts them, at the moment of the adoption."""


@dataclass(kw_only=True)
class Picture:
    """How a worker stands. ``condemned``: (engine, cause), each of which must be ended; ``frozen``: those of them without a process."""

    engines: dict[str, EngineRecord] = field(default_factory=dict)
    active: str | None = None
    epoch: int = 0
    kv_set: int = _CURRENT
    kv_name: str = ""
    """The keeper's id of the set that counts; empty: there is none, or it is not known."""
    kv_known: bool = True
    """Whether the keeper would give a newcomer the KV set that is in use."""
    desired: Desired = Desired.RUN
    condemned: list[tuple[str, str]] = field(default_factory=list)
    frozen: set[str] = field(default_factory=set)


def picture(found: m.Adopt, now_s: float) -> Picture:
    """Return how the worker stands; ``now_s``: monotonic seconds."""
    claims = {engine.id: _claim(engine, found) for engine in found.engines}
    made = Picture(epoch=max([found.epoch, *claims.values()]), desired=found.desired)
    top = max(found.engines, key=lambda engine: (claims[engine.id], engine.alive), default=None)
    # With a header beyond every claim, its owner is gone and forgotten: nobody is active.
    if top is not None and 0 < claims[top.id] == made.epoch:
        made.active = top.id
    active = top if made.active else None
    made.kv_name = current = _set_in_use(found, active)
    made.kv_known = not current or found.kv_set == current
    first = 1 if active is not None and active.alive else 0  # before a living owner of epoch 1 there was none
    said = active.beat if active is not None and active.alive else None
    fenced = said is not None and said.epoch == made.epoch and said.fenced  # one that has not taken over yet cannot know
    for engine in found.engines:
        record = made.engines[engine.id] = _record(engine, claims[engine.id], now_s)
        record.kv_set = _generation(engine, current, made.kv_known)
        if engine is active:
            record.role = Role.ACTIVE
            if record.state is EngineState.DRAINING and made.desired is Desired.RUN:
                made.desired = Desired.DRAIN
        if not engine.alive:
            made.condemned.append((engine.id, DIED_ALONE))
            made.frozen.add(engine.id)
            record.kv_set = _CURRENT
            record.excused = engine is not active
            if engine is not active and not fenced and made.epoch > first:
                # It may have been an owner: what is left of its tree must be gone before the fence. A gap in the epochs harms nobody.
                record.epoch = 1
                made.epoch = max(made.epoch, 2)
        elif engine.ending is Ending.KILL or (engine is not active and claims[engine.id] > 0):
            made.condemned.append((engine.id, CONDEMNED if engine.ending is Ending.KILL else SUCCEEDED))
            record.excused = True
    return made


def _claim(engine: m.FoundEngine, found: m.Adopt) -> int:
    """Return the newest epoch that the engine owns, or was ordered to own; 0: none."""
    claim = max(engine.beat.epoch, engine.beat.ordered) if engine.beat is not None else 0
    return max(claim, found.epoch) if engine.seq == found.owner else claim


def _set_in_use(found: m.Adopt, active: m.FoundEngine | None) -> str:
    """Return the id of the KV set that counts: the active engine's, else the one the keeper would give, else what shadows hold."""
    if active is not None and active.beat is not None and active.beat.kv_set:
        return active.beat.kv_set
    held = [engine.beat.kv_set for engine in found.engines if engine.beat is not None and engine.beat.kv_set]
    return found.kv_set or (held[0] if held else "")


def _generation(engine: m.FoundEngine, current: str, known: bool) -> int:
    held = engine.beat.kv_set if engine.beat is not None else ""
    if held:
        return _CURRENT if held == current else _OTHER
    return _CURRENT if known else _UNKNOWN  # it will ask the keeper


def _record(engine: m.FoundEngine, claim: int, now_s: float) -> EngineRecord:
    record = EngineRecord(
        id=engine.id,
        seq=engine.seq,
        how=engine.how,
        spawned_s=engine.spawned_s,
        refill=engine.refill,
        kv_set=_UNKNOWN,
        pid=engine.pid,
        epoch=claim,
        revision=engine.revision,
        gpus=engine.gpus,
    )
    beat = engine.beat
    if beat is None and claim:
        beat = _silence(engine, claim, now_s)  # the header names it: it has taken over
    if beat is None:
        record.adopted_s = now_s
        return record
    if engine.alive:
        record.vitals.note(beat, now_s)
    record.state = beat.state
    record.committed = beat.epoch > 0 and (beat.step > 0 or engine.beat is None)
    if engine.ending is not None or beat.state is EngineState.STOPPING:
        # By an order that is not ours. It gets the time of a planned end, and is told again if it does not seem to have heard.
        told = beat.state is EngineState.STOPPING
        record.stop = StopLadder(began_s=now_s, ordered=told, signalled=told, release=claim > 0)
        record.state = EngineState.STOPPING
        record.role = Role.RETIRING
        record.excused = True
    elif beat.state not in (EngineState.LOADING, EngineState.WARMING):
        record.parked_s = engine.spawned_s  # at the earliest; what counts is that it was long before anything that happens from now on
    if claim:
        record.promote_sent_s = now_s
        if beat.epoch == claim:
            record.promoted_s = now_s
            record.fence_sent = record.fenced = engine.beat is not None and beat.fenced
            record.drain_sent = beat.state is EngineState.DRAINING
        elif record.stop is None:
            record.state = EngineState.PROMOTING
    return record


def _silence(engine: m.FoundEngine, epoch: int, now_s: float) -> Beat:
    """Return a beat that an engine has not sent: its silence is judged from now on."""
    return Beat(
        engine=engine.id,
        pid=engine.pid,
        sent_s=now_s,
        state=EngineState.ACTIVE,
        phase=Phase.IDLE,
        epoch=epoch,
        step=0,
        inflight=0,
        queued=0,
        last_step_s=0.0,
        tokens_total=0,
        fenced=False,
    )
