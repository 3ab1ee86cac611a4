"""The keeper's clients: `KeeperClient` for engines (any thread, no event loop), and `Vault` for the supervisor (asyncio).

A keeper may die and come back at any time. Memory that is mapped is not disturbed by that, and neither is whoever uses it: a client
notices on a thread of its own, connects again and declares what it still holds. Only a call that needs an answer waits for it.
"""

from __future__ import annotations

import logging
import os
import queue
import select
import socket
import threading
import time
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from shadowsup.memkeeper import protocol as p
from shadowsup.memkeeper.channel import Channel, ChannelClosed, OwnedFd
from shadowsup.memkeeper.errors import KeeperError, StaleHandle, refusal
from shadowsup.memkeeper.handles import Handle, HandleSet

if TYPE_CHECKING:
    from shadowsup.memkeeper.vault import Vault

__all__ = ["Handle", "HandleSet", "KeeperClient", "Vault"]

log = logging.getLogger(__name__)


def __getattr__(name: str) -> Any:
    if name == "Vault":  # imported when asked for: an engine has no use for asyncio
        from shadowsup.memkeeper.vault import Vault

        return Vault
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


_RETRY_S = (0.0, 0.01, 0.05, 0.1, 0.2)
"""Pauses between attempts to connect; the last one is repeated."""


