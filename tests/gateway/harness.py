"""A node around a gateway, and how to read what it streams."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from gateway.stub_engine import WAIT_S, StubEngine, StubSupervisor

from shadowsup.supervisor.gateway.process import GatewayProcess
from shadowsup.wire.engine import EngineState, WorkerRoute

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


@dataclass
class Node:
    """A gateway and what surrounds it."""

    folder: Path
    supervisor: StubSupervisor
    process: GatewayProcess
    task: asyncio.Task[None]
    url: str
    http: aiohttp.ClientSession
    engines: list[StubEngine] = field(default_factory=list)

    async def engine(self, name: str, worker: str = "chat") -> StubEngine:
        engine = await StubEngine(name, self.folder, worker).start()
        self.engines.append(engine)
        return engine

    def row(self, *engines: StubEngine, **changes: Any) -> WorkerRoute:
        given: dict[str, Any] = {
            "worker": "chat",
            "served_name": "m",
            "kind": "link",
            "state": "healthy",
            "epoch": 1,
            "engines": tuple(engine.route for engine in engines),
            "give_up_after_s": 60.0,
        }
        return WorkerRoute(**(given | changes))

    async def serving(self, **changes: Any) -> StubEngine:
        """Return an engine that is active in epoch 1 and known to the gateway."""
        engine = await self.engine("chat.1")
        engine.activate(1)
        await self.supervisor.route(self.row(engine, **changes))
        await self.linked(engine)
        return engine

    async def pair(self, **changes: Any) -> tuple[StubEngine, StubEngine]:
        """Return an active engine of epoch 1 and its parked shadow."""
        active, shadow = await self.engine("chat.1"), await self.engine("chat.2")
        active.activate(1)
        await self.supervisor.route(self.row(active, shadow, **changes))
        await self.linked(active)
        await self.linked(shadow)
        return active, shadow

    async def linked(self, engine: StubEngine) -> None:
        await asyncio.wait_for(engine.connected.wait(), WAIT_S)
        if engine._state is EngineState.ACTIVE:
            await self.supervisor.beat(lambda beat: beat.epochs.get(engine.worker, 0) >= engine._epoch)

    def post(self, body: dict[str, Any], path: str = "/v1/chat/completions", **options: Any) -> asyncio.Task[aiohttp.ClientResponse]:
        async def send() -> aiohttp.ClientResponse:
            return await self.http.post(self.url + path, json=body, **options)

        return asyncio.create_task(send())


NodeMaker = Callable[..., Awaitable[Node]]


async def events(response: aiohttp.ClientResponse) -> AsyncIterator[str]:
    """Yield each server-sent event or comment as it comes."""
    while line := await asyncio.wait_for(response.content.readuntil(b"\n\n"), WAIT_S):
        yield line.decode().removesuffix("\n\n")


async def next_event(stream: AsyncIterator[str]) -> dict[str, Any]:
    """Return the next event's object."""
    line = await anext(stream)
    assert line.startswith("data: "), line
    event: dict[str, Any] = json.loads(line.removeprefix("data: "))
    return event


def text_of(event: dict[str, Any]) -> str:
    choice = event["choices"][0]
    text: str = choice["delta"].get("content", "") if "delta" in choice else choice["text"]
    return text


async def text_to_the_end(stream: AsyncIterator[str]) -> tuple[str, str]:
    """Return all text up to ``[DONE]`` and the finish reason."""
    text, reason = "", ""
    async for line in stream:
        if line.startswith(":"):
            continue
        if line == "data: [DONE]":
            return text, reason
        event = json.loads(line.removeprefix("data: "))
        assert "error" not in event, event
        if event["choices"]:
            text += text_of(event)
            reason = event["choices"][0]["finish_reason"] or reason
    raise AssertionError("the stream ended without [DONE]")
