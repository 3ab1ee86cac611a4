"""Supervisor ↔ scribe, over a Unix stream socket: frames with fds (`shadowsup.memkeeper.channel`), one msgpack message each.

The scribe keeps its streams when a connection ends; the next supervisor takes over with `Takeover`. Answers come in the order of
the requests and repeat their number.
"""

from __future__ import annotations

import msgspec


class Add(msgspec.Struct, frozen=True, kw_only=True, tag="add"):
    """Take a stream; brings one fd, the read end of its pipe. A key that is held already is left as it is."""

    number: int
    key: str
    """Unique for ever: names one pipe."""
    stream: str
    """What people and `Tail` call it; a later pipe of the same name continues it."""
    source: str
    """Marks each line in the file."""
    path: str
    max_size: int
    """Bytes of the file before it is rotated."""
    keep: int
    """Rotated files that are kept."""
    tail_lines: int


class Tail(msgspec.Struct, frozen=True, kw_only=True, tag="tail"):
    """→ `Lines`. What is in the pipe at this moment is read first."""

    number: int
    stream: str
    lines: int


class Watch(msgspec.Struct, frozen=True, kw_only=True, tag="watch"):
    """→ `Done`, and later one `Matched`, at the first line in which ``pattern`` (`re.search`) is found; lines kept so far count."""

    number: int
    stream: str
    pattern: str


class Unwatch(msgspec.Struct, frozen=True, kw_only=True, tag="unwatch"):
    """→ `Done`. ``watch``: number of the `Watch`."""

    number: int
    watch: int


class GetStats(msgspec.Struct, frozen=True, kw_only=True, tag="stats"):
    """→ `Stats`."""

    number: int


class Takeover(msgspec.Struct, frozen=True, kw_only=True, tag="takeover"):
    """→ `Held`, in parts: every stream the scribe holds, with the fds of those that have not ended."""

    number: int


class Quit(msgspec.Struct, frozen=True, kw_only=True, tag="quit"):
    """Read what is in the pipes, write it, answer `Done` and exit with status 0."""

    number: int


ToScribe = Add | Tail | Watch | Unwatch | GetStats | Takeover | Quit


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """One stream. Bytes since the scribe took it; ``dropped``: read, but not written (disk full, gone or too slow)."""

    key: str
    stream: str
    source: str
    path: str
    max_size: int
    keep: int
    tail_lines: int
    received: int
    dropped: int
    ended: bool


class Done(msgspec.Struct, frozen=True, kw_only=True, tag="done"):
    number: int


class Refused(msgspec.Struct, frozen=True, kw_only=True, tag="refused"):
    number: int
    message: str


class Lines(msgspec.Struct, frozen=True, kw_only=True, tag="lines"):
    """As the process wrote them, long ones cut; an unfinished last line counts."""

    number: int
    lines: list[str]


class Stats(msgspec.Struct, frozen=True, kw_only=True, tag="figures"):
    """``errors``: path → why the last write to it failed; only files that fail just now."""

    number: int
    streams: list[Figures]
    errors: dict[str, str]


class Held(msgspec.Struct, frozen=True, kw_only=True, tag="held"):
    """One fd for each stream that has not ended, in order."""

    number: int
    streams: list[Figures]
    more: bool = False


class Matched(msgspec.Struct, frozen=True, kw_only=True, tag="matched"):
    """``line`` None: the stream has ended without one."""

    watch: int
    line: str | None


class Ended(msgspec.Struct, frozen=True, kw_only=True, tag="ended"):
    """Every writer of the pipe is gone and all of it was read."""

    key: str
    stream: str


FromScribe = Done | Refused | Lines | Stats | Held | Matched | Ended

_to = msgspec.msgpack.Decoder(ToScribe)
_from = msgspec.msgpack.Decoder(FromScribe)


def encode(message: ToScribe | FromScribe) -> bytes:
    return msgspec.msgpack.encode(message)


def decode_request(payload: bytes) -> ToScribe:
    """Raises msgspec.MsgspecError when ``payload`` is not a request."""
    return _to.decode(payload)


def decode_answer(payload: bytes) -> FromScribe:
    """Raises msgspec.MsgspecError when ``payload`` is not an answer."""
    return _from.decode(payload)
