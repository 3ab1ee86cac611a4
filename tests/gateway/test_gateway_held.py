"""Engines with a server of their own: a stream outlives its engine, whatever byte that one died at."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from gateway.harness import CHAT, Node, NodeMaker, events, next_event
from gateway.stub_engine import WAIT_S
from gateway.stub_vllm import PROMPT, TEXT, TOOL, StubVllm, unpacked

from shadowsup.supervisor.gateway import held_http
from shadowsup.supervisor.gateway.held_request import OBSTACLES
from shadowsup.wire.engine import Death, WorkerRoute

STREAM = CHAT | {"stream": True}
FULL = STREAM | {
    "include_reasoning": True,
    "tools": [{"type": "function", "function": {"name": "weather"}}],
    "stream_options": {"include_usage": True},
}


def row(engine: StubVllm | None, epoch: int, **changes: Any) -> WorkerRoute:
    given: dict[str, Any] = {
        "worker": "chat",
        "served_name": "m",
        "kind": "held",
        "state": "healthy" if engine is not None else "recovering",
        "epoch": epoch,
        "upstream": engine.upstream if engine is not None else "",
        "give_up_after_s": 60.0,
    }
    return WorkerRoute(**(given | changes))


@pytest.fixture
async def engines(node: Node) -> AsyncIterator[list[StubVllm]]:
    """Three engines; the first one is routed in epoch 1."""
    started = [await StubVllm(node.folder, number).start() for number in (1, 2, 3)]
    await node.supervisor.route(row(started[0], 1))
    yield started
    for engine in started:
        await engine.stop()


async def held(node: Node, count: int) -> None:
    await node.supervisor.beat(lambda beat: beat.streams_held == count)


async def cut_off(node: Node, engine: StubVllm, count: int, epoch: int = 2) -> None:
    """Wait until ``engine`` has broken off ``count`` requests, and tell the gateway that it is gone."""
    async with asyncio.timeout(WAIT_S):
        while len(engine.cut) < count:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    await node.supervisor.route(row(None, epoch))
    await held(node, count)


async def lines(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """Yield each event as it was sent, its request id made the same for all."""
    assert response.status == 200, await response.text()
    async for line in events(response):
        yield re.sub(rb'"id":"[a-z]+-[0-9a-f]+"', b'"id":"x"', line.encode() + b"\n\n")


async def body_of(response: aiohttp.ClientResponse) -> bytes:
    """Return the stream as it was sent, its request id made the same for all."""
    assert response.status == 200, await response.text()
    return re.sub(rb'"id":"[a-z]+-[0-9a-f]+"', b'"id":"x"', await asyncio.wait_for(response.read(), 20))


def objects(body: bytes) -> list[dict[str, Any]]:
    *lines, last, end = body.decode().split("\n\n")
    assert (last, end) == ("data: [DONE]", "")
    return [json.loads(line.removeprefix("data: ")) for line in lines if not line.startswith(":")]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", FULL),
        ("/v1/completions", {"model": "m", "prompt": "hi", "stream": True, "stream_options": {"include_usage": True}}),
    ],
    ids=["chat", "completion"],
)
async def test_wherever_the_engine_dies_the_client_gets_the_undisturbed_stream(
    make_node: NodeMaker, path: str, body: dict[str, Any]
) -> None:
    node = await make_node(max_inflight=1000, keepalive_s=60)
    await node.http.close()
    node.http = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
    first, second = [await StubVllm(node.folder, number).start() for number in (1, 2)]
    try:
        await node.supervisor.route(row(first, 1))
        undisturbed = b"".join([line async for line in lines(await node.post(body, path))])
        assert b'"token_ids":null' in undisturbed and b"100," not in undisturbed
        sent = first.events(path.endswith("chat/completions"), body | {"return_token_ids": True}, "0" * 24)
        silent = [b'"delta":{}' in event and b'"stop"' not in event for event in sent]
        ends_at = [len(b"".join(sent[: at + 1])) for at in range(len(sent))]
        # Within an event one byte is like another; around its ends each is tried.
        cuts = [cut for cut in range(ends_at[-1]) if cut % 11 == 0 or any(abs(cut - end) < 3 for end in (0, *ends_at))]
        epoch = 1
        for start in range(0, len(cuts), 300):
            first.breaks.clear()
            asked = {cut: node.post(body, path, headers={"X-Cut": str(cut)}) for cut in cuts[start : start + 300]}
            got: dict[int, bytes] = {}
            for cut, task in asked.items():
                visible = sum(end <= cut and not nothing for end, nothing in zip(ends_at, silent, strict=True))
                if visible:
                    stream = lines(await task)
                    got[cut] = b"".join([await anext(stream) for _ in range(visible)])
                    assert undisturbed.startswith(got[cut]), cut
            first.breaks.set()
            # Where the finish reason is there, the gateway knows the rest.
            ends = sum(cut >= ends_at[-3] for cut in asked)
            await cut_off(node, first, len(asked) - ends, epoch + 1)
            epoch += 2
            await node.supervisor.route(row(second, epoch))
            for cut, task in asked.items():
                whole = got.get(cut, b"") + b"".join([line async for line in lines(await task)])
                want = undisturbed if cut in got else undisturbed.replace(b"1001", b"1002")
                assert _same(whole) == _same(want), cut
            epoch += 1
            await node.supervisor.route(row(first, epoch))
    finally:
        await node.http.close()
        await first.stop()
        await second.stop()


def _same(body: bytes) -> bytes:
    """Ids of tool calls are the engine's that began the call; that each is told once is another test."""
    return re.sub(rb"call-\d", b"call", body)


