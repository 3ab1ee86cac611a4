"""The keeper: requests in, the book decides, fds out. One thread; sockets that never block it (`shadowsup.memkeeper.hub`).

Memory is allocated on a worker thread (filling 100 GB takes tens of seconds), one set at a time; everything else goes on meanwhile.
"""

from __future__ import annotations

import logging
import queue
import secrets
import socket
import threading
import time
from collections.abc import Callable
from typing import assert_never

import msgspec

from shadowsup.memkeeper import protocol as p
from shadowsup.memkeeper.allocation import Allocator, Job, Segments
from shadowsup.memkeeper.book import Book, Changed, Effect, Freed, Grant, Publish, kv_devices
from shadowsup.memkeeper.channel import ChannelClosed, OwnedFd
from shadowsup.memkeeper.deposits import Deposits, Waiter
from shadowsup.memkeeper.errors import KeeperError, refusal_code
from shadowsup.memkeeper.hub import Connection, Hub, ProtocolError
from shadowsup.memkeeper.ledger_word import read_owner
from shadowsup.memkeeper.segments import SegmentSet

log = logging.getLogger("shadowsup.memkeeper")

EXPECT_S = 10.0
"""How long after a restore the former clients are waited for. They connect within a second of the socket being there."""
ACK_S = 10.0
"""How long the vault may take to acknowledge a deposit before it counts as gone: a stopped supervisor must not stop engines."""
VAULT_BACKLOG = 64 * 1024 * 1024
"""Bytes: a vault that connects is sent everything at once, about 1 KB a segment."""

_FROM_VAULT = (p.Deposited, p.Restore, p.Restored, p.Free)
_FROM_ENGINE = (p.GetWeights, p.Create, p.Seal, p.GetKv, p.Drop)


