"""Gateway ↔ API server of a parked vLLM: what becomes of requests that were sent ahead. A Unix socket beside the engine's own, frames of
`shadowsup.wire.framing`, each a msgpack array of messages.

The request itself goes ahead over HTTP, as the client wrote it, with the ids of its prompt and a key; the server prepares everything and
then waits. `Told` says what has been generated of it since, `Go` that the engine serves and has it now. The answer comes over HTTP.
"""

from __future__ import annotations

import os

import msgspec


class Told(msgspec.Struct, frozen=True, kw_only=True, tag="told"):
    """``output``: ids that were generated and delivered since the last one, little-endian u32; ``pieces``: how many of them each
    delivered event had, likewise."""

    key: str
    output: bytes
    pieces: bytes


class Go(msgspec.Struct, frozen=True, kw_only=True, tag="go"):
    """The last of its output, as in `Told`; from here on generate. ``request``, ``epoch``: as in a replay, to refuse a second one."""

    key: str
    request: str
    epoch: int
    output: bytes
    pieces: bytes


class Unknown(msgspec.Struct, frozen=True, kw_only=True, tag="unknown"):
    """Engine → gateway: nothing waits under this key."""

    key: str


ToServer = Told | Go

encode = msgspec.msgpack.Encoder().encode
decode_for_server = msgspec.msgpack.Decoder(list[ToServer]).decode
decode_for_gateway = msgspec.msgpack.Decoder(list[Unknown]).decode


def socket_of(link_socket: str) -> str:
    """Return the path of the socket beside an engine's own; no longer than that."""
    folder, name = os.path.split(link_socket)
    return os.path.join(folder, "go-" + name.removeprefix("link-"))
