"""The engine's voice: a thread of its own that beats to the supervisor, sends its reports and takes its orders.

The step thread may be inside one long torch call; this thread goes on beating then, with the step and phase that the step thread last
handed over, so that a step loop that stands still is visible as such. ZeroMQ reconnects by itself: a supervisor that is away is no event
here. Beats of that time are dropped, reports are kept; what a breaking connection may have swallowed is reported again, so a report can
come twice.
"""

from __future__ import annotations

import math
import os
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import zmq

from shadowsup.wire import engine as wire
from shadowsup.wire.engine import Beat, EngineState, KvCounts, Phase
from shadowsup.workers.doorbell import Doorbell

_EVENT = struct.Struct("=HI")
"""First frame of a monitor message: event, value (zmq_socket_monitor(3); zmq.utils.monitor would import asyncio)."""

_RECONNECT_MS, _RECONNECT_MAX_MS = 20, 200
_KEPT_REPORTS = 256

_UNSURE_S = 1.0
"""A report that was sent less than this before a connection broke may have been lost with it, and is sent once more."""

EngineReport = wire.Promoted | wire.FirstToken | wire.Fenced | wire.Canaried | wire.Failed


@dataclass(frozen=True, slots=True, kw_only=True)
class Vitals:
    """What a beat says of the step thread; never changed once handed over."""

    state: EngineState
    phase: Phase
    epoch: int = 0
    step: int = 0
    inflight: int = 0
    queued: int = 0
    last_step_s: float = 0.0
    tokens_total: int = 0
    kv: KvCounts | None = None
    detail: str = ""
    kv_set: str = ""
    fenced: bool = True
    since_s: float = 0.0
    step_tokens: int = 0
    stalled_since_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Gap:
    """A wait for a step that has ended: seconds, and the step's phase and tokens."""

    seconds: float
    phase: Phase
    tokens: int


