"""How the engines of a worker are started, for people: command line, interpreter, folder, environment. Secrets are never in it."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from typing import Any

from shadowsup.supervisor.config.secrets import redact_command
from shadowsup.supervisor.environment import REDACTED, is_secret
from shadowsup.supervisor.node_worker import WorkerOwner
from shadowsup.supervisor.protocol import SCHEMA
from shadowsup.supervisor.recipe import KeptRecipe

_OURS = ("PYTHONUNBUFFERED", "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER")
"""What `recipe.worker_environment` sets last, whatever a file says."""
_SHORTEST_SECRET = 6
"""Bytes; a shorter value of a secret variable is found in innocent text."""


def inspect(owner: WorkerOwner, inherited: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Return the answer to ``inspect``: ``env`` is a list of {name, value, from}; the values of ``env_file`` are never shown."""
    config, recipe = owner.recipe.config, owner.recipe
    kept = isinstance(recipe, KeptRecipe)
    words = list(config.command or ())
    if isinstance(recipe, KeptRecipe):
        words = [word.replace("{python}", recipe.python) for word in words] or [recipe.python, "-m", "shadowsup.workers.main", "SPEC.json"]
    secrets = [value for name, value in inherited.items() if is_secret(name) and len(value) >= _SHORTEST_SECRET]
    env = []
    for name, value in sorted(getattr(recipe, "env", {}).items()):
        source = _source(name, value, config.env, config.env_file is not None, inherited)
        hidden = source == "env_file" or is_secret(name)
        env.append({"name": name, "value": REDACTED if hidden else _without(value, secrets), "from": source})
    return {
        "schema": SCHEMA,
        "worker": owner.name,
        "engine": config.engine.value,
        "command": _without(shlex.join(redact_command(words)), secrets),
        "forked": kept and owner.nursery is not None,
        "cwd": str(config.cwd) if config.cwd is not None else None,
        "model": recipe.model if isinstance(recipe, KeptRecipe) else config.model or "",
        "gpus": list(owner.policy.settings.gpus),
        "env": env,
    }


def _source(name: str, value: str, env: Mapping[str, str], has_file: bool, inherited: Mapping[str, str]) -> str:
    if name in _OURS:
        return "shadowsup"
    if name in env:
        return "env"
    if inherited.get(name) == value:
        return "inherited"
    # The file is not read again for this: it may hang, or say something else by now.
    return "env_file" if has_file else "shadowsup"


def _without(text: str, secrets: list[str]) -> str:
    """A config may put ``${HF_TOKEN}`` into a variable, or an argument, of a harmless name."""
    for secret in secrets:
        text = text.replace(secret, REDACTED)
    return text
