"""The HTTP servers of engines that come and go: a client of each while a request of ours is there."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import aiohttp
from aiohttp import web

from shadowsup.supervisor.gateway.held import Target
from shadowsup.supervisor.gateway.proxy import CONNECT_S, Proxy, target_url


class Asking:
    """One request at one engine (a `Try`). Dropping it breaks off whatever is waited for."""

    def __init__(self, target: Target, asking: asyncio.Task[aiohttp.ClientResponse]) -> None:
        self.target = target
        self.asking = asking

    def drop(self) -> None:
        if not self.asking.done():
            self.asking.cancel()
        elif not self.asking.cancelled() and self.asking.exception() is None:
            self.asking.result().close()


class Reading:
    """One request that was let go at one engine (a `Try`)."""

    def __init__(self, target: Target, answer: aiohttp.ClientResponse) -> None:
        self.target = target
        self._answer = answer

    def drop(self) -> None:
        self._answer.close()


@dataclass(slots=True)
class _Server:
    session: aiohttp.ClientSession
    users: int = 0


class Servers:
    """Connections to engines' Unix sockets.

    Args:
        proxy: knows which of a client's headers are for an upstream.
    """

    def __init__(self, proxy: Proxy) -> None:
        self._proxy = proxy
        self._servers: dict[str, _Server] = {}

    @asynccontextmanager
    async def using(self, upstream: str) -> AsyncIterator[aiohttp.ClientSession]:
        """Yield a session for ``unix:/path``."""
        server = self._servers.get(upstream)
        if server is None:
            # No connection is kept: one that an engine left behind would fail the next request. On a Unix socket a new one costs little.
            connector = aiohttp.UnixConnector(upstream.removeprefix("unix:"), limit=0, force_close=True)
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S)
            server = self._servers[upstream] = _Server(
                aiohttp.ClientSession(connector=connector, timeout=timeout, auto_decompress=False, cookie_jar=aiohttp.DummyCookieJar())
            )
        server.users += 1
        try:
            yield server.session
        finally:
            server.users -= 1
            if not server.users and self._servers.get(upstream) is server:
                del self._servers[upstream]
                await server.session.close()

    async def ask(
        self, session: aiohttp.ClientSession, upstream: str, http: web.Request, body: bytes, request_id: str
    ) -> aiohttp.ClientResponse:
        """Send a client's request with ``body`` in place of its own.

        Raises:
            aiohttp.ClientError, OSError, TimeoutError: nobody answers.
        """
        headers = self._proxy.forwarded(http.headers)
        headers.popall("Accept-Encoding", None)  # its events are read here
        headers["Accept-Encoding"] = "identity"
        headers["X-Request-Id"] = request_id  # vLLM makes the answer's id of it
        data = body if body or http.body_exists else None
        return await session.request(http.method, target_url(upstream, http.raw_path), headers=headers, data=data, allow_redirects=False)

    async def close(self) -> None:
        for server in self._servers.values():
            await server.session.close()
        self._servers.clear()