class Heart:
    """Beats for ``engine`` over ``endpoint`` every ``interval_s`` from `start` to `stop`.

    Args:
        vitals: what the first beat says.
        on_order: called on the beat thread for every order; must only hand it on (and wake somebody).
    """

    def __init__(
        self,
        *,
        engine: str,
        endpoint: str,
        interval_s: float,
        vitals: Vitals,
        on_order: Callable[[wire.Order], None],
        log: Callable[[str], None] = lambda line: None,
    ) -> None:
        self._engine = engine
        self._endpoint = endpoint
        self._interval_s = interval_s
        self._vitals = vitals
        self._on_order = on_order
        self._log = log
        self.front: Callable[[], tuple[float, int]] | None = None
        """Says when the loop of the server in front last turned and how many requests it had; None: there is no such server."""
        self._bell = Doorbell()
        self._longest: Gap | None = None
        self._reports: deque[EngineReport] = deque(maxlen=_KEPT_REPORTS)
        self._sent: deque[tuple[float, EngineReport]] = deque(maxlen=_KEPT_REPORTS)
        self._ordered = 0
        self._stopping = False
        self._linger_s = 0.0
        self._thread = threading.Thread(target=self._run, name="heart", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def vitals(self) -> Vitals:
        """What was handed over last."""
        return self._vitals

    def update(self, vitals: Vitals) -> None:
        """Hand over what the next beat says. A change of state or epoch is sent at once."""
        before, self._vitals = self._vitals, vitals
        if before.state is not vitals.state or before.epoch != vitals.epoch:
            self._bell.ring()

    def step_ended(self, gap: Gap) -> None:
        """The next beat tells of the longest of these; one that ends in the very instant of a beat may be left out."""
        longest = self._longest
        if longest is None or gap.seconds > longest.seconds:
            self._longest = gap

    def report(self, report: EngineReport) -> None:
        """Send ``report``, behind a beat with the present state. Kept while the supervisor is away."""
        self._reports.append(report)
        self._bell.ring()

    def stop(self, linger_s: float = 0.5) -> None:
        """Send what is left, for at most ``linger_s``, and end the thread. Idempotent."""
        self._linger_s = linger_s
        self._stopping = True
        self._bell.ring()
        if self._thread.is_alive():
            self._thread.join(linger_s * 2 + 1.0)
            if self._thread.is_alive():  # closing the bell under a living thread would hand it a stranger's descriptor
                return
        self._bell.close()

    def _run(self) -> None:
        context = zmq.Context()
        socket = context.socket(zmq.DEALER)
        socket.setsockopt(zmq.ROUTING_ID, self._engine.encode())
        socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, _RECONNECT_MAX_MS)
        # Nothing is queued for a supervisor that is away: it would get a burst of stale beats when it is back.
        socket.setsockopt(zmq.IMMEDIATE, 1)
        monitor = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        socket.connect(self._endpoint)
        poller = zmq.Poller()
        poller.register(socket, zmq.POLLIN)
        poller.register(self._bell.fd, zmq.POLLIN)
        poller.register(monitor, zmq.POLLIN)
        try:
            self._loop(socket, monitor, poller)
        finally:
            socket.disable_monitor()
            monitor.close(linger=0)
            socket.close(linger=int(self._linger_s * 1000))
            context.term()

    def _loop(self, socket: zmq.Socket[bytes], monitor: zmq.Socket[bytes], poller: zmq.Poller) -> None:
        due = time.monotonic()
        while not self._stopping:
            ready = dict(poller.poll(math.ceil(max(0.0, due - time.monotonic()) * 1000)))
            if self._bell.fd in ready:
                self._bell.clear()
                due = 0.0
            if monitor in ready and self._connection_changed(monitor):
                due = 0.0  # the first beat after a (re)connection is what the supervisor waits for
            if socket in ready:
                self._take_orders(socket)
            now = time.monotonic()
            if now >= due:
                # A connection is announced a little before it takes messages.
                due = now + (self._interval_s if self._beat(socket) else min(self._interval_s, _RECONNECT_MS / 1000))
        deadline = time.monotonic() + self._linger_s
        while not self._beat(socket) and time.monotonic() < deadline:
            poller.poll(5)
            self._bell.clear()

    def _connection_changed(self, monitor: zmq.Socket[bytes]) -> bool:
        """Take what happened to the connection. Returns whether there is one now."""
        connected = False
        while monitor.poll(0):
            event, _ = _EVENT.unpack(monitor.recv_multipart()[0])
            connected = event == zmq.EVENT_HANDSHAKE_SUCCEEDED
            if not connected:
                unsure = [report for sent_s, report in self._sent if time.monotonic() - sent_s < _UNSURE_S]
                self._reports.extendleft(reversed(unsure))
                self._sent.clear()
        return connected

    def _beat(self, socket: zmq.Socket[bytes]) -> bool:
        """Send a beat and the reports that wait. Returns whether there was somebody to send to."""
        v, gap = self._vitals, self._longest
        front_s, front_open = self.front() if self.front is not None else (0.0, 0)
        beat = Beat(
            engine=self._engine,
            pid=os.getpid(),
            sent_s=time.monotonic(),
            state=v.state,
            phase=v.phase,
            epoch=v.epoch,
            step=v.step,
            inflight=v.inflight,
            queued=v.queued,
            last_step_s=v.last_step_s,
            tokens_total=v.tokens_total,
            kv=v.kv,
            detail=v.detail,
            ordered=self._ordered,
            kv_set=v.kv_set,
            fenced=v.fenced,
            since_s=v.since_s,
            step_tokens=v.step_tokens,
            stalled_since_s=v.stalled_since_s,
            gap_s=gap.seconds if gap is not None else 0.0,
            gap_phase=gap.phase if gap is not None else Phase.IDLE,
            gap_tokens=gap.tokens if gap is not None else 0,
            front_s=front_s,
            front_open=front_open,
        )
        try:
            socket.send(wire.encode(beat), zmq.NOBLOCK)
            if self._longest is gap:
                self._longest = None
            while self._reports:
                socket.send(wire.encode(self._reports[0]), zmq.NOBLOCK)
                self._sent.append((time.monotonic(), self._reports.popleft()))
        except zmq.Again:
            return False
        return True

    def _take_orders(self, socket: zmq.Socket[bytes]) -> None:
        while True:
            try:
                data = socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                order = wire.decode_order(data)
            except msgspec.MsgspecError as error:
                self._log(f"order not understood, ignored: {error}")
                continue
            if isinstance(order, wire.Promote):
                # Told in the very next beat, whatever the step thread is at: a new supervisor must not promote another one meanwhile.
                self._ordered = max(self._ordered, order.epoch)
            self._on_order(order)