class KeeperClient:
    """An engine's connection to the keeper. Thread-safe; calls are answered one after another.

    Args:
        socket_path: the keeper's socket.
        client_id: engine id.
        holds: segments this process has mapped already.
        patience_s: how long a call waits for a keeper that is not there.
    """

    def __init__(self, socket_path: str | os.PathLike[str], client_id: str, holds: Iterable[str] = (), *, patience_s: float = 30.0) -> None:
        self._path = os.fspath(socket_path)
        self._client_id = client_id
        self._patience_s = patience_s
        self._held: dict[str, set[str]] = {"": set(holds)}
        """Segments by set id, as they are declared after a reconnect; under ``""`` those declared by id only."""
        self._stale: frozenset[str] = frozenset()
        self._calls = threading.Lock()
        self._sending = threading.Lock()
        """Held while a channel is sent on or closed."""
        self._state = threading.Condition()
        """Guards what follows, and `_held`."""
        self._channel: Channel | None = None
        self._answers: queue.SimpleQueue[_Reply | None] = queue.SimpleQueue()
        """Of the connection; None: it ended."""
        self._closed = False
        self._last_error = "not connected yet"
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="keeper-client", daemon=True)
        _clients.add(self)
        self._thread.start()

    # --- calls ---------------------------------------------------------------------------------------------------------------

    def get_weights(self, fingerprint: p.Fingerprint, device: str = "host", *, timeout_s: float | None = None) -> HandleSet | None:
        """Return the sealed weights with this fingerprint, or None: they are this client's to publish (`create`, then `seal`).

        Waits while another client publishes them.

        Raises:
            KeeperError: no keeper for ``patience_s``, or no answer in ``timeout_s`` (None: any time).
        """
        reply = self._call(p.GetWeights(fingerprint=fingerprint, device=device), timeout_s)
        return None if reply.answer.publisher else self._adopt(reply)

    def create(
        self,
        fingerprint: p.Fingerprint,
        sizes: Sequence[int],
        *,
        device: str = "host",
        worker: str = "",
        meta: dict[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> HandleSet:
        """Create the weights segments that this client publishes. ``sizes`` in bytes; they come back rounded up to whole pages.

        Raises:
            OutOfMemory: they do not fit.
            KeeperError: another client publishes these weights.
        """
        request = p.Create(
            kind=p.Kind.WEIGHTS, worker=worker, fingerprint=fingerprint, device=device, sizes=tuple(sizes), meta=dict(meta or {})
        )
        return self._adopt(self._call(request, timeout_s))

    def seal(self, set_id: str, meta: dict[str, str] | None = None, *, timeout_s: float | None = 60.0) -> None:
        """End publishing: the content is final and readers get it. ``meta`` is added to every manifest (checksums).

        Host memory is write-sealed, so no mapping that is or could become writable may exist: unmap, and map `Handle.open_readonly`.

        Raises:
            StaleHandle: there is no such set.
            KeeperError: not this client's, or still mapped writable.
        """
        self._call(p.Seal(set_id=set_id, meta=dict(meta or {})), timeout_s)

    def get_kv(
        self,
        worker: str,
        fingerprint: p.Fingerprint,
        kv_sizes: Sequence[int],
        ledger_size: int,
        *,
        device: str = "host",
        ledger_meta: dict[str, str] | None = None,
        fresh: bool = False,
        beside: bool = False,
        devices: Sequence[str] = (),
        timeout_s: float | None = None,
    ) -> HandleSet:
        """Return the worker's KV slabs and, last, its ledger; created where there are none with this fingerprint and these sizes.

        Where ``ledger_meta`` has ``blocks`` and ``block_tokens`` (decimal), the keeper initialises a new ledger with them, with the
        fingerprint's digest and with ``salt`` (32 hex digits; drawn at random where it is missing). What holds is in the ledger's manifest.

        Args:
            fresh: take a new set in any case. The caller drops the old one first if both do not fit.
            beside: a new set does not supersede those that the worker has.
            devices: of each slab, where they are not all on ``device``.

        Raises:
            OutOfMemory: they do not fit.
        """
        request = p.GetKv(
            worker=worker,
            fingerprint=fingerprint,
            device=device,
            kv_sizes=tuple(kv_sizes),
            ledger_size=ledger_size,
            ledger_meta=dict(ledger_meta or {}),
            fresh=fresh,
            beside=beside,
            devices=tuple(devices),
        )
        return self._adopt(self._call(request, timeout_s))

    def drop(self, set_id: str, *, discard: bool = False, timeout_s: float | None = 30.0) -> None:
        """End this client's lease on a set (its mappings and fds stay valid). ``discard``: give the set to nobody any more.

        Raises:
            StaleHandle: there is no such set, and this client never held it.
        """
        with self._state:
            held = self._held.pop(set_id, None)
        try:
            self._call(p.Drop(set_id=set_id, discard=discard), timeout_s)
        except StaleHandle:
            # Where the keeper died meanwhile, the new one was not told of this lease, and may have freed the set: so it is dropped.
            if held is None:
                raise

    def list(self, *, timeout_s: float | None = 30.0) -> tuple[p.SegmentInfo, ...]:
        """Return every segment of the keeper."""
        return self._call(p.ListSegments(), timeout_s).answer.segments

    @property
    def connected(self) -> bool:
        with self._state:
            return self._channel is not None

    @property
    def stale(self) -> frozenset[str]:
        """Held segments that the keeper did not know when this client last connected: they live on in their holders only."""
        with self._state:
            return self._stale

    def close(self) -> None:
        """End all leases. Handles stay open: they are the caller's. Idempotent."""
        with self._state:
            self._closed = True
            self._closing.set()
            channel = self._channel
            self._state.notify_all()
        if channel is not None:
            self._lost(channel, "this keeper client is closed")
        _clients.discard(self)
        if self._thread is not threading.current_thread():
            self._thread.join()

    # --- one call ------------------------------------------------------------------------------------------------------------

    def _call(self, request: p.ToKeeper, timeout_s: float | None) -> _Reply:
        """Send and wait. A keeper that dies meanwhile is asked again when it is back: every request may be repeated."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        with self._calls:
            while True:
                channel, answers = self._connection(deadline)
                try:
                    with self._sending:
                        channel.send(p.encode(request))
                        _flush(channel)
                except ChannelClosed as error:
                    self._lost(channel, str(error))
                    continue
                try:
                    reply = answers.get(timeout=None if deadline is None else max(0.0, deadline - time.monotonic()))
                except queue.Empty:
                    # The answer may still come and would be taken for the next call's.
                    self._lost(channel, "no answer in time")
                    raise KeeperError(f"the keeper at {self._path} did not answer in {timeout_s:g} s", "look at its log") from None
                if reply is not None:
                    if reply.refused is not None:
                        raise refusal(reply.refused.code, reply.refused.message, reply.refused.hint)
                    return reply

    def _connection(self, deadline: float | None) -> tuple[Channel, queue.SimpleQueue[_Reply | None]]:
        patience = time.monotonic() + self._patience_s
        with self._state:
            while self._channel is None and not self._closed:
                left = (patience if deadline is None else min(patience, deadline)) - time.monotonic()
                if left <= 0:
                    raise KeeperError(f"no keeper at {self._path}: {self._last_error}", "is the node running? `shadowsup status`")
                self._state.wait(left)
            if self._channel is None:
                raise KeeperError("this keeper client is closed")
            return self._channel, self._answers

    def _adopt(self, reply: _Reply) -> HandleSet:
        handles = HandleSet(
            (Handle(manifest, fd.detach()) for manifest, fd in zip(reply.manifests, reply.fds, strict=True)), created=reply.answer.created
        )
        with self._state:
            self._held[handles.set_id] = {handle.manifest.segment for handle in handles}
        return handles

    # --- the connection, on its own thread -----------------------------------------------------------------------------------

    def _run(self) -> None:
        attempt = 0
        while not self._closing.wait(_RETRY_S[min(attempt, len(_RETRY_S) - 1)]):
            attempt += 1
            try:
                channel, welcome = self._dial()
            except (ChannelClosed, OSError, KeeperError) as error:
                with self._state:
                    self._last_error = str(error)
                continue
            attempt = 0
            if welcome.stale:
                log.warning("the keeper does not know %d segments that %s holds", len(welcome.stale), self._client_id)
            answers: queue.SimpleQueue[_Reply | None] = queue.SimpleQueue()
            with self._state:
                self._channel, self._answers, self._stale = channel, answers, frozenset(welcome.stale)
                if self._closed:
                    channel.shutdown()
                self._state.notify_all()
            why = _read(channel, answers)
            with self._state:
                self._channel, self._last_error = None, why
            with self._sending:
                channel.close()
            answers.put(None)

    def _dial(self) -> tuple[Channel, p.Welcome]:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        channel = Channel(sock)
        try:
            sock.connect(self._path)  # of a Unix socket: at once, or EAGAIN where the keeper does not accept
            with self._state:
                holds = tuple(sorted(segment for segments in self._held.values() for segment in segments))
            channel.send(p.encode(p.Hello(client=self._client_id, pid=os.getpid(), holds=holds)))
            _flush(channel)
            poll = select.poll()
            poll.register(channel.fileno(), select.POLLIN)
            # A restarted keeper answers only when its vault has restored it: no time limit, but an eye on `close`.
            while not self._closing.is_set():
                for payload in channel.receive() if poll.poll(100) else ():
                    message = p.decode_answer(payload)
                    if isinstance(message, p.Welcome):
                        return channel, message
                    if isinstance(message, p.Refused):
                        raise refusal(message.code, message.message, message.hint)
            raise ChannelClosed("this keeper client is closed")
        except ValueError as error:
            channel.close()
            raise ChannelClosed(f"the peer does not speak the keeper's protocol: {error}") from error
        except BaseException:
            channel.close()
            raise

    def _lost(self, channel: Channel, why: str) -> None:
        """Give a connection up; the reader thread sees its end and makes a new one."""
        with self._state:
            if self._channel is channel:
                self._channel, self._last_error = None, why
        with self._sending:
            channel.shutdown()

    def _forked(self) -> None:
        """In a forked child: it must not keep its parent's leases alive. No lock is taken: its holder may not exist here."""
        self._closed = True
        self._closing.set()
        if self._channel is not None:
            self._channel.close()
            self._channel = None


@dataclass
class _Reply:
    """One answer, which may come in several frames. Its fds are closed with it unless they are detached."""

    answer: p.Answer = field(default_factory=p.Answer)
    refused: p.Refused | None = None
    manifests: list[p.Manifest] = field(default_factory=list)
    fds: list[OwnedFd] = field(default_factory=list)

    def add(self, message: p.Answer, channel: Channel) -> None:
        self.answer = message
        self.manifests += message.manifests
        self.fds += map(OwnedFd, channel.take_fds(len(message.manifests)))

    @property
    def complete(self) -> bool:
        return self.refused is not None or not self.answer.more


def _read(channel: Channel, answers: queue.SimpleQueue[_Reply | None]) -> str:
    """Pass answers on until the connection ends; return why it did."""
    poll = select.poll()
    poll.register(channel.fileno(), select.POLLIN)
    partial = _Reply()
    try:
        while True:
            poll.poll()
            for payload in channel.receive():
                message = p.decode_answer(payload)
                if isinstance(message, p.Answer):
                    partial.add(message, channel)
                elif isinstance(message, p.Refused):
                    partial.refused = message
                else:  # nothing that this client asked for
                    continue
                if partial.complete:
                    answers.put(partial)
                    partial = _Reply()
    except (ChannelClosed, OSError, ValueError) as error:
        return str(error)


def _flush(channel: Channel, timeout_s: float = 10.0) -> None:
    """Send all that is queued.

    Raises:
        ChannelClosed: the peer is gone, or did not read for ``timeout_s``.
    """
    while channel.unsent:
        poll = select.poll()
        poll.register(channel.fileno(), select.POLLOUT)
        if not poll.poll(timeout_s * 1000):
            raise ChannelClosed("the keeper does not read")
        channel.flush()


_clients: weakref.WeakSet[KeeperClient] = weakref.WeakSet()


def _after_fork() -> None:
    for client in list(_clients):
        client._forked()
    _clients.clear()


os.register_at_fork(after_in_child=_after_fork)
