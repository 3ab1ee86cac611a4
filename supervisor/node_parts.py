"""The parts of a node besides its engines: scribe, keeper with the vault, nurseries, gateway."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from shadowsup.memkeeper.errors import KeeperError
from shadowsup.memkeeper.protocol import Kind, SegmentInfo
from shadowsup.memkeeper.vault import Vault
from shadowsup.supervisor import devices
from shadowsup.supervisor import identity as ids
from shadowsup.supervisor.beats import GATEWAY, BeatRouter
from shadowsup.supervisor.errors import SupervisorError
from shadowsup.supervisor.gateway.retune import retune
from shadowsup.supervisor.nursery_client import NurseryClient, Spare
from shadowsup.supervisor.part_process import Part, PartHost
from shadowsup.supervisor.paths import write_private
from shadowsup.supervisor.policy.model import NurseryState
from shadowsup.supervisor.policy.part import PartSettings, PartState
from shadowsup.supervisor.process import Child, send_signal
from shadowsup.wire.engine import DrainGateway, GatewayBeat
from shadowsup.wire.gateway import GatewaySpec, Retune

RECONNECT_S = 1.0
RETUNE_S = 5.0
"""How long a gateway may take to listen on other sockets."""
NURSERY_READY_S = 180.0
"""Importing torch and transformers from a cold disk."""

log = logging.getLogger("shadowsup.parts")

SPARE_AGAIN_S = 5.0
"""How soon a nursery is asked for another spare after one could not be made or has died."""

SPARE_COMES_S = 1.0
"""How long a nursery that is stopped may still be forking a spare."""


class ScribePart(Part):
    """Writes what the others print. Its own output goes to a file of its own: it cannot read itself."""

    what = "scribe"

    def __init__(self, host: PartHost) -> None:
        super().__init__(host, PartSettings(name="scribe"))

    def argv(self, ready_fd: int) -> Sequence[str]:
        socket_path = str(self.host.paths.scribe)
        return [sys.executable, "-m", "shadowsup.supervisor.scribe", "--socket", socket_path, "--ready-fd", str(ready_fd)]

    async def output(self) -> int:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        return await asyncio.to_thread(os.open, self.host.paths.log("scribe"), flags, 0o600)  # the disk may hang

    async def connect(self) -> None:
        await self.host.scribe.connect()


class KeeperPart(Part):
    """Keeps the memory. The vault, in this process, keeps it too, and gives it to the keeper's successor."""

    what = "keeper"

    def __init__(
        self, host: PartHost, backend: str, gpus: Sequence[str] = (), *, on_change: Callable[[Vault], None] = lambda _: None
    ) -> None:
        """``gpus``: UUIDs of the devices that it makes memory on; ``on_change``: told when the vault holds something else."""
        super().__init__(host, PartSettings(name="memkeeper"))
        self.vault: Vault | None = None
        self._backend = backend
        self._gpus = gpus
        self._on_change = on_change

    def argv(self, ready_fd: int) -> Sequence[str]:
        command = [sys.executable, "-m", "shadowsup.memkeeper", "--socket", str(self.host.paths.keeper), "--backend", self._backend]
        # A successor must serve nobody before it has back what its predecessor gave out.
        restore = ["--restore"] if self.vault is not None else []
        return [*command, "--ready-fd", str(ready_fd), *restore]

    def environment(self) -> dict[str, str]:
        # Whatever this node was started with: of a MIG instance that is not named CUDA knows nothing.
        return {**super().environment(), **(devices.environment(self._gpus) if self._gpus else {})}

    def preload(self, fill: Callable[[Vault], int]) -> int:
        """Begin with a vault that ``fill`` puts segments into, before any keeper runs. Returns how many it has put there."""
        vault = self._new_vault()
        count = fill(vault)
        if count:
            self.vault = vault
        return count

    def _new_vault(self) -> Vault:
        vault = Vault(self.host.paths.keeper, on_lost=self._disconnected, on_change=lambda: self._on_change(vault))
        return vault

    async def connect(self) -> None:
        if self.vault is not None:
            await self.vault.restore()
            return
        vault = self._new_vault()
        try:
            await vault.restore()
        except BaseException:
            await vault.close()
            raise
        self.vault = vault

    def _disconnected(self, why: str) -> None:
        """The connection broke. Mostly the keeper is dead and its exit follows; where it is not, it has dropped us: connect again."""
        self.host.run_task(self._reconnect())

    async def _reconnect(self) -> None:
        child, vault = self.child, self.vault
        while child is not None and vault is not None and self.policy.wanted:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(RECONNECT_S):
                    await child.wait()
                    return
            if self.child is not child or not vault.lost.is_set():
                return
            with contextlib.suppress(KeeperError):  # stopped, or busy: without the vault its death would cost everything it made since
                await vault.restore()

    def segments(self) -> list[SegmentInfo]:
        return self.vault.segments() if self.vault is not None else []

    async def free(self, worker: str) -> None:
        """Free what is the worker's own. A keeper that is being replaced is waited for."""
        async with asyncio.timeout(10.0):
            await self.running.wait()
        if self.vault is not None:
            await self.vault.free(worker=worker)

    async def tidy(self, worker: str, keep: str) -> None:
        """Free the KV sets of ``worker`` but ``keep``, and weights that nobody else has used and nobody uses now."""
        for segment in self.segments():
            manifest = segment.manifest
            own = manifest.worker == worker and manifest.kind is Kind.LEDGER and manifest.set_id != keep
            weights = manifest.kind is Kind.WEIGHTS and manifest.index == 0 and segment.workers == (worker,)
            if (own or weights) and not segment.leases and self.vault is not None:
                try:
                    await self.vault.free(set_id=manifest.set_id)
                except KeeperError as error:
                    log.warning("%s of %s was not freed: %s", manifest.set_id, worker, error)
                else:
                    what = "weights" if weights else "KV"
                    self.host.journal.add("keeper.freed", f"{what} that {worker} does not use any more were freed", worker=worker)

    async def close_vault(self) -> None:
        if self.vault is not None:
            await self.vault.close()


