"""What takes more than one field, or the machine, to tell."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shadowsup.supervisor.config import ConfigError
from shadowsup.supervisor.config.secret_files import read_env_file
from shadowsup.supervisor.errors import Problem

Problems = Callable[..., list[Problem]]
Load = Callable[..., Any]


@pytest.mark.parametrize(
    ("lines", "line", "told"),
    [
        ("gpus: [0, 1]", 6, "tensor_parallel is 1 but there are 2 GPUs"),
        ("gpus: [0]\ntensor_parallel: 2", 7, "tensor_parallel is 2 but there is 1 GPU"),
        ("tensor_parallel: 2", 6, "there are no gpus"),
        ("spares: [1]", 6, "spares without gpus"),
        ("gpus: [0]\nspares: [0, 1]", 7, "0 cannot be a spare"),
        ("kv: {size: 1000B}", 6, "not a multiple of 4KiB"),
        ("gpus: [0]\nkv: {size: 3MiB}", 7, "write 2MiB or 4MiB"),
        ("health: {heartbeat: 800ms}", 6, "must be below health.hang.floor (800ms)"),
        ("health: {heartbeat: 1ms}", 6, "too short"),
        ("health: {hang: {floor: 31s}}", 6, "above hang.ceiling (30s)"),
        ("args: {device_map: auto}", 6, "use gpus"),
        ("args: {--block-size: 16}", 6, "use kv.block_tokens"),
        ("args: {Torch-Dtype: x}", 6, "use the worker's dtype"),
        ("env: {CUDA_VISIBLE_DEVICES: '0'}", 6, "use gpus"),
        ("env: {SHADOWSUP_X: '0'}", 6, "for shadowsup itself"),
        ("command: [x]", 6, "a transformers engine has no command"),
        ("port: 80", 6, "a transformers engine has no port"),
        ("env_file: nope.env", 6, "no such file"),
        ("python: no-such-python", 6, "there is no program no-such-python"),
        ("python: ./bin/python", 6, "there is no program /"),
    ],
)
def test_fields_that_do_not_fit_together_are_told(worker_problems: Problems, lines: str, line: int, told: str) -> None:
    [problem] = worker_problems(lines)
    assert told in f"{problem.message}; {problem.hint}"
    assert problem.line == line


def worker(text: str) -> str:
    return "version: 1\nworkers:\n  - name: web\n" + textwrap.indent(textwrap.dedent(text).strip(), "    ") + "\n"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("engine: command\nready: {notify: true}", "a command engine needs command"),
        ("engine: command\ncommand: [x]", "a command engine needs ready"),
        ("engine: command\ncommand: [x]\nready: {}", "exactly one of http, exec, log, notify; there is none of them"),
        ("engine: command\ncommand: [x]\nready: {http: /, notify: true}", "there is http and notify"),
        ("engine: command\ncommand: [x]\nready: {notify: true}\nmodel: y", "a command engine has no model"),
        ("engine: command\ncommand: [x]\nready: {notify: true}\nkv: {size: 1MiB}", "a command engine has no kv"),
        ("engine: command\ncommand: [x]\nready: {log: '('}", "not a regular expression"),
        ("engine: command\ncommand: [x]\nready: {notify: false}", "write True"),
        ("engine: command\ncommand: x y\nready: {notify: true}", "a list is wanted"),
        ("engine: command\ncommand: [x]\nready: {notify: true}\ncwd: nowhere", "there is no folder"),
        ("engine: loop\nmodel: x", "a loop engine needs command"),
        ("engine: loop\ncommand: [x]\nready: {notify: true}", "a loop engine has no ready"),
        ("engine: loop\ncommand: [x]\nport: 80", "a loop engine has no port"),
        ("engine: vllm\nmodel: x\nkv: {block_tokens: 32}", "needs a size for its KV cache"),
        ("engine: vllm\nmodel: x\nkv: {size: 64MiB}", "blocks of a multiple of 32 tokens, not 16"),
        ("engine: vllm\nkv: {size: 64MiB, block_tokens: 32}", "a vllm engine needs model"),
        ("engine: transformers", "needs model"),
        ("engine: transformer\nmodel: x", "did you mean 'transformers'?"),
    ],
)
def test_each_engine_has_its_keys(problems: Problems, text: str, told: str) -> None:
    found = problems(worker(text))
    assert any(told.lower() in f"{problem.message}; {problem.hint}".lower() for problem in found)
    assert len(found) == 1


def test_a_loop_has_a_command_and_all_of_kept_memory(load_text: Load) -> None:
    text = "engine: loop\ncommand: ['{python}', serve.py]\ncwd: .\nargs: {model: y, port: 1}\nkv: {size: 1MiB}\nshadows: 2\nverify: full"
    [loop] = load_text(worker(text)).config.workers
    assert loop.engine.keeps_memory and loop.command == ("{python}", "serve.py") and loop.args == {"model": "y", "port": 1}


def test_names_are_unique_in_every_spelling(problems: Problems) -> None:
    one = "{{name: {}, engine: transformers, model: x, served_name: {}}}"
    text = "version: 1\nworkers:\n" + "".join(
        f"  - {one.format(*pair)}\n" for pair in (("a", "m"), ("A", "n"), ("b", "m"), ("gateway", "o"))
    )
    assert [problem.message.partition(": ")[2] for problem in problems(text)] == [
        "worker name 'A' is taken by workers[0]",
        "clients could not tell this worker from 'a': both are served as 'm'",
        "'gateway' is the name of a part of every node",
    ]


def test_a_check_that_rests_on_a_wrong_field_is_not_told(worker_problems: Problems) -> None:
    [problem] = worker_problems("gpus: [zero]\ntensor_parallel: 2")
    assert "not a GPU id" in problem.message


def test_gpus_need_a_backend_that_can_use_them(problems: Problems) -> None:
    [problem] = problems("version: 1\nmemkeeper: {backend: host}\nworkers:\n  - {name: a, engine: transformers, model: x, gpus: [0]}\n")
    assert "memkeeper.backend is host" in problem.message


def test_an_address_open_to_the_network_without_a_key_is_a_warning(load_text: Load) -> None:
    loaded = load_text("version: 1\ngateway: {listen: '0.0.0.0:80'}\nworkers:\n  - {name: a, engine: transformers, model: x}\n")
    [warning] = loaded.warnings
    assert (warning.line, warning.column) == (2, 19)
    assert "without a key" in warning.message


def test_a_group_that_does_not_exist_is_told(problems: Problems) -> None:
    [problem] = problems("version: 1\nnode: {group: no-such-group}\nworkers:\n  - {name: a, engine: transformers, model: x}\n")
    assert "no group" in problem.message


# --- files with secrets -----------------------------------------------------------------------------------------------------


def test_an_env_file_of_ours_is_read(tmp_path: Path, load_text: Load) -> None:
    path = tmp_path / "secrets.env"
    path.write_text("# comment\n\nHF_TOKEN=abc=d\nexport QUOTED=\"a b\"\nSINGLE='$x'\nEMPTY=\n")
    path.chmod(0o600)
    assert read_env_file(path) == {"HF_TOKEN": "abc=d", "QUOTED": "a b", "SINGLE": "$x", "EMPTY": ""}
    loaded = load_text("version: 1\nworkers:\n  - {name: a, engine: transformers, model: x, env_file: secrets.env}\n")
    assert loaded.config.workers[0].env_file == path


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o644, 0o660])
def test_a_file_with_secrets_that_others_may_use_is_refused(tmp_path: Path, problems: Problems, mode: int) -> None:
    path = tmp_path / "secrets.env"
    path.write_text("A=b\n")
    path.chmod(mode)
    [problem] = problems("version: 1\nworkers:\n  - {name: a, engine: transformers, model: x, env_file: secrets.env}\n")
    assert f"mode {mode:04o}" in problem.message
    assert problem.hint == f"chmod 600 {path}"
    [problem] = problems("version: 1\ngateway: {api_key_file: secrets.env}\nworkers:\n  - {name: a, engine: transformers, model: x}\n")
    assert "open to other users" in problem.message


def test_wrong_lines_of_an_env_file_are_told_with_their_place_and_without_values(tmp_path: Path, problems: Problems) -> None:
    path = tmp_path / "secrets.env"
    path.write_text("A=hidden\nnot a line hidden\nA=hidden\nCUDA_VISIBLE_DEVICES=hidden\n")
    path.chmod(0o600)
    text = "version: 1\nworkers:\n  - {name: a, engine: transformers, model: x, env_file: secrets.env}\n"
    found = problems(text)
    assert [(problem.file, problem.line) for problem in found] == [(str(path), 2), (str(path), 3)]
    assert not any("hidden" in str(problem) for problem in found)
    path.write_text("CUDA_VISIBLE_DEVICES=hidden\n")
    [problem] = problems(text)
    assert "shadowsup sets CUDA_VISIBLE_DEVICES: use gpus" in problem.message


def test_a_folder_is_no_env_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a file"):
        read_env_file(tmp_path)
