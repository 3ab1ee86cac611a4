"""GPUs that are in trouble: hand over in time, quarantine, move to a spare; and what a failure says about kept memory."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping

from shadowsup.supervisor.policy import ladder, severity
from shadowsup.supervisor.policy import messages as m
from shadowsup.supervisor.policy.detector import works
from shadowsup.supervisor.policy.model import EngineRecord, WorkerSettings
from shadowsup.supervisor.policy.severity import Decision
from shadowsup.supervisor.policy.standing import GpuKey
from shadowsup.supervisor.policy.watch import Watch
from shadowsup.wire.engine import Death
from shadowsup.wire.faults import Fault

WARNED_S = 1.5
"""A warning that is gone sooner changes nothing."""
FINISH_S = 30.0
"""How long requests may take to finish on a device that is in trouble; then they are replayed elsewhere."""
SETTLED_S = 0.5
"""After the pause of admission: what was on its way to the engine has arrived."""
MOST_RELOADS = 2
"""Within the restart window. Memory that has errors again after that is not to be trusted at all."""
NEAR_S = 10.0
"""A notice of a device this long before or after an engine's end belongs to it."""


class Placing(Watch, ABC):
    """Where a worker's engines may be."""

    # --- what failures say ------------------------------------------------------------------------------------------------------

    def _draw_conclusions(self, engine: EngineRecord, now_s: float) -> None:
        """An engine was condemned for a fault that is known: what of its memory and its device is still to be trusted?"""
        decision = severity.of(engine.fault).decision
        gpus = self.gpus_of(engine)
        if decision is Decision.KEEP and self._in_doubt(gpus, now_s):
            decision = Decision.RELOAD
        if decision is Decision.RELOAD and gpus:
            self._answer_doubts(gpus)
            while self._reloads and self._reloads[0] < now_s - self.settings.window_s:
                self._reloads.popleft()
            self._reloads.append(now_s)
            if len(self._reloads) > MOST_RELOADS:
                decision = Decision.QUARANTINE
        if decision in (Decision.RELOAD, Decision.QUARANTINE) and not gpus:
            decision = Decision.DISCARD
        engine.decision = decision
        if decision in (Decision.DISCARD, Decision.RELOAD, Decision.QUARANTINE):
            self.succession.distrust()
        if decision is Decision.RELOAD:
            self._verify = True
            self._condemn_others(engine, gpus, "the weights that it has mapped are in doubt", now_s)
        elif decision is Decision.QUARANTINE:
            # Not by the engine's name alone: that reason ends with its process, and what its device has does not.
            self._quarantine(f"{engine.fault.value} of {engine.id}", gpus, severity.of(engine.fault).text, now_s)

    def _in_doubt(self, gpus: tuple[str, ...], now_s: float) -> bool:
        """Say whether one of these has told of an error in its memory that nothing was done about yet."""
        said = any(uuid in gpus and now_s - at_s <= NEAR_S for uuid, at_s in self._doubted.items())
        return said or any(key[0] in gpus for key in self._memory_warnings())

    def _memory_warnings(self) -> set[GpuKey]:
        """Return the warnings, not answered yet, after which neither blocks nor weights are to be trusted."""
        return {
            key
            for key, (_, notice) in self._warnings.items()
            if key not in self._handled and severity.of_notice(notice).decision is Decision.RELOAD
        }

    def _answer_doubts(self, gpus: tuple[str, ...]) -> None:
        """What the memory of these holds is given up: what they said of it until now is dealt with."""
        self._handled |= {key for key in self._memory_warnings() if key[0] in gpus}
        for uuid in gpus:
            self._doubted.pop(uuid, None)

    def _quarantine(self, by: str, gpus: tuple[str, ...], why: str, now_s: float) -> None:
        """Nothing may use these devices any more, on the whole node. What of us is there is ended."""
        fresh = [uuid for uuid in gpus if uuid not in self.quarantined]
        self.quarantined |= set(gpus)
        for uuid in gpus:
            self.quarantined_why.setdefault(uuid, why)
        if fresh:
            text = f"GPU {', '.join(fresh)} is quarantined: {why}"
            self._do(m.Announce("gpu.quarantined", text, "error", data={"gpus": fresh, "why": why}))
        self._do(m.Quarantine(by, gpus, why))
        self._condemn_others(None, gpus, f"its GPU is quarantined: {why}", now_s)

    def _condemn_others(self, but: EngineRecord | None, gpus: Iterable[str], cause: str, now_s: float) -> None:
        taken = set(gpus)
        for other in list(self.engines.values()):
            if other is not but and not other.dying and taken.intersection(self.gpus_of(other)):
                other.excused = True
                self._condemn(other, cause, now_s, Fault.GPU_ERROR if "quarantined" in cause else Fault.PLANNED)

    # --- what the sensor says ---------------------------------------------------------------------------------------------------

    def _warned(self, notice: m.GpuNotice, now_s: float) -> None:
        known = self.settings.gpus + self.settings.spares
        if notice.uuid not in known and notice.uuid not in self.gpus:
            return
        found = severity.of_notice(notice)
        # More errors, or fewer lanes still, are the same trouble; another Xid is another.
        key = (notice.uuid, notice.kind, notice.number if notice.kind is m.GpuTrouble.XID else 0)
        self._evidence.append((now_s, f"{found.text}: {notice.text}" if notice.text else found.text, notice))
        if found.decision is Decision.NOTE:
            return
        if found.decision is Decision.QUARANTINE:
            name = f"xid {notice.number}" if notice.kind is m.GpuTrouble.XID else notice.kind.value
            why = f"{name}: {notice.text or found.text}"
            if notice.uuid in self.gpus:
                self.succession.distrust()
            self._quarantine(name, (notice.uuid,), why, now_s)
            return
        if found.decision is Decision.RELOAD:
            if self._verify and notice.uuid in self.gpus:
                return  # that is what the engine before died of; the next one makes sure of its weights
            self._doubted[notice.uuid] = now_s
            if key in self._handled:  # it has happened again, to what was sound since
                self._handled.discard(key)
                del self._warnings[key]
        if key not in self._warnings:
            self._warnings[key] = (notice.since_s or now_s, notice)

    def _cleared(self, uuid: str, kind: m.GpuTrouble | None) -> None:
        for key in [key for key in self._warnings if key[0] == uuid and kind in (None, key[1])]:
            del self._warnings[key]
            self._handled.discard(key)

    def _wind_down(self, now_s: float) -> None:
        """A warning that lasts: admit nothing new, let what runs finish, hand over as planned."""
        mine = {key: since for key, (since, _) in self._warnings.items() if key[0] in self.gpus and key not in self._handled}
        active = self.active
        if not mine or active is None or active.promoted_s is None or not active.serving or active.stop is not None:
            if self.paused_s is not None and (
                not self._warnings or (active is not None and active.promoted_s is not None and active.stop is None)
            ):
                self._resume()
            return
        due_s = min(mine.values()) + WARNED_S
        if now_s < due_s:
            self._at(due_s)
            return
        spare = self._spare_for({key[0] for key in mine}) is not None
        doubted = not spare and not self._memory_warnings().isdisjoint(mine)
        if not spare and not doubted and not any(e.parked for e in self.engines.values()):
            if self.paused_s is not None:
                self._resume("there is nobody to hand over to")  # who was there is gone: what waits may wait for ever
            return  # go on as long as it goes
        if self.paused_s is None:
            self.paused_s = now_s
            words = "; ".join(notice.text or notice.kind.value for key, (_, notice) in self._warnings.items() if key in mine)
            text = f"{self.settings.name} admits no new requests: its GPU is in trouble ({words})"
            self._do(m.Announce("worker.paused", text, "warning", active.id, active.epoch, {"gpus": sorted({key[0] for key in mine})}))
        beat = active.vitals.beat
        quiet = beat is not None and not works(beat) and beat.inflight + beat.queued == 0 and beat.sent_s >= self.paused_s + SETTLED_S
        if not quiet and now_s < self.paused_s + FINISH_S:
            self._at(min(self.paused_s + FINISH_S, now_s + 0.2))
            return
        self._planned_why = "planned hand-over: its GPU is in trouble"
        if doubted:
            # Shadows have mapped the same weights, so nobody who is there may take over: `_draw_conclusions`, once the active is gone.
            self._release(active, now_s)
            return
        self._handled |= set(mine)
        if spare:
            self._move({key[0] for key in mine}, now_s)
        self._release(active, now_s)

    def _resume(self, why: str = "") -> None:
        self.paused_s = None
        why = why or ("" if self._warnings else "the warning is over")
        self._do(m.Announce("worker.resumed", f"{self.settings.name} admits requests again{': ' if why else ''}{why}"))

    def refusal(self, event: m.WorkerEvent) -> tuple[str, str] | None:
        """As `Standing.refusal`; a restart needs a device that it may use."""
        held = dict(event.held) if isinstance(event, m.RestartWorker) else {}
        if not held.keys().isdisjoint(self.gpus) and self._spare_for(held, out_of_use=held) is None:
            return restart_refused(self.settings.name, held, self.gpus)
        return super().refusal(event)

    # --- where to ---------------------------------------------------------------------------------------------------------------

    @property
    def gpus(self) -> tuple[str, ...]:
        """The devices that new engines are started on."""
        return self.placed(self.settings)

    def placed(self, settings: WorkerSettings) -> tuple[str, ...]:
        """Return where engines with these settings go: spares in the places of what they stand for."""
        return tuple(self.moved.get(uuid, uuid) for uuid in settings.gpus)

    def gpus_of(self, engine: EngineRecord) -> tuple[str, ...]:
        """Return the devices that an engine is on."""
        return engine.gpus if engine.gpus is not None else self.placed(self.settings_of(engine))

    def _blocked(self) -> bool:
        """Say whether a GPU of this worker is quarantined (P06). What serves there already goes on."""
        return not self.quarantined.isdisjoint(self.gpus)

    def _stranded(self) -> bool:
        """Say whether it is, and there is nowhere to go."""
        return self._blocked() and self._spare_for(self.quarantined) is None

    def _spare_for(self, bad: Iterable[str], *, out_of_use: Iterable[str] | None = None) -> dict[str, str] | None:
        """Return configured GPU → spare for each place that is on a bad device; None: there are not enough.

        ``out_of_use``: what is quarantined; None: what is so now.
        """
        avoided = set(bad) | set(self.quarantined if out_of_use is None else out_of_use) | {key[0] for key in self._warnings}
        free = [
            uuid
            for uuid in self.settings.spares
            if uuid not in avoided and uuid not in self.gpus and self.spares_taken.get(uuid, self.settings.name) == self.settings.name
        ]
        found: dict[str, str] = {}
        for uuid in self.settings.gpus:
            if self.moved.get(uuid, uuid) in set(bad):
                if not free:
                    return None
                found[uuid] = free.pop(0)
        return found or None

    def _move(self, bad: Iterable[str], now_s: float) -> bool:
        """Go to spares with what is on bad devices. Returns whether there are enough."""
        found = self._spare_for(bad)
        if found is None:
            return False
        before = self.gpus
        for uuid in [uuid for uuid, name in self.spares_taken.items() if name == self.settings.name and uuid in set(bad)]:
            del self.spares_taken[uuid]
        self.moved |= found
        self.spares_taken.update(dict.fromkeys(found.values(), self.settings.name))
        self.succession.abandon_memory()  # what was kept lies on a device that is left
        text = f"{self.settings.name} moves from GPU {', '.join(before)} to {', '.join(self.gpus)}: weights are loaded there anew"
        self._do(m.Announce("worker.moved", text, "warning", data={"from": list(before), "to": list(self.gpus)}))
        for engine in self.engines.values():
            if engine.live and engine.id != self.succession.active and self.gpus_of(engine) != self.gpus:
                ladder.begin(engine, now_s)
        return True

    # --- who died of what -------------------------------------------------------------------------------------------------------

    def _note_death(self, engine: EngineRecord, now_s: float) -> None:
        """The engine that served is lost. What of is told to the gateway, which knows the requests that it had."""
        known = engine.fault is not Fault.UNKNOWN
        own = (severity.of(engine.fault).own and not engine.excused) if known else None
        self._deaths.append((now_s, Death(epoch=engine.epoch, engine=engine.id, fault=engine.fault.value, own=own)))

    def _note_cause(self, engine: EngineRecord) -> None:
        """What it died of is known now."""
        own = severity.of(engine.fault).own and not engine.excused
        for at, (when_s, death) in enumerate(self._deaths):
            if death.engine == engine.id and death.own is None:
                self._deaths[at] = (when_s, Death(epoch=death.epoch, engine=death.engine, fault=engine.fault.value, own=own))

    def deaths(self, now_s: float) -> tuple[Death, ...]:
        """Return the deaths of serving engines within the restart window, oldest first."""
        while self._deaths and self._deaths[0][0] < now_s - self.settings.window_s:
            self._deaths.popleft()
        return tuple(death for _, death in self._deaths)

    def _evidence_near(self, engine: EngineRecord, now_s: float) -> list[str]:
        """Return what its devices' sensor said around the end of an engine."""
        gpus = self.gpus_of(engine)
        return [text for at_s, text, notice in self._evidence if notice.uuid in gpus and now_s - at_s <= NEAR_S]

    @abstractmethod
    def _release(self, active: EngineRecord, now_s: float) -> None: ...


def restart_refused(worker: str, held: Mapping[str, str], gpus: Iterable[str]) -> tuple[str, str]:
    """Return why a restart would start nothing. ``held``: GPU → why, of those that a process holds; ``gpus``: the worker's."""
    words = "; ".join(f"GPU {uuid}: {held[uuid]}" for uuid in gpus if uuid in held)
    hint = "it is in use again, and the worker runs, once that process has ended; where it never does, the machine must be rebooted"
    return f"worker {worker} cannot be restarted, its GPU is quarantined: {words}", hint
