"""Heartbeats and reports in, orders out: the ROUTER that every engine and the gateway dial (`shadowsup.wire.engine`).

The socket's fd is watched by the loop and read without waiting, and while nothing but routine beats comes in, it is read in batches: 64
engines at 5 beats a second cost about one percent of a core, where a wake-up, a task and a future for each message would cost several.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

import msgspec
import zmq

from shadowsup.wire.engine import Order, Report, decode_report, encode
from shadowsup.wire.sensor import SENSOR, SensorBeat

GATEWAY = "gateway"
MAX_BATCH = 1000
"""Messages taken at once before the loop gets its turn."""
MAX_REPORT = 4 * 1024 * 1024
"""Bytes of one message; ZeroMQ drops the connection of a peer that sends a longer one, which then dials again."""
QUIET_S = 0.2
"""Between two reads while only routine beats come in. No death is seen later for it: those have lifelines and pidfds."""
ALERT_S = 1.0
"""After news every message is read at once for this long: more is to come, and a failover may wait for it."""

log = logging.getLogger("shadowsup.beats")

_TAKEN_OVER = b"\0"
"""With this begin the names that ZeroMQ makes up: of connections without one, and of a connection that has ended unread when a newer one
came by its name. (What was unread of one that had not ended is gone.) Whoever dials again repeats what may be lost
(`shadowsup.workers.heartbeat`); beats are not missed."""


class BeatRouter:
    """Needs a running loop.

    Args:
        on_report: called on the loop for each message with the peer (an engine id or ``gateway``) and what it said. Returns whether
            that was news.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], path: Path, on_report: Callable[[str, Report], bool]) -> None:
        self._on_report = on_report
        self._loop = asyncio.get_running_loop()
        self.rejected = 0
        """Messages that were no report."""
        self._heard: set[str] = set()
        """Who has spoken under its own name."""
        self._socket = context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        # A peer that dials again under its name (a restarted gateway, a reconnect) takes over from its dead connection.
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self._socket.setsockopt(zmq.SNDHWM, 10_000)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_REPORT)
        self.endpoint = f"ipc://{path}"
        self._socket.bind(self.endpoint)
        path.chmod(0o600)
        self._fd = int(self._socket.getsockopt(zmq.FD))
        self._again: asyncio.Handle | None = None
        self._alert_until_s = self._loop.time() + ALERT_S
        self._watching = True
        self._loop.add_reader(self._fd, self._readable)

    def drain(self) -> int:
        """Take what has arrived, return how much. Also called before a verdict on silence, so that nothing waits unread."""
        for taken in range(MAX_BATCH):
            try:
                peer = self._socket.recv(zmq.NOBLOCK)
                payload = self._socket.recv(zmq.NOBLOCK)
                if self._socket.getsockopt(
                    zmq.RCVMORE
                ):  # not as an attribute: that is found in ten times the time; messages arrive whole, so the rest of this one is there
                    self._socket.recv_multipart(zmq.NOBLOCK)
                    payload = b""
            except zmq.ZMQError:  # nothing more, or closed
                return taken
            self._take(peer, payload)
        self._wake(0.0)
        return MAX_BATCH

    def alert(self) -> None:
        """Something is going on: read every message at once for a while."""
        self._alert_until_s = self._loop.time() + ALERT_S
        if not self._watching:
            self._wake(0.0)

    def send(self, peer: str, order: Order) -> bool:
        """Send an order. Returns False when the peer is not connected (an order to a dead engine is void anyway)."""
        try:
            self._socket.send_multipart([peer.encode(), encode(order)], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            log.warning("order %s to %s was not sent: %s", type(order).__name__, peer, error)
            return False
        # ZeroMQ's fd is edge-triggered, and sending processes its signals too: look again or a message may lie there unannounced.
        self._wake(0.0)
        return True

    def close(self) -> None:
        """Idempotent."""
        if not self._socket.closed:
            self._watch(False)
            if self._again is not None:
                self._again.cancel()
            self._socket.close()

    def _watch(self, on: bool) -> None:
        if on and not self._watching:
            self._loop.add_reader(self._fd, self._readable)
        elif self._watching and not on:
            self._loop.remove_reader(self._fd)
        self._watching = on

    def _wake(self, after_s: float) -> None:
        if self._again is not None:
            if after_s > 0:
                return
            self._again.cancel()
        self._again = self._loop.call_later(after_s, self._readable) if after_s else self._loop.call_soon(self._readable)

    def _readable(self) -> None:
        if self._again is not None:
            self._again.cancel()
            self._again = None
        taken = self.drain()
        if self._socket.closed:
            return
        if taken and self._loop.time() >= self._alert_until_s:
            self._watch(False)
            self._wake(QUIET_S)
        elif not self._watching:
            self._watch(True)
            if not taken:
                return
            self._wake(0.0)

    def _take(self, identity: bytes, payload: bytes) -> None:
        try:
            report = decode_report(payload)
        except msgspec.MsgspecError as error:
            self.rejected += 1
            log.warning("%r sent no report: %s", identity[:100], error)
            return
        peer = identity.decode(errors="replace")
        name = SENSOR if isinstance(report, SensorBeat) else getattr(report, "engine", GATEWAY)
        if name != peer and identity[:1] == _TAKEN_OVER and name in self._heard:
            log.debug("%s spoke on a connection that another one of its name has taken over meanwhile", name)
            return
        if name != peer:
            # Nobody speaks for another engine: a confused process must not confuse the policy.
            self.rejected += 1
            log.warning("%r sent a report in the name of %r", peer[:100], name[:100])
            return
        self._heard.add(peer)
        try:
            if self._on_report(peer, report):
                self.alert()
        except Exception:
            # One bad event must not end the reading of all others.
            log.exception("a report of %s could not be handled", peer)
