"""Engine ↔ supervisor: the spawn spec, heartbeats, reports and orders.

Transport: ZeroMQ, one ROUTER in the supervisor bound at ``{runtime_dir}/beat.sock``, one DEALER in each engine and in the gateway
whose routing id is the engine id (``chat.3``) or ``gateway``. Each message is one frame: msgpack of the tagged union. A peer sends a
`Beat` (or `GatewayBeat`) as its first message, on every change of state, and every ``heartbeat_s``. Times are
``time.monotonic()`` of this machine (CLOCK_MONOTONIC is the same for every process), in seconds.
"""

from __future__ import annotations

import enum

import msgspec

from shadowsup.wire.sensor import SensorBeat

SPEC_VARIABLE = "SHADOWSUP_SPEC"
"""Environment of an engine that is started by a command line of the user's own: the path of its `EngineSpec`."""


UNKNOWN_TOKENS = -1
"""Of a step in a loop that is not ours: its length follows no pattern, and only ``health.hang.ceiling`` bounds it."""


class EngineState(str, enum.Enum):
    SPAWNING = "spawning"
    LOADING = "loading"
    WARMING = "warming"
    PARKED = "parked"
    PROMOTING = "promoting"
    ACTIVE = "active"
    DRAINING = "draining"
    STOPPING = "stopping"
    GONE = "gone"
    QUARANTINED = "quarantined"


class Role(str, enum.Enum):
    ACTIVE = "active"
    SHADOW = "shadow"
    RETIRING = "retiring"


class Phase(str, enum.Enum):
    """What the step loop says it is doing; hang detection judges progress by it.

    An active engine that compiles something says ``warming`` for as long as that takes.
    """

    LOADING = "loading"
    WARMING = "warming"
    PARKED = "parked"
    IDLE = "idle"
    PREFILL = "prefill"
    DECODE = "decode"


class KvSpec(msgspec.Struct, frozen=True, kw_only=True):
    """``size``: bytes, 0 = the engine chooses; ``block_tokens``: tokens a block; ``reserve``: blocks, None = 2 × max_batch."""

    size: int
    block_tokens: int = 16
    reserve: int | None = None
    beside: bool = False
    """Engines with other settings serve from another set, which must stay good until they have handed over."""


class EngineSpec(msgspec.Struct, frozen=True, kw_only=True):
    """All that an engine process needs to know. Written as JSON (0600); a nursery gets it in the fork request."""

    node: str
    worker: str
    engine: str
    """Engine id, ``NAME.K``."""
    seq: int
    """K of ``NAME.K``; names the owner in the ledger header (u32, from 1)."""
    kind: str
    """Engine adapter: a key of ``shadowsup.workers.registry.ADAPTERS``."""
    model: str
    revision: str | None = None
    served_name: str
    dtype: str = "auto"
    args: dict[str, object] = {}
    gpus: tuple[str, ...] = ()
    """Device UUIDs; empty = CPU and host memory."""
    shadows: int = 1
    """How many parked engines share the device with the active one; ``kv.size: auto`` leaves room for them."""
    rank: int = 0
    world: int = 1
    kv: KvSpec
    verify: str = "none"
    """Checksum of weights at attach: ``none | sample | full``."""
    hurry: bool = False
    """Clients wait for this engine: what only makes it a little faster later may be left out of its start."""
    gentle: bool = False
    """Another engine serves on the same device, and nobody waits for this one: heavy work of its start is spread out, until `Hurry`."""
    heartbeat_s: float = 0.2
    runtime_dir: str
    keeper_socket: str
    beat_endpoint: str
    """ZeroMQ endpoint, ``ipc://…``."""
    link_socket: str
    """Unix socket the engine listens on for the gateway."""
    lifeline_fd: int = -1
    """Set for cold spawns; a nursery replaces it by the fd it received."""
    tether: str = ""
    """File of the robust mutex that the engine's main thread holds for life; empty: there is none."""
    front_tether: str = ""
    """The same, of the server in front of the engine's step loop, where there is one (vLLM's API server)."""
    rank_tethers: tuple[str, ...] = ()
    """The same, of each rank that is a process of its own; empty: there is none, or no such process."""


class KvCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Blocks. ``blocks = free + active + valid-but-unused + reserve + quarantined`` need not add up: valid blocks may be in use."""

    blocks: int
    valid: int
    free: int
    quarantined: int
    reserve: int


class Beat(msgspec.Struct, frozen=True, kw_only=True, tag="beat"):
    engine: str
    pid: int
    sent_s: float
    state: EngineState
    phase: Phase
    epoch: int
    """The epoch this engine owns the ledger in; 0 while it owns none."""
    step: int
    """Steps finished since the process started; grows by one a step."""
    inflight: int
    queued: int
    last_step_s: float
    """When the last step finished; 0.0 before the first."""
    tokens_total: int
    kv: KvCounts | None = None
    detail: str = ""
    """For people: ``loading weights 41%``, ``capturing graphs``."""
    ordered: int = 0
    """The newest epoch this engine was ordered to own, from the moment in which the order was read; 0: none. With ``kv_set`` and ``fenced``
    it is all that a supervisor must know to go on where one that died has left off."""
    kv_set: str = ""
    """Id of the KV set it holds; empty while it holds none."""
    fenced: bool = True
    """False: it owns the ledger and uses reserve blocks only, until `Fence` comes."""
    since_s: float = 0.0
    """Since when the step under way is waited for: the end of the one before, or when there was something to do again. 0.0: nothing is."""
    step_tokens: int = 0
    """At most so many tokens are computed by the step under way; 0: not known, `UNKNOWN_TOKENS`: no step tells anything of another."""
    gap_s: float = 0.0
    """The longest such wait that has ended since the beat before; 0.0: none has."""
    gap_phase: Phase = Phase.IDLE
    gap_tokens: int = 0
    """Phase and tokens of that step."""
    stalled_since_s: float = 0.0
    """Since when steps do nothing though there are requests (they wait for blocks, for the fence); 0.0: they do."""
    front_s: float = 0.0
    """When the event loop of the server in front of the step loop (vLLM's API server) last turned; 0.0: there is none, or not yet."""
    front_open: int = 0
    """Requests that this server had then."""


class Promoted(msgspec.Struct, frozen=True, kw_only=True, tag="promoted"):
    """The successor owns the ledger and serves. Durations in seconds, measured in the engine."""

    engine: str
    epoch: int
    header_s: float
    map_s: float
    index_s: float
    blocks_kept: int
    blocks_dropped: int


class FirstToken(msgspec.Struct, frozen=True, kw_only=True, tag="first_token"):
    """The first step of this epoch that produced a token was sent to the gateway. ``resumed``: replayed requests so far."""

    engine: str
    epoch: int
    sent_s: float
    resumed: int


class Fenced(msgspec.Struct, frozen=True, kw_only=True, tag="fenced"):
    """Answer to the order `Fence`: quarantined blocks are free again and the reserve is refilled."""

    engine: str
    epoch: int
    reserve: int


class Canaried(msgspec.Struct, frozen=True, kw_only=True, tag="canaried"):
    """Answer to the order `Canary`: a step that computed something has ended after the order was taken."""

    engine: str
    number: int


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag="failed"):
    """The engine cannot go on and exits after this. ``fatal``: trying again cannot help (no such model, bad argument)."""

    engine: str
    stage: str
    """``load | warm | park | promote | step``."""
    message: str
    hint: str = ""
    fatal: bool = False
    fault: str = ""
    """A `shadowsup.wire.faults.Fault`, as the engine classifies its own error."""
    evidence: dict[str, object] = {}
    """What it was doing: type of the error; for want of memory the batch, the lengths, and bytes by purpose."""


class GatewayBeat(msgspec.Struct, frozen=True, kw_only=True, tag="gateway_beat"):
    pid: int
    sent_s: float
    ready: bool
    connections: int
    streams_held: int
    """Requests accepted and now without an engine (waiting for a successor)."""
    inflight: int
    requests_total: int
    errors_total: int
    """Requests that ended in a 5xx or an error event."""
    tokens_total: int
    replays_total: int
    epochs: dict[str, int] = {}
    """Worker → the newest epoch the gateway has a live link to."""
    routes_version: int = 0
    """Of the routing table in force; a beat comes at once when it changes. 0: none yet."""


Report = Beat | Promoted | FirstToken | Fenced | Canaried | Failed | GatewayBeat | SensorBeat
"""Everything that arrives at the supervisor's ROUTER."""


