"""The life of an EngineCore: `shadowsup.workers.life`, whose step thread is vLLM's busy loop.

The busy loop waits in its input queue. What it is to do for us comes there as an `Errand`: orders, the ticks on which a parked engine
follows the ledger, the news that the API server listens. The gateway is no concern of this process: it speaks to the API server.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, NoReturn

import msgspec

from shadowsup.memkeeper.errors import LedgerLost
from shadowsup.wire.engine import EngineSpec, EngineState, Failed, FirstToken, Order, Phase, Release, Stop
from shadowsup.workers import compiling, kept_kv, process
from shadowsup.workers.api import KvGeometry, Served
from shadowsup.workers.arena import KvArena
from shadowsup.workers.errors import ExitCode, WorkerError
from shadowsup.workers.leaving import Leave
from shadowsup.workers.life import FOLLOW_S, IDLE_S, Life
from shadowsup.workers.vllm import current, turns
from shadowsup.workers.vllm.ranks import RankedArena, Ranks, together

if TYPE_CHECKING:
    from shadowsup.memkeeper.protocol import Fingerprint
    from shadowsup.workers.weights import KeptWeights

LISTENS_LOOK_S = 0.02
"""Between two looks whether the API server listens yet."""

log = logging.getLogger("shadowsup.engine")


class Errand:
    """Something for the busy loop's thread. An exception that leaves it ends the engine."""

    def __init__(self, run: Callable[[], None]) -> None:
        self.run = run


