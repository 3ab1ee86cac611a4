"""What a client can take from the gateway: headers, bodies and connections are bounded, by size and by time."""

from __future__ import annotations

import asyncio
from urllib.parse import urlsplit

import pytest
from gateway.harness import Node, NodeMaker
from gateway.stub_engine import WAIT_S

from shadowsup.supervisor.gateway.server import SILENCE_S


async def dial(node: Node) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    where = urlsplit(node.url)
    assert where.hostname is not None
    return await asyncio.open_connection(where.hostname, where.port)


@pytest.mark.parametrize(
    "head",
    [
        b"GET /" + b"x" * 20_000 + b" HTTP/1.1\r\n\r\n",
        b"GET /livez HTTP/1.1\r\nX-A: " + b"x" * 20_000 + b"\r\n\r\n",
        b"GET /livez HTTP/1.1\r\n" + b"X" * 20_000 + b": a\r\n\r\n",
        b"GET /livez HTTP/9.9\r\nHost\r\n\r\n",
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n",
    ],
)
async def test_a_head_that_is_too_long_or_none_is_refused_and_the_next_client_served(node: Node, head: bytes) -> None:
    reader, writer = await dial(node)
    writer.write(head)
    answer = await asyncio.wait_for(reader.read(4096), WAIT_S)
    assert answer.startswith((b"HTTP/1.1 400", b"HTTP/1.0 400", b"HTTP/1.1 414", b"HTTP/1.1 431")), answer[:80]
    writer.close()
    async with node.http.get(node.url + "/livez") as response:
        assert response.status == 200


async def test_a_body_that_never_ends_is_refused_at_the_bound(make_node: NodeMaker) -> None:
    node = await make_node(max_body=10_000)
    reader, writer = await dial(node)
    writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n")
    await node.serving()
    for _ in range(20):
        writer.write(b"3e8\r\n" + b"x" * 1000 + b"\r\n")
    answer = await asyncio.wait_for(reader.read(4096), WAIT_S)
    assert answer.startswith(b"HTTP/1.1 413")
    writer.close()


async def test_a_connection_without_a_request_is_closed_in_time_and_one_that_waits_for_its_answer_is_not(node: Node) -> None:
    engine = await node.serving()
    _, half = await dial(node)
    half.write(b"GET /livez HTTP/1.1\r\nX-Slow: ")
    await half.drain()
    asked = node.post({"model": "m", "messages": [{"role": "user", "content": "hi"}]})
    request = await engine.submit()
    server, process = node.process._server, node.process
    while len(process._connections()) < 2:  # noqa: ASYNC110 (both are accepted before the first look)
        await asyncio.sleep(0)
    server.close_silent(process._connections(), 1000.0)
    server.close_silent(process._connections(), 1000.0 + SILENCE_S - 1.0)
    assert len(process._connections()) == 2
    server.close_silent(process._connections(), 1000.0 + SILENCE_S)
    while len(process._connections()) > 1:  # noqa: ASYNC110
        await asyncio.sleep(0)
    engine.accept(request)
    engine.say(request, "x", (1,), 1, "stop")
    assert (await asked).status == 200
    half.close()
