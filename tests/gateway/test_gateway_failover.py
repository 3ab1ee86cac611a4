"""A stream outlives its engine: one replay, nothing twice, nothing missing."""

from __future__ import annotations

import asyncio
import json
import struct

import aiohttp
import pytest
from gateway.harness import CHAT, Node, NodeMaker, events, next_event, text_of, text_to_the_end
from gateway.stub_engine import PROMPT, WAIT_S

from shadowsup.supervisor.gateway.worker import Worker
from shadowsup.wire.engine import EngineState, Routes
from shadowsup.wire.framing import pack
from shadowsup.wire.link import Cancel, Hello, Submit, Token

STREAM = CHAT | {"stream": True}


async def test_a_stream_goes_on_with_the_successor_where_the_dead_engine_stopped(node: Node) -> None:
    active, shadow = await node.pair()
    asked = node.post(STREAM | {"max_tokens": 7, "seed": 5, "stream_options": {"include_usage": True}})
    first = await active.submit()
    active.accept(first, cached=2)
    active.say(first, "Hel", (1, 2), 3)
    stream = events(await asked)
    assert (await next_event(stream))["choices"][0]["delta"]["role"] == "assistant"
    assert text_of(await next_event(stream)) == "Hel"

    active.die()
    await node.supervisor.beat(lambda beat: beat.streams_held == 1)
    shadow.activate(2)  # no routing table says so: the engine's own word is enough
    second = await shadow.submit()
    assert second.epoch == 2 and second.rid == first.rid
    assert second.replay is not None
    assert (second.replay.prompt_ids, second.replay.output_ids, second.replay.delivered_chars) == (PROMPT, (1, 2), 3)
    assert second.prompt_ids == PROMPT and second.messages is None and second.prompt is None
    assert second.sampling == first.sampling and second.sampling.max_tokens == 7

    shadow.accept(second, cached=4)
    shadow.say(second, "lo", (3,), 5)
    assert text_of(await next_event(stream)) == "lo"
    shadow.say(second, "", (), 5, "stop")
    last = await next_event(stream)
    assert last["choices"][0]["finish_reason"] == "stop"
    assert (await next_event(stream))["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 3,
        "total_tokens": 6,
        "prompt_tokens_details": {"cached_tokens": 2},
    }
    assert await anext(stream) == "data: [DONE]"
    assert shadow.frames.empty()
    beat = await node.supervisor.beat(lambda beat: beat.inflight == 0)
    assert (beat.replays_total, beat.tokens_total, beat.errors_total) == (1, 3, 0)


async def test_all_held_requests_travel_in_one_frame(node: Node) -> None:
    active, shadow = await node.pair()
    asked = [node.post(STREAM) for _ in range(8)]
    requests = [await active.submit() for _ in asked]
    for request in requests[:5]:
        active.accept(request)
        active.say(request, "ab", (1,), 2)
    streams = [events(await task) for task in await _first(asked, 5)]
    for stream in streams:
        await next_event(stream)
        assert text_of(await next_event(stream)) == "ab"
    active.die()
    await node.supervisor.beat(lambda beat: beat.streams_held == 8)
    shadow.activate(2)
    frame = await shadow.frame()
    assert [message.rid for message in frame] == [request.rid for request in requests]
    assert [message.replay is not None for message in frame if isinstance(message, Submit)] == [True] * 5 + [False] * 3
    for message in frame:
        assert isinstance(message, Submit)
        shadow.accept(message)
        shadow.say(message, "c", (2,), 3 if message.replay else 1, "stop")
    for stream in streams:
        assert await text_to_the_end(stream) == ("c", "stop")
    for task in asked:
        (await task).close()


async def _first(tasks: list[asyncio.Task[aiohttp.ClientResponse]], count: int) -> list[asyncio.Task[aiohttp.ClientResponse]]:
    """Return the first ``count`` tasks to finish."""
    done: set[asyncio.Task[aiohttp.ClientResponse]] = set()
    waiting = set(tasks)
    while len(done) < count:
        newly, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        done |= newly
    return list(done)


