"""What happened so often since the supervisor started, for Prometheus: counted from the node's events, so that no one else counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from shadowsup.histogram import Buckets
from shadowsup.supervisor.protocol import Event, Recovery
from shadowsup.wire import figures as wire
from shadowsup.wire.faults import Fault

STEPS = ("detect", "freeze", "promote", "first_token", "fence", "refill")
REASONS = ("died", "hang", "failed", "startup", "spawn", "handover", "replaced", "other")
"""Why an engine had to be replaced: its process died; it stood still; it reported a failure; it did not come up in time; it could not be
started; it handed over as planned; it was out of date; anything else."""
FAULTS = tuple(fault.value for fault in Fault)
_BY_CAUSE = (
    ("engine process died", "died"),
    ("hang", "hang"),
    ("failed to", "failed"),
    ("no sign of life", "startup"),
    ("start-up took", "startup"),
    ("not ready", "startup"),
    ("promotion did not", "startup"),
)
_BY_EVENT = {"engine.spawn_failed": "spawn", "worker.hand_over": "handover", "engine.replaced": "replaced"}


def reason_of(event: str, cause: str) -> str | None:
    """Return why an engine has to be replaced, one of `REASONS`; None when the event does not say that one has to."""
    if event != "engine.verdict":
        return _BY_EVENT.get(event)
    return next((reason for beginning, reason in _BY_CAUSE if cause.startswith(beginning)), "other")


def _known(fault: object) -> str:
    return fault if isinstance(fault, str) and fault in FAULTS else Fault.UNKNOWN.value


@dataclass(kw_only=True)
class WorkerTally:
    restarts: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    failovers: Counter[str] = field(default_factory=Counter)
    steps: dict[str, Buckets] = field(default_factory=dict)
    blocks_kept: int = 0
    blocks_dropped: int = 0
    resumed: int = 0
    log_dropped: int = 0


@dataclass(kw_only=True)
class XidTally:
    counts: Counter[int] = field(default_factory=Counter)
    last_time: float = 0.0


class Tally:
    """The counters of one node."""

    def __init__(self) -> None:
        self.workers: dict[str, WorkerTally] = {}
        self.xids: dict[str, XidTally] = {}
        self._dropped: dict[str, int] = {}

    def worker(self, name: str) -> WorkerTally:
        return self.workers.setdefault(name, WorkerTally())

    def event(self, event: Event) -> None:
        """Count an event of the node."""
        if event.event == "gpu.xid":
            xid = self.xids.setdefault(str(event.data.get("gpu_uuid") or ""), XidTally())
            xid.counts[int(event.data.get("number") or 0)] += 1
            xid.last_time = event.ts
        elif event.worker is not None:
            if event.event == "engine.gone":
                self.worker(event.worker).faults[_known(event.data.get("fault"))] += 1
            reason = reason_of(event.event, str(event.data.get("cause") or ""))
            if reason is not None:
                self.worker(event.worker).restarts[reason] += 1

    def recovery(self, recovery: Recovery) -> None:
        """Count a recovery that is complete."""
        tally = self.worker(recovery.worker)
        tally.failovers[recovery.kind] += 1
        tally.blocks_kept += recovery.blocks_kept or 0
        tally.blocks_dropped += recovery.blocks_dropped or 0
        tally.resumed += recovery.requests_resumed or 0
        for step in STEPS:
            taken_ms = getattr(recovery, f"{step}_ms")
            if taken_ms is not None:
                tally.steps.setdefault(step, Buckets(wire.STEPS_S)).observe(taken_ms / 1e3)

    def dropped(self, streams: Iterable[tuple[str, int]]) -> None:
        """Take how many bytes of each log stream (by engine id or part) were dropped since the scribe took it."""
        now = dict(streams)
        for stream, count in now.items():
            before = self._dropped.get(stream, 0)
            # A scribe that was replaced counts anew.
            more = count - before if count >= before else count
            if more:
                self.worker(stream.rpartition(".")[0] or stream).log_dropped += more
        self._dropped = now
