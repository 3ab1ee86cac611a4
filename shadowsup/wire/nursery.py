"""Supervisor ↔ nursery: asking a fork server for engine processes.

Transport: one Unix stream socket, frames of `shadowsup.wire.framing`, each one msgpack message of the tagged unions below. File
descriptors travel by SCM_RIGHTS with the first byte of the frame that names them. The nursery listens and accepts one supervisor at a
time (the newest connection wins, an older one is closed), so that a restarted supervisor adopts a nursery that outlived its
predecessor. It speaks first: `Ready`, then every `Exited` that no supervisor has been told yet.
"""

from __future__ import annotations

import msgspec

from shadowsup.wire.engine import EngineSpec

FORK_FDS = 3
"""File descriptors that come with `Fork`, in this order: lifeline, stdout, stderr."""


class Fork(msgspec.Struct, frozen=True, kw_only=True, tag="fork"):
    """Fork one engine. Brings `FORK_FDS`; the nursery closes its copies whatever happens.

    ``env`` replaces the child's whole environment. Variables that libraries read while they are imported (``HF_HOME``, …) have been
    read by then: they must be those the nursery was started with.
    """

    number: int
    """Chosen by the supervisor; the answer repeats it."""
    spec: EngineSpec
    env: dict[str, str]


class Clone(msgspec.Struct, frozen=True, kw_only=True, tag="clone"):
    """Fork a spare: a copy of the nursery with everything imported, which waits to take its place.

    Brings `FORK_FDS`, with the *line* in place of the lifeline: one end of a stream socketpair. A byte that comes with a ready fd makes the
    spare serve at the nursery's path (by then its predecessor is gone), EOF makes it exit. The answer is `Forked` with an empty ``engine``.
    """

    number: int


class Quit(msgspec.Struct, frozen=True, kw_only=True, tag="quit"):
    """Exit with status 0. Engines live on; they are reparented to the nearest subreaper."""


ToNursery = Fork | Clone | Quit


class Child(msgspec.Struct, frozen=True, kw_only=True):
    """A living engine. ``start_time``: field 22 of /proc/PID/stat (clock ticks since boot), which tells a reused pid apart."""

    engine: str
    pid: int
    start_time: int


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag="ready"):
    """First message on every connection."""

    pid: int
    preload: str
    import_s: float
    """Seconds that the preload took."""
    threads: int
    """Threads of the nursery now; more than ``max_threads`` and it refuses to fork."""
    max_threads: int
    children: tuple[Child, ...] = ()


class Forked(msgspec.Struct, frozen=True, kw_only=True, tag="forked"):
    """Answer to `Fork`; one fd: the engine's pidfd."""

    number: int
    engine: str
    pid: int
    start_time: int
    fork_s: float
    """Seconds the nursery spent in fork()."""


class ForkRefused(msgspec.Struct, frozen=True, kw_only=True, tag="fork_refused"):
    """Answer to `Fork`: there is no child. ``hint`` says what to do; a cold spawn always remains."""

    number: int
    engine: str
    message: str
    hint: str = ""


class Exited(msgspec.Struct, frozen=True, kw_only=True, tag="exited"):
    """An engine was reaped. ``status``: as subprocess.Popen.returncode has it (``-9`` for signal 9)."""

    engine: str
    pid: int
    status: int


FromNursery = Ready | Forked | ForkRefused | Exited

_to = msgspec.msgpack.Decoder(ToNursery)
_from = msgspec.msgpack.Decoder(FromNursery)


def encode(message: ToNursery | FromNursery) -> bytes:
    return msgspec.msgpack.encode(message)


def decode_request(payload: bytes) -> ToNursery:
    """Raises msgspec.MsgspecError when ``payload`` is not a request."""
    return _to.decode(payload)


def decode_answer(payload: bytes) -> FromNursery:
    """Raises msgspec.MsgspecError when ``payload`` is not an answer."""
    return _from.decode(payload)