async def test_an_engine_that_dies_before_it_accepted_gets_no_replay_but_the_request_anew(node: Node) -> None:
    active, shadow = await node.pair()
    asked = node.post(CHAT)
    first = await active.submit()
    active.die()
    await node.supervisor.beat(lambda beat: beat.streams_held == 1)
    shadow.activate(2)
    second = await shadow.submit()
    assert second.replay is None and second.messages == first.messages and second.sampling == first.sampling
    shadow.accept(second)
    shadow.say(second, "ok", (1,), 2, "stop")
    body = await (await asked).json()
    assert body["choices"][0]["message"]["content"] == "ok"


async def test_two_deaths_in_a_row_lose_nothing(node: Node) -> None:
    active, shadow = await node.pair()
    third = await node.engine("chat.3")
    await node.supervisor.route(node.row(active, shadow, third))
    await node.linked(third)
    asked = node.post(STREAM)
    one = await active.submit()
    active.accept(one)
    active.say(one, "a", (1,), 1)
    stream = events(await asked)
    await next_event(stream)
    assert text_of(await next_event(stream)) == "a"
    active.die()
    await node.supervisor.beat(lambda beat: beat.streams_held == 1)
    shadow.activate(2)
    two = await shadow.submit()
    shadow.accept(two)  # and dies before a token
    shadow.die()
    await node.supervisor.beat(lambda beat: beat.streams_held == 1)
    third.activate(3)
    three = await third.submit()
    assert three.replay is not None and three.replay.output_ids == (1,) and three.replay.delivered_chars == 1
    third.accept(three)
    third.say(three, "b", (2,), 2, "length")
    assert await text_to_the_end(stream) == ("b", "length")


async def test_a_grown_epoch_in_the_routes_silences_the_former_engine(node: Node) -> None:
    active, shadow = await node.pair()
    asked = node.post(STREAM)
    first = await active.submit()
    active.accept(first)
    active.say(first, "a", (1,), 1)
    stream = events(await asked)
    await next_event(stream)
    await next_event(stream)
    await node.supervisor.route(node.row(active, shadow, epoch=2))
    active.say(first, "WRONG", (9,), 6)  # the former engine is alive and does not know yet
    shadow.activate(2)
    second = await shadow.submit()
    active.say(first, "WRONG", (9,), 6)
    assert second.replay is not None and second.replay.output_ids == (1,)
    shadow.accept(second)
    shadow.say(second, "b", (2,), 2, "stop")
    assert await text_to_the_end(stream) == ("b", "stop")


async def test_text_the_client_has_is_not_sent_again(node: Node) -> None:
    active, shadow = await node.pair()
    asked = node.post(STREAM)
    first = await active.submit()
    active.accept(first)
    active.say(first, "Hello", (1, 2), 5)
    active.say(first, "Hello", (1, 2), 5)  # the same event twice
    active.die()
    await node.supervisor.beat(lambda beat: beat.streams_held == 1)
    shadow.activate(2)
    second = await shadow.submit()
    assert second.replay is not None and second.replay.output_ids == (1, 2)
    shadow.accept(second)
    shadow.say(second, "lo wörld", (3,), 11, "stop")  # begins two characters early
    assert await text_to_the_end(events(await asked)) == ("Hello wörld", "stop")
    async with node.http.get(node.url + "/metrics") as metrics:
        assert 'shadowsup_gateway_repeated_chars_total{worker="chat"} 7.0' in await metrics.text()


async def test_a_hole_in_the_text_is_never_delivered_but_replayed(node: Node) -> None:
    active = await node.serving()
    asked = node.post(STREAM)
    first = await active.submit()
    active.accept(first)
    active.say(first, "ab", (1,), 2)
    active.say(first, "ef", (3,), 6)  # "cd" never came
    cancel, again = await active.frame()
    assert isinstance(cancel, Cancel) and cancel.rid == first.rid
    assert isinstance(again, Submit) and again.rid != first.rid and again.epoch == 1
    assert again.replay is not None and again.replay.output_ids == (1,) and again.replay.delivered_chars == 2
    active.say(first, "WRONG", (9,), 7)
    active.accept(again)
    active.say(again, "cdef", (2, 3), 6, "stop")
    assert await text_to_the_end(events(await asked)) == ("abcdef", "stop")