async def test_a_replay_says_what_was_delivered_and_nothing_is_counted_twice(node: Node, engines: list[StubVllm]) -> None:
    first, second, third = engines
    for engine in engines:
        engine.gates = asyncio.Queue()
    task = node.post(FULL)
    for _ in range(5):
        first.gates.put_nowait("go")  # type: ignore[union-attr]
    stream = events(await task)
    deltas = [(await next_event(stream))["choices"][0]["delta"] for _ in range(5)]
    assert deltas[0] == {"role": "assistant", "content": ""} and deltas[4] == {"content": "Hel"}
    first.gates.put_nowait("half")  # type: ignore[union-attr]
    await held(node, 1)
    await node.supervisor.route(row(None, 2))
    await node.supervisor.route(row(second, 2))
    for _ in range(3):  # opening, what was delivered, the next
        second.gates.put_nowait("go")  # type: ignore[union-attr]
    assert (await next_event(stream))["choices"][0]["delta"] == {"content": "lo"}
    second.gates.put_nowait("half")  # type: ignore[union-attr]
    await held(node, 1)
    await node.supervisor.route(row(third, 3))
    for _ in range(50):
        third.gates.put_nowait("go")  # type: ignore[union-attr]
    rest = [json.loads(line[6:]) async for line in stream if line != "data: [DONE]"]
    for asked, epoch in zip((first.asked[0], second.asked[0], third.asked[0]), (1, 2, 3), strict=True):
        assert asked["return_token_ids"] is True and asked["messages"] == CHAT["messages"]
        assert asked["vllm_xargs"]["shadowsup_epoch"] == epoch
    assert "shadowsup_output" not in first.asked[0]["vllm_xargs"]
    xargs = third.asked[0]["vllm_xargs"]
    assert unpacked(xargs["shadowsup_prompt"]) == PROMPT
    assert unpacked(xargs["shadowsup_output"]) == [100, 101, 102, 103, 104]
    assert unpacked(xargs["shadowsup_pieces"]) == [1, 1, 1, 1, 1]
    assert {event["created"] for event in rest} == {1001} and len({event["id"] for event in rest}) == 1
    assert all("role" not in choice["delta"] for event in rest for choice in event["choices"])
    assert rest[-1]["usage"]["completion_tokens"] == 3 + len(TEXT) + 2 + len(TOOL) + 1
    beat = await node.supervisor.beat(lambda beat: beat.inflight == 0)
    assert (beat.replays_total, beat.tokens_total, beat.errors_total) == (2, rest[-1]["usage"]["completion_tokens"], 0)
    metrics = await (await node.http.get(node.url + "/metrics")).text()
    assert 'shadowsup_gateway_failovers_total{worker="chat"} 2.0' in metrics
    assert 'shadowsup_gateway_failover_pause_seconds_count{worker="chat"} 2.0' in metrics