class NurseryPart(Part):
    """Forks engines of one (interpreter, engine, environment). A spare, forked from it, takes its place when it dies."""

    what = "nursery"

    def __init__(
        self,
        host: PartHost,
        number: int,
        *,
        engine: str,
        preload: str,
        python: str,
        env: dict[str, str],
        on_state: Callable[[NurseryPart, NurseryState], None],
        on_exited: Callable[[str, int], None],
    ) -> None:
        name = f"nursery-{number}"
        super().__init__(host, PartSettings(name=name, ready_s=NURSERY_READY_S))
        self.label = str(number)
        self.engine = engine
        self.client: NurseryClient | None = None
        self._socket = host.paths.nursery(number)
        self._preload = preload
        self._python = python
        self._env = env
        self._on_state = on_state
        self._on_exited = on_exited
        self._spare: Spare | None = None
        self._spare_timer: asyncio.TimerHandle | None = None
        self._cloning: asyncio.Task[None] | None = None

    def argv(self, ready_fd: int) -> Sequence[str]:
        command = [self._python, "-m", "shadowsup.workers.nursery", "--socket", str(self._socket)]
        return [*command, "--preload", self._preload, "--ready-fd", str(ready_fd)]

    def environment(self) -> dict[str, str]:
        return dict(self._env)

    async def connect(self) -> None:
        client = NurseryClient(self._socket)
        client.on_exited = lambda engine, pid, status: self._on_exited(engine, status)
        client.on_lost = lambda why: self._disconnected(client)
        try:
            await client.connect(10.0)
        except BaseException:
            client.close()
            raise
        self.client = client

    async def take_over(self) -> None:
        await self.connect()
        assert self.client is not None and self.client.ready is not None
        recorded = {entry.identity for entry in self.host.registry.entries}
        for child in self.client.ready.children:
            forked = ids.Identity(pid=child.pid, start_time=child.start_time, boot_id=ids.boot_id())
            if forked not in recorded and (pidfd := ids.open_identity(forked)) is not None:
                log.warning("%s forked %s for a supervisor that died before it knew: it is ended", self.name, child.engine)
                send_signal(pidfd, signal.SIGKILL, child.engine)
                os.close(pidfd)

    def _disconnected(self, client: NurseryClient) -> None:
        """The connection broke. Mostly the nursery is dead and its exit follows; where it is not, it forks for nobody: it is replaced."""
        if self.client is client and self.child is not None and self.policy.wanted:
            self.child.signal_group(signal.SIGKILL)

    def lost(self) -> None:
        if self.client is not None:
            self.client.close()
            self.client = None
        self._socket.unlink(missing_ok=True)

    async def _spawn(self, write_fd: int) -> Child:
        spare, self._spare = self._spare, None
        child = spare.take_over(write_fd) if spare is not None else None
        return child if child is not None else await super()._spawn(write_fd)

    async def _make_spare(self) -> None:
        client = self.client
        if client is None or self._spare is not None or not self.policy.wanted:
            return
        output = await self.output()
        try:
            spare = await client.clone(stdout=output, stderr=output, what=f"the spare of {self.name}")
        except SupervisorError as error:
            if self.client is client and self.policy.wanted:
                log.warning("%s has no spare: %s", self.name, error)
                self._spare_later()
            return
        finally:
            os.close(output)
        if client is not self.client or not self.policy.wanted or self._spare is not None:
            await spare.end()
            return
        self._spare = spare
        spare.child.on_exit = lambda status: self._spare_gone(spare)

    def _spare_gone(self, spare: Spare) -> None:
        if self._spare is spare:
            self._spare = None
            spare.close()
            self._spare_later()

    def _spare_later(self) -> None:
        self._spare_timer = self._loop.call_later(SPARE_AGAIN_S, self._clone)

    def _clone(self) -> None:
        self._cloning = self.host.run_task(self._make_spare())

    def _drop_spare(self) -> None:
        if self._spare_timer is not None:
            self._spare_timer.cancel()
        spare, self._spare = self._spare, None
        if spare is not None:
            spare.close()

    def retire(self) -> None:
        self._drop_spare()
        super().retire()

    async def stop(self, *, signal_number: int = signal.SIGTERM, timeout_s: float = 5.0) -> None:
        spare, self._spare = self._spare, None
        self.retire()
        if self._cloning is not None:  # a spare that comes now is ended there
            await asyncio.wait({self._cloning}, timeout=SPARE_COMES_S)
        if spare is not None:  # it would end by itself, but a node that has stopped leaves no process, not even for a moment
            await spare.end()
        await super().stop(signal_number=signal_number, timeout_s=timeout_s)

    def close(self) -> None:
        self._drop_spare()
        super().close()

    def changed(self) -> None:
        if self.state is PartState.RUNNING:
            self._clone()
        states = {PartState.RUNNING: NurseryState.READY, PartState.STARTING: NurseryState.STARTING}
        self._on_state(self, states.get(self.state, NurseryState.DOWN if self.policy.wanted else NurseryState.NONE))


