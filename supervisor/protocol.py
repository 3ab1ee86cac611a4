"""The control protocol: what CLI, dashboard and other clients say to the supervisor.

Requests: ZeroMQ DEALER → ROUTER at ``{runtime_dir}/control.sock``; one frame of JSON each way, matched by ``id``.
Events: SUB ← PUB at ``{runtime_dir}/events.sock``; frames ``[b"event", JSON]``, numbered without gaps. A client subscribes first, then
asks ``status`` (whose ``event`` is the number the snapshot includes) and ignores events up to that number; on a gap it does so again.
"""

from __future__ import annotations

import enum
from typing import Any

import msgspec

SCHEMA = 1


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """``verb`` is a CLI verb (``status``, ``memory``, ``recoveries``, ``stop``, …), ``args`` its options by long name."""

    id: int
    verb: str
    args: dict[str, Any] = {}


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """``ok`` False: ``error`` and ``hint`` are for people, ``exit_code`` is what the CLI exits with."""

    id: int
    ok: bool
    result: Any = None
    error: str = ""
    hint: str = ""
    exit_code: int = 0


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """Something that happened. ``ts``: seconds since the epoch (for people only); ``mono_s``: monotonic."""

    n: int
    ts: float
    mono_s: float
    level: str
    """``info | warning | error``."""
    event: str
    """Dotted name: ``engine.state``, ``worker.state``, ``recovery.done``, ``keeper.gone`` …"""
    worker: str | None = None
    engine: str | None = None
    pid: int | None = None
    epoch: int | None = None
    message: str = ""
    data: dict[str, Any] = {}
    gpu_uuid: str | None = None
    """The GPU that it is about; of a worker with several, all of them, joined by commas."""
    reason: str | None = None
    """Why, in a few words, where there is a reason."""


class Recovery(msgspec.Struct, kw_only=True):
    """One failover. Milliseconds from the verdict, but ``detect_ms``: from the last sign of life to it. None: has not happened yet."""

    n: int
    worker: str
    kind: str
    """``shadow | respawn | cold | spare``."""
    cause: str
    ts: float
    epoch: int
    from_engine: str
    to_engine: str | None = None
    detect_ms: float | None = None
    freeze_ms: float | None = None
    promote_ms: float | None = None
    first_token_ms: float | None = None
    fence_ms: float | None = None
    refill_ms: float | None = None
    blocks_kept: int | None = None
    blocks_dropped: int | None = None
    requests_resumed: int | None = None
    exit: str = ""
    """What the old leader's end says: ``signal 9``, ``status 1``, empty while unknown."""
    fault: str = ""
    """Class of the failure: a `shadowsup.wire.faults.Fault`; ``unknown`` until the end of the process tells."""
    decision: str = ""
    """What was done about it: a `shadowsup.supervisor.policy.severity.Decision`."""
    evidence: dict[str, Any] = {}
    """What the engine, its exit and the sensor said; for want of memory the batch, its lengths, and bytes by purpose."""


# --- reload -----------------------------------------------------------------------------------------------------------------------


class Change(str, enum.Enum):
    """What a changed config means for one worker, or for a section of the node."""

    KEPT = "kept"
    IN_PLACE = "in_place"
    """Takes effect without a new engine."""
    ADDED = "added"
    REMOVED = "removed"
    REPLACED = "replaced"
    """Through a shadow with the new settings, without a gap."""
    GAP = "restarted_with_gap"
    NODE_RESTART = "needs_node_restart"
    """Cannot be applied to a running node; then nothing of the config is."""


class KvFate(str, enum.Enum):
    """What becomes of a worker's KV. New: requests in flight are replayed by full prefill."""

    NONE = ""
    KEPT = "kept"
    NEW = "new"
    ENGINE_DECIDES = "engine_decides"


class KeyChange(msgspec.Struct, frozen=True, kw_only=True):
    """One setting, by its dotted key in its section. Values as text, secrets hidden; empty: not there."""

    key: str
    old: str = ""
    new: str = ""


class Consequence(msgspec.Struct, frozen=True, kw_only=True):
    """What the config means for one worker (``name``) or section. ``text``: for people."""

    section: str
    """``worker | gateway | node | memkeeper``."""
    name: str = ""
    change: Change
    keys: tuple[KeyChange, ...] = ()
    kv: KvFate = KvFate.NONE
    gap_s: float | None = None
    """About so long nobody serves (`Change.GAP`); None: not known."""
    text: str = ""


class ReloadPlan(msgspec.Struct, frozen=True, kw_only=True):
    """``refused``: why nothing of it can be applied to the running node; empty: it can. ``text``: of the config, where a revision was asked
    for by `undo` or `to`."""

    current: str
    path: str
    summary: str
    refused: str = ""
    hint: str = ""
    changes: tuple[Consequence, ...] = ()
    text: str = ""

    @property
    def nothing(self) -> bool:
        return all(change.change is Change.KEPT for change in self.changes)


class ReloadAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to ``reload``. ``state``: ``planned | nothing | started | queued``; ``n``: number of the reload, 0 where none was begun."""

    schema: int = SCHEMA
    n: int = 0
    state: str
    plan: ReloadPlan
    message: str = ""


class ReloadState(str, enum.Enum):
    """How far a reload is. The last three are ends."""

    WAITING = "waiting"
    """For a recovery, a start, or another save."""
    PREPARING = "preparing"
    HANDING_OVER = "handing_over"
    FINISHING = "finishing"
    TAKING_BACK = "taking_back"
    DONE = "done"
    FAILED = "failed"
    SUPERSEDED = "superseded"


class ReloadProgress(msgspec.Struct, kw_only=True):
    """``reload`` of ``status``: the newest reload, running or ended. ``revision``: that it brought, once it is done."""

    n: int
    state: ReloadState = ReloadState.WAITING
    revision: str = ""
    summary: str = ""
    message: str = ""
    workers: dict[str, str] = {}
    started_ts: float = 0.0
    ended_ts: float | None = None
    queued: bool = False
    """Another reload waits for the end of this one."""


class Revision(msgspec.Struct, frozen=True, kw_only=True):
    """A config that was in force. ``origin``: ``start | reload | undo``; ``digest``: of its text."""

    id: str
    ts: float
    path: str
    digest: str
    origin: str
