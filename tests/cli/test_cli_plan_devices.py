"""``plan`` and the memory of GPUs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shadowsup.supervisor import devices
from shadowsup.supervisor.devices import Gpu

Cli = Callable[..., Any]
GIB = 2**30
H200 = Gpu(uuid="GPU-aaaaaaaa-0000-0000-0000-000000000001", index=0, name="NVIDIA H200", memory=140 * GIB)
SHAPE = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
}


def planned(cli: Cli, folder: Path, kv: str) -> tuple[int, dict[str, Any]]:
    worker = {"name": "chat", "engine": "transformers", "model": "dummy:8b", "dtype": "bfloat16", "gpus": [0], "kv": {"size": kv}}
    worker["args"] = {"load_format": "dummy", "config": SHAPE}
    path = folder / "node.json"
    path.write_text(json.dumps({"version": 1, "node": {"state_dir": str(folder / "state")}, "workers": [worker]}))
    result = cli("plan", path, "-o", "json")
    return result.code, json.loads(result.out)["memory"]


def test_the_device_is_added_up_and_what_has_no_room_is_refused(tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "read_gpus", lambda: (H200,))
    code, memory = planned(cli, tmp_path, "100GiB")
    (device,) = memory["devices"]
    assert (code, device["fits"]) == (0, True)
    assert round(device["needed"] / GIB) == round(8.03e9 * 2 / GIB + 100 + 4.5)
    code, memory = planned(cli, tmp_path, "130GiB")
    assert (code, memory["fits"]) == (1, False)
    assert "does not fit" in memory["reason"] and "KV 130.0 GiB" in memory["reason"]


def test_a_cache_of_auto_size_is_what_the_engine_would_choose_on_that_gpu(
    tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "read_gpus", lambda: (H200,))
    code, memory = planned(cli, tmp_path, "auto")
    assert code == 0
    # 64 requests of 8192 tokens, and two blocks each: 2 × 32 layers × 8 heads × 128 × 2 B a token.
    assert "32,896 blocks" in next(need["how"] for need in memory["needs"] if need["what"] == "KV")


def test_a_machine_without_that_gpu_cannot_tell(tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "read_gpus", lambda: ())
    code, memory = planned(cli, tmp_path, "auto")
    assert (code, memory["fits"], memory["reason"]) == (1, None, "there is no GPU on this machine")
