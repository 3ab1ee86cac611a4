"""Seam: the process of a rank (0.26, 0.32): `WorkerProc.make_worker_process`, which forks it from EngineCore, and `WorkerProc.worker_main`,
which it runs.

It is the ranks that write the memory. So each holds the engine's lifeline, whose end is that of the last of them, and a tether of its own.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import socket
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from shadowsup.memkeeper.client import KeeperClient
from shadowsup.wire.engine import EngineSpec
from shadowsup.workers import kept_kv, last_words, process, tether
from shadowsup.workers.api import KvGeometry
from shadowsup.workers.arena import KvArena
from shadowsup.workers.lifeline import Lifeline
from shadowsup.workers.vllm import current, ranks
from shadowsup.workers.weights import WeightStore

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shadowsup.memkeeper.protocol import Fingerprint
    from shadowsup.workers.weights import KeptWeights

LINGER_S = 2.0
"""A rank that has failed gives EngineCore so long to tell of it."""

log = logging.getLogger("shadowsup.engine")

_original: dict[str, Callable[..., Any]] = {}

_seat: tuple[socket.socket, int] | None = None
"""The line and the lifeline's copy for the rank that is being forked."""


class RankLife:
    """What one rank holds. See `shadowsup.workers.vllm.holding`; made on the process's main thread.

    Args:
        priority: EngineCore's, which the fork has copied: lowered while the engine comes up.
    """

    def __init__(
        self, spec: EngineSpec, rank: int, line: socket.socket, lifeline_fd: int, priority: process.Priority | None = None
    ) -> None:
        self.spec = msgspec.structs.replace(spec, rank=rank)
        self.device = spec.gpus[rank] if spec.gpus else "host"
        self.weight_bytes = 0
        self.weight_marks: tuple[tuple[str, str], ...] = ()
        self.stage = "load"
        self._line = line
        self._lifeline = Lifeline(lifeline_fd)
        self._priority = priority
        self._keeper: KeeperClient | None = None
        self._arena: KvArena
        self._geometry: KvGeometry
        self._failed = False
        if spec.rank_tethers:
            tether.hold(spec.rank_tethers[rank])

    def connect(self) -> WeightStore:
        """Return the weight store of this rank's device."""
        self._keeper = KeeperClient(self.spec.keeper_socket, f"{self.spec.engine}/{self.spec.rank}")
        return WeightStore(self._keeper, device=self.device, verify=self.spec.verify)

    def progress(self, words: str) -> None:
        log.info("rank %d: %s", self.spec.rank, words)

    def take_weights(self, weights: KeptWeights, mark: Fingerprint) -> None:
        """This rank's part of the model is there."""
        self.weight_bytes = weights.nbytes
        self.weight_marks = current.weight_marks(mark, weights.digest)

    def reserve_range(self, size: int) -> KvArena:
        """Return the arena for ``size`` bytes of this rank's part of the blocks, over scratch."""
        self.stage = "warm"
        self._arena = KvArena.reserve(sum(kept_kv.slab_sizes(size, self.device)), self.device)
        self._arena.map_scratch()
        return self._arena

    def hold(self, geometry: KvGeometry, weights: Fingerprint | None) -> None:
        """The blocks are laid out; EngineCore, which has the index, gets them from the keeper."""
        self._geometry = geometry
        self._lifeline.renew()

    def part(self) -> ranks.RankPart:
        """Return what EngineCore must know for that."""
        geometry = self._geometry
        return ranks.RankPart(
            device=self.device,
            size=self._arena.size,
            blocks=geometry.blocks,
            block_tokens=geometry.block_tokens,
            block_bytes=geometry.block_bytes,
            reserve=geometry.reserve,
            fingerprint=geometry.fingerprint,
        )

    def warmed(self) -> None:
        """This rank is warm: it touches the arena no more until EngineCore is promoted."""
        self._arena.rest()
        gc.collect()
        gc.freeze()
        self._lifeline.renew()  # above all that was opened meanwhile
        self.stage = "promote"

    def map(self, sizes: Sequence[int]) -> None:
        """Put the segments whose descriptors EngineCore has sent behind the arena.

        Raises:
            WorkerError: they cannot be mapped.
        """
        fds = ranks.take_fds(self._line, len(sizes))
        try:
            self._arena.map_segments(fds, sizes)
        finally:
            for fd in fds:
                os.close(fd)

    def serve(self) -> int:
        """The engine is being promoted. Returns the rank."""
        if self._priority is not None:
            self._priority.restore()
        self.stage = "step"
        return self.spec.rank

    def tell(self, error: BaseException) -> None:
        """Leave the last words of this engine: EngineCore, which hears of the failure from vLLM, is only told its text."""
        self._failed = True
        ranks.say(self._line, time.monotonic(), last_words.failed(self.spec.engine, self.stage, error, None))

    def linger(self) -> None:
        """After a failure: let EngineCore say why, before this rank's end has the whole tree killed."""
        if self._failed:
            self._line.settimeout(LINGER_S)
            with contextlib.suppress(OSError):
                self._line.recv(1)  # ends with EngineCore


def install() -> None:
    """In EngineCore: put ours in vLLM's place. Idempotent."""
    from vllm.v1.executor.multiproc_executor import WorkerProc

    if _original:
        return
    _original["make"] = WorkerProc.make_worker_process
    _original["main"] = WorkerProc.worker_main
    WorkerProc.make_worker_process = staticmethod(_make_worker_process)
    WorkerProc.worker_main = staticmethod(_worker_main)


def _make_worker_process(*args: Any, **kwargs: Any) -> Any:
    global _seat
    life = current.life()
    assert life.ranks is not None
    with life.ranks.seat() as line, life.lifeline_copy() as lifeline_fd:
        _seat = (line, lifeline_fd)
        try:
            return _original["make"](*args, **kwargs)
        finally:
            _seat = None


def _worker_main(*args: Any, **kwargs: Any) -> None:
    """Be a rank."""
    process.log_apart()
    core = current.life()
    assert _seat is not None and core.ranks is not None
    line, lifeline_fd = _seat
    core.ranks.forget()
    life = RankLife(core.spec, int(kwargs["rank"]), line, lifeline_fd, core.priority)
    current.begin_rank(life)
    try:
        _original["main"](*args, **kwargs)
    finally:
        life.linger()
