"""What is said to the memkeeper, over its Unix stream socket (``{runtime_dir}/keeper.sock``).

One frame (`shadowsup.wire.framing`) of msgpack a message; answers come in the order of the requests. File descriptors travel by
SCM_RIGHTS with the first byte of the frame that names them, at most 253 (SCM_MAX_FD) a frame; longer lists are split over several
frames (`Answer.more`). A connection is one client; its leases end with it.

What stays and what goes: a sealed weights set and a worker's newest KV set (slabs and ledger: bytes and index live and die together)
stay without any lease until they are freed by order. A set that is still being written goes with its publisher; a set that was
superseded or discarded goes with its last lease.
"""

from __future__ import annotations

import enum

import msgspec

MAX_FDS = 253
"""SCM_MAX_FD of Linux (include/net/scm.h)."""


class Kind(str, enum.Enum):
    WEIGHTS = "weights"
    KV = "kv"
    LEDGER = "ledger"


class SegmentState(str, enum.Enum):
    """``writing`` → ``sealed`` for weights; ``leased``/``frozen`` for kv and ledger (frozen: no process may write it just now)."""

    WRITING = "writing"
    SEALED = "sealed"
    LEASED = "leased"
    FROZEN = "frozen"


class Fingerprint(msgspec.Struct, frozen=True):
    """What the bytes of a segment depend on: ordered (name, value) pairs. Equal or a miss, nothing in between."""

    items: tuple[tuple[str, str], ...]

    def digest(self) -> str:
        """Return 32 hex digits (blake2b-128 of the msgpack encoding)."""
        import hashlib

        return hashlib.blake2b(msgspec.msgpack.encode(self.items), digest_size=16).hexdigest()


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """One segment: one fd. ``size`` in bytes. Segments of one ``set_id`` belong together (KV slabs in order of ``index``)."""

    segment: str
    """Unique for the life of the node: ``{kind}-{generation}-{hex}``; a stale id is refused with words."""
    generation: int
    """Of the keeper process that created it."""
    kind: Kind
    set_id: str
    index: int
    of: int = 1
    """How many segments the set has."""
    worker: str
    """Owner for kv and ledger; empty for weights, which any worker with the same fingerprint may read."""
    device: str
    """Device UUID, or ``host``."""
    size: int
    fingerprint: Fingerprint
    meta: dict[str, str] = {}
    """Small facts of the set: for a ledger its salt and geometry, for weights the checksum."""


class SegmentInfo(msgspec.Struct, frozen=True, kw_only=True):
    manifest: Manifest
    state: SegmentState
    leases: tuple[str, ...]
    """Who: engine ids."""
    created_s: float
    workers: tuple[str, ...] = ()
    """Workers that have used the set. Weights are freed with the order for the last of them."""
    superseded: bool = False
    """Given to nobody any more (a newer KV set exists, or the content was found wrong); freed with its last lease."""
    epoch: int = 0
    owner: int = 0
    """KV and ledger: what the ledger's header says now."""


# --- requests ---------------------------------------------------------------------------------------------------------------


class Hello(msgspec.Struct, frozen=True, kw_only=True, tag="hello"):
    """First on every connection. ``client``: engine id or ``supervisor``. ``holds``: segments it still has mapped, after a reconnect."""

    client: str
    pid: int
    vault: bool = False
    """The supervisor's connection: gets every fd (`Deposit`) and may give them back (`Restore`)."""
    holds: tuple[str, ...] = ()


class GetWeights(msgspec.Struct, frozen=True, kw_only=True, tag="get_weights"):
    """Sealed set with this fingerprint → its fds, a read lease. None → the caller becomes its publisher (`Answer.publisher`), which
    then calls `Create`. Being published by someone else → the answer waits until that is sealed or its publisher died."""

    fingerprint: Fingerprint
    device: str = "host"


class Create(msgspec.Struct, frozen=True, kw_only=True, tag="create"):
    """Create a set of segments. Weights: state ``writing``. The answer carries the manifests and fds."""

    kind: Kind
    worker: str
    fingerprint: Fingerprint
    device: str
    sizes: tuple[int, ...]
    meta: dict[str, str] = {}


class Seal(msgspec.Struct, frozen=True, kw_only=True, tag="seal"):
    """Publisher only, after it has remapped read-only. Host segments get F_SEAL_WRITE. ``meta`` is added (checksum)."""

    set_id: str
    meta: dict[str, str] = {}


