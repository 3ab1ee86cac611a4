"""The HTTP side: which path means what, who may, what an error looks like, and one log line for each request."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable

import msgspec
from aiohttp import web

from shadowsup.supervisor.gateway import params, strict_json
from shadowsup.supervisor.gateway.auth import ApiKeys
from shadowsup.supervisor.gateway.errors import ApiError, internal, invalid, model_not_found, unavailable
from shadowsup.supervisor.gateway.gateway import Gateway, Upstream
from shadowsup.supervisor.gateway.generate import Generator, Record
from shadowsup.supervisor.gateway.held import HeldWorker
from shadowsup.supervisor.gateway.held_http import HeldProxy
from shadowsup.supervisor.gateway.held_request import Asked, refuse_our_names
from shadowsup.supervisor.gateway.metrics import CONTENT_TYPE, Metrics
from shadowsup.supervisor.gateway.proxy import Proxy

log = logging.getLogger(__name__)
access = logging.getLogger("shadowsup.access")

ROUTES_WAIT_S = 30.0
"""A gateway that has just started does not know its models yet; requests wait so long for the first routing table."""

BODY_S = 60.0
"""A request holds its place among those in flight while its body comes, so that must not take for ever."""

SILENCE_S = 60.0
"""Without a request on a connection, be it that it keeps alive or that its headers do not come to an end. nginx: 60 s and 75 s."""

CHAT, COMPLETIONS, MODELS = "/v1/chat/completions", "/v1/completions", "/v1/models"
CLIENT_LEFT = 499
"""For log and metrics only: the client closed the connection before the response was complete (nginx's number for it)."""

_Handler = Callable[[web.Request, Record], Awaitable[web.StreamResponse]]


class Server:
    """Dispatches requests.

    Args:
        gateway: routing and streams.
        generator: runs generations.
        proxy: reaches the workers with a server of their own.
        held: the same for those whose answers outlive an engine.
        keys: who may.
        metrics: told of each request.
        max_body: bytes of one request body.
    """

    def __init__(
        self, gateway: Gateway, generator: Generator, proxy: Proxy, held: HeldProxy, keys: ApiKeys, metrics: Metrics, max_body: int
    ) -> None:
        self._gateway = gateway
        self._generator = generator
        self._proxy = proxy
        self._held = held
        self._keys = keys
        self._metrics = metrics
        self._max_body = max_body
        self._busy: set[asyncio.BaseTransport] = set()
        self._silent_since: dict[asyncio.BaseTransport, float] = {}
        self._endpoints: dict[str, tuple[str, _Handler]] = {
            CHAT: ("POST", self._generate),
            COMPLETIONS: ("POST", self._generate),
            MODELS: ("GET", self._models),
        }
        self._open_endpoints: dict[str, tuple[str, _Handler]] = {
            "/livez": ("GET", self._livez),
            "/readyz": ("GET", self._readyz),
            "/metrics": ("GET", self._exposition),
        }

    def application(self) -> web.Application:
        """Return the aiohttp application; one catch-all, since every path, known or not, gets the same treatment."""
        app = web.Application(client_max_size=self._max_body)
        app.router.add_route("*", r"/{path:[\s\S]*}", self._dispatch)  # a newline is a character of a path, too
        return app

    def use_keys(self, keys: ApiKeys) -> None:
        """Check these from now on."""
        self._keys = keys

    def close_idle(self, connections: Iterable[web.RequestHandler]) -> None:
        """Close those of ``connections`` that have no request under way (aiohttp's own drain leaves them open, and deaf)."""
        for connection in list(connections):
            if connection.transport not in self._busy:
                connection.force_close()

    def close_silent(self, connections: Iterable[web.RequestHandler], now_s: float) -> None:
        """Close those that have had no whole request for `SILENCE_S`: clients that send a header a minute hold descriptors for ever."""
        idle = {each.transport: each for each in list(connections) if each.transport is not None and each.transport not in self._busy}
        self._silent_since = {transport: self._silent_since.get(transport, now_s) for transport in idle}
        for transport, connection in idle.items():
            if now_s - self._silent_since[transport] >= SILENCE_S:
                connection.force_close()

    async def _dispatch(self, http: web.Request) -> web.StreamResponse:
        loop = asyncio.get_running_loop()
        record = Record(loop.time())
        status = CLIENT_LEFT
        transport = http.transport
        if transport is not None:
            self._busy.add(transport)
            self._silent_since.pop(transport, None)
        try:
            response = await self._answer(http, record)
            status = response.status
            return response
        except ConnectionError:
            # The transport is closed already: there is nobody to answer, aiohttp only wants something to return.
            return web.Response(status=CLIENT_LEFT)
        finally:
            if transport is not None:
                self._busy.discard(transport)
            self._note(http, record, status, loop.time() - record.started_s)

    async def _answer(self, http: web.Request, record: Record) -> web.StreamResponse:
        try:
            response = await self._handler(http)(http, record)
        except ConnectionError:
            raise
        except ApiError as error:
            response = _response(error, record)
        except web.HTTPRequestEntityTooLarge:
            message = f"The request body is larger than the {self._max_body} bytes that this server takes"
            response = _response(ApiError(413, message, code="request_too_large"), record)
        except web.HTTPException as error:  # a body that cannot be decoded, and the like
            response = _response(ApiError(error.status, error.reason), record)
        except Exception:
            log.exception("%s %s failed", http.method, _path(http))
            response = _response(internal(), record)
        if self._gateway.draining and not response.prepared:
            response.force_close()
        return response

    def _note(self, http: web.Request, record: Record, status: int, seconds: float) -> None:
        record.failed |= status >= 500
        if http.path not in self._open_endpoints:
            self._gateway.totals.requests += 1
            self._gateway.totals.errors += record.failed
            endpoint = http.path if http.path in self._endpoints else "other"
            self._metrics.request(endpoint, record.worker, status, seconds)
        access.info(
            "%s %s %d worker=%s tokens=%d seconds=%.3f replays=%d%s id=%s",
            http.method,
            _path(http),
            status,
            record.worker or "-",
            record.tokens,
            seconds,
            record.replays,
            " error" if record.failed else "",
            record.id,
        )

    def _handler(self, http: web.Request) -> _Handler:
        """Return what answers this path, after the caller has shown that it may ask.

        Raises:
            ApiError: 401, 404 or 405.
        """
        found = self._open_endpoints.get(http.path)
        if found is None:
            self._keys.check(http.headers.get("Authorization"))
            found = self._endpoints.get(http.path)
        if found is None and http.path.startswith(MODELS + "/"):
            found = ("GET", self._model)
        if found is None and http.path.startswith("/v1/"):
            return self._pass_on
        if found is None:
            raise _no_such_path(http)
        method, handler = found
        if http.method != method and not (method == "GET" and http.method == "HEAD"):
            raise ApiError(405, f"{http.method} is not allowed for {http.path}: use {method}", code="method_not_allowed")
        return handler

    # Generations

    async def _generate(self, http: web.Request, record: Record) -> web.StreamResponse:
        # Admitted before its body is read: what waits in memory is bounded, too.
        with self._gateway.admitted():
            await self._routes_known()
            body = await _body(http)
            parsed = strict_json.parse(body)
            worker = self._gateway.pick(params.model_of(parsed))
            record.worker = worker.name
            if isinstance(worker, Upstream):
                return await self._forward(http, worker, body)
            if isinstance(worker, HeldWorker):
                return await self._held.answer(http, worker, Asked(http.path == CHAT, parsed, body, self._held.key), body, record)
            generation = params.chat(parsed) if http.path == CHAT else params.completion(parsed)
            return await self._generator.answer(http, worker, generation, record)

    async def _pass_on(self, http: web.Request, record: Record) -> web.StreamResponse:
        """Any other path of the API: only a worker with a server of its own may know it."""
        with self._gateway.admitted():
            await self._routes_known()
            upstreams = [worker for worker in self._gateway.workers.values() if isinstance(worker, Upstream | HeldWorker)]
            if not upstreams:
                raise _no_such_path(http)
            body = None
            if http.body_exists and http.content_type == "application/json":
                body = await _body(http)
                parsed = strict_json.parse(body)
                worker = self._gateway.pick(params.model_of(parsed))
                if not isinstance(worker, Upstream | HeldWorker):
                    raise _no_such_path(http)
                if isinstance(worker, HeldWorker):
                    refuse_our_names(parsed)
            elif len(upstreams) == 1:
                worker = upstreams[0]
            else:
                raise invalid(f"{http.path} needs a JSON body that names one of several models", "model", "missing_required_parameter")
            record.worker = worker.name
            if isinstance(worker, HeldWorker):
                return await self._held.answer(http, worker, None, await _body(http) if body is None else body, record)
            return await self._forward(http, worker, body)

    async def _forward(self, http: web.Request, worker: Upstream, body: bytes | None) -> web.StreamResponse:
        worker.inflight += 1
        try:
            return await self._proxy.forward(http, worker, body)
        finally:
            worker.inflight -= 1

    async def _routes_known(self) -> None:
        if not self._gateway.routed.is_set():
            try:
                async with asyncio.timeout(ROUTES_WAIT_S):
                    await self._gateway.routed.wait()
            except TimeoutError:
                raise unavailable("This gateway has not heard yet which models there are") from None

    # What there is

    async def _models(self, http: web.Request, record: Record) -> web.StreamResponse:
        await self._routes_known()
        return _json({"object": "list", "data": [self._card(name) for name in self._gateway.models()]})

    async def _model(self, http: web.Request, record: Record) -> web.StreamResponse:
        await self._routes_known()
        name = http.path.removeprefix(MODELS + "/")
        known = self._gateway.models()
        if name not in known:
            raise model_not_found(name, known)
        return _json(self._card(name))

    def _card(self, name: str) -> dict[str, object]:
        return {"id": name, "object": "model", "created": self._gateway.created, "owned_by": "shadowsup"}

    # How it is

    async def _livez(self, http: web.Request, record: Record) -> web.StreamResponse:
        return web.Response(text="ok\n")

    async def _readyz(self, http: web.Request, record: Record) -> web.StreamResponse:
        workers = {
            worker.name: {"state": worker.route.state, "serving": self._gateway.serves(worker), "reason": worker.route.reason}
            for worker in self._gateway.workers.values()
        }
        ready = self._gateway.ready()
        return _json({"ready": ready, "draining": self._gateway.draining, "workers": workers}, 200 if ready else 503)

    async def _exposition(self, http: web.Request, record: Record) -> web.StreamResponse:
        return web.Response(body=await self._metrics.all(), headers={"Content-Type": CONTENT_TYPE})


async def _body(http: web.Request) -> bytes:
    try:
        async with asyncio.timeout(BODY_S):
            return await http.read()
    except TimeoutError:
        raise ApiError(408, f"The request body did not come within {BODY_S:g} s", code="request_timeout") from None


def _json(value: object, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), status=status, content_type="application/json")


def _response(error: ApiError, record: Record) -> web.Response:
    headers = {"x-request-id": record.id} | error.headers()
    return web.Response(body=error.body(), status=error.status, content_type="application/json", headers=headers)


def _no_such_path(http: web.Request) -> ApiError:
    return ApiError(404, f"There is no {http.path} here: see {MODELS}, {CHAT}, {COMPLETIONS}", code="unknown_url")


def _path(http: web.Request) -> str:
    """Return the path as it was sent, without the query (it may hold what no log should) and not at any length."""
    return http.raw_path.partition("?")[0][:200]