async def test_a_link_that_breaks_under_a_living_engine_is_dialled_again_and_the_request_replayed_under_another_id(node: Node) -> None:
    active = await node.serving()
    asked = node.post(STREAM)
    first = await active.submit()
    active.accept(first)
    active.say(first, "a", (1,), 1)
    stream = events(await asked)
    await next_event(stream)
    await next_event(stream)
    active.hang_up()
    cancel, again = await active.frame()
    assert isinstance(cancel, Cancel) and cancel.rid == first.rid
    assert isinstance(again, Submit) and again.rid != first.rid and again.epoch == 1 and again.replay is not None
    active.say(first, "WRONG", (9,), 6)
    active.accept(again)
    active.say(again, "b", (2,), 2, "stop")
    assert await text_to_the_end(stream) == ("b", "stop")


async def test_a_half_closed_link_counts_as_lost(node: Node) -> None:
    active, shadow = await node.pair()
    asked = node.post(CHAT)
    await active.submit()
    active.half_close()
    await asyncio.wait_for(active.disconnected.wait(), WAIT_S)
    shadow.activate(2)
    second = await shadow.submit()
    shadow.accept(second)
    shadow.say(second, "ok", (1,), 2, "stop")
    assert (await asked).status == 200


@pytest.mark.parametrize(
    "garbage",
    [struct.pack("<I", 1 << 31) + b"xx", pack(b"\xc1"), pack(b"not msgpack at all"), pack(b"\x91\x81\xa4type\xa5bogus")],
    ids=["too-long", "invalid-msgpack", "not-a-list", "unknown-message"],
)
async def test_a_malformed_frame_drops_this_link_and_no_other(node: Node, garbage: bytes) -> None:
    active = await node.serving()
    other = await node.engine("other.1", worker="other")
    other.activate(1)
    await node.supervisor.route(node.row(active), node.row(other, worker="other", served_name="o"))
    await node.linked(other)
    unharmed = node.post(STREAM | {"model": "o"})
    request = await other.submit()
    other.accept(request)
    asked = node.post(CHAT)
    await active.submit()
    active.send_raw(garbage)
    await asyncio.wait_for(active.disconnected.wait(), WAIT_S)
    await node.supervisor.beat(lambda beat: beat.streams_held == 1)
    other.say(request, "fine", (1,), 4, "stop")
    assert await text_to_the_end(events(await unharmed)) == ("fine", "stop")
    cancel, again = await active.frame()  # dialled again after a pause
    assert isinstance(cancel, Cancel) and isinstance(again, Submit)
    active.accept(again)
    active.say(again, "x", (1,), 1, "stop")
    assert (await asked).status == 200


async def test_an_engine_that_is_not_the_one_dialled_is_not_served(node: Node) -> None:
    active = await node.serving()
    impostor = await node.engine("chat.2")
    impostor.claims = "chat.9"
    impostor.activate(2)
    await node.supervisor.route(node.row(active, impostor))
    await asyncio.wait_for(impostor.connected.wait(), WAIT_S)
    await asyncio.wait_for(impostor.disconnected.wait(), WAIT_S)
    node.post(CHAT).add_done_callback(lambda task: task.result().close())
    request = await active.submit()
    active.reject(request, 400, "enough")
    await node.supervisor.beat(lambda beat: beat.inflight == 0)


async def test_a_client_that_leaves_cancels_its_request(node: Node) -> None:
    active = await node.serving()
    asked = node.post(STREAM)
    request = await active.submit()
    active.accept(request)
    active.say(request, "a", (1,), 1)
    response = await asked
    response.close()
    assert await active.cancelled() == request.rid


async def test_a_client_that_leaves_before_the_first_token_cancels_its_request(node: Node) -> None:
    active = await node.serving()
    asked = node.post(CHAT)
    request = await active.submit()
    asked.cancel()
    assert await active.cancelled() == request.rid


