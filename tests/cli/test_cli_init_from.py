"""A command line of vLLM's becomes a config that does the same, or says what it leaves out."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from shadowsup.supervisor.cli.init_from import compose, convert
from shadowsup.supervisor.config.loader import loads
from shadowsup.supervisor.errors import SupervisorError


def test_what_has_a_place_in_the_config_goes_there() -> None:
    line = (
        "CUDA_VISIBLE_DEVICES=2,3 VLLM_USE_V2_MODEL_RUNNER=1 /opt/vllm/bin/vllm serve Qwen/Qwen3-8B --served-model-name qwen --port 9000 "
        "--host 0.0.0.0 -tp 2 --dtype=bfloat16 --max-model-len 32768 --enable-auto-tool-choice --tool-call-parser hermes "
        "--no-enable-log-requests --block-size 32 --hf-overrides '{\"a\": [1, 2]}'"
    )
    made = convert(line, gpus=4)
    assert made.notes == []
    assert made.listen == "0.0.0.0:9000"
    assert made.worker == {
        "name": "chat",
        "engine": "vllm",
        "python": "/opt/vllm/bin/python",
        "model": "Qwen/Qwen3-8B",
        "dtype": "bfloat16",
        "served_name": "qwen",
        "gpus": [2, 3],
        "tensor_parallel": 2,
        "kv": {"block_tokens": 32},
        "args": {
            "max_model_len": 32768,
            "enable_auto_tool_choice": True,
            "tool_call_parser": "hermes",
            "enable_log_requests": False,
            "hf_overrides": {"a": [1, 2]},
        },
        "env": {"VLLM_USE_V2_MODEL_RUNNER": "1"},
    }


def test_what_is_ours_is_left_out_with_a_reason() -> None:
    line = (
        "vllm serve m --gpu-memory-utilization 0.9 --worker-cls x.Y --api-key secret --enable-sleep-mode --kv-cache-memory-bytes 1073741824"
    )
    made = convert(line, gpus=1)
    told = "\n".join(made.notes)
    assert all(word in told for word in ("gpu-memory-utilization", "worker-cls", "api_key_file", "enable-sleep-mode"))
    assert "secret" not in compose(made, "node") + told
    assert made.worker["kv"] == {"size": 1073741824}
    assert "args" not in made.worker


def test_the_config_is_valid_and_clients_go_on_using_the_same_model_name(tmp_path: Path) -> None:
    text = compose(convert("VLLM_CPU_KVCACHE_SPACE=2 python3 -m vllm.entrypoints.openai.api_server --model a/b", gpus=0), "n")
    worker = loads(text, tmp_path / "node.yaml").config.workers[0]
    assert (worker.public_name, worker.kv.size, worker.kv.block_tokens) == ("a/b", 2 * 2**30, 32)


@pytest.mark.parametrize("line", ["", "vllm bench serve", "nginx -g x", "vllm serve --port 8000", "vllm serve 'unclosed"])
def test_anything_else_is_refused(line: str) -> None:
    with pytest.raises(SupervisorError):
        convert(line, gpus=0)


def test_init_writes_it(tmp_path: Path) -> None:
    from shadowsup.supervisor.cli.app import cli

    path = tmp_path / "node.yaml"
    done = CliRunner().invoke(cli, ["init", str(path), "--from", "vllm serve a/b --max-model-len 4096"])
    assert done.exit_code == 0, done.output
    assert yaml.safe_load(path.read_text())["workers"][0]["args"] == {"max_model_len": 4096}
