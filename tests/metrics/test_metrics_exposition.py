"""Other servers' metrics, passed on with the worker's name."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web
from prometheus_client.parser import text_string_to_metric_families

from shadowsup.supervisor.gateway import engine_metrics, exposition
from shadowsup.supervisor.gateway.engine_metrics import EngineMetrics
from shadowsup.wire.engine import Route, WorkerRoute

VLLM = r"""# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="a \"b\" } c, worker=\\"} 2.0
# HELP vllm:time_to_first_token_seconds Histogram of time to first token.
# TYPE vllm:time_to_first_token_seconds histogram
vllm:time_to_first_token_seconds_bucket{engine="0",le="0.1"} 3.0
vllm:time_to_first_token_seconds_bucket{engine="0",le="+Inf"} 4.0
vllm:time_to_first_token_seconds_count{engine="0"} 4.0
vllm:time_to_first_token_seconds_sum{engine="0"} 0.5
# HELP vllm:prompt_tokens_total Tokens.
# TYPE vllm:prompt_tokens_total counter
vllm:prompt_tokens_total{engine="0",worker="rank0",} 7 1700000000000
# TYPE python_info gauge
python_info 1.0
untyped_one 3
shadowsup_worker_state{state="down"} 1
# EOF is a comment

garbage{ 1
{} 2
lonely
"""


def samples(text: str) -> list[tuple[str, dict[str, str], float]]:
    """Return every sample as a parser that is not ours sees it; it raises where the text is not in the format."""
    return [(s.name, dict(s.labels), s.value) for family in text_string_to_metric_families(text) for s in family.samples]


def test_every_sample_gets_the_workers_name_and_nothing_else_changes() -> None:
    text = "\n".join(exposition.merge([("chat", VLLM)])) + "\n"
    found = samples(text)
    assert all(labels["worker"] == "chat" for _, labels, _ in found)
    assert ("vllm:num_requests_running", {"worker": "chat", "engine": "0", "model_name": 'a "b" } c, worker=\\'}, 2.0) in found
    assert ("vllm:prompt_tokens_total", {"worker": "chat", "engine": "0", "exported_worker": "rank0"}, 7.0) in found
    assert ("python_info", {"worker": "chat"}, 1.0) in found
    assert ("untyped_one", {"worker": "chat"}, 3.0) in found
    assert len(found) == 8  # nothing of the garbage, and nobody speaks for us
    assert "shadowsup_" not in text


def test_a_family_of_several_workers_is_told_once() -> None:
    lines = list(exposition.merge([("a", VLLM), ("b", VLLM)]))
    assert lines.count("# TYPE vllm:time_to_first_token_seconds histogram") == 1
    start = lines.index("# TYPE vllm:time_to_first_token_seconds histogram")
    assert all(line.startswith("vllm:time_to_first_token_seconds_") for line in lines[start + 1 : start + 9])
    assert len(samples("\n".join(lines) + "\n")) == 16


@pytest.mark.parametrize("name", ['a"b', "a\\b", "ä"])
def test_odd_names_of_workers_are_escaped(name: str) -> None:
    (sample,) = samples("\n".join(exposition.merge([(name, "x 1\n")])) + "\n")
    assert sample == ("x", {"worker": name}, 1.0)


def worker(name: str, upstream: str = "", metrics: str = "/metrics", **more: Any) -> Any:
    route = WorkerRoute(
        worker=name, served_name=name, kind="http", state="healthy", epoch=1, upstream=upstream, give_up_after_s=60.0, metrics=metrics
    )
    return SimpleNamespace(route=route, **more)


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[str]:
    """A server on a Unix socket: quick, slow, endless and broken."""
    release = asyncio.Event()

    async def answer(http: web.Request) -> web.StreamResponse:
        if http.path == "/slow":
            await release.wait()
        if http.path == "/large":
            return web.Response(text="x 1\n" * (engine_metrics.MOST_BYTES // 4 + 1))
        return web.Response(text="up_time 5\n", status=500 if http.path == "/broken" else 200)

    app = web.Application()
    app.router.add_get("/{path:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    path = tmp_path / "server"
    await web.UnixSite(runner, str(path)).start()
    yield f"unix:{path}"
    release.set()
    await runner.cleanup()


async def test_servers_are_asked_within_bounds_and_who_does_not_answer_is_down(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_metrics, "TIMEOUT_S", 0.2)
    workers = [
        worker("good", server),
        worker("slow", server, "/slow"),
        worker("large", server, "/large"),
        worker("broken", server, "/broken"),
        worker("gone", "unix:/nonexistent/socket"),
        worker("none", ""),
        worker("unasked", server, ""),
    ]
    found = samples((await EngineMetrics(lambda: workers).exposition()).decode())
    up = {labels["worker"]: value for name, labels, value in found if name == "shadowsup_worker_metrics_up"}
    assert up == {"good": 1.0, "slow": 0.0, "large": 0.0, "broken": 0.0, "gone": 0.0, "none": 0.0}
    assert [(name, labels) for name, labels, _ in found if name == "up_time"] == [("up_time", {"worker": "good"})]


async def test_a_worker_whose_engines_have_a_socket_each_is_asked_at_the_one_that_serves(server: str) -> None:
    route = WorkerRoute(
        worker="v",
        served_name="v",
        kind="held",
        state="healthy",
        epoch=1,
        engines=(Route(engine="v.1", socket="/nonexistent"), Route(engine="v.2", socket=server.removeprefix("unix:"))),
        give_up_after_s=60.0,
        metrics="/metrics",
    )
    text = await EngineMetrics(lambda: [SimpleNamespace(route=route, serving="v.2")]).exposition()
    assert ("up_time", {"worker": "v"}, 5.0) in samples(text.decode())
    assert engine_metrics.address(SimpleNamespace(route=route, serving=None)) == ""  # type: ignore[arg-type]


async def test_without_such_workers_nothing_is_said() -> None:
    assert await EngineMetrics(lambda: [worker("x", "unix:/x", "")]).exposition() == b""
