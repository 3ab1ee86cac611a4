"""Requests that wait at a parked engine: a failover lets them go on, and whatever goes wrong with that is a replay."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable

import aiohttp
import pytest
from gateway.harness import Node, events, next_event
from gateway.stub_engine import WAIT_S
from gateway.stub_vllm import PROMPT, TEXT, StubVllm
from gateway.test_gateway_held import FULL, STREAM, _same, held, lines, row

from shadowsup.supervisor.gateway import held_stage
from shadowsup.wire.engine import Route, WorkerRoute
from shadowsup.wire.staged import Go, Told


def beside(engine: StubVllm | None, epoch: int, *parked: StubVllm) -> WorkerRoute:
    """A row that lists engines that do not serve, too."""
    there = [*parked, *([engine] if engine is not None else [])]
    return row(engine, epoch, engines=tuple(Route(engine=f"e{one.number}", socket=one.path) for one in there))


@pytest.fixture
async def engines(node: Node) -> AsyncIterator[list[StubVllm]]:
    """The first serves in epoch 1, the second is parked, the third is not there yet."""
    started = [await StubVllm(node.folder, number).start() for number in (1, 2, 3)]
    await node.supervisor.route(beside(started[0], 1, started[1]))
    yield started
    for engine in started:
        await engine.stop()


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not holds():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


async def begun(node: Node, first: StubVllm, count: int) -> AsyncIterator[str]:
    """Begin a stream and return what of it comes after ``count`` events."""
    first.gates = asyncio.Queue()
    task = node.post(STREAM)
    for _ in range(count):
        first.gates.put_nowait("go")
    stream = events(await task)
    for _ in range(count):
        await next_event(stream)
    return stream


async def text_of(stream: AsyncIterator[str]) -> str:
    said = [json.loads(line[6:]) async for line in stream if line != "data: [DONE]"]
    assert not [one for one in said if "error" in one], said
    return "".join(choice["delta"].get("content", "") for one in said for choice in one["choices"])


@pytest.mark.parametrize("tell_tokens", [2, 1000])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", FULL),
        ("/v1/completions", {"model": "m", "prompt": "hi", "stream": True, "stream_options": {"include_usage": True}}),
    ],
    ids=["chat", "completion"],
)
async def test_wherever_the_engine_dies_what_waits_goes_on_with_the_undisturbed_stream(
    node: Node,
    engines: list[StubVllm],
    path: str,
    body: dict[str, object],
    tell_tokens: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(held_stage, "TELL_TOKENS", tell_tokens)
    first, second, _ = engines
    chat = path.endswith("chat/completions")
    undisturbed = b"".join([line async for line in lines(await node.post(body, path))])
    sent = first.events(chat, body | {"return_token_ids": True}, "0" * 24)
    ends_at = [len(b"".join(sent[: at + 1])) for at in range(len(sent))]
    cuts = [end + by for end in ends_at[:-3] for by in (-7, 0, 1)]
    first.breaks.clear()
    asked = {cut: node.post(body, path, headers={"X-Cut": str(cut)}) for cut in cuts}
    waiting = sum(sum(end <= cut for end in ends_at) > chat for cut in cuts)  # at least one token was delivered
    await until(lambda: len(second.ahead) == waiting)
    first.breaks.set()
    await until(lambda: len(first.cut) == len(cuts))
    await node.supervisor.route(beside(None, 2, second))
    await held(node, len(cuts))
    before = len(second.asked)
    await node.supervisor.route(beside(second, 2))
    for cut, task in asked.items():
        whole = b"".join([line async for line in lines(await task)])
        want = undisturbed if cut >= ends_at[0] else undisturbed.replace(b"1001", b"1002")
        assert _same(whole) == _same(want), (cut, ends_at)
    gone_on = [said for said in second.told if isinstance(said, Go)]
    assert len(gone_on) == waiting and {said.epoch for said in gone_on} == {2}
    assert any(isinstance(said, Told) for said in second.told) == (tell_tokens == 2)
    assert len(second.asked) - before == len(cuts) - waiting  # nobody who waited was replayed
    await until(lambda: not second.ahead)
    beat = await node.supervisor.beat(lambda beat: beat.inflight == 0)
    assert beat.replays_total == waiting


@pytest.mark.parametrize("fault", ["refuses", "another prompt", "forgets", "breaks", "lies"])
async def test_what_goes_wrong_with_what_waits_is_a_replay(node: Node, engines: list[StubVllm], fault: str) -> None:
    first, second, _ = engines
    second.ahead_fault = fault
    stream = await begun(node, first, 3)
    await until(lambda: bool(second.asked) and (bool(second.ahead) or fault in ("refuses", "another prompt")))
    assert first.gates is not None
    first.gates.put_nowait("die")
    await held(node, 1)
    await node.supervisor.route(beside(second, 2))
    assert await text_of(stream) == "".join(TEXT[2:])
    assert "shadowsup_output" in second.asked[-1]["vllm_xargs"]
    ids = [asked["vllm_xargs"]["shadowsup_request"] for asked in second.asked[1:]]
    assert len(ids) == len(set(ids)) == 1


async def test_what_waits_ends_with_its_stream_and_with_its_client(node: Node, engines: list[StubVllm]) -> None:
    first, second, _ = engines
    stream = await begun(node, first, 3)
    await until(lambda: len(second.ahead) == 1)
    assert first.gates is not None
    for _ in TEXT:
        first.gates.put_nowait("go")
    assert await text_of(stream) == "".join(TEXT[2:])
    await until(lambda: not second.ahead)
    task = node.post(STREAM)
    for _ in range(3):
        first.gates.put_nowait("go")
    response: aiohttp.ClientResponse = await task
    await until(lambda: len(second.ahead) == 1)
    response.close()
    await until(lambda: not second.ahead)


async def test_an_engine_that_is_parked_later_gets_the_streams_that_run(node: Node, engines: list[StubVllm]) -> None:
    first, second, third = engines
    stream = await begun(node, first, 3)
    await until(lambda: len(second.ahead) == 1)
    await node.supervisor.route(beside(first, 1, third))
    await until(lambda: len(third.ahead) == 1 and not second.ahead)
    assert third.asked[-1]["messages"] == STREAM["messages"]
    assert first.gates is not None
    first.gates.put_nowait("die")
    await held(node, 1)
    await node.supervisor.route(beside(third, 2))
    assert await text_of(stream) == "".join(TEXT[2:])
    assert not second.told and [type(said) for said in third.told] == [Go]


async def test_no_more_waits_at_an_engine_than_it_has_room_for(
    node: Node, engines: list[StubVllm], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(held_stage, "MOST_TOKENS", len(PROMPT))
    first, second, _ = engines
    one = await begun(node, first, 3)
    await until(lambda: len(second.ahead) == 1)
    other = await begun(node, first, 3)
    assert len(second.ahead) == 1
    first.die()
    await node.supervisor.route(row(None, 2))
    await held(node, 2)
    await node.supervisor.route(beside(second, 2))
    assert [await text_of(stream) for stream in (one, other)] == ["".join(TEXT[2:])] * 2
