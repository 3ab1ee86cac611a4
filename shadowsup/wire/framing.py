"""Length-framed msgpack over Unix stream sockets: ``u32 little-endian length`` then that many bytes."""

from __future__ import annotations

import struct
from collections.abc import Iterator

MAX_FRAME = 64 * 1024 * 1024
"""Bytes. A longer frame is a protocol error: the peer is not speaking this protocol."""

_HEADER = struct.Struct("<I")
HEADER_SIZE = _HEADER.size


class FrameError(ValueError):
    """Raised when a peer announces a frame longer than `MAX_FRAME`."""


def pack(payload: bytes) -> bytes:
    """Return ``payload`` with its length in front.

    Raises:
        FrameError: the payload is longer than `MAX_FRAME`.
    """
    if len(payload) > MAX_FRAME:
        raise FrameError(f"frame of {len(payload)} bytes exceeds {MAX_FRAME}")
    return _HEADER.pack(len(payload)) + payload


class Unpacker:
    """Turns a byte stream into payloads, whatever the chunk boundaries are. ``limit``: bytes of the longest one."""

    def __init__(self, limit: int = MAX_FRAME) -> None:
        self._buffer = bytearray()
        self._limit = limit

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Take ``data`` and yield each payload it completes.

        Raises:
            FrameError: the announced length exceeds the limit.
        """
        self._buffer += data
        while len(self._buffer) >= HEADER_SIZE:
            (length,) = _HEADER.unpack_from(self._buffer)
            if length > self._limit:
                raise FrameError(f"peer announced a frame of {length} bytes")
            end = HEADER_SIZE + length
            if len(self._buffer) < end:
                return
            payload = bytes(self._buffer[HEADER_SIZE:end])
            del self._buffer[:end]
            yield payload