async def test_a_tool_call_keeps_its_id_over_a_failover_and_a_later_one_gets_its_own(node: Node, engines: list[StubVllm]) -> None:
    first, second, _ = engines
    first.gates = asyncio.Queue()
    task = node.post(STREAM | {"tools": [{}]})
    for _ in range(1 + len(TEXT) + 3):  # opening, text, the start of the call, its first arguments
        first.gates.put_nowait("go")
    stream = events(await task)
    told = [await next_event(stream) for _ in range(1 + len(TEXT) - 1 + 2)]  # two of them are silent
    first.gates.put_nowait("die")
    await held(node, 1)
    await node.supervisor.route(row(second, 2))
    told += [json.loads(line[6:]) async for line in stream if line != "data: [DONE]"]
    calls = [call for event in told for choice in event["choices"] for call in choice["delta"].get("tool_calls", ())]
    assert [(call.get("id"), call["index"]) for call in calls] == [
        ("call-1", 0),
        (None, 0),
        (None, 0),
        (None, 0),
        ("call-2b", 1),
    ]
    assert "".join(call["function"]["arguments"] for call in calls if call["index"] == 0) == "".join(TOOL)


async def test_a_client_that_asked_for_ids_gets_each_once(node: Node, engines: list[StubVllm]) -> None:
    first, second, _ = engines
    first.breaks.clear()
    stream = events(await node.post(STREAM | {"return_token_ids": True}, headers={"X-Cut": "700"}))
    told = [await next_event(stream) for _ in range(2)]
    first.breaks.set()
    await cut_off(node, first, 1)
    await node.supervisor.route(row(second, 2))
    told += [json.loads(line[6:]) async for line in stream if line != "data: [DONE]"]
    assert told[0]["prompt_token_ids"] == PROMPT
    ids = [i for event in told for choice in event["choices"] for i in choice.get("token_ids") or ()]
    assert ids == list(range(100, 100 + len(TEXT)))


async def test_hidden_reasoning_stays_hidden_and_is_replayed(node: Node, engines: list[StubVllm]) -> None:
    first, second, _ = engines
    first.gates = asyncio.Queue()
    task = node.post(STREAM | {"include_reasoning": False, "return_token_ids": True})
    for _ in range(5):
        first.gates.put_nowait("go")
    stream = events(await task)
    told = [await next_event(stream) for _ in range(2)]  # three events were reasoning
    first.gates.put_nowait("die")
    await held(node, 1)
    await node.supervisor.route(row(second, 2))
    told += [json.loads(line[6:]) async for line in stream if line != "data: [DONE]"]
    assert all("reasoning" not in event["choices"][0]["delta"] for event in told)
    assert not any(event["choices"][0].get("token_ids") for event in told)
    assert "".join(event["choices"][0]["delta"].get("content", "") for event in told) == "".join(TEXT)
    assert len(unpacked(second.asked[0]["vllm_xargs"]["shadowsup_output"])) == 4


async def test_an_engine_that_aborts_its_requests_on_its_way_out_is_not_believed(node: Node, engines: list[StubVllm]) -> None:
    first, second, _ = engines
    first.abort_after = 3
    task = node.post(STREAM)
    first.gates = None
    response = await task
    stream = events(response)
    for _ in range(3):  # opening, two texts; the third token is silent
        await next_event(stream)
    await node.supervisor.route(row(second, 2))
    reasons, text = [], ""
    async for line in stream:
        if line != "data: [DONE]":
            choice = json.loads(line[6:])["choices"][0]
            text += choice["delta"].get("content", "")
            reasons.append(choice["finish_reason"])
    assert text == "".join(TEXT[2:]) and reasons[-1] == "stop" and "abort" not in reasons


async def test_a_grown_epoch_moves_streams_though_their_engine_still_speaks(node: Node, engines: list[StubVllm]) -> None:
    first, second, _ = engines
    first.gates = asyncio.Queue()
    task = node.post(STREAM)
    first.gates.put_nowait("go")
    first.gates.put_nowait("go")
    stream = events(await task)
    await next_event(stream)
    await next_event(stream)
    await node.supervisor.route(row(second, 2))
    await asyncio.wait_for(first.left.wait(), WAIT_S)
    text = [json.loads(line[6:])["choices"][0]["delta"].get("content", "") async for line in stream if line != "data: [DONE]"]
    assert "".join(text) == "".join(TEXT[1:])


