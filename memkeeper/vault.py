"""The vault: the supervisor's duplicate of every segment's fd, so that the keeper may die. Whoever holds the fds holds the memory."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from shadowsup.memkeeper import protocol as p
from shadowsup.memkeeper.channel import Channel, ChannelClosed, OwnedFd
from shadowsup.memkeeper.errors import KeeperError, refusal

_RETRY_S = 0.02


@dataclass
class _Kept:
    info: p.SegmentInfo
    fd: OwnedFd


class Vault:
    """One connection to the keeper at a time, and what outlives it. Make it with `connect`; use it on one event loop.

    Attributes:
        lost: set while there is no connection. Restart the keeper if it is gone, then call `restore`.
        generation, backend: of the keeper last connected to.
    """

    def __init__(
        self,
        socket_path: str | os.PathLike[str],
        *,
        client: str = "supervisor",
        on_change: Callable[[], None] | None = None,
        on_lost: Callable[[str], None] | None = None,
    ) -> None:
        self._path = os.fspath(socket_path)
        self._client = client
        self._on_change = on_change or (lambda: None)
        self._on_lost = on_lost or (lambda why: None)
        self._kept: dict[str, _Kept] = {}
        self._seen: set[str] = set()
        """Deposited or restored over the present connection."""
        self._channel: Channel | None = None
        self._writing = False
        self._welcome: asyncio.Future[p.Welcome] | None = None
        self._answers: deque[asyncio.Future[p.Answer]] = deque()
        self.lost = asyncio.Event()
        self.lost.set()
        self.generation = 0
        self.backend = ""

    @classmethod
    async def connect(
        cls,
        socket_path: str | os.PathLike[str],
        *,
        client: str = "supervisor",
        timeout_s: float = 10.0,
        on_change: Callable[[], None] | None = None,
        on_lost: Callable[[str], None] | None = None,
    ) -> Vault:
        """Connect to a keeper, and keep all that it has. One that waits for a restore gets an empty one: this vault holds nothing yet.

        Args:
            on_change: called when `segments` has changed.
            on_lost: called with the reason when the connection ends by itself.

        Raises:
            KeeperError: no keeper within ``timeout_s``.
        """
        vault = cls(socket_path, client=client, on_change=on_change, on_lost=on_lost)
        try:
            await vault.restore(timeout_s=timeout_s)
        except BaseException:
            await vault.close()
            raise
        return vault

    async def restore(self, *, timeout_s: float = 10.0) -> None:
        """Connect again. A new keeper process gets back every segment that it lacks; what the same one freed meanwhile is let go.

        Raises:
            KeeperError: no keeper within ``timeout_s``, or it refused.
        """
        self._disconnect(KeeperError("the vault connects again"))
        try:
            async with asyncio.timeout(timeout_s):
                await self._dial()
                welcome = await self._hello()
                if welcome.generation != self.generation:
                    await self._give_back(welcome)
                else:
                    self._let_go(set(self._kept) - self._seen)
        except TimeoutError:
            self._disconnect(KeeperError("timed out"))
            raise KeeperError(f"no keeper answered at {self._path} in {timeout_s:g} s") from None
        except ChannelClosed as error:
            self._disconnect(KeeperError(str(error)))
            raise KeeperError(f"the keeper at {self._path} went away: {error}") from None
        except BaseException as error:
            self._disconnect(KeeperError(str(error)))
            raise
        self.generation, self.backend = welcome.generation, welcome.backend
        self.lost.clear()
        self._on_change()

    def segments(self) -> list[p.SegmentInfo]:
        """Return what the vault holds, oldest first."""
        return sorted(
            (kept.info for kept in self._kept.values()), key=lambda info: (info.created_s, info.manifest.set_id, info.manifest.index)
        )

    def hold(self, info: p.SegmentInfo, fd: int) -> None:
        """Hold a segment that somebody else has kept; takes ``fd``. Before the first `restore`, which gives it to a new keeper."""
        self._kept[info.manifest.segment] = _Kept(info, OwnedFd(fd))

    def holds(self, segment: str) -> bool:
        return segment in self._kept

    def fd(self, segment: str) -> int:
        """Return the vault's own fd of a segment (dup it to keep it). Raises KeyError."""
        return self._kept[segment].fd.fileno()

    async def free(self, *, worker: str = "", set_id: str = "", timeout_s: float = 10.0) -> None:
        """Order the keeper to free every set of ``worker`` (weights that no other worker used included), or the one set ``set_id``.

        Raises:
            StaleHandle: there is no such set.
            KeeperError: the keeper is gone.
        """
        try:
            await asyncio.wait_for(self._ask(p.Free(worker=worker, set_id=set_id)), timeout_s)
        except TimeoutError:
            raise KeeperError(f"the keeper did not answer in {timeout_s:g} s") from None

    async def close(self) -> None:
        """Close the connection and every fd. Idempotent."""
        self._disconnect(KeeperError("the vault is closed"))
        self._kept.clear()

    # --- connecting ----------------------------------------------------------------------------------------------------------

    async def _dial(self) -> None:
        while True:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
            sock.setblocking(False)
            try:
                sock.connect(self._path)
                break
            except OSError:  # not there yet
                sock.close()
            await asyncio.sleep(_RETRY_S)
        self._channel = Channel(sock)
        self._seen.clear()
        asyncio.get_running_loop().add_reader(sock.fileno(), self._readable, self._channel)

    async def _hello(self) -> p.Welcome:
        self._welcome = asyncio.get_running_loop().create_future()
        self._send(p.Hello(client=self._client, pid=os.getpid(), vault=True))
        return await self._welcome

    async def _give_back(self, welcome: p.Welcome) -> None:
        missing = [kept for segment, kept in self._kept.items() if segment not in self._seen]
        for start in range(0, len(missing), p.MAX_FDS):
            part = missing[start : start + p.MAX_FDS]
            await self._ask(p.Restore(segments=tuple(kept.info for kept in part)), [kept.fd for kept in part])
        if welcome.restoring or missing:
            await self._ask(p.Restored())

    # --- talking -------------------------------------------------------------------------------------------------------------

    def _ask(self, request: p.ToKeeper, fds: list[OwnedFd] | None = None) -> asyncio.Future[p.Answer]:
        future: asyncio.Future[p.Answer] = asyncio.get_running_loop().create_future()
        self._answers.append(future)
        self._send(request, fds)
        return future

    def _send(self, message: p.ToKeeper, fds: list[OwnedFd] | None = None) -> None:
        channel = self._channel
        if channel is None:
            self._end("not connected")
            return
        try:
            channel.send(p.encode(message), fds or [])
        except ChannelClosed as error:
            self._end(str(error))
            return
        if channel.unsent and not self._writing:
            self._writing = True
            asyncio.get_running_loop().add_writer(channel.fileno(), self._writable, channel)

    def _writable(self, channel: Channel) -> None:
        try:
            channel.flush()
        except ChannelClosed as error:
            self._end(str(error))
            return
        if not channel.unsent:
            asyncio.get_running_loop().remove_writer(channel.fileno())
            self._writing = False

    def _readable(self, channel: Channel) -> None:
        try:
            for payload in channel.receive():
                self._handle(p.decode_answer(payload), channel)
        except (ChannelClosed, msgspec.MsgspecError) as error:
            if self._channel is channel:
                self._end(str(error))

    def _handle(self, message: p.FromKeeper, channel: Channel) -> None:
        match message:
            case p.Deposit():
                for info, fd in zip(message.segments, channel.take_fds(len(message.segments)), strict=True):
                    self._deposit(info, OwnedFd(fd))
                self._send(p.Deposited(number=message.number))
            case p.Changed(segment=info):
                if kept := self._kept.get(info.manifest.segment):
                    kept.info = info
            case p.Forget():
                self._let_go(set(message.segments))
            case p.Welcome():
                if self._welcome is not None and not self._welcome.done():
                    self._welcome.set_result(message)
                return
            case p.Answer() | p.Refused():
                self._resolve(message)
                return
        self._on_change()

    def _resolve(self, message: p.Answer | p.Refused) -> None:
        error = refusal(message.code, message.message, message.hint) if isinstance(message, p.Refused) else None
        if self._welcome is not None and not self._welcome.done() and error is not None:
            self._welcome.set_exception(error)
        elif self._answers:
            future = self._answers.popleft()
            if future.done():  # its caller has given up
                return
            if isinstance(message, p.Answer):
                future.set_result(message)
            else:
                future.set_exception(error or KeeperError("refused"))

    def _deposit(self, info: p.SegmentInfo, fd: OwnedFd) -> None:
        segment = info.manifest.segment
        self._seen.add(segment)
        if segment in self._kept:  # known from an earlier connection; the new fd is closed
            self._kept[segment].info = info
        else:
            self._kept[segment] = _Kept(info, fd)

    def _let_go(self, segments: set[str]) -> None:
        for segment in segments:
            self._kept.pop(segment, None)

    # --- the end of a connection ---------------------------------------------------------------------------------------------

    def _end(self, why: str) -> None:
        was_serving = not self.lost.is_set()
        self._disconnect(KeeperError(f"the keeper at {self._path} went away: {why}"))
        if was_serving:
            self._on_lost(why)

    def _disconnect(self, error: KeeperError) -> None:
        self.lost.set()
        if self._channel is not None:
            loop = asyncio.get_running_loop()
            loop.remove_reader(self._channel.fileno())
            if self._writing:
                loop.remove_writer(self._channel.fileno())
                self._writing = False
            self._channel.close()
            self._channel = None
        waiting: list[asyncio.Future[p.Answer] | asyncio.Future[p.Welcome]] = [*self._answers]
        if self._welcome is not None:
            waiting.append(self._welcome)
        self._answers.clear()
        self._welcome = None
        for future in waiting:
            if not future.done():
                future.set_exception(error)
                with contextlib.suppress(BaseException):
                    future.exception()  # retrieved: nobody may be waiting any more
