"""One node with vLLM for all tests that need one: its start takes half a minute."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
import vllm_tiny
from vllm_world import config

from shadowsup.supervisor.bench.node import Node, running


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return vllm_tiny.write(tmp_path_factory.mktemp("model") / "tiny")


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def node(model: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Node]:
    shm, temporary = set(Path("/dev/shm").iterdir()), tmp_path_factory.mktemp("t")
    given = config(model, shadows=1)
    given["workers"][0]["env"]["TMPDIR"] = str(temporary)
    async with running(given) as node:
        yield node
    assert set(Path("/dev/shm").iterdir()) - shm == set()
    assert [path.name for path in temporary.iterdir() if path.is_socket() or path.name.startswith("vllm_dist_")] == []
    assert not node.runtime_dir.exists()