async def test_a_request_that_is_not_streamed_is_held_and_begun_anew(node: Node, engines: list[StubVllm]) -> None:
    first, second, _ = engines
    first.gates = asyncio.Queue()
    tasks = [node.post(CHAT), node.post(CHAT)]
    first.gates.put_nowait("die")
    first.gates.put_nowait("abort")
    await node.supervisor.beat(lambda beat: beat.inflight == 2)
    await node.supervisor.route(row(None, 2))
    await held(node, 2)
    await node.supervisor.route(row(second, 2))
    for task in tasks:
        answer = await (await task).json()
        assert answer["choices"][0]["message"]["content"] == "".join(TEXT) and answer["created"] == 2
    assert second.asked == [CHAT, CHAT]  # as the client wrote it
    beat = await node.supervisor.beat(lambda beat: beat.inflight == 0)
    assert beat.tokens_total == 2 * len(TEXT) and beat.replays_total == 0
    metrics = await (await node.http.get(node.url + "/metrics")).text()
    assert 'shadowsup_gateway_begun_anew_total{worker="chat"} 2.0' in metrics


NOT_REPLAYED: list[tuple[str, dict[str, Any]]] = [
    ("n > 1", {"n": 2}),
    ("best_of > 1", {"best_of": 2}),
    ("beam search", {"use_beam_search": True}),
    ("several prompts in one request", {"prompt": ["a", "b"]}),
    ("prompt_logprobs", {"prompt_logprobs": 1}),
    ("echo", {"echo": True}),
    ("images, audio and other media", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}),
    ("prompt_embeds", {"prompt_embeds": "x"}),
    ("kv_transfer_params", {"kv_transfer_params": {"a": 1}}),
    ("thinking_token_budget", {"thinking_token_budget": 5}),
    ("truncate_prompt_tokens", {"truncate_prompt_tokens": 5}),
    ("vllm_xargs that is no object", {"vllm_xargs": [1]}),
]


def test_each_obstacle_is_tried() -> None:
    assert [name for name, _ in NOT_REPLAYED] == [name for name, _ in OBSTACLES]


@pytest.mark.parametrize(("name", "change"), NOT_REPLAYED)
async def test_what_cannot_be_replayed_is_served_and_failed_clearly_when_its_engine_dies(
    node: Node, engines: list[StubVllm], name: str, change: dict[str, Any]
) -> None:
    first, second, _ = engines
    body = STREAM | change
    assert (await (await node.post(body)).read()).endswith(b"data: [DONE]\n\n")
    assert first.asked[-1] == body  # nothing is added to what will not be replayed
    before = node.post(body, headers={"X-Cut": "0"})
    await cut_off(node, first, 1)
    await node.supervisor.route(row(second, 2))
    assert (await (await before).read()).endswith(b"data: [DONE]\n\n")  # the client had nothing: another engine begins anew
    await node.supervisor.route(row(first, 3))
    first.breaks.clear()
    stream = events(await node.post(body, headers={"X-Cut": "400"}))
    await anext(stream)
    first.breaks.set()
    *_, last = [line async for line in stream]
    error = json.loads(last.removeprefix("data: "))["error"]
    assert error["retryable"] is True and error["type"] == "engine_unavailable" and name in error["message"]
    metrics = await (await node.http.get(node.url + "/metrics")).text()
    assert re.search(r'shadowsup_gateway_unreplayable_total\{worker="chat"\} [12]\.0', metrics)


async def test_a_successor_that_tells_another_answer_is_not_listened_to(node: Node, engines: list[StubVllm]) -> None:
    first, _, third = engines
    third.lies = True
    first.breaks.clear()
    stream = events(await node.post(STREAM, headers={"X-Cut": "900"}))
    for _ in range(3):
        await anext(stream)
    first.breaks.set()
    await cut_off(node, first, 1)
    await node.supervisor.route(row(third, 2))
    *_, last = [line async for line in stream]
    error = json.loads(last.removeprefix("data: "))["error"]
    assert error["retryable"] is True and "content is not what was delivered" in error["message"]
    metrics = await (await node.http.get(node.url + "/metrics")).text()
    assert 'shadowsup_gateway_missteps_total{worker="chat"} 1.0' in metrics
    assert 'shadowsup_gateway_unreplayable_total{worker="chat"} 1.0' in metrics


async def test_a_successor_without_the_plugin_that_draws_the_same_tokens_goes_on(node: Node, engines: list[StubVllm]) -> None:
    first, second, _ = engines
    second.without_plugin = True
    first.breaks.clear()
    stream = events(await node.post(STREAM, headers={"X-Cut": "900"}))
    told = [await next_event(stream) for _ in range(3)]
    first.breaks.set()
    await cut_off(node, first, 1)
    await node.supervisor.route(row(second, 2))
    told += [json.loads(line[6:]) async for line in stream if line != "data: [DONE]"]
    assert "".join(event["choices"][0]["delta"].get("content", "") for event in told) == "".join(TEXT)


