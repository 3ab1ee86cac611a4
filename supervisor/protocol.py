"""The control protocol: what CLI, dashboard and other clients say to the supervisor.

Requests: ZeroMQ DEALER → ROUTER at ``{runtime_dir}/control.sock``; one frame of JSON each way, matched by ``id``.
Events: SUB ← PUB at ``{runtime_dir}/events.sock``; frames ``[b"event", JSON]``, numbered without gaps. A client subscribes first, then
asks ``status`` (whose ``event`` is the number the snapshot includes) and ignores events up to that number; on a gap it does so again.
"""

from __future__ import annotations

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
