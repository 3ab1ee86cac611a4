"""Workers with an HTTP server of their own: the gateway passes requests on and answers back, as they come."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from gateway.harness import CHAT, Node, NodeMaker, events
from gateway.stub_engine import WAIT_S

from shadowsup.wire.engine import WorkerRoute


@dataclass
class Upstream:
    """A server that remembers what it was asked and streams what a test puts in ``chunks``; None ends, "break" breaks off."""

    url: str = ""
    asked: list[tuple[str, str, dict[str, str], bytes]] = field(default_factory=list)
    chunks: asyncio.Queue[bytes | str | None] = field(default_factory=asyncio.Queue)
    left: asyncio.Event = field(default_factory=asyncio.Event)

    async def answer(self, http: web.Request) -> web.StreamResponse:
        self.asked.append((http.method, http.raw_path, dict(http.headers), await http.read()))
        if http.path == "/v1/half":
            half = web.StreamResponse(headers={"Content-Length": "10"})
            await half.prepare(http)
            await half.write(b"12345")
            assert http.transport is not None
            http.transport.abort()
            return half
        if http.path != "/v1/chat/completions":
            return web.Response(body=b"raw", status=201, headers={"X-Mine": "1", "Connection": "X-Hop", "X-Hop": "1"})
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(http)
        try:
            while (chunk := await self.chunks.get()) is not None:
                if isinstance(chunk, str):
                    assert http.transport is not None
                    http.transport.abort()
                    return response
                await response.write(chunk)
        except asyncio.CancelledError:
            self.left.set()
            raise
        return response


@pytest.fixture(params=["tcp", "unix"])
async def upstream(request: pytest.FixtureRequest, short_folder: Path) -> AsyncIterator[Upstream]:
    up = Upstream()
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", up.answer)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    if request.param == "tcp":
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        up.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    else:
        path = str(short_folder / "up.sock")
        await web.UnixSite(runner, path).start()
        up.url = f"unix:{path}"
    yield up
    await runner.cleanup()


def row(upstream: str, **changes: object) -> WorkerRoute:
    given: dict[str, object] = {"worker": "up", "served_name": "m", "kind": "http", "state": "healthy", "epoch": 1, "give_up_after_s": 60.0}
    return WorkerRoute(**(given | {"upstream": upstream} | changes))  # type: ignore[arg-type]


async def test_a_request_is_passed_on_and_its_stream_comes_back_as_it_is_written(node: Node, upstream: Upstream) -> None:
    await node.supervisor.route(row(upstream.url))
    body = CHAT | {"stream": True, "tools": [{"whatever": "the upstream knows"}]}
    asked = node.post(body, "/v1/chat/completions?x=1%2B2", headers={"Connection": "keep-alive, X-Hop", "X-Hop": "1", "X-Mine": "1"})
    response = await asked
    stream = events(response)
    upstream.chunks.put_nowait(b"data: 1\n\n")
    assert await anext(stream) == "data: 1"  # while the upstream has not ended
    upstream.chunks.put_nowait(b"data: 2\n\n")
    upstream.chunks.put_nowait(None)
    assert [line async for line in stream] == ["data: 2"]
    ((method, path, headers, got),) = upstream.asked
    assert (method, path, json.loads(got)) == ("POST", "/v1/chat/completions?x=1%2B2", body)
    assert "X-Hop" not in headers and headers["X-Mine"] == "1"


async def test_any_path_of_the_api_is_passed_on(node: Node, upstream: Upstream) -> None:
    await node.supervisor.route(row(upstream.url))
    response = await node.post({"model": "m", "input": "x"}, "/v1/embeddings")
    assert (response.status, await response.read(), response.headers["X-Mine"]) == (201, b"raw", "1")
    assert "X-Hop" not in response.headers
    async with node.http.delete(node.url + "/v1/files/a%20b") as deleted:
        assert deleted.status == 201
    form = b"--b\r\nwhatever\r\n--b--"
    async with node.http.post(
        node.url + "/v1/audio", data=form, headers={"Content-Type": "multipart/form-data; boundary=b"}, chunked=True
    ) as sent:
        assert sent.status == 201
    assert [(method, path) for method, path, *_ in upstream.asked] == [
        ("POST", "/v1/embeddings"),
        ("DELETE", "/v1/files/a%20b"),
        ("POST", "/v1/audio"),
    ]
    assert upstream.asked[-1][3] == form
    async with node.http.get(node.url + "/v1/models") as models:
        assert [model["id"] for model in (await models.json())["data"]] == ["m"]


async def test_a_client_that_leaves_is_gone_for_the_upstream_too(node: Node, upstream: Upstream) -> None:
    await node.supervisor.route(row(upstream.url))
    response = await node.post(CHAT | {"stream": True})
    response.close()
    await asyncio.wait_for(upstream.left.wait(), WAIT_S)


async def test_an_upstream_that_breaks_off_is_told_to_the_stream(node: Node, upstream: Upstream) -> None:
    await node.supervisor.route(row(upstream.url))
    stream = events(await node.post(CHAT | {"stream": True}))
    upstream.chunks.put_nowait(b"data: 1\n\n")
    assert await anext(stream) == "data: 1"
    upstream.chunks.put_nowait("break")
    error = json.loads((await anext(stream)).removeprefix("data: "))["error"]
    assert error["type"] == "engine_unavailable" and error["retryable"] is True


async def test_half_an_answer_never_looks_whole(node: Node, upstream: Upstream) -> None:
    await node.supervisor.route(row(upstream.url))
    with pytest.raises(aiohttp.ClientError):
        async with node.http.get(node.url + "/v1/half") as response:
            await response.read()


async def test_an_upstream_that_is_not_there_is_a_retryable_503(node: Node, short_folder: Path) -> None:
    for url in (f"unix:{short_folder}/nothing.sock", "http://127.0.0.1:1", ""):
        await node.supervisor.route(row(url, state="starting", reason="it starts"))
        response = await node.post(CHAT)
        error = (await response.json())["error"]
        assert response.status == 503 and response.headers["Retry-After"] == "1", url
        assert error["type"] == "engine_unavailable" and "worker up" in error["message"]


@pytest.mark.parametrize("upstream", ["tcp"], indirect=True)
async def test_the_gateways_own_key_does_not_reach_the_upstream(make_node: NodeMaker, upstream: Upstream, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("secret\n")
    node = await make_node(api_key_file=str(keys))
    await node.supervisor.route(row(upstream.url))
    response = await node.post({"model": "m"}, "/v1/embeddings", headers={"Authorization": "Bearer secret"})
    assert response.status == 201 and "Authorization" not in upstream.asked[0][2]


@pytest.mark.parametrize("upstream", ["tcp"], indirect=True)
async def test_a_worker_with_a_link_and_one_with_a_server_live_side_by_side(node: Node, upstream: Upstream) -> None:
    engine = await node.engine("chat.1")
    engine.activate(1)
    await node.supervisor.route(node.row(engine, served_name="own"), row(upstream.url))
    await node.linked(engine)
    asked = node.post(CHAT | {"model": "own"})
    request = await engine.submit()
    engine.accept(request)
    engine.say(request, "x", (1,), 1, "stop")
    assert (await asked).status == 200
    assert (await node.post({"model": "m"}, "/v1/embeddings")).status == 201
    assert (await node.post({"model": "own"}, "/v1/embeddings")).status == 404
    await node.supervisor.route(node.row(engine, served_name="own"))
    assert (await node.post({"model": "m"}, "/v1/embeddings")).status == 404
