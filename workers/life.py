"""The life of an engine process but for the model: what its supervisor, its keeper and the gateway see of it, stage by stage.

Two kinds of step loop live it: an adapter is driven by `shadowsup.workers.runtime`, a loop of the user's own drives itself
(`shadowsup.workers.loop`). One thread (the step thread) calls everything here, in order: `start`, `connect`, `hold`, `reserve`, `warmed`,
`park`, `wait_for_promotion`, then `arrivals`, `stepping`, `stepped` and `obey` again and again, at last `over`.

Beside it run the heart (`shadowsup.workers.heartbeat`), the link to the gateway (`shadowsup.workers.link`) and the keeper's client; they
hand things over and ring the step thread, and touch neither the engine nor the ledger.
"""

from __future__ import annotations

import gc
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from shadowsup.memkeeper.client import KeeperClient
from shadowsup.wire.engine import (
    Canaried,
    Canary,
    Drain,
    EngineSpec,
    EngineState,
    Failed,
    Fence,
    Fenced,
    FirstToken,
    Hurry,
    Order,
    Phase,
    Promote,
    Promoted,
    Release,
    Stop,
)
from shadowsup.wire.link import Accepted, Hello, Rejected, Sampling, Submit, Token
from shadowsup.workers import compiling, kept_kv, last_words, process, tether
from shadowsup.workers.api import KvGeometry, Served
from shadowsup.workers.arena import KvArena
from shadowsup.workers.doorbell import Doorbell
from shadowsup.workers.errors import ExitCode, exit_code
from shadowsup.workers.heartbeat import Gap, Heart, Vitals
from shadowsup.workers.intake import Intake
from shadowsup.workers.kv_watch import KvWatch
from shadowsup.workers.leaving import Leave, Leaving
from shadowsup.workers.lifeline import Lifeline
from shadowsup.workers.link import LinkServer
from shadowsup.workers.weights import WeightStore

if TYPE_CHECKING:
    from shadowsup.memkeeper.ledger import LedgerReader, LedgerWriter
    from shadowsup.memkeeper.protocol import Fingerprint

FOLLOW_S = 0.05
"""How often a parked engine catches up with the ledger."""

IDLE_S = 1.0
"""How often an idle engine makes sure that the ledger is still its own (an order or a request wakes it at once)."""

STALLED_S = 0.01
"""How soon a step is tried again that could do nothing though requests wait (for the fence, for blocks)."""

KV_COUNTS_S = 0.1
"""How often beats get new block counts; counting is not free."""

_CLOSING = ("link", "watch", "engine", "arena", "kv", "keeper")
"""Nobody is sent anything any more; then the engine, before the memory under its tensors."""

log = logging.getLogger("shadowsup.engine")


