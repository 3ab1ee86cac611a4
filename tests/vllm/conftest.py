"""One node with vLLM for all tests that need one: its start takes half a minute."""

from __future__ import annotations

from collections.abc import AsyncIterator, Generator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import vllm_tiny
from vllm_world import config

from shadowsup.supervisor.bench.node import Node, running


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Tell of a failed test what its node has recorded."""
    report = yield
    arguments: dict[str, Any] = getattr(item, "funcargs", {})
    for node in (one for one in arguments.values() if report.failed and isinstance(one, Node)):
        for name, lines in (("recoveries", 5), ("events", 40)):
            path = node.folder / "state" / f"{name}.jsonl"
            if path.exists():
                report.sections.append((name, "\n".join(path.read_text().splitlines()[-lines:])))
    return report


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