class GetKv(msgspec.Struct, frozen=True, kw_only=True, tag="get_kv"):
    """KV slabs and ledger of a worker, created where there are none with this fingerprint, or where ``fresh`` is set.

    Older sets of the worker stay until nobody leases them, then they are freed. The answer has the ledger last. ``beside``: they stay as
    good as the new one, until they are freed by order (engines with other settings come up beside those that serve).
    """

    worker: str
    fingerprint: Fingerprint
    device: str
    kv_sizes: tuple[int, ...]
    ledger_size: int
    ledger_meta: dict[str, str] = {}
    fresh: bool = False
    beside: bool = False
    devices: tuple[str, ...] = ()
    """Of each slab, where an engine has several devices (one a rank); ``device`` is the first of them. Empty: all are on ``device``."""


class Drop(msgspec.Struct, frozen=True, kw_only=True, tag="drop"):
    """End this client's lease on a set. ``discard``: its content is wrong, so nobody is given it any more."""

    set_id: str
    discard: bool = False


class Free(msgspec.Struct, frozen=True, kw_only=True, tag="free"):
    """By order of the supervisor: free every set of a worker (``worker``), or one set. Leased memory lives on in its holders."""

    worker: str = ""
    set_id: str = ""


class ListSegments(msgspec.Struct, frozen=True, kw_only=True, tag="list"):
    pass


class Restore(msgspec.Struct, frozen=True, kw_only=True, tag="restore"):
    """Vault → a fresh keeper: segments it held, with their fds. May be sent several times; then `Restored`."""

    segments: tuple[SegmentInfo, ...]


class Restored(msgspec.Struct, frozen=True, kw_only=True, tag="restored"):
    """End of restore. The keeper serves other clients only after it (it starts empty or waiting: ``--restore``)."""


# --- answers and what the keeper sends by itself ------------------------------------------------------------------------------


class Welcome(msgspec.Struct, frozen=True, kw_only=True, tag="welcome"):
    """Answer to `Hello`; a vault gets everything deposited first."""

    generation: int
    """Of the keeper process: larger in each later one of this boot."""
    backend: str
    restoring: bool
    """A vault only: the keeper waits for `Restore` and `Restored` before it serves anyone else."""
    stale: tuple[str, ...] = ()
    """Those of `Hello.holds` that the keeper does not know: the memory lives on in its holders only."""


class Answer(msgspec.Struct, frozen=True, kw_only=True, tag="answer"):
    """``manifests`` in the order of the fds that came with this frame."""

    manifests: tuple[Manifest, ...] = ()
    segments: tuple[SegmentInfo, ...] = ()
    publisher: bool = False
    created: bool = False
    more: bool = False


class Refused(msgspec.Struct, frozen=True, kw_only=True, tag="refused"):
    message: str
    hint: str = ""
    code: str = "refused"
    """``refused | stale | out_of_memory | bad_request``."""


class Deposit(msgspec.Struct, frozen=True, kw_only=True, tag="deposit"):
    """Keeper → vault, with fds: keep these. Nobody is given a segment before the vault has acknowledged it, while one is connected."""

    number: int
    manifests: tuple[Manifest, ...]
    segments: tuple[SegmentInfo, ...]
    """The same with state and leases: a keeper that dies right after this message loses nothing."""


class Changed(msgspec.Struct, frozen=True, kw_only=True, tag="changed"):
    """Keeper → vault: the segment's state, meta or leases changed."""

    segment: SegmentInfo


class Forget(msgspec.Struct, frozen=True, kw_only=True, tag="forget"):
    """Keeper → vault: these are freed, close the fds."""

    segments: tuple[str, ...]


class Deposited(msgspec.Struct, frozen=True, kw_only=True, tag="deposited"):
    """Vault → keeper: acknowledges `Deposit.number`."""

    number: int


FromKeeper = Welcome | Answer | Refused | Deposit | Changed | Forget
ToKeeper = Hello | GetWeights | Create | Seal | GetKv | Drop | Free | ListSegments | Restore | Restored | Deposited

_to = msgspec.msgpack.Decoder(ToKeeper)
_from = msgspec.msgpack.Decoder(FromKeeper)


def encode(message: ToKeeper | FromKeeper) -> bytes:
    return msgspec.msgpack.encode(message)


def decode_request(payload: bytes) -> ToKeeper:
    """Raises msgspec.MsgspecError."""
    return _to.decode(payload)


def decode_answer(payload: bytes) -> FromKeeper:
    """Raises msgspec.MsgspecError."""
    return _from.decode(payload)