async def test_a_client_that_left_while_held_is_not_replayed(node: Node) -> None:
    active, shadow = await node.pair()
    leaves, stays = node.post(STREAM), node.post(STREAM)
    requests = [await active.submit(), await active.submit()]
    for request in requests:
        active.accept(request)
        active.say(request, "a", (1,), 1)
    (await leaves, await stays)
    active.die()
    await node.supervisor.beat(lambda beat: beat.streams_held == 2)
    leaves.result().close()
    await node.supervisor.beat(lambda beat: beat.streams_held == 1)
    shadow.activate(2)
    replayed = await shadow.submit()
    shadow.accept(replayed)
    shadow.say(replayed, "b", (2,), 2, "stop")
    assert await text_to_the_end(events(stays.result())) == ("ab", "stop")
    assert shadow.frames.empty()


async def test_requests_wait_for_the_first_engine(node: Node) -> None:
    await node.supervisor.route(node.row(state="starting", epoch=0))
    asked = node.post(CHAT)
    await node.supervisor.beat(lambda beat: beat.streams_held == 1)
    engine = await node.engine("chat.1")
    await node.supervisor.route(node.row(engine, state="starting", epoch=0))
    await asyncio.wait_for(engine.connected.wait(), WAIT_S)
    engine.activate(1)
    request = await engine.submit()
    engine.accept(request)
    engine.say(request, "ok", (1,), 2, "stop")
    assert (await asked).status == 200


async def test_waiting_ends_after_give_up_with_a_retryable_503_and_the_reason(node: Node) -> None:
    await node.supervisor.route(node.row(state="backoff", reason="it crashed 9 times", give_up_after_s=0.05))
    response = await node.post(CHAT)
    error = (await response.json())["error"]
    assert response.status == 503 and response.headers["Retry-After"] == "1" and response.headers["x-should-retry"] == "true"
    assert error["type"] == "engine_unavailable" and error["retryable"] is True
    assert "it crashed 9 times" in error["message"] and "0.05 s" in error["message"]


async def test_a_stream_that_began_ends_with_an_error_event_when_nobody_comes(node: Node) -> None:
    active = await node.serving(give_up_after_s=0.05)
    asked = node.post(STREAM)
    request = await active.submit()
    active.accept(request)
    active.say(request, "a", (1,), 1)
    stream = events(await asked)
    await next_event(stream)
    await next_event(stream)
    active.die()
    error = (await next_event(stream))["error"]
    assert error["type"] == "engine_unavailable" and error["retryable"] is True
    assert [line async for line in stream] == []  # and the response ends, without [DONE]
    assert (await node.supervisor.beat(lambda beat: beat.inflight == 0)).errors_total == 1


@pytest.mark.parametrize("state", ["down", "stopped"])
async def test_a_worker_without_hope_fails_its_requests_at_once(node: Node, state: str) -> None:
    active = await node.serving()
    asked = node.post(CHAT)
    await active.submit()
    active.die()
    await node.supervisor.beat(lambda beat: beat.streams_held == 1)
    await node.supervisor.route(node.row(state=state, reason="no such model"))
    response = await asked
    assert response.status == 503 and "no such model" in (await response.json())["error"]["message"]
    response = await node.post(CHAT)
    assert response.status == 503 and "no such model" in (await response.json())["error"]["message"]


async def test_a_held_stream_is_kept_alive_by_comments(make_node: NodeMaker) -> None:
    node = await make_node(keepalive_s=0.02)
    await node.supervisor.route(node.row(state="starting", epoch=0))
    stream = events(await node.post(STREAM))  # headers come with the first comment
    assert await anext(stream) == ": waiting for the engine"
    assert await anext(stream) == ": waiting for the engine"
    engine = await node.engine("chat.1")
    engine.activate(1)
    await node.supervisor.route(node.row(engine))
    request = await engine.submit()
    engine.reject(request, 400, "too long", param="messages")
    async for line in stream:
        if not line.startswith(":"):
            break
    assert json.loads(line.removeprefix("data: "))["error"] == {
        "message": "too long",
        "type": "invalid_request_error",
        "param": "messages",
        "code": None,
    }


