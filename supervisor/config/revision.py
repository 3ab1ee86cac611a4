"""Which settings need a new engine, and one short name for all of them: the worker's revision.

Engines are recorded with the revision that they were started with. Equal revisions: the engine is as the config wants it.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

from shadowsup.supervisor.config.model import EngineKind, WorkerConfig

IN_PLACE = ("name", "served_name", "spares", "shadows", "health", "restart", "stop", "give_up_after", "verify", "logs")
"""What takes effect without a new engine. Of ``health`` the heartbeat is the engine's own all the same."""


def engine_settings(worker: WorkerConfig) -> dict[str, Any]:
    """Return what the engines of ``worker`` are started with, as plain JSON values by dotted key; defaults are filled in."""
    found = flat(worker.model_dump(mode="json", exclude=set(IN_PLACE)))
    found["health.heartbeat"] = worker.health.heartbeat
    if worker.engine is EngineKind.VLLM:
        found["served_name"] = worker.public_name  # where its own server is used, that knows its model by this name only
    if worker.gpus and worker.kv.size is None and worker.engine.keeps_memory:
        found["shadows"] = worker.shadows  # the KV takes what so many engines leave
    if worker.env_file is not None:
        found["env_file.content"] = _content(worker)
    return found


def revision_of(worker: WorkerConfig) -> str:
    """Return 16 hex digits: equal for equal `engine_settings`."""
    text = json.dumps(engine_settings(worker), sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def flat(value: Any, prefix: str = "") -> dict[str, Any]:
    """Return nested mappings as one, by dotted key; an empty mapping is nothing."""
    found: dict[str, Any] = {}
    for key, item in value.items():
        if isinstance(item, dict):
            found |= flat(item, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = item
    return found


def _content(worker: WorkerConfig) -> str:
    assert worker.env_file is not None
    try:
        data = worker.env_file.expanduser().read_bytes()
    except OSError as error:  # whoever starts the engine says so
        return error.strerror or "unreadable"
    return hashlib.blake2b(data, digest_size=8).hexdigest()