class Keeper:
    """Serves ``listener`` until `stop`.

    Args:
        listener: bound and listening; the caller's.
        allocator: over the backend.
        restoring: wait for a vault's `Restored` before anyone else is served.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        listener: socket.socket,
        allocator: Allocator,
        *,
        restoring: bool = False,
        clock: Callable[[], float] = time.monotonic,
        expect_s: float = EXPECT_S,
        ack_s: float = ACK_S,
    ) -> None:
        # Milliseconds since boot: every later keeper of this boot has a larger one, without any file that remembers it.
        self.generation = int(time.monotonic() * 1000)
        self._allocator = allocator
        self._restoring = restoring
        self._clock = clock
        self._expect_s, self._ack_s = expect_s, ack_s
        self._expire_at: float | None = None
        self._book = Book(self.generation, new_id=lambda: secrets.token_hex(6), clock=clock)
        self._fds: dict[str, OwnedFd] = {}
        self._deposits = Deposits()
        self._restored: list[tuple[p.SegmentInfo, OwnedFd]] = []
        self._vault: Connection | None = None
        self._to_pump: dict[int, Connection] = {}
        self._job: Job | None = None
        self._done: queue.SimpleQueue[Segments | Exception] = queue.SimpleQueue()
        self._stopping = False
        self._hub = Hub(listener, clock=clock, on_request=self._pump_soon, on_closed=self._closed)

    def run(self) -> None:
        """Serve until `stop`, then close every connection. What the fds' other holders map stays."""
        try:
            while not self._stopping:
                self._hub.select(self._next_deadline())
                if not self._done.empty():
                    self._allocated(self._done.get())
                self._on_time()
                while self._to_pump:
                    self._pump(self._to_pump.pop(next(iter(self._to_pump))))
        finally:
            self._hub.close_all()
            self._fds.clear()
            self._restored.clear()

    def stop(self) -> None:
        """End `run`. May be called from a signal handler or another thread."""
        self._stopping = True
        self._hub.wake()

    # --- time ----------------------------------------------------------------------------------------------------------------

    def _next_deadline(self) -> float | None:
        oldest = self._deposits.oldest_s
        deadlines = [self._expire_at, None if oldest is None else oldest + self._ack_s]
        return min((at for at in deadlines if at is not None), default=None)

    def _on_time(self) -> None:
        now = self._clock()
        if self._expire_at is not None and now >= self._expire_at:
            self._expire_at = None
            self._apply(self._book.expire())
        oldest = self._deposits.oldest_s
        if self._vault is not None and oldest is not None and now >= oldest + self._ack_s:
            self._hub.close(self._vault, f"acknowledged no deposit for {self._ack_s:g} s")

    # --- connections ---------------------------------------------------------------------------------------------------------

    def _closed(self, connection: Connection) -> None:
        self._to_pump.pop(connection.number, None)
        if connection is self._vault:
            self._vault = None
            self._restored.clear()
            # Nobody to wait for: engines go on without a vault.
            self._hand_out(self._deposits.vault_gone())
        self._apply(self._book.disconnect(connection.number))

    def _answer(self, connection: Connection, message: p.Answer | p.Refused | p.Welcome) -> None:
        """Send the answer to what ``connection`` is busy with."""
        connection.busy = False
        self._pump_soon(connection)
        self._hub.send(connection, message)

    def _answer_set(self, connection: Connection, each: SegmentSet, *, created: bool) -> None:
        """The same with the fds of ``each``, in as many frames as SCM_MAX_FD asks for."""
        connection.busy = False
        self._pump_soon(connection)
        parts = [each.manifests[start : start + p.MAX_FDS] for start in range(0, len(each.manifests), p.MAX_FDS)]
        # All of them now: should a send fail, the set may be freed while we are here.
        fds = [[self._fds[manifest.segment] for manifest in part] for part in parts]
        for number, part in enumerate(parts):
            frame = p.Answer(manifests=part, created=created, more=number + 1 < len(parts))
            self._hub.send(connection, frame, fds[number])

    def _refuse(self, connection: Connection, error: KeeperError) -> None:
        log.warning("refused %s: %s", connection, error)
        self._answer(connection, p.Refused(message=error.message, hint=error.hint, code=refusal_code(error)))

    # --- requests ------------------------------------------------------------------------------------------------------------

    def _pump_soon(self, connection: Connection) -> None:
        if connection.number in self._hub.connections:
            self._to_pump[connection.number] = connection

    def _pump_all(self) -> None:
        self._to_pump.update(self._hub.connections)

    def _pump(self, connection: Connection) -> None:
        """Work on the next request of ``connection`` if it can be worked on now."""
        if not connection.requests or connection.busy:
            return
        request = connection.requests[0]
        is_vault = connection.vault or (isinstance(request, p.Hello) and request.vault)
        if (self._restoring and not is_vault) or (self._job is not None and isinstance(request, p.Create | p.GetKv)):
            return
        connection.requests.popleft()
        connection.busy = True
        try:
            self._handle(connection, request)
        except KeeperError as error:
            self._refuse(connection, error)
        except (ProtocolError, ChannelClosed) as error:
            self._hub.close(connection, str(error))

    def _handle(self, connection: Connection, request: p.ToKeeper) -> None:
        if isinstance(request, p.Hello) != (not connection.client):
            raise ProtocolError("a connection begins with one hello")
        if connection.channel.untaken and not (connection.vault or (isinstance(request, p.Hello) and request.vault)):
            raise ProtocolError("only the vault sends fds")
        if isinstance(request, _FROM_ENGINE if connection.vault else _FROM_VAULT):
            raise KeeperError("this request is not for a connection of this kind", "orders are the vault's, leases are engines'")
        match request:
            case p.Hello():
                self._hello(connection, request)
            case p.GetWeights():
                self._apply(self._book.get_weights(connection.number, request.fingerprint, request.device))
            case p.Create():
                sizes = self._allocator.round_up(request.sizes, request.device)
                self._start(connection, self._book.plan_weights(connection.number, request, sizes))
            case p.GetKv():
                self._get_kv(connection, request)
            case p.Seal():
                self._seal(connection, request)
            case p.Drop():
                self._apply(self._book.drop(connection.number, request.set_id, discard=request.discard))
                self._answer(connection, p.Answer())
            case p.Free():
                self._apply(self._book.free(worker=request.worker, set_id=request.set_id))
                self._answer(connection, p.Answer())
            case p.ListSegments():
                self._answer(connection, p.Answer(segments=tuple(map(self._with_owner, self._book.infos()))))
            case p.Deposited():
                connection.busy = False
                self._pump_soon(connection)
                self._hand_out(self._deposits.acknowledged(request.number))
            case p.Restore():
                fds = [OwnedFd(fd) for fd in connection.channel.take_fds(len(request.segments))]
                self._restored += zip(request.segments, fds, strict=True)
                self._answer(connection, p.Answer())
            case p.Restored():
                self._finish_restore(connection)
            case _:
                assert_never(request)

    def _hello(self, connection: Connection, request: p.Hello) -> None:
        if not request.client:
            raise ProtocolError("a client has a name")
        connection.client, connection.vault = request.client, request.vault
        stale: tuple[str, ...] = ()
        if request.vault:
            if self._vault is not None:
                self._hub.close(self._vault, f"{connection} is the vault now")
            self._vault = connection
            connection.channel.backlog = VAULT_BACKLOG
            for each in list(self._book.sets.values()):
                self._deposit(each)
        else:
            stale, effects = self._book.connect(connection.number, request.client, request.holds)
            self._apply(effects)
        restoring = self._restoring and request.vault
        welcome = p.Welcome(generation=self.generation, backend=self._allocator.backend.name, restoring=restoring, stale=stale)
        self._answer(connection, welcome)

    def _get_kv(self, connection: Connection, request: p.GetKv) -> None:
        sizes = [
            size
            for wanted, device in zip(request.kv_sizes, kv_devices(request), strict=True)
            for size in self._allocator.round_up([wanted], device)
        ]
        (ledger_size,) = self._allocator.round_up([request.ledger_size], "host")
        if each := self._book.find_kv(request, sizes, ledger_size):
            self._apply(self._book.lease(connection.number, each))
            self._promise(connection, each, created=False)
            return
        meta = dict(request.ledger_meta)
        if "blocks" in meta:
            meta.setdefault("salt", secrets.token_hex(16))
        planned = self._book.plan_kv(request, sizes, ledger_size, meta)
        # Before the new one is allocated: memory may be short, and what nobody leases would be freed anyway.
        if not request.beside:
            self._apply(self._book.supersede(request.worker))
        self._start(connection, planned)

    def _seal(self, connection: Connection, request: p.Seal) -> None:
        each = self._book.to_seal(connection.number, request.set_id)
        if each is not None:
            for manifest in each.manifests:
                self._allocator.seal(self._fds[manifest.segment].fileno(), manifest.device)
            self._apply(self._book.seal(each, request.meta))
            log.info("sealed %s: %d bytes of %s", each.set_id, each.size, connection.client)
        self._answer(connection, p.Answer())

    def _with_owner(self, info: p.SegmentInfo) -> p.SegmentInfo:
        """Add whom the ledger's header names: the book follows it."""
        each = self._book.sets[info.manifest.set_id]
        if each.weights:
            return info
        epoch, owner = read_owner(self._fds[each.manifests[-1].segment].fileno())
        return msgspec.structs.replace(info, epoch=epoch, owner=owner)

    # --- allocation ----------------------------------------------------------------------------------------------------------

    def _start(self, connection: Connection, planned: SegmentSet) -> None:
        holdings = self._book.holdings()
        self._allocator.require(planned, holdings)
        self._job = Job(connection.number, planned)

        def allocate() -> Segments | Exception:
            try:
                return self._allocator.allocate(planned, holdings)
            except Exception as error:
                return error

        def work() -> None:
            # Held by nobody else when the keeper is woken: a thread that ends late would keep memory that was freed meanwhile.
            self._done.put(allocate())
            self._hub.wake()

        threading.Thread(target=work, name="allocate", daemon=True).start()

    def _allocated(self, result: Segments | Exception) -> None:
        job, self._job = self._job, None
        assert job is not None
        self._pump_all()
        connection = self._hub.connections.get(job.connection)
        if connection is None:  # whoever asked is gone; the fds go with the result
            return
        if isinstance(result, Exception):
            self._refuse(connection, result if isinstance(result, KeeperError) else KeeperError(f"cannot create memory: {result}"))
            return
        each = job.planned
        self._fds.update(result)
        self._book.add(connection.number, each)
        log.info("created %s: %s, %d bytes for %s", each.set_id, each.first.kind.value, each.size, connection.client)
        self._deposit(each)
        self._promise(connection, each, created=True)

    # --- the vault -----------------------------------------------------------------------------------------------------------

    def _deposit(self, each: SegmentSet) -> None:
        for start in range(0, len(each.manifests), p.MAX_FDS):
            if self._vault is None:
                return
            part = each.manifests[start : start + p.MAX_FDS]
            infos = tuple(each.infos()[start : start + p.MAX_FDS])
            deposit = p.Deposit(number=self._deposits.add(each.set_id, self._clock()), manifests=part, segments=infos)
            self._hub.send(self._vault, deposit, [self._fds[manifest.segment] for manifest in part])

    def _tell(self, each: SegmentSet) -> None:
        for info in each.infos():
            if self._vault is not None:
                self._hub.send(self._vault, p.Changed(segment=info))

    def _promise(self, connection: Connection, each: SegmentSet, *, created: bool) -> None:
        """Answer with the set, as soon as the vault has it."""
        self._hand_out(self._deposits.wait(each.set_id, connection.number, created=created))

    def _hand_out(self, ready: list[Waiter]) -> None:
        for set_id, number, created in ready:
            connection = self._hub.connections.get(number)
            if connection is None:
                continue
            if each := self._book.sets.get(set_id):
                self._answer_set(connection, each, created=created)
            else:
                self._refuse(connection, KeeperError(f"set {set_id} was freed while it was being handed out", "ask again"))

    def _finish_restore(self, connection: Connection) -> None:
        fds = {info.manifest.segment: fd for info, fd in self._restored}
        restored, left_over = self._book.restore(info for info, _ in self._restored)
        self._restored.clear()
        for each in restored:
            self._fds.update((segment, fds[segment]) for segment in each.segments)
        if left_over:
            self._hub.send(connection, p.Forget(segments=tuple(left_over)))
        self._restoring = False
        if self._book.expecting:
            self._expire_at = self._clock() + self._expect_s
        log.info("restored %d sets; their clients have %g s to come back", len(restored), self._expect_s)
        self._answer(connection, p.Answer())
        self._pump_all()

    # --- effects -------------------------------------------------------------------------------------------------------------

    def _apply(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Freed(set=each):
                    log.info("freed %s: %s, %d bytes of %s", each.set_id, each.first.kind.value, each.size, each.owner_text)
                    for segment in each.segments:
                        self._fds.pop(segment, None)
                    if self._vault is not None:
                        self._hub.send(self._vault, p.Forget(segments=each.segments))
                    self._hand_out(self._deposits.freed(each.set_id))
                case Changed(set=each):
                    self._tell(each)
                case Grant(connection=number, set=each):
                    if connection := self._hub.connections.get(number):
                        self._promise(connection, each, created=False)
                case Publish(connection=number):
                    if connection := self._hub.connections.get(number):
                        self._answer(connection, p.Answer(publisher=True))
                case _:
                    assert_never(effect)