class EngineLife(Life):
    """One EngineCore's, on its main thread.

    Attributes:
        resumed: replayed requests since the promotion; counted by the scheduler.
    """

    def __init__(self, spec: EngineSpec) -> None:
        super().__init__(spec)
        self._heart.front = turns.turns.read if turns.turns is not None else None
        self.resumed = 0
        self.weight_bytes = 0
        self.weight_marks: tuple[tuple[str, str], ...] = ()
        """For the KV's fingerprint: what its bytes depend on of the weights."""
        self._post: Callable[[Errand], None] | None = None
        """Puts an errand into the busy loop's queue; None: there is no loop yet."""
        self._told_first = False
        self._flying: deque[tuple[Phase, int]] = deque()
        """What is being computed, oldest first, as it was begun: with asynchronous scheduling one step is begun while another one runs."""
        self._over = threading.Event()
        self.ranks: Ranks | None = None
        """Where they are processes of their own."""
        self._told: Failed | None = None
        """What a rank said that could not go on."""

    @property
    def salt(self) -> bytes:
        """Of the ledger: keys the hashes of its blocks."""
        return self._kv.reader.header().salt

    # --- coming up ---------------------------------------------------------------------------------------------------------------

    def take_weights(self, weights: KeptWeights, mark: Fingerprint) -> None:
        """The model's weights are there."""
        self.weight_bytes = weights.nbytes
        self.weight_marks = current.weight_marks(mark, weights.digest)

    def reserve_range(self, size: int) -> KvArena:
        """Return the arena for ``size`` bytes of blocks, over scratch. Before `hold`: what the blocks mean is known once vLLM has laid its
        tensors over them."""
        self.stage = "warm"
        self._state(EngineState.WARMING, phase=Phase.WARMING, detail="")
        self._arena = KvArena.reserve(sum(kept_kv.slab_sizes(size, self.device)), self.device)
        self._arena.map_scratch()
        return self._arena

    def hold(self, geometry: KvGeometry, weights: Fingerprint | None) -> None:
        super().hold(geometry, weights)
        assert self._kv.size == self._arena.size, "the slabs of a worker fill its arena"

    def hold_ranks(self) -> None:
        """Every rank has laid out its part of the blocks: get all of them, and their ledger, from the keeper, as one set.

        Raises:
            WorkerError: the parts do not go together.
            OutOfMemory: the keeper cannot create the segments.
            KeeperError: the keeper refuses or is not there.
        """
        ranks = self.ranks
        assert ranks is not None
        self.stage = "warm"
        self._state(EngineState.WARMING, phase=Phase.WARMING, detail="")
        parts = ranks.parts()
        self._arena = RankedArena(ranks, parts)
        self.connect()
        self.hold(together(parts), None)

    def lifeline_copy(self) -> AbstractContextManager[int]:
        """Lend a rank's process the lifeline while that is being forked."""
        return self._lifeline.copy()

    @property
    def priority(self) -> process.Priority | None:
        """Lowered while the engine comes up."""
        return self._priority

    def attend(self, engine: Served, post: Callable[[Errand], None]) -> None:
        """Busy loop, before its first turn: the engine is warm. Parks as soon as the API server listens."""
        self._engine = engine
        self._post = post
        threading.Thread(target=self._tick, name="ticks", daemon=True).start()

    def _tick(self) -> None:
        post = self._post
        assert post is not None
        while not _listens(self.spec.link_socket):
            if self._over.wait(LISTENS_LOOK_S):
                return
        post(Errand(lambda: self.park(self._engine)))
        while not self._over.wait(FOLLOW_S if self.writer is None else IDLE_S):
            post(Errand(self._tock))

    def _tock(self) -> None:
        """Busy loop: follow while parked; then make sure that the ledger is still ours."""
        if self.writer is not None:
            self.writer.check()
            if not self._engine.inflight and not self._engine.queued:
                self._vitals(phase=Phase.IDLE, since_s=0.0, step_tokens=0, stalled_since_s=0.0)
        elif self._heart.vitals.state is EngineState.PARKED:
            if self._watch.catch_up():
                log.info("another engine took fresh KV blocks: following those")
                self._tell_kv_set()
                self._map_ahead()
            self._engine.follow(self._kv.reader)

    def _ring(self) -> None:
        if self._post is not None:
            self._post(Errand(self.obey))

    # --- what `Life` does over the link ----------------------------------------------------------------------------------------------

    def _open_front(self, engine: Served) -> None:
        """The gateway speaks to the API server."""

    def _front_state(self, state: EngineState) -> None:
        """The gateway learns of it from the supervisor's routes."""
        if state is EngineState.ACTIVE:
            self.stage = "step"
            self.resumed, self._told_first = 0, False
            compiling.tell(self._compiling)

    def _hand_over(self, order: Order) -> None:
        if self._post is None and isinstance(order, Stop | Release):
            os._exit(ExitCode.STOPPED)  # vLLM is starting, which cannot be interrupted, and leaves nothing to be put in order
        self._orders.append(order)
        self._ring()

    # --- steps -------------------------------------------------------------------------------------------------------------------------

    def step_begins(self, phase: Phase, tokens: int) -> None:
        """A step is handed to the model, which will compute ``tokens`` tokens.

        Raises:
            LedgerLost: another engine owns the ledger: nothing may be written any more.
        """
        assert self.writer is not None
        self.writer.check()
        compiling.watch_torch()
        self._flying.append((phase, tokens))
        self._awaiting(*self._flying[0], queued=self._engine.queued)

    def step_ended(self, tokens: int, phase: Phase, *, progressed: bool) -> None:
        """A step's output is there, its blocks are published; it is sent when this returns.

        Args:
            tokens: sampled.
            phase: what the next one will do, if none has begun.
            progressed: it computed something.

        Raises:
            LedgerLost: another engine owns the ledger: nothing may be sent any more.
        """
        writer = self.writer
        assert writer is not None
        writer.check()
        if tokens and not self._told_first:
            self._told_first = True
            told = FirstToken(engine=self.spec.engine, epoch=writer.epoch, sent_s=time.monotonic(), resumed=self.resumed)
            self._heart.report(told)
        if progressed and self._flying:
            self._flying.popleft()
        next_tokens = 0
        if self._flying:
            phase, next_tokens = self._flying[0]
        self._step_over(tokens, phase, progressed=progressed, next_tokens=next_tokens)
        if phase is Phase.IDLE:
            self._vitals(phase=phase, since_s=0.0, step_tokens=0, stalled_since_s=0.0)

    # --- the end -------------------------------------------------------------------------------------------------------------------------

    def leave(self, error: BaseException) -> NoReturn:
        """End this process because of ``error`` (`Leave`: as asked). vLLM's own way out takes seconds, and what it leaves behind is removed
        after the fence."""
        self._over.set()
        if self.ranks is not None and not isinstance(error, Leave | LedgerLost):
            self._told = self.ranks.failure()
            if self._told is not None:
                error = WorkerError(self._told.message, self._told.hint, fatal=self._told.fatal)
        code: int = ExitCode.FAILED
        try:
            code = self.over(error)
        finally:
            os._exit(code)

    def _last_words(self, error: BaseException) -> Failed:
        """What a rank has said of its own failure tells more than what vLLM tells of it here."""
        if self._told is None:
            return super()._last_words(error)
        log.error("cannot go on (%s): a rank has failed: %s", self.stage, error)
        return msgspec.structs.replace(self._told, stage=self.stage)


def _listens(path: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except OSError:
            return False
    return True