async def test_the_clients_own_mistakes_come_back_as_the_engine_says_them(node: Node, engines: list[StubVllm]) -> None:
    first, _, _ = engines
    error = {"error": {"message": "max_tokens is too large", "type": "BadRequestError", "param": "max_tokens", "code": 400}}
    for body in (CHAT, STREAM, STREAM | {"n": 2}):
        first.fails.append((400, error))
        response = await node.post(body)
        assert (response.status, await response.json()) == (400, error)
    response = await node.post(STREAM | {"vllm_xargs": {"shadowsup_output": "x"}})
    assert response.status == 400 and (await response.json())["error"]["param"] == "vllm_xargs.shadowsup_output"


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages", "/v1/chat/completions", "/v1/completions"])
async def test_no_path_takes_names_of_the_replay_from_a_client(node: Node, engines: list[StubVllm], path: str) -> None:
    response = await node.post({"model": "m", "input": "x", "vllm_xargs": {"shadowsup_held": 1}}, path)
    assert response.status == 400 and (await response.json())["error"]["param"] == "vllm_xargs.shadowsup_held"
    assert not engines[0].headers


async def test_a_server_error_is_the_clients_only_when_the_engine_outlives_it(
    node: Node, engines: list[StubVllm], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, _ = engines
    error = {"error": {"message": "EngineCore encountered an issue", "type": "InternalServerError", "code": 500}}
    first.fails += [(500, error)] * 2
    tasks = [node.post(CHAT), node.post(STREAM)]
    while first.fails:  # noqa: ASYNC110
        await asyncio.sleep(0)
    await node.supervisor.route(row(second, 2))
    for task in tasks:
        assert (await task).status == 200 and await (await task).read()
    monkeypatch.setattr("shadowsup.supervisor.gateway.held.SUSPECT_S", 0.01)
    second.fails += [(500, error)] * 2
    response = await node.post(CHAT)
    assert (response.status, await response.json()) == (500, error) and not second.fails


async def test_an_engine_that_may_be_dying_is_not_asked_again_for_news_of_others(node: Node, engines: list[StubVllm]) -> None:
    first, second, _ = engines
    first.fails += [(500, {"error": {"message": "EngineCore encountered an issue", "code": 500}})] * 9
    task = node.post(CHAT)
    while len(first.fails) == 9:  # noqa: ASYNC110
        await asyncio.sleep(0)
    for _ in range(3):
        await node.supervisor.route(row(first, 1))
        assert (await node.http.get(node.url + "/v1/models")).status == 200  # it has had its turns since
    await node.supervisor.route(row(second, 2))
    assert (await task).status == 200
    assert len(first.fails) == 8


async def test_a_client_that_leaves_is_gone_for_the_engine_and_a_held_one_is_not_replayed(node: Node, engines: list[StubVllm]) -> None:
    first, second, _ = engines
    first.gates = asyncio.Queue()
    first.gates.put_nowait("go")
    response = await node.post(STREAM)
    response.close()
    await asyncio.wait_for(first.left.wait(), WAIT_S)
    task = node.post(STREAM)
    first.gates.put_nowait("go")
    response = await task
    await next_event(events(response))
    first.gates.put_nowait("die")
    await held(node, 1)
    response.close()
    await held(node, 0)
    await node.supervisor.route(row(second, 2))
    await node.supervisor.beat(lambda beat: beat.inflight == 0)
    assert not second.asked


async def test_a_held_client_hears_a_comment_and_gives_up_in_the_end(make_node: NodeMaker) -> None:
    node = await make_node(keepalive_s=0.02)
    await node.supervisor.route(row(None, 1, give_up_after_s=0.2))
    stream = events(await node.post(STREAM))
    assert await anext(stream) == ": waiting for the engine"
    *_, last = [line async for line in stream]
    assert json.loads(last.removeprefix("data: "))["error"]["retryable"] is True
    await node.supervisor.route(row(None, 1, state="down", reason="too many failures"))
    response = await node.post(CHAT)
    assert response.status == 503 and "too many failures" in await response.text()
    engine = await StubVllm(node.folder, 1, gates=asyncio.Queue()).start()
    try:
        await node.supervisor.route(row(engine, 2))
        response = await node.post(STREAM)
        assert await anext(events(response)) == ": waiting for the next token"
        response.close()
    finally:
        await engine.stop()


async def test_an_engine_whose_socket_is_gone_is_waited_for(node: Node, engines: list[StubVllm]) -> None:
    first, second, _ = engines
    await first.stop()
    task = node.post(STREAM)
    await held(node, 1)
    await node.supervisor.route(row(second, 2))
    assert (await (await task).read()).endswith(b"data: [DONE]\n\n")


async def test_new_requests_wait_while_admission_is_paused_and_those_that_run_are_moved(node: Node, engines: list[StubVllm]) -> None:
    first, second, _ = engines
    first.gates = asyncio.Queue()
    running = node.post(STREAM)
    first.gates.put_nowait("go")
    stream = events(await running)
    await next_event(stream)
    await node.supervisor.route(row(first, 1, admits=False, give_up_after_s=0.05))
    new = node.post(CHAT)
    await held(node, 1)
    await node.supervisor.route(row(second, 2, admits=False, give_up_after_s=0.05))
    assert [line async for line in stream][-1] == "data: [DONE]"
    assert (len(first.asked), len(second.asked)) == (1, 1)
    await asyncio.sleep(0.06)
    await node.supervisor.route(row(second, 2))
    assert (await new).status == 200


async def test_the_same_epoch_gets_a_request_again_under_another_id(node: Node, engines: list[StubVllm]) -> None:
    first, *_ = engines
    first.revives = True
    response = await node.post(STREAM, headers={"X-Cut": "500"})  # only this connection breaks; the engine lives on
    assert "".join(e["choices"][0]["delta"].get("content", "") for e in objects(await body_of(response))) == "".join(TEXT)
    one, two = (asked["vllm_xargs"]["shadowsup_request"] for asked in first.asked)
    assert two == f"{one}~1"


async def test_other_paths_are_passed_on_and_begun_anew(node: Node, engines: list[StubVllm]) -> None:
    first, second, _ = engines
    first.gates = asyncio.Queue()
    task = node.post({"model": "m", "input": "x"}, "/v1/embeddings")
    first.gates.put_nowait("die")
    await held(node, 1)
    await node.supervisor.route(row(second, 2))
    assert await (await task).json() == {"path": "/v1/embeddings", "from": 2}
    async with node.http.get(node.url + "/v1/models") as models:
        assert [model["id"] for model in (await models.json())["data"]] == ["m"]


async def test_a_stream_of_another_path_costs_nothing_while_its_engine_is_silent(
    make_node: NodeMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`keepalive_s` is over after 20 ms, and there is nothing to send: a comment may not be for every protocol."""
    looks, quiet = 0, held_http._Run._keep_alive

    async def counted(run: Any, what: str) -> None:
        nonlocal looks
        looks += 1
        await quiet(run, what)

    monkeypatch.setattr(held_http._Run, "_keep_alive", counted)
    node = await make_node(keepalive_s=0.02)
    engine = await StubVllm(node.folder, 1, gates=asyncio.Queue()).start()
    try:
        assert engine.gates is not None
        await node.supervisor.route(row(engine, 1))
        asking = node.post({"model": "m", "input": "x", "stream": True}, "/v1/responses")
        await asyncio.sleep(0.5)
        assert engine.asked and looks <= 20
        engine.gates.put_nowait("go")
        response = await asking
        assert (await anext(events(response))).startswith("data: ")
        response.close()
    finally:
        await engine.stop()


async def test_a_draining_gateway_and_a_removed_worker_fail_their_requests_clearly(make_node: NodeMaker) -> None:
    node = await make_node()
    engine = await StubVllm(node.folder, 1, gates=asyncio.Queue()).start()
    try:
        await node.supervisor.route(row(engine, 1))
        engine.gates.put_nowait("go")  # type: ignore[union-attr]
        streamed, plain = node.post(STREAM), node.post(CHAT)
        response = await streamed
        stream = events(response)
        await next_event(stream)
        await node.supervisor.beat(lambda beat: beat.inflight == 2)
        await node.supervisor.route()
        assert "removed" in json.loads((await anext(stream)).removeprefix("data: "))["error"]["message"]
        assert await response.read() == b""
        assert (await plain).status == 503
        await node.supervisor.route(row(engine, 1))
        waiting = node.post(CHAT)
        await node.supervisor.beat(lambda beat: beat.inflight == 1)
        node.process.stop(0.0)
        response = await waiting
        assert response.status == 503 and response.headers["x-should-retry"] == "true"
    finally:
        await engine.stop()


@pytest.mark.parametrize("body", [STREAM, CHAT], ids=["streamed", "whole"])
async def test_a_request_that_ends_every_engine_is_found_and_takes_no_other_with_it(node: Node, body: dict[str, Any]) -> None:
    engines = [await StubVllm(node.folder, number).start() for number in range(10, 20)]
    deaths: tuple[Death, ...] = ()
    try:
        await node.supervisor.route(row(None, 0))
        poison = node.post(body, headers={"X-Poison": "1"})
        others = [node.post(STREAM, headers={"X-Slow": "1"}) for _ in range(3)]
        await held(node, 4)
        for epoch, engine in enumerate(engines, 1):
            if epoch > 2:
                engine.spared.set()
            await node.supervisor.route(row(engine, epoch, deaths=deaths))
            while not (engine.dead or poison.done()):  # noqa: ASYNC110
                await asyncio.sleep(0.001)
            if poison.done():
                break
            deaths += (Death(epoch=epoch, engine=f"chat.{epoch}", fault="segv", own=True),)
            await node.supervisor.route(row(None, epoch, deaths=deaths))
        assert sum(engine.dead for engine in engines) == 3, "two beside others, one alone"
        response = await poison
        error = (await response.json())["error"]
        assert response.status == 500 and error["code"] == "request_ends_engines" and "chat.3 (segv) while it ran alone" in error["message"]
        assert response.headers["x-should-retry"] == "false"
        for other in others:
            assert (await (await other).read()).endswith(b"data: [DONE]\n\n")
    finally:
        for engine in engines:
            await engine.stop()


@pytest.mark.parametrize("body", [STREAM, CHAT], ids=["streamed", "whole"])
async def test_a_request_whose_engines_are_killed_from_outside_is_served_in_the_end(node: Node, body: dict[str, Any]) -> None:
    engines = [await StubVllm(node.folder, number).start() for number in range(10, 18)]
    deaths: tuple[Death, ...] = ()
    try:
        await node.supervisor.route(row(None, 0))
        requests = [node.post(body, headers={"X-Slow": "1"}) for _ in range(3)]
        await held(node, 3)
        for epoch, engine in enumerate(engines, 1):
            await node.supervisor.route(row(engine, epoch, deaths=deaths))
            if engine is engines[-1]:
                engine.spared.set()
                break
            while len(engine.headers) < 3:  # all of them at once, none alone  # noqa: ASYNC110
                await asyncio.sleep(0.001)
            engine.die()
            deaths += (Death(epoch=epoch, engine=f"chat.{epoch}", fault="killed", own=False),)
            await node.supervisor.route(row(None, epoch, deaths=deaths))
            await held(node, 3)
        for request in requests:
            response = await request
            assert response.status == 200 and await response.read()
    finally:
        for engine in engines:
            await engine.stop()


async def test_a_suspect_whose_tokens_are_not_seen_is_let_go_when_its_engine_has_lived_with_it(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(held_http, "LONG_ENOUGH_S", 1.0)
    engines = [await StubVllm(node.folder, number).start() for number in range(10, 13)]
    deaths = tuple(Death(epoch=epoch, engine=f"chat.{epoch}", fault="segv", own=True) for epoch in (1, 2))
    try:
        await node.supervisor.route(row(None, 0))
        requests = [node.post(CHAT, headers={"X-Slow": "1"}) for _ in range(2)]
        await held(node, 2)
        for epoch, engine in enumerate(engines[:2], 1):
            await node.supervisor.route(row(engine, epoch, deaths=deaths[: epoch - 1]))
            while len(engine.headers) < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
            engine.die()
            await node.supervisor.route(row(None, epoch, deaths=deaths[:epoch]))
            await held(node, 2)
        await node.supervisor.route(row(engines[2], 3, deaths=deaths))
        while not engines[2].headers:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        await node.supervisor.beat(lambda beat: beat.streams_held == 1)
        while len(engines[2].headers) < 2:  # the first one has no answer yet  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        engines[2].spared.set()
        assert [(await request).status for request in requests] == [200, 200]
    finally:
        for engine in engines:
            await engine.stop()