class Life:
    """One engine's, on the process's main thread (elsewhere signals are left alone).

    Attributes:
        device: a device UUID or ``host``.
        stage: for a failure's report: ``load``, ``warm``, ``park``, ``promote``, ``step``.
        writer: the ledger, once promoted.
        promoted: the report of the promotion.
        open: what an orderly end closes, by the names in `_CLOSING`.
    """

    def __init__(self, spec: EngineSpec) -> None:
        self.spec = spec
        self.device = spec.gpus[spec.rank] if spec.gpus else "host"
        self.stage = "load"
        self.writer: LedgerWriter | None = None
        self.promoted: Promoted | None = None
        self.open: dict[str, Callable[[], None]] = {}
        self.leaving = Leaving(self._on_signal)
        self._bell = Doorbell()
        self._orders: deque[Order] = deque()
        self._lifeline = Lifeline(spec.lifeline_fd)
        tether.hold(spec.tether)
        self._heart = Heart(
            engine=spec.engine,
            endpoint=spec.beat_endpoint,
            interval_s=spec.heartbeat_s,
            vitals=Vitals(state=EngineState.LOADING, phase=Phase.LOADING),
            on_order=self._on_order,
            log=log.warning,
        )
        self._priority: process.Priority | None = None
        self._engine: Served
        self._keeper: KeeperClient
        self._kv: kept_kv.KeptKv
        self._mapped: LedgerReader | None = None
        """Of the blocks that are behind the arena already."""
        self._watch: KvWatch
        self._arena: KvArena
        self._intake: Intake
        self._link: LinkServer
        self._first_token_sent = False
        self._kv_counted_s = 0.0
        self._canary: Canary | None = None
        self.loading: object = None
        """The adapter, before it is parked."""
        self._before_compiling: tuple[Phase, float] | None = None
        self.hurried = threading.Event()
        """Somebody waits for this engine, whatever it was started for."""

    # --- coming up -------------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Beat from now on."""
        self._heart.start()
        self._priority = process.Priority.from_environment()  # after the heart, which keeps its own

    def connect(self) -> WeightStore:
        """Return the weight store of this engine's keeper."""
        self._keeper = KeeperClient(self.spec.keeper_socket, self.spec.engine)
        self.open["keeper"] = self._keeper.close
        return WeightStore(self._keeper, device=self.device, verify=self.spec.verify)

    def hold(self, geometry: KvGeometry, weights: Fingerprint | None) -> None:
        """Get the worker's KV and ledger, and hold them.

        Raises:
            OutOfMemory: the keeper cannot create the segments.
            KeeperError: the keeper refuses or is not there.
        """
        self._lifeline.renew()
        self._kv = kept_kv.KeptKv(
            self._keeper,
            worker=self.spec.worker,
            device=self.device,
            geometry=geometry,
            fingerprint=kept_kv.fingerprint(weights, geometry),
            beside=self.spec.kv.beside,
        )
        self.open["kv"] = self._kv.close
        self._tell_kv_set()

    def reserve(self) -> KvArena:
        """Return the arena, over scratch."""
        self.stage = "warm"
        self._state(EngineState.WARMING, phase=Phase.WARMING, detail="")
        self._arena = KvArena.reserve(self._kv.size, self.device)
        self._arena.map_scratch()
        return self._arena

    def warmed(self) -> None:
        """The engine is warm: it touches the arena no more until it is promoted."""
        self._arena.rest()  # nothing runs before the promotion, which then has nothing to take away
        kept_kv.rehearse()
        # What is loaded stays: the collector need not walk it again and again while streams run.
        gc.collect()
        gc.freeze()

    def park(self, engine: Served) -> None:
        """Listen for the gateway, follow the ledger, and say so."""
        self.stage = "park"
        self._engine = engine
        self._open_front(engine)
        self._watch = KvWatch(self._kv, self._ring)
        self.open["watch"] = self._watch.stop
        self._watch.start()
        engine.follow(self._kv.reader)
        # Descriptors of a dying process are closed newest first: the lifeline once more, now that everything else is open.
        self._lifeline.renew()
        self._map_ahead()
        self._state(EngineState.PARKED, phase=Phase.PARKED, detail=engine.about)
        log.info("parked")

    def _open_front(self, engine: Served) -> None:
        """Listen for the gateway."""
        self._intake = Intake(engine, self._ring, log.warning)
        self._link = LinkServer(self.spec.link_socket, hello=self._hello(EngineState.PARKED), deliver=self._intake.deliver, log=log.warning)
        self.open["link"] = self._link.close
        self._link.start()

    def _front_state(self, state: EngineState) -> None:
        """Tell the gateway, over the link."""
        if state is EngineState.ACTIVE:
            self._intake.begin()
        self._link.set_hello(self._hello(state))

    def _ring(self) -> None:
        """Any thread: wake the step thread."""
        self._bell.ring()

    def _map_ahead(self) -> None:
        """Put the real blocks behind a device's arena before they are ours: nothing of this engine runs until they are.

        At the promotion the driver's calls would wait for what it does to tear down the engine that has just died (20 to 30 ms).
        """
        if self.device != "host":
            self._kv.map_into(self._arena)
            self._mapped = self._kv.reader

    def wait_for_promotion(self) -> LedgerWriter:
        """Follow the ledger until this engine owns it.

        Raises:
            Leave: it was asked to go instead.
            LedgerLost: another engine was faster.
        """
        while self.writer is None:
            self._bell.wait(FOLLOW_S)
            self.obey()
            if self.writer is None:
                if self._watch.catch_up():
                    log.info("another engine took fresh KV blocks: following those")
                    self._tell_kv_set()
                    self._map_ahead()
                self._refuse(self._intake.take(EngineState.PARKED, 0))
                self._engine.follow(self._kv.reader)
        self.stage = "step"
        compiling.tell(self._compiling)
        return self.writer

    # --- serving ---------------------------------------------------------------------------------------------------------------

    def arrivals(self, wait_s: float = IDLE_S) -> bool:
        """Give the engine what came in. Returns whether there is anything to do; if not, it has waited for that, ``wait_s`` at most.

        Raises:
            LedgerLost: another engine owns the ledger.
        """
        writer, engine = self.writer, self._engine
        assert writer is not None
        self._bell.clear()  # before the inbox is looked at: what comes later rings again
        if waiting := self._intake.weight():
            self._awaiting(Phase.PREFILL, waiting, queued=engine.queued + 1)  # taking it in is work, too: a tokenizer may be slow, or hang
        self._refuse(self._intake.take(self._heart.vitals.state, writer.epoch))
        writer.check()
        if engine.inflight or engine.queued or self._intake.waiting:
            return True
        self._vitals(phase=Phase.IDLE, since_s=0.0, step_tokens=0, stalled_since_s=0.0)
        if not self._orders:
            self._bell.wait(wait_s)
        return False

    def stepping(self, phase: Phase, tokens: int = 0) -> None:
        """A step begins. ``tokens``: at most so many it will compute, 0: not known."""
        compiling.watch_torch()
        self._awaiting(Phase.PREFILL if phase is Phase.IDLE else phase, tokens, queued=self._engine.queued)

    def _awaiting(self, phase: Phase, tokens: int, *, queued: int) -> None:
        before = self._heart.vitals
        since_s = before.since_s or time.monotonic()
        self._heart.update(replace(before, phase=phase, inflight=self._engine.inflight, queued=queued, since_s=since_s, step_tokens=tokens))

    def stepped(
        self, events: Sequence[Accepted | Token | Rejected], phase: Phase, *, progressed: bool = True, next_tokens: int = 0
    ) -> None:
        """A step has ended: send ``events`` as one frame. ``phase``, ``next_tokens``: of the next one. ``progressed``: it did something.

        Raises:
            LedgerLost: another engine owns the ledger; nothing was sent.
        """
        writer = self.writer
        assert writer is not None
        writer.check()  # whoever owns the ledger now speaks to the gateway; we do not
        passing = self._intake.passing(events)
        sent = bool(passing) and self._link.send(passing, self._intake.connection)
        tokens = sum(len(event.ids) for event in passing if isinstance(event, Token))
        if tokens and sent and not self._first_token_sent:
            self._first_token_sent = True
            self._heart.report(
                FirstToken(engine=self.spec.engine, epoch=writer.epoch, sent_s=time.monotonic(), resumed=self._intake.resumed)
            )
        self._step_over(tokens, phase, progressed=progressed, next_tokens=next_tokens)

    def _step_over(self, tokens: int, phase: Phase, *, progressed: bool, next_tokens: int = 0) -> None:
        before, now = self._heart.vitals, time.monotonic()
        stalled_s = 0.0
        if progressed:
            self._heart.step_ended(Gap(now - (before.since_s or now), before.phase, before.step_tokens))
            if self._canary is not None:
                self._heart.report(Canaried(engine=self.spec.engine, number=self._canary.number))
                self._canary = None
        else:
            stalled_s = before.stalled_since_s or now
        self._vitals(
            phase=phase,
            step=before.step + 1,
            last_step_s=now,
            tokens_total=before.tokens_total + tokens,
            since_s=now,
            step_tokens=next_tokens,
            stalled_since_s=stalled_s,
        )

    def stalled(self) -> None:
        """The step could do nothing: wait a little for what it waits for."""
        if not self._intake.waiting and not self._orders:
            self._bell.wait(STALLED_S)

    def _compiling(self, what: str) -> None:
        """Something is being compiled; empty: not any more. It is no part of the step's time."""
        vitals = self._heart.vitals
        if what:
            self._before_compiling = (vitals.phase, time.monotonic())
            self._heart.update(replace(vitals, phase=Phase.WARMING, detail=f"compiling {what}"))
        elif self._before_compiling is not None:
            (phase, began_s), self._before_compiling = self._before_compiling, None
            since_s = vitals.since_s + time.monotonic() - began_s if vitals.since_s else 0.0
            self._heart.update(replace(vitals, phase=phase, detail="", since_s=since_s))

    def _refuse(self, rejected: Sequence[Rejected]) -> None:
        if rejected:
            self._link.send(rejected, self._intake.connection)

    # --- orders ----------------------------------------------------------------------------------------------------------------

    def _on_order(self, order: Order) -> None:
        """Beat thread: take ``order``."""
        if isinstance(order, Hurry):
            self.hurried.set()
        else:
            self._hand_over(order)

    def _hand_over(self, order: Order) -> None:
        """Beat thread: the step thread is to obey ``order``."""
        self._orders.append(order)
        if isinstance(order, Stop | Release):
            self.leaving.ask()
        self._bell.ring()

    def _on_signal(self) -> None:
        self._orders.append(Stop())
        self._bell.ring()

    def obey(self) -> None:
        """Do what the supervisor has ordered.

        Raises:
            Leave: to go.
            LedgerLost: to be promoted, and another engine was faster.
        """
        while self._orders:
            order = self._orders.popleft()
            if isinstance(order, Promote):
                self._promote(order)
            elif isinstance(order, Fence):
                self._fence(order)
            elif isinstance(order, Canary):
                self._take_canary(order)
            elif isinstance(order, Drain):
                self._drain()
            elif isinstance(order, Release | Stop):
                raise Leave
            else:
                log.warning("order %s is not for an engine, ignored", type(order).__name__)

    def _promote(self, order: Promote) -> None:
        if self.writer is not None:
            if self.promoted is not None and order.epoch == self.writer.epoch:
                self._heart.report(self.promoted)  # asked again by a supervisor that has not heard the answer
            else:
                log.warning("ordered to promote to epoch %d while active in epoch %d, ignored", order.epoch, self.writer.epoch)
            return
        self.stage = "promote"
        self._state(EngineState.PROMOTING)
        if self._priority is not None:
            self._priority.restore()
        self._watch.catch_up()
        self._watch.stop()
        if not order.keep_kv:
            self._kv.renew(owner=self.spec.seq, epoch=order.epoch)
        started = time.perf_counter()
        writer = self._kv.take(owner=self.spec.seq, epoch=order.epoch)
        taken = time.perf_counter()
        if self._mapped is not self._kv.reader:
            self._kv.map_into(self._arena)
        mapped = time.perf_counter()
        kept, dropped = self._engine.promote(writer, fenced=order.fenced)
        indexed = time.perf_counter()
        self.writer = writer
        self._front_state(EngineState.ACTIVE)
        self.promoted = Promoted(
            engine=self.spec.engine,
            epoch=writer.epoch,
            header_s=taken - started,
            map_s=mapped - taken,
            index_s=indexed - mapped,
            blocks_kept=kept,
            blocks_dropped=dropped,
        )
        self._heart.report(self.promoted)
        self._state(EngineState.ACTIVE, phase=Phase.IDLE, kv_set=self._kv.set_id, fenced=order.fenced)
        spent = [1e3 * one for one in (taken - started, mapped - taken, indexed - mapped)]
        log.info(
            "active in epoch %d: header %.1f, map %.1f, index %.1f ms; %d blocks kept, %d dropped", writer.epoch, *spent, kept, dropped
        )

    def _fence(self, order: Fence) -> None:
        if self.writer is None or order.epoch != self.writer.epoch:
            log.info("fence of epoch %d is not for this engine now, ignored", order.epoch)
            return
        reserve = self._engine.fence()
        self._heart.report(Fenced(engine=self.spec.engine, epoch=order.epoch, reserve=reserve))
        self._vitals(phase=self._heart.vitals.phase, recount=True, fenced=True)

    def _take_canary(self, order: Canary) -> None:
        """See to it that a step computes something, of a request of our own if there is no other."""
        if self.writer is None:
            log.info("a canary is for an engine that serves, ignored")
            return
        self._canary = order
        one = Submit(
            rid=f"canary {order.number}", epoch=self.writer.epoch, prompt_ids=(0,), sampling=Sampling(max_tokens=1, temperature=0.0, seed=0)
        )
        # Nobody has asked for its answer: `Intake.passing` lets none through.
        getattr(self._engine, "canary", self._engine.submit)(one)

    def _drain(self) -> None:
        if self.writer is None:
            log.info("ordered to drain while nothing is served, ignored")
            return
        self._state(EngineState.DRAINING)
        self._front_state(EngineState.DRAINING)

    # --- what others see -------------------------------------------------------------------------------------------------------

    def _hello(self, state: EngineState) -> Hello:
        spec = self.spec
        epoch = self.writer.epoch if self.writer is not None else 0
        return Hello(
            worker=spec.worker, engine=spec.engine, state=state, epoch=epoch, model=spec.served_name, max_context=self._engine.max_context
        )

    @property
    def draining(self) -> bool:
        return self._heart.vitals.state is EngineState.DRAINING

    def progress(self, words: str) -> None:
        """Say in the beats what goes on."""
        self._heart.update(replace(self._heart.vitals, detail=words))

    def _tell_kv_set(self) -> None:
        self._heart.update(replace(self._heart.vitals, kv_set=self._kv.set_id))

    def _state(self, state: EngineState, **changes: Any) -> None:
        """``changes``: further fields of `Vitals`."""
        epoch = self.writer.epoch if self.writer is not None else 0
        self._heart.update(replace(self._heart.vitals, state=state, epoch=epoch, **changes))

    def _vitals(self, *, phase: Phase, recount: bool = False, **changes: Any) -> None:
        """Hand the present figures to the heart. ``changes``: further fields of `Vitals`."""
        engine, before, now = self._engine, self._heart.vitals, time.monotonic()
        kv = before.kv
        if recount or now - self._kv_counted_s >= KV_COUNTS_S:
            kv, self._kv_counted_s = engine.kv_counts(), now
        self._heart.update(replace(before, phase=phase, inflight=engine.inflight, queued=engine.queued, kv=kv, **changes))

    # --- the end ---------------------------------------------------------------------------------------------------------------

    def _last_words(self, error: BaseException) -> Failed:
        return last_words.failed(self.spec.engine, self.stage, error, getattr(self, "_engine", None) or self.loading)

    def over(self, error: BaseException) -> ExitCode:
        """Leave because of ``error`` (`Leave`: as asked), which is reported and logged. Returns the exit status.

        After a failure only what is seen from outside is closed: the rest goes with the process, whatever state it is in.
        """
        self.leaving.over()
        code = exit_code(error)
        if code is not ExitCode.STOPPED:
            self._heart.report(self._last_words(error))
        log.info("leaving with status %d (%s)", code, code.name.lower())
        if code is ExitCode.STOPPED:
            self._state(EngineState.STOPPING)
        for name in _CLOSING if code is ExitCode.STOPPED else ("link",):
            try:
                self.open.pop(name, lambda: None)()
            except Exception:
                log.exception("closing the %s failed", name)
        self._heart.stop()
        self._bell.close()
        return code
