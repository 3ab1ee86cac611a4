"""Hands a request to a worker that has an HTTP server of its own, and its answer back, both as they come."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncIterator

import aiohttp
from aiohttp import web
from multidict import CIMultiDict, CIMultiDictProxy
from yarl import URL

from shadowsup.supervisor.gateway import shapes
from shadowsup.supervisor.gateway.errors import unavailable
from shadowsup.supervisor.gateway.gateway import Upstream

log = logging.getLogger(__name__)

CONNECT_S = 5.0
_HOP_BY_HOP = frozenset(
    {
        "connection",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    }
)
"""RFC 9110, 7.6.1, and what older software sends."""


class Proxy:
    """A client of the upstreams: one connection pool for all on TCP, and one for each Unix socket.

    Args:
        hide_authorization: the gateway's own keys end here.
    """

    def __init__(self, *, hide_authorization: bool) -> None:
        self._drop: frozenset[str] = frozenset()
        self.hide_authorization(hide_authorization)
        self._sessions: dict[str, aiohttp.ClientSession] = {}

    def hide_authorization(self, hide: bool) -> None:
        """Say whether the gateway's own keys end here."""
        self._drop = _HOP_BY_HOP | {"host"} | ({"authorization"} if hide else frozenset())

    async def forward(self, http: web.Request, worker: Upstream, body: bytes | None) -> web.StreamResponse:
        """Pass a request on and its response back.

        Args:
            http: the client's request.
            worker: where to.
            body: what was read of the request; None: nothing was, it is passed on as it comes.

        Raises:
            ApiError: 503 when the upstream does not answer.
        """
        upstream = worker.route.upstream
        if not upstream:
            raise unavailable(f"The worker {worker.name} cannot serve this request: {worker.route.reason or f'it is {worker.route.state}'}")
        async with contextlib.AsyncExitStack() as stack:
            try:
                answer = await stack.enter_async_context(
                    self._session(upstream).request(
                        http.method,
                        target_url(upstream, http.raw_path),
                        headers=self.forwarded(http.headers),
                        data=body if body is not None else _content_of(http) if http.body_exists else None,
                        allow_redirects=False,
                    )
                )
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                log.warning("upstream %s of worker %s does not answer: %s", upstream, worker.name, error)
                raise unavailable(f"The worker {worker.name} cannot serve this request: its server does not answer") from None
            return await _pass_back(http, worker, answer)

    def forwarded(self, headers: CIMultiDictProxy[str]) -> CIMultiDict[str]:
        """Return the headers of a request as an upstream gets them."""
        named = {name.strip().lower() for key, value in headers.items() if key.lower() == "connection" for name in value.split(",")}
        # The length comes anew: a compressed body was unpacked when it was read.
        drop = self._drop | named | {"content-length", "content-encoding", "expect"}
        return CIMultiDict((key, value) for key, value in headers.items() if key.lower() not in drop)

    def _session(self, upstream: str) -> aiohttp.ClientSession:
        path = upstream.removeprefix("unix:")
        pool = path if path != upstream else "tcp"
        session = self._sessions.get(pool)
        if session is None:
            # No limit on connections: admission is the gateway's.
            connector: aiohttp.BaseConnector = aiohttp.UnixConnector(path, limit=0) if path != upstream else aiohttp.TCPConnector(limit=0)
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S)
            session = aiohttp.ClientSession(
                connector=connector, timeout=timeout, auto_decompress=False, cookie_jar=aiohttp.DummyCookieJar()
            )
            self._sessions[pool] = session
        return session

    async def close(self) -> None:
        for session in self._sessions.values():
            await session.close()
        self._sessions.clear()


def target_url(upstream: str, raw_path: str) -> URL:
    """Return the address of a path, already encoded, at an upstream."""
    base = "http://localhost" if upstream.startswith("unix:") else upstream.rstrip("/")
    return URL(base + raw_path, encoded=True)


async def _content_of(http: web.Request) -> AsyncIterator[bytes]:
    async for chunk in http.content.iter_any():
        yield chunk


def headers_back(answer: aiohttp.ClientResponse) -> CIMultiDict[str]:
    """Return the headers of a response as the client gets them."""
    named = {name.strip().lower() for value in answer.headers.getall("Connection", []) for name in value.split(",")}
    drop = _HOP_BY_HOP | named
    return CIMultiDict((key, value) for key, value in answer.headers.items() if key.lower() not in drop)


async def _pass_back(http: web.Request, worker: Upstream, answer: aiohttp.ClientResponse) -> web.StreamResponse:
    response = web.StreamResponse(status=answer.status, reason=answer.reason, headers=headers_back(answer))
    await response.prepare(http)
    broke_off = False
    while True:
        try:
            chunk = await answer.content.readany()
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            log.warning("upstream of worker %s broke off: %s", worker.name, error)
            broke_off = True
            break
        if not chunk:
            break
        await response.write(chunk)
    if broke_off and not answer.content_type.startswith("text/event-stream"):
        # The client must not take half an answer for a whole one.
        if http.transport is not None:
            http.transport.abort()
        return response
    if broke_off:
        gone = unavailable(f"The worker {worker.name} broke off this answer: its server is gone")
        await response.write(shapes.error_event(gone))
    await response.write_eof()
    return response