class Promote(msgspec.Struct, frozen=True, kw_only=True, tag="promote"):
    """Become the active engine of ``epoch``. ``keep_kv`` False: take fresh KV segments and an empty ledger from the keeper.

    ``fenced`` False: a predecessor's kernels may still write; use reserve blocks only until `Fence` comes.
    """

    epoch: int
    keep_kv: bool = True
    fenced: bool = True


class Hurry(msgspec.Struct, frozen=True, kw_only=True, tag="hurry"):
    """The engine that served is lost, and you are still coming up: somebody waits for you. An engine of an older version ignores it."""


class Fence(msgspec.Struct, frozen=True, kw_only=True, tag="fence"):
    """Every process of every earlier epoch is gone."""

    epoch: int


class Canary(msgspec.Struct, frozen=True, kw_only=True, tag="canary"):
    """Compute one token of a request of your own, and say so: does the step loop turn, and does anything come out of it?

    ``number``: another one for each canary of an engine, whichever supervisor sends it."""

    number: int


class Drain(msgspec.Struct, frozen=True, kw_only=True, tag="drain"):
    """Accept no new request, finish those in flight, go on beating with state ``draining``."""


class Release(msgspec.Struct, frozen=True, kw_only=True, tag="release"):
    """Planned hand-over: finish the step in flight, publish, send no further token, then exit with status 0."""


class Stop(msgspec.Struct, frozen=True, kw_only=True, tag="stop"):
    """Exit with status 0 after the step in flight. Requests in flight are not finished."""


class Route(msgspec.Struct, frozen=True, kw_only=True):
    """One engine the gateway keeps a link to (parked ones too, so that nothing is dialled in a failover)."""

    engine: str
    socket: str


class Death(msgspec.Struct, frozen=True, kw_only=True):
    """An engine died while it served. ``fault``: a `shadowsup.wire.faults.Fault`; ``own``: of its own making, None: not known yet."""

    epoch: int
    engine: str
    fault: str
    own: bool | None


class WorkerRoute(msgspec.Struct, frozen=True, kw_only=True):
    worker: str
    served_name: str
    kind: str
    """``link``: own framed protocol; ``http``: plain HTTP upstream (engine: command); ``held``: an HTTP server of the engine's own whose
    answers are held and replayed (engine: vllm)."""
    state: str
    epoch: int
    """The newest epoch the supervisor has ordered; events of older ones are dropped."""
    engines: tuple[Route, ...] = ()
    upstream: str = ""
    """``http``: ``http://127.0.0.1:PORT`` or ``unix:/path``; ``held``: ``unix:/path`` of the active engine's server, from its promotion on.
    Empty while there is none."""
    give_up_after_s: float
    reason: str = ""
    """Why the worker does not serve, for the client's error."""
    deaths: tuple[Death, ...] = ()
    """Of engines that served, within the worker's restart window, oldest first."""
    admits: bool = True
    """False: new requests wait; those that run go on, so that the engine can be replaced when they are done."""
    metrics: str = ""
    """``http`` only: path of the server's own Prometheus metrics, passed on with a ``worker`` label. Empty: it has none."""


class Routes(msgspec.Struct, frozen=True, kw_only=True, tag="routes"):
    """Supervisor → gateway, on each change and as answer to the gateway's first beat: the whole table."""

    version: int
    workers: tuple[WorkerRoute, ...]


class DrainGateway(msgspec.Struct, frozen=True, kw_only=True, tag="drain_gateway"):
    """Stop accepting, finish (or fail with a retryable error) what runs within ``grace_s``, then exit 0."""

    grace_s: float


class NodeFigures(msgspec.Struct, frozen=True, kw_only=True, tag="figures"):
    """Supervisor → gateway, for ``/metrics``. ``data``: a `shadowsup.wire.figures.Figures`, decoded only when somebody asks for it."""

    data: bytes


Order = Promote | Hurry | Fence | Canary | Drain | Release | Stop | Routes | DrainGateway | NodeFigures
"""Everything the supervisor sends from its ROUTER."""


def encode(message: Report | Order) -> bytes:
    return msgspec.msgpack.encode(message)


_report = msgspec.msgpack.Decoder(Report)
_order = msgspec.msgpack.Decoder(Order)


def decode_report(data: bytes) -> Report:
    """Raises msgspec.MsgspecError when ``data`` is not a report."""
    return _report.decode(data)


def decode_order(data: bytes) -> Order:
    """Raises msgspec.MsgspecError when ``data`` is not an order."""
    return _order.decode(data)
