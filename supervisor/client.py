"""The synchronous client of the control socket, for the command line. Imports ZeroMQ only when a request is made."""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shadowsup.supervisor.errors import ExitCode, NoAnswer, NotRunning, SupervisorError
from shadowsup.supervisor.runtime_dir import connected, read_record, socket_names
from shadowsup.wire.credentials import peer

if TYPE_CHECKING:
    import zmq

_LOOK_S = 0.5
"""While no answer comes, whether there is still somebody is looked at this often."""
TIMEOUT_S = 5.0
"""The supervisor answers a reading verb in milliseconds, whatever its engines do."""


class ControlClient:
    """One conversation with the supervisor that serves ``runtime_dir``. Not thread-safe; a context manager.

    Raises on entry and in `call`:
        NotRunning: nothing listens there.
        NoAnswer: something listens but did not answer in ``timeout_s``.
        SupervisorError: it refused; the message, hint and exit code are its own.
    """

    def __init__(self, runtime_dir: Path, timeout_s: float = TIMEOUT_S) -> None:
        self.runtime_dir = runtime_dir
        self.timeout_s = timeout_s
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._socket: zmq.Socket[bytes] | None = None
        self._ids = itertools.count(1)

    def __enter__(self) -> ControlClient:
        peer_pid(self.runtime_dir)
        self._open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open(self) -> None:
        import zmq

        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.connect(f"ipc://{self.runtime_dir / socket_names(self.runtime_dir)[0]}")

    def close(self) -> None:
        """Close the sockets. Idempotent."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        if self._context is not None:
            self._context.term()
            self._context = None

    def call(self, verb: str, timeout_s: float | None = None, /, **args: Any) -> Any:
        """Send one request and return its result (decoded JSON). Raises as the class says."""
        import msgspec

        from shadowsup.supervisor.protocol import Reply, Request

        assert self._socket is not None
        number = next(self._ids)
        self._socket.send(msgspec.json.encode(Request(id=number, verb=verb, args=args)))
        limit_s = self.timeout_s if timeout_s is None else timeout_s
        deadline = time.monotonic() + limit_s
        while True:
            left_s = deadline - time.monotonic()
            if not self._socket.poll(round(max(0.0, min(left_s, _LOOK_S)) * 1000)):
                pid = peer_pid(self.runtime_dir)  # gone in the meantime is another answer than silent
                if left_s > 0:
                    continue
                raise NoAnswer(
                    f"the supervisor{f' (pid {pid})' if pid else ''} did not answer {verb!r} in {limit_s:g} s",
                    "it may be stopped or stuck: look at it with ps; engines and clients go on without it",
                )
            payload = self._socket.recv_multipart()[-1]
            try:
                reply = msgspec.json.decode(payload, type=Reply)
            except msgspec.MsgspecError as error:
                raise SupervisorError(
                    f"the supervisor's answer to {verb!r} is not of this protocol: {error}", "is it of another version?"
                ) from None
            if reply.id != number:
                continue  # the late answer to an earlier request
            if not reply.ok:
                raise SupervisorError(reply.error or f"{verb} failed", reply.hint, exit_code=reply.exit_code or ExitCode.FAILED)
            return reply.result


def call(runtime_dir: Path, verb: str, timeout_s: float = TIMEOUT_S, /, **args: Any) -> Any:
    """Make one request in a conversation of its own; arguments that are None are left out. Raises as `ControlClient`."""
    args = {name: value for name, value in args.items() if value is not None}
    with ControlClient(runtime_dir, timeout_s) as client:
        return client.call(verb, **args)


def peer_pid(runtime_dir: Path) -> int:
    """Return the pid of the process that listens on the control socket, 0 when it cannot be told.

    Raises:
        NotRunning: nothing listens.
        SupervisorError: no permission.
    """
    try:
        with connected(runtime_dir) as probe:
            return peer(probe).pid
    except BlockingIOError:
        return int(read_record(runtime_dir).get("pid") or 0)
    except PermissionError:
        raise SupervisorError(
            f"no permission to talk to the node in {runtime_dir}", "ask its user, or for membership in node.group"
        ) from None
    except OSError:
        raise NotRunning(f"no supervisor is running in {runtime_dir}", _what_is_left(runtime_dir)) from None


def _what_is_left(runtime_dir: Path) -> str:
    """Return what to do about a node without a supervisor: its other processes may serve on."""
    from shadowsup.supervisor.registry import Registry
    from shadowsup.supervisor.runtime_dir import PROCESSES

    left: tuple[object, ...] = ()
    with contextlib.suppress(SupervisorError):
        left = Registry(runtime_dir / PROCESSES).leftovers()
    if not left:
        return "start it with shadowsup start CONFIG"
    return f"{len(left)} processes of this node serve on without one: shadowsup start CONFIG adopts them, shadowsup stop ends them"


def follow_events(client: ControlClient, since: int | None, stop: Callable[[], bool] = lambda: False) -> Iterator[dict[str, Any]]:
    """Yield events from number ``since`` on (None: those the supervisor still has), then each as it happens, without a gap.

    Subscribes first and asks then, as the protocol wants; when numbers are missing it asks again. ``stop`` is asked twice a second; what
    has happened until it says yes is told all the same.

    Raises:
        NotRunning: the supervisor ended.
        SupervisorError: as `ControlClient.call`.
    """
    import msgspec
    import zmq

    assert client._context is not None
    subscriber = client._context.socket(zmq.SUB)
    try:
        subscriber.setsockopt(zmq.LINGER, 0)
        subscriber.setsockopt(zmq.SUBSCRIBE, b"event")
        subscriber.connect(f"ipc://{client.runtime_dir / socket_names(client.runtime_dir)[1]}")
        last = -1 if since is None else since - 1
        for event in _past(client, since):
            last = int(event["n"])
            yield event
        while not stop():
            if not subscriber.poll(500):
                peer_pid(client.runtime_dir)
                # A subscription takes effect a moment after it is asked for: what happened in that moment is asked for here.
                for event in _past(client, last + 1):
                    last = int(event["n"])
                    yield event
                continue
            event = msgspec.json.decode(subscriber.recv_multipart()[-1])
            number = int(event["n"])
            if number <= last:
                continue
            if last >= 0 and number > last + 1:
                for missed in _past(client, last + 1):
                    last = int(missed["n"])
                    yield missed
            if number > last:
                last = number
                yield event
        with contextlib.suppress(SupervisorError):  # whatever becomes of the supervisor now, its client has seen what it waited for
            for event in _past(client, last + 1):
                yield event
    finally:
        subscriber.close()


def _past(client: ControlClient, since: int | None) -> list[dict[str, Any]]:
    result = client.call("events", since=since)
    events = result.get("events", []) if isinstance(result, dict) else result
    return [event for event in events if since is None or int(event["n"]) >= since]


def wait_gone(pidfd: int, timeout_s: float | None) -> bool:
    """Wait until the process of ``pidfd`` is gone; return False after ``timeout_s`` (None: no limit)."""
    import select

    poller = select.poll()
    poller.register(pidfd, select.POLLIN)
    return bool(poller.poll(None if timeout_s is None else max(0, round(timeout_s * 1000))))


def open_process(pid: int) -> int | None:
    """Return a pidfd of ``pid``, None when it is gone."""
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        return None
