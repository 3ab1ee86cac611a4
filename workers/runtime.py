"""The life of an engine process: load, park, be promoted, serve, leave. One thread (the step thread) does all of it, in order.

Beside it run the heart (`shadowsup.workers.heartbeat`), the link to the gateway (`shadowsup.workers.link`) and the keeper's client; they
hand things over and ring the step thread, and touch neither the adapter nor the ledger.
"""

from __future__ import annotations

import gc
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NoReturn

from shadowsup.errors import ShadowsupError
from shadowsup.memkeeper.client import KeeperClient
from shadowsup.memkeeper.errors import LedgerLost
from shadowsup.memkeeper.ledger import LedgerWriter
from shadowsup.wire.engine import (
    Drain,
    EngineSpec,
    EngineState,
    Failed,
    Fence,
    Fenced,
    FirstToken,
    Order,
    Phase,
    Promote,
    Promoted,
    Release,
    Stop,
)
from shadowsup.wire.link import Hello, Rejected, Token
from shadowsup.workers import kept_kv, process, registry
from shadowsup.workers.api import AdapterFactory, Engine
from shadowsup.workers.arena import KvArena
from shadowsup.workers.doorbell import Doorbell
from shadowsup.workers.errors import ExitCode, WorkerError
from shadowsup.workers.heartbeat import Heart, Vitals
from shadowsup.workers.intake import Intake
from shadowsup.workers.kv_watch import KvWatch
from shadowsup.workers.leaving import Leave, Leaving
from shadowsup.workers.lifeline import Lifeline
from shadowsup.workers.link import LinkServer
from shadowsup.workers.weights import WeightStore

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


def run(spec: EngineSpec, factory: AdapterFactory | None = None) -> ExitCode:
    """Live the life of the engine ``spec`` and return its exit status; everything that goes wrong is reported and logged, not raised.

    Args:
        factory: makes the adapter; None: the registry's for ``spec.kind``.
    """
    return EngineProcess(spec, factory).run()


