"""A gateway in this process, on a real socket, with a real ROUTER and stub engines around it."""

from __future__ import annotations

import asyncio
import socket
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from gateway.harness import Node, NodeMaker
from gateway.stub_engine import StubSupervisor

from shadowsup.supervisor.gateway.process import GatewayProcess
from shadowsup.wire.gateway import GatewaySpec


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """A folder whose path leaves room for a Unix socket's 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="gw-") as folder:
        yield Path(folder)


@pytest.fixture
async def make_node(short_folder: Path) -> AsyncIterator[NodeMaker]:
    async with AsyncExitStack() as stack:

        async def make(**changes: Any) -> Node:
            supervisor = StubSupervisor(short_folder)
            stack.callback(supervisor.close)
            listener = socket.create_server(("127.0.0.1", 0))
            spec = GatewaySpec(
                node="test",
                runtime_dir=str(short_folder),
                listen_fds=(),
                beat_endpoint=supervisor.endpoint,
                heartbeat_s=0.02,
                **changes,
            )
            process = GatewayProcess(spec, [listener])
            task = asyncio.create_task(process.run())

            async def stop() -> None:
                process.stop(0.0)
                await task

            stack.push_async_callback(stop)
            http = await stack.enter_async_context(aiohttp.ClientSession())
            node = Node(short_folder, supervisor, process, task, f"http://127.0.0.1:{listener.getsockname()[1]}", http)

            async def close_engines() -> None:
                for engine in node.engines:
                    await engine.close()

            stack.push_async_callback(close_engines)
            await supervisor.beat()
            return node

        yield make


@pytest.fixture
async def node(make_node: NodeMaker) -> Node:
    return await make_node()