async def test_an_engine_that_has_no_room_is_asked_again(node: Node) -> None:
    active = await node.serving()
    asked = node.post(CHAT)
    first = await active.submit()
    active.reject(first, 503, "queue full", retryable=True)
    _, second = await active.frame()
    assert isinstance(second, Submit) and second.replay is None
    active.accept(second)
    active.say(second, "ok", (1,), 2, "stop")
    assert (await asked).status == 200


async def test_what_an_engine_refuses_for_good_is_the_clients_error(node: Node) -> None:
    active = await node.serving()
    for body in (CHAT, STREAM):
        asked = node.post(body)
        active.reject(await active.submit(), 400, "the prompt has 2000 tokens, the context 1024", param="messages")
        response = await asked
        error = (await response.json())["error"]
        assert response.status == 400 and error["param"] == "messages" and "2000 tokens" in error["message"]


async def test_a_draining_engine_finishes_what_it_has_and_gets_nothing_new(node: Node) -> None:
    active, shadow = await node.pair()
    running = node.post(STREAM)
    first = await active.submit()
    active.accept(first)
    active.say(first, "a", (1,), 1)
    stream = events(await running)
    active.become(EngineState.DRAINING, 1)
    active.send(Token(rid=first.rid, epoch=1, ids=(2,), text="b", chars=2, finish_reason="stop"))
    assert await text_to_the_end(stream) == ("ab", "stop")
    waits = node.post(CHAT)
    await node.supervisor.beat(lambda beat: beat.streams_held == 1)
    assert active.frames.empty()
    shadow.activate(2)
    second = await shadow.submit()
    shadow.accept(second)
    shadow.say(second, "ok", (1,), 2, "stop")
    assert (await waits).status == 200


async def test_a_worker_that_leaves_the_table_fails_its_requests_with_words(node: Node) -> None:
    active = await node.serving()
    asked = node.post(CHAT)
    await active.submit()
    await node.supervisor.route()
    response = await asked
    assert response.status == 503 and "was removed" in (await response.json())["error"]["message"]
    assert (await node.post(CHAT)).status == 404


async def test_an_engine_that_leaves_the_table_gives_its_requests_to_the_next(node: Node) -> None:
    active, shadow = await node.pair()
    asked = node.post(STREAM)
    first = await active.submit()
    active.accept(first)
    active.say(first, "a", (1,), 1)
    stream = events(await asked)
    await next_event(stream)
    assert text_of(await next_event(stream)) == "a"
    await node.supervisor.route(node.row(shadow))  # the epoch has not grown, and the engine is alive
    await asyncio.wait_for(active.disconnected.wait(), WAIT_S)
    await node.supervisor.beat(lambda beat: beat.streams_held == 1)
    shadow.activate(2)
    second = await shadow.submit()
    assert second.replay is not None and second.replay.output_ids == (1,)
    shadow.accept(second)
    shadow.say(second, "b", (2,), 2, "stop")
    assert await text_to_the_end(stream) == ("b", "stop")


async def test_what_an_engine_says_in_the_turn_in_which_it_leaves_the_table_is_nobodys(node: Node) -> None:
    active = await node.serving()
    gateway = node.process._gateway
    link = gateway._links[active.route.engine]
    gateway.apply(Routes(version=99, workers=(node.row(),)))
    link.received([Hello(worker="chat", engine="chat.1", state=EngineState.ACTIVE, epoch=7, model="m", max_context=9)])
    worker = gateway.workers["chat"]
    assert isinstance(worker, Worker)
    assert (worker.epoch, worker.serving) == (1, None)


async def test_a_lost_supervisor_changes_nothing_for_the_clients(node: Node) -> None:
    active, shadow = await node.pair()
    node.supervisor._socket.unbind(node.supervisor.endpoint)
    asked = node.post(CHAT)
    first = await active.submit()
    active.accept(first)
    active.die()
    shadow.activate(2)
    second = await shadow.submit()
    assert second.replay is not None
    shadow.accept(second)
    shadow.say(second, "ok", (1,), 2, "stop")
    assert (await asked).status == 200
