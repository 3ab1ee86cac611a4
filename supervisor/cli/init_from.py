"""``shadowsup init --from 'vllm serve …'``: a command line that somebody runs, as a config. Pure; what does not fit is said, not lost."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from shadowsup.supervisor.config.model import EngineKind
from shadowsup.supervisor.config.owned import owned_argument, owned_variable
from shadowsup.supervisor.config.plain import plain
from shadowsup.supervisor.errors import ExitCode, SupervisorError

_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
_SHORT = {"-tp": "tensor_parallel_size", "-pp": "pipeline_parallel_size", "-dp": "data_parallel_size", "-q": "quantization"}
_MODULE = "vllm.entrypoints.openai.api_server"
_CPU_KV = "4GiB"
_HINT = "like --from 'vllm serve MODEL --max-model-len 32768'"


@dataclass(kw_only=True)
class Converted:
    """``worker``: keys of the config. ``notes``: what was left out or changed, and why."""

    worker: dict[str, Any]
    listen: str
    notes: list[str] = field(default_factory=list)


def convert(command: str, *, gpus: int) -> Converted:
    """Return what ``command`` (a shell's line without pipes and variables) would be here. ``gpus``: how many this machine has.

    Raises:
        SupervisorError: (exit code 2) it is no command line of vLLM's server.
    """
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise SupervisorError(f"the command line cannot be read: {error}", _HINT, exit_code=ExitCode.USAGE) from None
    env: dict[str, str] = {}
    while words and (match := _ASSIGNMENT.fullmatch(words[0])):
        env[match[1]] = match[2]
        words.pop(0)
    python, words = _program(words)
    options, loose = _options(words)
    model = options.pop("model", None) or (loose[0] if loose else None)
    if not isinstance(model, str):
        raise SupervisorError("the command line names no model", _HINT, exit_code=ExitCode.USAGE)
    return _place(model, options, env, python, gpus)


def _program(words: Sequence[str]) -> tuple[str | None, list[str]]:
    """Return (the interpreter, if the words tell; the arguments)."""
    program, rest = (words[0] if words else ""), list(words[1:])
    if Path(program).name == "vllm" and rest[:1] == ["serve"]:
        return (str(Path(program).with_name("python")) if "/" in program else None), rest[1:]
    if Path(program).name.startswith("python") and rest[:2] == ["-m", _MODULE]:
        return program, rest[2:]
    raise SupervisorError(f"{program or 'nothing'} is not vLLM's server", _HINT, exit_code=ExitCode.USAGE)


def _options(words: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Return (options by their names with underscores, words that belong to none)."""
    found: dict[str, Any] = {}
    loose: list[str] = []
    name: str | None = None
    values: list[str] = []

    def end() -> None:
        if name is not None:
            key, value = (name[3:], False) if name.startswith("no_") and not values else (name, _value(values))
            found[key] = value

    for word in words:
        if word in _SHORT or (word.startswith("--") and len(word) > 2):
            end()
            text, equals, value = word.partition("=")
            name = _SHORT.get(text) or text[2:].replace("-", "_").replace(".", "_dot_")
            values = [value] if equals else []
        elif name is not None:
            values.append(word)
        else:
            loose.append(word)
    end()
    return found, loose


def _value(words: Sequence[str]) -> Any:
    if not words:
        return True
    made = [json.loads(word) if word[:1] in "{[" and _is_json(word) else plain(word) for word in words]
    return made[0] if len(made) == 1 else made


def _is_json(word: str) -> bool:
    try:
        json.loads(word)
    except ValueError:
        return False
    return True


def _place(model: str, options: dict[str, Any], env: dict[str, str], python: str | None, gpus: int) -> Converted:
    local = Path(model).expanduser()
    worker: dict[str, Any] = {"name": "chat", "engine": "vllm"}
    made = Converted(worker=worker, listen="127.0.0.1:8000")
    if python is not None:
        worker["python"] = python
    worker["model"] = str(local.absolute()) if local.exists() else model
    for key in ("revision", "dtype"):
        if key in options:
            worker[key] = options.pop(key)
    served = options.pop("served_model_name", None)
    if served is not None:
        worker["served_name"] = str(served[0] if isinstance(served, list) else served)
        if isinstance(served, list):
            made.notes.append(f"only the first name is served: {served[0]}")
    else:
        worker["served_name"] = model
    host, port = options.pop("host", "127.0.0.1"), options.pop("port", 8000)
    made.listen = f"{host}:{port}"
    if options.pop("api_key", None) is not None:
        made.notes.append("--api-key: write the keys into a file of mode 0600 and name it in gateway.api_key_file")
    _memory(made, options, env, gpus)
    args: dict[str, Any] = {}
    for name, value in options.items():
        reason = owned_argument(EngineKind.VLLM, name)
        if "_dot_" in name:
            made.notes.append(f"--{name.replace('_dot_', '.')} is left out: write it as a mapping in args")
        elif reason is not None:
            made.notes.append(f"--{name.replace('_', '-')} is left out: {reason}")
        else:
            args[name] = value
    if args:
        worker["args"] = args
    kept = {name: value for name, value in env.items() if owned_variable(name) is None}
    if kept:
        worker["env"] = kept
    return made


def _memory(made: Converted, options: dict[str, Any], env: dict[str, str], gpus: int) -> None:
    """Put devices and KV in place."""
    worker = made.worker
    ranks = options.pop("tensor_parallel_size", 1)
    visible = env.pop("CUDA_VISIBLE_DEVICES", None)
    env.pop("CUDA_DEVICE_ORDER", None)
    if visible:
        worker["gpus"] = [plain(one.strip()) for one in visible.split(",")][:ranks]
    elif gpus:
        worker["gpus"] = list(range(ranks))
    if ranks > 1:
        worker["tensor_parallel"] = ranks
    kv: dict[str, Any] = {}
    space = env.pop("VLLM_CPU_KVCACHE_SPACE", None)
    if "kv_cache_memory_bytes" in options:
        kv["size"] = options.pop("kv_cache_memory_bytes")
    elif not worker.get("gpus"):
        kv["size"] = f"{space}GiB" if space else _CPU_KV
    if "gpu_memory_utilization" in options:
        made.notes.append(
            f"--gpu-memory-utilization {options.pop('gpu_memory_utilization')}: kv.size takes its place; auto is what is left"
        )
    if "block_size" in options:
        kv["block_tokens"] = options.pop("block_size")
    elif not worker.get("gpus"):
        kv["block_tokens"] = 32
    if kv:
        worker["kv"] = kv


def compose(converted: Converted, name: str) -> str:
    """Return the text of the config."""
    content = {
        "version": 1,
        "node": {"name": name},
        "gateway": {"listen": converted.listen},
        "workers": [{**converted.worker, "shadows": 1}],
    }
    dumped = yaml.safe_dump(content, sort_keys=False, allow_unicode=True, width=120).replace("$", "$$")
    notes = "".join(f"# note: {note}\n" for note in converted.notes)
    head = "# A node of shadowsup, made from a command line of vLLM's. Every option: configs/reference.yaml, or shadowsup config schema.\n"
    return f"{head}{notes}{dumped}"
