"""The effective config for people: every default filled in, units as in the file, secrets hidden."""

from __future__ import annotations

from typing import Any

import yaml

from shadowsup.supervisor.config.loader import LoadedConfig
from shadowsup.supervisor.config.model import EngineKind
from shadowsup.supervisor.config.plain import plain, trap
from shadowsup.supervisor.config.secrets import REDACTED, redact, redact_command


def as_dict(loaded: LoadedConfig) -> dict[str, Any]:
    """Return the config in the form of the file (sizes and durations as text), secrets replaced by ``***``."""
    data: dict[str, Any] = loaded.config.model_dump(mode="json")
    for path in loaded.secrets:
        _hide(data, path)
    for worker in data["workers"]:
        for key in EngineKind(worker["engine"]).foreign_keys:
            del worker[key]
        worker["env"] = {name: redact(name, value) for name, value in worker["env"].items()}
        if "args" in worker:
            worker["args"] = _redacted(worker["args"])
        if "command" in worker:
            worker["command"] = redact_command(worker["command"])
        if "ready" in worker:
            probes = worker["ready"].items()
            worker["ready"] = {name: redact_command(probe) if name == "exec" else probe for name, probe in probes if probe is not None}
    return data


def as_yaml(loaded: LoadedConfig) -> str:
    """Return `as_dict` as YAML that `load` accepts (but for what is hidden)."""
    return str(yaml.dump(as_dict(loaded), Dumper=_Dumper, sort_keys=False, allow_unicode=True, default_flow_style=None, width=100))


def _hide(data: Any, path: tuple[str | int, ...]) -> None:
    for part in path[:-1]:
        try:
            data = data[part]
        except (KeyError, IndexError, TypeError):
            return
    if path and isinstance(data, dict | list):
        data[path[-1]] = REDACTED  # type: ignore[index]


def _redacted(value: Any, name: str = "") -> Any:
    if isinstance(value, dict):
        return {key: _redacted(item, key) for key, item in value.items()}
    if isinstance(value, list):
        return [_redacted(item, name) for item in value]
    return redact(name, value)


class _Dumper(yaml.SafeDumper):
    """Quotes what a strict reader would refuse without quotes."""


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    # A literal dollar sign is doubled, so that reading it back gives the same text.
    escaped = value.replace("$", "$$")
    quoted = plain(escaped) != escaped or trap(escaped) is not None
    return dumper.represent_scalar("tag:yaml.org,2002:str", escaped, style='"' if quoted else None)


_Dumper.add_representer(str, _text)