class GatewayPart(Part):
    """Speaks HTTP. The listening sockets are this process's: a successor takes up the same ones, and the port is never free."""

    what = "gateway"

    def __init__(self, host: PartHost, sockets: Sequence[socket.socket], spec: GatewaySpec, beats: BeatRouter) -> None:
        super().__init__(host, PartSettings(name="gateway"))
        self.sockets = list(sockets)
        self.beat: GatewayBeat | None = None
        self._spec = msgspec.structs.replace(spec, listen_fds=tuple(sock.fileno() for sock in sockets))
        self._beats = beats
        self._heard = asyncio.Event()

    def argv(self, ready_fd: int) -> Sequence[str]:
        path: Path = self.host.paths.gateway_spec
        write_private(path, msgspec.json.format(msgspec.json.encode(self._spec)))
        return [sys.executable, "-m", "shadowsup.supervisor.gateway", str(path)]

    def pass_fds(self) -> tuple[int, ...]:
        return self._spec.listen_fds

    async def wait_ready(self, ready_fd: int) -> None:
        """It is ready when it says so in its beats."""
        await self._heard.wait()

    async def take_over(self) -> None:
        await self._heard.wait()

    def take_beat(self, beat: GatewayBeat) -> bool:
        """Take a beat. Returns whether it is the first of this process, which then wants the routes."""
        if self.child is None or beat.pid != self.child.pid:
            return False  # of a predecessor
        first = self.beat is None or self.beat.pid != beat.pid
        self.beat = beat
        self._heard.set()
        return first

    def lost(self) -> None:
        self._heard.clear()
        self.beat = None  # its successor may come by the same pid, and wants the routes all the same

    async def drain(self, grace_s: float, hurry: asyncio.Event) -> None:
        """Let requests end within ``grace_s``, or none of it once ``hurry`` is set; then make sure that it is gone."""
        child = self.child
        if child is not None and self.running.is_set():
            self.retire()
            self._beats.send(GATEWAY, DrainGateway(grace_s=grace_s))
            gone = asyncio.ensure_future(child.wait())
            hurried = asyncio.ensure_future(hurry.wait())
            try:
                await asyncio.wait({gone, hurried}, timeout=grace_s + 3.0, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in (gone, hurried):
                    task.cancel()
                await asyncio.gather(gone, hurried, return_exceptions=True)
        await self.stop(timeout_s=3.0)

    async def retune(self, settings: Retune, sockets: Sequence[socket.socket] = ()) -> list[socket.socket]:
        """Give other settings to the gateway and to its successors; with ``sockets``, which are owned from now on, listen on those instead.

        Returns the sockets that are left then; `close_sockets` gives up their address.

        Raises:
            SupervisorError: it cannot take them; nothing was changed, and ``sockets`` are the caller's still.
        """
        spec = msgspec.structs.replace(self._spec, api_key_file=settings.api_key_file, max_inflight=settings.max_inflight)
        if sockets:
            spec = msgspec.structs.replace(spec, listen_fds=tuple(sock.fileno() for sock in sockets))
        if self.running.is_set():
            await asyncio.to_thread(retune, self.host.paths.retune, settings, sockets, RETUNE_S)
        self._spec = spec  # one that is just being replaced is spawned with it
        left: list[socket.socket] = []
        if sockets:
            left, self.sockets = self.sockets, list(sockets)
        return left

    def close_sockets(self) -> None:
        close_sockets(self.sockets)


def close_sockets(sockets: Sequence[socket.socket]) -> None:
    """Give up the addresses of listening sockets."""
    for sock in sockets:
        if sock.family == socket.AF_UNIX:
            with contextlib.suppress(OSError):
                Path(sock.getsockname()).unlink()
        sock.close()


def port_of(sockets: Sequence[socket.socket]) -> str:
    """Return where the gateway listens, for people: ``127.0.0.1:8000``, several joined by commas, ``unix:/path``."""
    names = []
    for sock in sockets:
        address = sock.getsockname()
        if sock.family == socket.AF_UNIX:
            names.append(f"unix:{address}")
        else:
            host, port = address[0], address[1]
            names.append(f"[{host}]:{port}" if ":" in host else f"{host}:{port}")
    if not names:
        raise SupervisorError("the gateway has no address to listen on")
    return ",".join(names)
