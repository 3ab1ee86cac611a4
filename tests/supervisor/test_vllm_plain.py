"""Whether a vLLM worker's memory can be kept is told before anything is started; where it cannot, vLLM runs plainly."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from shadowsup.supervisor.config.model import WorkerConfig
from shadowsup.supervisor.errors import SupervisorError
from shadowsup.supervisor.vllm_plain import HealthProbe, why_not


@pytest.fixture
def interpreter(tmp_path: Path) -> Path:
    """Answers for an environment with vLLM 0.30.0."""
    return fake(tmp_path, {"version": "0.30.0", "missing": []})


def fake(folder: Path, answer: dict[str, Any]) -> Path:
    path = folder / "python"
    path.write_text(f"#!/bin/sh\necho hello\necho '{json.dumps(answer)}'\n")
    path.chmod(0o755)
    return path


def worker(python: Path, **more: Any) -> WorkerConfig:
    return WorkerConfig.model_validate({"name": "v", "engine": "vllm", "python": str(python), "model": "nobody/nothing", **more})


def test_a_tested_version_with_plain_options_keeps_its_memory(interpreter: Path) -> None:
    assert why_not(worker(interpreter, args={"max_model_len": 4096, "kv_cache_dtype": "auto"}), {}) is None


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ({"args": {"speculative_config": {"method": "ngram"}}}, "speculative_config"),
        ({"args": {"--enable-lora": True}}, "enable_lora"),
        ({"args": {"kv-cache-dtype": "fp8"}}, "kv_cache_dtype: fp8"),
        ({"args": {"quantization": "fp8"}}, "quantization: fp8"),
        ({"args": {"enable_prefix_caching": False}}, "prefix caching"),
        ({"args": {"data_parallel_size": 2}}, "data_parallel_size: 2"),
        ({"args": {"pipeline_parallel_size": 2}}, "pipeline_parallel_size: 2"),
    ],
)
def test_what_is_not_proven_is_told(interpreter: Path, more: dict[str, Any], told: str) -> None:
    assert told in (why_not(worker(interpreter, **more), {}) or "")


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"quantization_config": {"quant_method": "awq"}}, "quantised"),
        ({"num_local_experts": 8}, "experts"),
        ({"text_config": {"layer_types": ["full_attention", "linear_attention"]}}, "hybrid"),
        ({"layer_types": ["full_attention", "full_attention"]}, ""),
    ],
)
def test_a_models_config_tells(interpreter: Path, tmp_path: Path, config: dict[str, Any], told: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    why = why_not(worker(interpreter, model=str(tmp_path)), {})
    assert told in why if told and why else why is None


def test_another_version_runs_plainly_and_none_is_an_error(tmp_path: Path) -> None:
    assert "0.40.0 is outside" in (why_not(worker(fake(tmp_path, {"version": "0.40.0", "missing": []})), {}) or "")
    assert "msgspec" in (why_not(worker(fake(tmp_path, {"version": "0.30.0", "missing": ["msgspec"]})), {}) or "")
    with pytest.raises(SupervisorError, match="has no vLLM"):
        why_not(worker(fake(tmp_path, {"version": None, "missing": []})), {})
    with pytest.raises(SupervisorError, match="cannot be asked"):
        why_not(worker(tmp_path / "nothing"), {})


async def test_health_is_asked_on_the_unix_socket(tmp_path: Path) -> None:
    path, answers = str(tmp_path / "s"), [b"HTTP/1.1 503 Service Unavailable\r\n\r\n", b"HTTP/1.1 200 OK\r\n\r\n"]

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert (await reader.readline()).startswith(b"GET /health ")
        writer.write(answers.pop(0))
        writer.close()

    probe = HealthProbe(path)
    assert not await probe.check()
    async with await asyncio.start_unix_server(serve, path):
        assert not await probe.check()
        assert "503" in probe.detail
        assert await probe.check()
