"""Where observations come from: the control socket of a running node, looked at from a thread of its own."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import zmq

from shadowsup.errors import ShadowsupError
from shadowsup.supervisor.client import ControlClient, call
from shadowsup.supervisor.errors import NotRunning
from shadowsup.supervisor.runtime_dir import socket_names
from shadowsup.tui.log_tail import LogTail
from shadowsup.tui.story import Observation

LOOK_S = 0.5
"""Between two looks while nothing happens."""
SOONEST_S = 0.1
"""Between two looks while events come in."""
RETRY_S = 1.0
CLOSE_S = 1.0
ANSWER_S = 3.0
"""A reading verb is answered in milliseconds; after this long the banner comes."""


Told = Callable[[Observation], None]
Missed = Callable[[str, str], None]


class Feed(Protocol):
    """Gives observations from a thread of its own, answers to verbs, and lines of logs."""

    name: str
    """For the head of the screen: the runtime directory, or the file that is replayed."""
    live: bool
    """Of a running node; the other kind is a recording."""

    @property
    def note(self) -> str:
        """What else the head of the screen says: that it is recorded, or which moment is played."""
        ...

    def start(self, told: Told, missed: Missed) -> None:
        """Begin. ``told`` and ``missed`` are called from another thread; ``missed`` with message and hint."""

    def ask(self, verb: str, timeout_s: float = ANSWER_S, /, **args: Any) -> Any:
        """Make one request; waits. Raises ShadowsupError."""

    def log_lines(self) -> Sequence[bytes]:
        """Return lines that are new since the last call, in the order of their time; waits for the disk."""

    def close(self) -> None: ...


class LiveFeed:
    """A running node. Subscribes to its events first, so that none is missed, and looks when one comes, or twice a second."""

    live = True
    note = ""

    def __init__(self, runtime_dir: Path, look_s: float = LOOK_S) -> None:
        self.name = str(runtime_dir)
        self._folder = runtime_dir
        self._look_s = look_s
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._tail = LogTail(lambda: self.ask("logs"))

    def start(self, told: Told, missed: Missed) -> None:
        self._thread = threading.Thread(target=self._run, args=(told, missed), name="feed", daemon=True)
        self._thread.start()

    def ask(self, verb: str, timeout_s: float = ANSWER_S, /, **args: Any) -> Any:
        return call(self._folder, verb, timeout_s, **args)

    def log_lines(self) -> Sequence[bytes]:
        return self._tail.read()

    def close(self) -> None:
        """Idempotent."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(CLOSE_S)  # it may be waiting for a supervisor that stands still; nobody waits for it
            self._thread = None
        self._tail.close()

    def _run(self, told: Told, missed: Missed) -> None:
        while not self._stop.is_set():
            try:
                self._follow(told)
            except NotRunning:
                missed("no supervisor serves this node", "engines and clients go on without one; the dashboard connects again by itself")
            except ShadowsupError as error:
                missed(error.message, error.hint)
            except zmq.ZMQError as error:
                missed(f"the connection broke: {error}", "trying again")
            self._stop.wait(RETRY_S)

    def _follow(self, told: Told) -> None:
        """One conversation, until it breaks."""
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        subscriber = context.socket(zmq.SUB)
        try:
            subscriber.setsockopt(zmq.LINGER, 0)
            subscriber.setsockopt(zmq.SUBSCRIBE, b"event")
            subscriber.setsockopt(zmq.RCVHWM, 1000)
            subscriber.connect(f"ipc://{self._folder / socket_names(self._folder)[1]}")
            with ControlClient(self._folder, ANSWER_S) as client:
                look = _Look(client)
                while not self._stop.is_set():
                    began_s = time.monotonic()
                    told(look())
                    self._wait(subscriber, began_s)
        finally:
            subscriber.close()
            context.term()

    def _wait(self, subscriber: zmq.Socket[bytes], began_s: float) -> None:
        """Sleep until the next look is due, or something happened."""
        while not self._stop.is_set():
            left_s = began_s + self._look_s - time.monotonic()
            if left_s <= 0:
                return
            if subscriber.poll(max(1, round(left_s * 1000))):
                # What happened is asked for, in order and without gaps; here it only wakes.
                while subscriber.poll(0):
                    subscriber.recv_multipart()
                self._stop.wait(max(0.0, began_s + SOONEST_S - time.monotonic()))
                return


class _Look:
    """Asks for what is new. A supervisor with another pid, or whose events are numbered anew, is another one."""

    def __init__(self, client: ControlClient) -> None:
        self._client = client
        self._pid: object = None
        self._last = 0

    def __call__(self) -> Observation:
        status = self._client.call("status")
        pid, newest = (status.get("node") or {}).get("pid"), int(status.get("event") or 0)
        fresh = pid != self._pid or newest < self._last
        if fresh:
            self._pid, self._last = pid, 0
        events: list[dict[str, Any]] = []
        if newest > self._last:
            events = list(self._client.call("events", since=self._last + 1).get("events") or [])
            self._last = max([newest, *(int(event["n"]) for event in events)])
        recoveries: list[dict[str, Any]] = []
        if fresh or any(str(event.get("event", "")).startswith("recovery.") for event in events):
            recoveries = list(self._client.call("recoveries").get("recoveries") or [])
        return Observation(status=status, events=tuple(events), recoveries=tuple(recoveries), fresh=fresh, ts=time.time())