class EngineProcess:
    """One engine. `run` is called once, on the process's main thread (elsewhere signals are left alone)."""

    def __init__(self, spec: EngineSpec, factory: AdapterFactory | None = None) -> None:
        self._spec = spec
        self._factory = factory
        self._device = spec.gpus[spec.rank] if spec.gpus else "host"
        self._bell = Doorbell()
        self._orders: deque[Order] = deque()
        self._leaving = Leaving(self._on_signal)
        self._stage = "load"
        self._lifeline = Lifeline(spec.lifeline_fd)
        self._heart = Heart(
            engine=spec.engine,
            endpoint=spec.beat_endpoint,
            interval_s=spec.heartbeat_s,
            vitals=Vitals(state=EngineState.LOADING, phase=Phase.LOADING),
            on_order=self._on_order,
            log=log.warning,
        )
        self._engine: Engine
        self._keeper: KeeperClient
        self._kv: kept_kv.KeptKv
        self._watch: KvWatch
        self._arena: KvArena
        self._intake: Intake
        self._link: LinkServer
        self._writer: LedgerWriter | None = None
        self._promoted: Promoted | None = None
        self._first_token_sent = False
        self._kv_counted_s = 0.0
        self._open: dict[str, Callable[[], None]] = {}
        """What an orderly end closes, by the names in `_CLOSING`."""

    # --- the whole life --------------------------------------------------------------------------------------------------------

    def run(self) -> ExitCode:
        with self._leaving.signals():
            try:
                self._heart.start()
                self._live()
            except Leave:
                return self._end(ExitCode.STOPPED)
            except LedgerLost as error:
                self._report_failure(error)
                return self._end(ExitCode.LEDGER_LOST)
            except BaseException as error:
                self._report_failure(error)
                return self._end(ExitCode.FATAL if isinstance(error, WorkerError) and error.fatal else ExitCode.FAILED)

    def _live(self) -> NoReturn:
        with self._leaving.interruptible():
            priority = process.Priority.from_environment()
            self._load()
            self._warm()
        self._park()
        while self._writer is None:
            self._bell.wait(FOLLOW_S)
            self._obey(priority)
            if self._writer is None:
                if self._watch.catch_up():
                    log.info("another engine took fresh KV blocks: following those")
                self._refuse(self._intake.take(EngineState.PARKED, 0))
                self._engine.follow(self._kv.reader)
        self._stage = "step"
        while True:
            self._serve()
            self._obey(priority)

    def _load(self) -> None:
        spec = self._spec
        log.info("loading %s (%s)", spec.model, spec.kind)
        self._keeper = KeeperClient(spec.keeper_socket, spec.engine)
        self._open["keeper"] = self._keeper.close
        store = WeightStore(self._keeper, device=self._device, verify=spec.verify)
        self._engine = (self._factory or registry.factory(spec.kind))()
        self._open["engine"] = self._engine.close
        self._engine.load(spec, store, self._progress)
        self._lifeline.renew()
        geometry = self._engine.geometry()
        self._kv = kept_kv.KeptKv(
            self._keeper,
            worker=spec.worker,
            device=self._device,
            geometry=geometry,
            fingerprint=kept_kv.fingerprint(store.fingerprint, geometry),
        )
        self._open["kv"] = self._kv.close

    def _warm(self) -> None:
        self._stage = "warm"
        self._state(EngineState.WARMING, phase=Phase.WARMING, detail="")
        self._arena = KvArena.reserve(self._kv.size, self._device)
        self._open["arena"] = self._arena.close
        self._arena.map_scratch()
        self._engine.warm(self._arena)
        self._arena.rest()  # nothing runs before the promotion, which then has nothing to take away
        kept_kv.rehearse()
        # What is loaded stays: the collector need not walk it again and again while streams run.
        gc.collect()
        gc.freeze()

    def _park(self) -> None:
        self._stage = "park"
        self._intake = Intake(self._engine, self._bell.ring, log.warning)
        self._link = LinkServer(
            self._spec.link_socket, hello=self._hello(EngineState.PARKED), deliver=self._intake.deliver, log=log.warning
        )
        self._open["link"] = self._link.close
        self._link.start()
        self._watch = KvWatch(self._kv, self._bell.ring)
        self._open["watch"] = self._watch.stop
        self._watch.start()
        self._engine.follow(self._kv.reader)
        # Descriptors of a dying process are closed newest first: the lifeline once more, now that everything else is open.
        self._lifeline.renew()
        self._state(EngineState.PARKED, phase=Phase.PARKED, detail="")
        log.info("parked")

    # --- serving ---------------------------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        """Run one step, or wait until there is something to do."""
        writer, engine = self._writer, self._engine
        assert writer is not None
        self._bell.clear()  # before the inbox is looked at: what comes later rings again
        self._refuse(self._intake.take(self._heart.vitals.state, writer.epoch))
        writer.check()
        if not (engine.inflight or engine.queued or self._intake.waiting):
            self._vitals(phase=Phase.IDLE)
            if not self._orders:
                self._bell.wait(IDLE_S)
            return
        phase = engine.phase
        self._vitals(phase=Phase.PREFILL if phase is Phase.IDLE else phase)
        result = engine.step()
        writer.check()  # whoever owns the ledger now speaks to the gateway; we do not
        events = self._intake.passing(result.events)
        sent = bool(events) and self._link.send(events, self._intake.connection)
        tokens = sum(len(event.ids) for event in events if isinstance(event, Token))
        if tokens and sent and not self._first_token_sent:
            self._first_token_sent = True
            self._heart.report(
                FirstToken(engine=self._spec.engine, epoch=writer.epoch, sent_s=time.monotonic(), resumed=self._intake.resumed)
            )
        before = self._heart.vitals
        self._vitals(phase=engine.phase, step=before.step + 1, last_step_s=time.monotonic(), tokens_total=before.tokens_total + tokens)
        if not result.progressed and not self._intake.waiting and not self._orders:
            self._bell.wait(STALLED_S)

    def _refuse(self, rejected: Sequence[Rejected]) -> None:
        if rejected:
            self._link.send(rejected, self._intake.connection)

    # --- orders ----------------------------------------------------------------------------------------------------------------

    def _on_order(self, order: Order) -> None:
        """Beat thread: hand ``order`` over."""
        self._orders.append(order)
        if isinstance(order, Stop | Release):
            self._leaving.ask()
        self._bell.ring()

    def _on_signal(self) -> None:
        self._orders.append(Stop())
        self._bell.ring()

    def _obey(self, priority: process.Priority) -> None:
        while self._orders:
            order = self._orders.popleft()
            if isinstance(order, Promote):
                self._promote(order, priority)
            elif isinstance(order, Fence):
                self._fence(order)
            elif isinstance(order, Drain):
                self._drain()
            elif isinstance(order, Release | Stop):
                raise Leave
            else:
                log.warning("order %s is not for an engine, ignored", type(order).__name__)

    def _promote(self, order: Promote, priority: process.Priority) -> None:
        if self._writer is not None:
            if self._promoted is not None and order.epoch == self._writer.epoch:
                self._heart.report(self._promoted)  # asked again by a supervisor that has not heard the answer
            else:
                log.warning("ordered to promote to epoch %d while active in epoch %d, ignored", order.epoch, self._writer.epoch)
            return
        self._stage = "promote"
        self._state(EngineState.PROMOTING)
        priority.restore()
        self._watch.catch_up()
        self._watch.stop()
        if not order.keep_kv:
            self._kv.renew(owner=self._spec.seq, epoch=order.epoch)
        started = time.perf_counter()
        writer = self._kv.take(owner=self._spec.seq, epoch=order.epoch)
        taken = time.perf_counter()
        self._kv.map_into(self._arena)
        mapped = time.perf_counter()
        kept, dropped = self._engine.promote(writer, fenced=order.fenced)
        indexed = time.perf_counter()
        self._writer = writer
        self._intake.begin()
        self._link.set_hello(self._hello(EngineState.ACTIVE))
        self._promoted = Promoted(
            engine=self._spec.engine,
            epoch=writer.epoch,
            header_s=taken - started,
            map_s=mapped - taken,
            index_s=indexed - mapped,
            blocks_kept=kept,
            blocks_dropped=dropped,
        )
        self._heart.report(self._promoted)
        self._state(EngineState.ACTIVE, phase=Phase.IDLE)
        log.info("active in epoch %d after %.1f ms: %d blocks kept, %d dropped", writer.epoch, 1e3 * (indexed - started), kept, dropped)

    def _fence(self, order: Fence) -> None:
        if self._writer is None or order.epoch != self._writer.epoch:
            log.info("fence of epoch %d is not for this engine now, ignored", order.epoch)
            return
        reserve = self._engine.fence()
        self._heart.report(Fenced(engine=self._spec.engine, epoch=order.epoch, reserve=reserve))
        self._vitals(phase=self._heart.vitals.phase, recount=True)

    def _drain(self) -> None:
        if self._writer is None:
            log.info("ordered to drain while nothing is served, ignored")
            return
        self._state(EngineState.DRAINING)
        self._link.set_hello(self._hello(EngineState.DRAINING))

    # --- what others see -------------------------------------------------------------------------------------------------------

    def _hello(self, state: EngineState) -> Hello:
        spec = self._spec
        epoch = self._writer.epoch if self._writer is not None else 0
        return Hello(
            worker=spec.worker, engine=spec.engine, state=state, epoch=epoch, model=spec.served_name, max_context=self._engine.max_context
        )

    def _progress(self, words: str) -> None:
        self._heart.update(replace(self._heart.vitals, detail=words))

    def _state(self, state: EngineState, *, phase: Phase | None = None, detail: str | None = None) -> None:
        vitals = self._heart.vitals
        epoch = self._writer.epoch if self._writer is not None else 0
        self._heart.update(
            replace(vitals, state=state, epoch=epoch, phase=phase or vitals.phase, detail=vitals.detail if detail is None else detail)
        )

    def _vitals(
        self,
        *,
        phase: Phase,
        step: int | None = None,
        last_step_s: float | None = None,
        tokens_total: int | None = None,
        recount: bool = False,
    ) -> None:
        """Hand the present figures to the heart."""
        before, now = self._heart.vitals, time.monotonic()
        kv = before.kv
        if recount or now - self._kv_counted_s >= KV_COUNTS_S:
            kv, self._kv_counted_s = self._engine.kv_counts(), now
        self._heart.update(
            replace(
                before,
                phase=phase,
                step=before.step if step is None else step,
                last_step_s=before.last_step_s if last_step_s is None else last_step_s,
                tokens_total=before.tokens_total if tokens_total is None else tokens_total,
                inflight=self._engine.inflight,
                queued=self._engine.queued,
                kv=kv,
            )
        )

    # --- the end ---------------------------------------------------------------------------------------------------------------

    def _report_failure(self, error: BaseException) -> None:
        if isinstance(error, ShadowsupError):
            message, hint = error.message, error.hint
            log.error("cannot go on (%s): %s", self._stage, error)
        else:
            message, hint = f"{type(error).__name__}: {error}", "the engine's log has the traceback"
            log.error("cannot go on (%s): %s", self._stage, message, exc_info=error)
        fatal = isinstance(error, WorkerError) and error.fatal
        self._heart.report(Failed(engine=self._spec.engine, stage=self._stage, message=message, hint=hint, fatal=fatal))

    def _end(self, code: ExitCode) -> ExitCode:
        """Leave. After a failure only what is seen from outside is closed: the rest goes with the process, whatever state it is in."""
        self._leaving.over()
        log.info("leaving with status %d (%s)", code, code.name.lower())
        if code is ExitCode.STOPPED:
            self._state(EngineState.STOPPING)
        for name in _CLOSING if code is ExitCode.STOPPED else ("link",):
            try:
                self._open.pop(name, lambda: None)()
            except Exception:
                log.exception("closing the %s failed", name)
        self._heart.stop()
        self._bell.close()
        return code
