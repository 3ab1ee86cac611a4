"""The ranks of an engine, seen from its EngineCore: where there are several, each is a process of its own, forked from it, that holds the
weights and KV of its device.

Two ways lead to a rank. vLLM's own calls (`collective_rpc`) order it to do something, all ranks at once and each with an answer; a socket
that is made before the fork carries descriptors to it, and its last words back.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import socket
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from shadowsup.wire.engine import EngineSpec, Failed
from shadowsup.workers.api import KvGeometry
from shadowsup.workers.arena import KvArena
from shadowsup.workers.errors import WorkerError

PROMOTE_S = 2.0
"""For what all ranks do at a promotion; it takes milliseconds. A rank that stands still must not hold up the next rung of the ladder."""

FDS_A_MESSAGE = 200
"""Less than SCM_MAX_FD."""

_AT = struct.Struct("=d")
"""Before the last words: when they were said, CLOCK_MONOTONIC in seconds."""

_MOST_WORDS = 1 << 16


@dataclass(frozen=True, kw_only=True)
class RankPart:
    """What one rank holds of every block. ``size``: bytes of its arena; ``fingerprint``: what its part of the bytes depends on."""

    device: str
    size: int
    blocks: int
    block_tokens: int
    block_bytes: int
    reserve: int
    fingerprint: tuple[tuple[str, str], ...]


def together(parts: Sequence[RankPart]) -> KvGeometry:
    """Return the geometry of all ranks together: one index, whose blocks have a part in each of them.

    Raises:
        WorkerError: they do not go together.
    """
    first = parts[0]
    if any((one.blocks, one.block_tokens, one.reserve) != (first.blocks, first.block_tokens, first.reserve) for one in parts):
        raise WorkerError("the ranks have KV caches of different shapes", "serve it by engine: command, without kept memory", fatal=True)
    digests = (hashlib.blake2b(json.dumps(one.fingerprint).encode(), digest_size=16).hexdigest() for one in parts)
    return KvGeometry(
        blocks=first.blocks,
        block_tokens=first.block_tokens,
        block_bytes=sum(one.block_bytes for one in parts),
        reserve=first.reserve,
        fingerprint=(("engine", "vllm"), ("ranks", str(len(parts))), *((f"rank.{rank}", digest) for rank, digest in enumerate(digests))),
        parts=tuple((one.device, one.size) for one in parts),
    )


class Ranks:
    """Made before they are.

    Args:
        call: runs a method of every rank's worker and returns their answers: ``(method, timeout_s, *args)``. Raises whatever the executor
            raises when a rank fails, or does not answer.
    """

    def __init__(self, spec: EngineSpec, call: Callable[..., list[Any]]) -> None:
        self._call = call
        self._lines: list[socket.socket] = []
        """Our ends, by rank."""
        self._world = spec.world

    @contextlib.contextmanager
    def seat(self) -> Iterator[socket.socket]:
        """Yield the next rank's end of its line, to be inherited by the process that is forked meanwhile."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        self._lines.append(ours)
        with theirs:
            yield theirs

    def forget(self) -> None:
        """In a rank: the lines of EngineCore are not ours."""
        for line in self._lines:
            line.close()
        self._lines.clear()

    def parts(self) -> list[RankPart]:
        """Return what each holds, once their KV caches are laid out."""
        return self._call("kept_part", None)

    def map(self, fds: Sequence[int], sizes: Sequence[Sequence[int]]) -> None:
        """Have each rank put its segments behind its arena. ``sizes``: bytes of its segments, by rank; ``fds``: of all, in that order.

        Raises:
            Exception: of the executor; one of them could not, or did not answer in `PROMOTE_S`. Then none is to be used.
        """
        ends = list(accumulate((len(one) for one in sizes), initial=0))
        for rank, line in enumerate(self._lines):
            mine = fds[ends[rank] : ends[rank + 1]]
            for start in range(0, len(mine), FDS_A_MESSAGE):
                socket.send_fds(line, [b"m"], mine[start : start + FDS_A_MESSAGE])
        self._call("kept_map", PROMOTE_S, [list(one) for one in sizes])

    def serve(self) -> None:
        """Have each rank make ready to serve. That all of them answer is what makes a promotion one of the whole engine.

        Raises:
            Exception: of the executor, see `map`.
        """
        answers = self._call("kept_serve", PROMOTE_S)
        if answers != list(range(self._world)):
            raise WorkerError(f"of {self._world} ranks these have answered: {answers}")

    def failure(self) -> Failed | None:
        """Return the last words of the rank that failed first; None: none has said any."""
        said: list[tuple[float, Failed]] = []
        for line in self._lines:
            with contextlib.suppress(OSError, msgspec.MsgspecError, struct.error):
                while words := line.recv(_MOST_WORDS, socket.MSG_DONTWAIT):
                    said.append((_AT.unpack_from(words)[0], msgspec.msgpack.decode(words[_AT.size :], type=Failed)))
        return min(said, key=lambda one: one[0])[1] if said else None


def say(line: socket.socket, at_s: float, failed: Failed) -> None:
    """In a rank: leave last words."""
    with contextlib.suppress(OSError):  # EngineCore is gone, or has been told a dozen times already
        line.send(_AT.pack(at_s) + msgspec.msgpack.encode(failed), socket.MSG_DONTWAIT)


def take_fds(line: socket.socket, count: int) -> list[int]:
    """In a rank: take the descriptors that EngineCore has sent before it called.

    Raises:
        WorkerError: there are not so many.
    """
    found: list[int] = []
    line.setblocking(False)  # `recv_fds` takes flags and passes none of them on
    while len(found) < count:
        try:
            _, fds, _, _ = socket.recv_fds(line, 1, FDS_A_MESSAGE)
        except OSError:
            fds = []
        if not fds:
            for fd in found:
                os.close(fd)
            raise WorkerError(f"{count} descriptors were to come from EngineCore and {len(found)} came")
        found += fds
    return found


class RankedArena(KvArena):
    """The arenas of all ranks, one after the other: each lies in a process of its own, and only mapping is to be done from here.

    Args:
        parts: what the ranks have reserved.
    """

    granularity = 1
    address = 0

    def __init__(self, ranks: Ranks, parts: Sequence[RankPart]) -> None:
        self._ranks = ranks
        self._parts = parts
        self.device = parts[0].device
        self.size = sum(one.size for one in parts)

    def map_scratch(self) -> None:
        """Each rank has done that."""

    def map_segments(self, fds: Sequence[int], sizes: Sequence[int]) -> None:
        left, by_rank = list(sizes), []
        for part in self._parts:
            mine: list[int] = []
            while left and sum(mine) < part.size:
                mine.append(left.pop(0))
            by_rank.append(mine)
        if left or [sum(one) for one in by_rank] != [part.size for part in self._parts]:
            raise WorkerError(f"segments of {list(sizes)} bytes do not fill arenas of {[part.size for part in self._parts]}")
        self._ranks.map(fds, by_rank)

    def view(self) -> npt.NDArray[np.uint8]:
        raise WorkerError("the KV arena is that of other processes")

    def close(self) -> None:
        """Each goes with its process."""
