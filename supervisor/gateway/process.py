"""The life of the gateway process: start, serve, drain, exit."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import logging.handlers
import queue
import signal
import socket
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from aiohttp import web

from shadowsup.supervisor.gateway.auth import ApiKeys
from shadowsup.supervisor.gateway.channel import SupervisorChannel
from shadowsup.supervisor.gateway.errors import ApiError
from shadowsup.supervisor.gateway.gateway import Gateway
from shadowsup.supervisor.gateway.generate import Generator
from shadowsup.supervisor.gateway.handover import Handover
from shadowsup.supervisor.gateway.held_http import HeldProxy
from shadowsup.supervisor.gateway.held_servers import Servers
from shadowsup.supervisor.gateway.metrics import Metrics
from shadowsup.supervisor.gateway.proxy import Proxy
from shadowsup.supervisor.gateway.retune import RetuneServer
from shadowsup.supervisor.gateway.server import SILENCE_S, Server
from shadowsup.wire.engine import DrainGateway, GatewayBeat, Routes
from shadowsup.wire.gateway import GatewaySpec, Retune
from shadowsup.wire.seal import key_of

log = logging.getLogger(__name__)

SIGNAL_GRACE_S = 30.0
"""What SIGTERM gives to the requests in flight; a second signal gives none."""
_UNWIND_S = 2.0
"""What handlers get after the grace to send their last error."""
_LOG_LINES = 10_000


class GatewayProcess:
    """Wires the parts together.

    Args:
        spec: from the supervisor.
        sockets: the listening sockets. They are closed at the end, not shut down: other processes hold them, too.
    """

    def __init__(self, spec: GatewaySpec, sockets: list[socket.socket]) -> None:
        metrics = Metrics()
        keys = ApiKeys(spec.api_key_file)
        self._sockets = sockets
        self._sites: list[web.SockSite] = []
        self._handover_path = spec.handover
        self._retune_path = spec.retune
        self._gateway = Gateway(spec.max_inflight, metrics.pause)
        metrics.watch(self._gateway)
        self._proxy = Proxy(hide_authorization=keys.required)
        generator = Generator(self._gateway, metrics, spec.keepalive_s)
        self._servers = Servers(self._proxy)
        held = HeldProxy(self._servers, metrics, spec.keepalive_s, key_of(Path(spec.runtime_dir)))
        self._server = Server(self._gateway, generator, self._proxy, held, keys, metrics, spec.max_body)
        app = self._server.application()
        app.on_shutdown.append(self._finish)
        # Without handler_cancellation a client that leaves would go unnoticed until the next write, which may be a failover away.
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=_UNWIND_S)
        self._channel = SupervisorChannel(spec.beat_endpoint, spec.heartbeat_s, self._beat, self._order, metrics.node.take)
        self._stop = asyncio.Event()
        self._hurry = asyncio.Event()
        self._grace_s = SIGNAL_GRACE_S

    async def run(self) -> None:
        """Serve until told to stop, then drain."""
        await self._runner.setup()
        self._sites = await self._listen(self._sockets)
        handover = self._hand_over()
        tuner = self._take_settings()
        self._channel.start()
        looking = asyncio.create_task(self._look_for_silence())
        gc.freeze()  # what is here now stays: the collector need not look at it while streams run
        try:
            await self._stop.wait()
            log.info("draining, %d requests in flight, at most %.1f s", self._gateway.totals.inflight, self._grace_s)
            self._gateway.draining = True
            await self._channel.beat_now()
            if handover is not None:
                handover.close()
            await self._runner.cleanup()  # stops accepting, then calls _finish
        finally:
            looking.cancel()
            await asyncio.gather(looking, return_exceptions=True)
            for door in (handover, tuner):
                if door is not None:
                    door.close()
            await self._proxy.close()
            await self._servers.close()
            await self._gateway.close()
            await self._channel.close()
        log.info("done")

    async def _listen(self, sockets: Sequence[socket.socket]) -> list[web.SockSite]:
        """Serve on ``sockets``. Raises OSError or ValueError: on none of them."""
        sites: list[web.SockSite] = []
        try:
            for sock in sockets:
                site = web.SockSite(self._runner, sock, backlog=1024)
                await site.start()
                sites.append(site)
                log.info("serving on %s", sock.getsockname())
        except (OSError, ValueError):
            for site in sites:
                await site.stop()
            raise
        return sites

    async def _retune(self, settings: Retune, sockets: list[socket.socket]) -> None:
        """Take other settings into use. Who is connected at a socket that is left stays connected."""
        if sockets:
            former, self._sites = self._sites, await self._listen(sockets)
            left = list(self._sockets)
            self._sockets[:] = sockets  # the handover gives these away
            for site in former:
                await site.stop()
            for sock in left:
                sock.close()
        keys = ApiKeys(settings.api_key_file)
        self._server.use_keys(keys)
        self._proxy.hide_authorization(keys.required)
        self._gateway.max_inflight = settings.max_inflight
        log.info("took other settings: at most %d requests, keys from %s", settings.max_inflight, settings.api_key_file or "nowhere")

    def _take_settings(self) -> RetuneServer | None:
        if not self._retune_path:
            return None
        try:
            return RetuneServer(Path(self._retune_path), self._retune)
        except OSError as error:
            log.warning("settings can be changed by a restart only: %s", error)
            return None

    def _hand_over(self) -> Handover | None:
        if not self._handover_path:
            return None
        try:
            return Handover(Path(self._handover_path), self._sockets)
        except OSError as error:
            log.warning("a later supervisor will have to bind anew: %s", error)
            return None

    def stop(self, grace_s: float = SIGNAL_GRACE_S) -> None:
        """Begin to drain; when it has begun already, end it now."""
        if self._stop.is_set():
            self._hurry.set()
        self._grace_s = grace_s
        self._stop.set()

    async def _finish(self, app: web.Application) -> None:
        """Let requests end within the grace, then fail the rest."""
        self._server.close_idle(self._connections())
        idle, hurry = asyncio.create_task(self._all_sent()), asyncio.create_task(self._hurry.wait())
        _, pending = await asyncio.wait({idle, hurry}, timeout=self._grace_s, return_when=asyncio.FIRST_COMPLETED)
        for task in pending:
            task.cancel()
        self._gateway.abandon(ApiError(503, "This gateway is shutting down; send the request again", retry_after_s=1.0))

    async def _all_sent(self) -> None:
        await self._gateway.idle.wait()
        # Each connection closes when its client has taken the last byte; aiohttp has no event for the last of them.
        while self._connections():  # noqa: ASYNC110
            await asyncio.sleep(0.01)

    async def _look_for_silence(self) -> None:
        while True:
            await asyncio.sleep(SILENCE_S / 4)
            self._server.close_silent(self._connections(), asyncio.get_running_loop().time())

    def _connections(self) -> list[web.RequestHandler]:
        server = self._runner.server
        return server.connections if isinstance(server, web.Server) else []

    def _beat(self) -> GatewayBeat:
        return self._gateway.beat(len(self._connections()))

    def _order(self, order: Routes | DrainGateway) -> None:
        if isinstance(order, Routes):
            self._gateway.apply(order)
        else:
            self.stop(order.grace_s)


async def _serve(spec: GatewaySpec) -> None:
    sockets = []
    for fd in spec.listen_fds:
        sock = socket.socket(fileno=fd)
        sock.set_inheritable(False)
        sockets.append(sock)
    process = GatewayProcess(spec, sockets)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, process.stop)
    await process.run()


def serve(spec: GatewaySpec) -> None:
    """Run a gateway until it is told to stop."""
    with logging_to_stderr():
        asyncio.run(_serve(spec))


@contextlib.contextmanager
def logging_to_stderr() -> Iterator[None]:
    """Log from a thread of its own: a pipe that nobody reads must not stop the streams. Lines beyond the bound are dropped."""
    lines: queue.Queue[logging.LogRecord] = queue.Queue(_LOG_LINES)
    output = logging.StreamHandler(sys.stderr)
    output.setFormatter(logging.Formatter("%(asctime)s %(levelname).1s %(name)s: %(message)s"))
    listener = logging.handlers.QueueListener(lines, output)
    root = logging.getLogger()
    root.setLevel(logging.INFO)
    root.addHandler(_DroppingHandler(lines))
    listener.start()
    try:
        yield
    finally:
        listener.stop()


class _DroppingHandler(logging.handlers.QueueHandler):
    """Drops what does not fit, and says later how much that was."""

    def __init__(self, lines: queue.Queue[logging.LogRecord]) -> None:
        super().__init__(lines)
        self._dropped = 0

    def enqueue(self, record: logging.LogRecord) -> None:
        if self._dropped:
            record.msg = f"({self._dropped} log lines were dropped before this one) {record.msg}"
        try:
            self.queue.put_nowait(record)
        except queue.Full:
            self._dropped += 1
        else:
            self._dropped = 0
