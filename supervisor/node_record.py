"""``plan.json``: what was decided when a node was started, for a supervisor that finds the node running without one.

With it an adoption decides nothing anew: no model is looked up, no GPU counted, and what runs is compared with a changed config.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import msgspec

from shadowsup.supervisor.config import NodeConfig
from shadowsup.supervisor.errors import SupervisorError
from shadowsup.supervisor.paths import write_private

FILE = "plan.json"
SCHEMA = 1


class NurseryRecord(msgspec.Struct, frozen=True, kw_only=True):
    engine: str
    preload: str
    python: str
    number: int | None = None
    """Of its socket; None: its place in the list."""


class WorkerRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What was resolved for a worker. ``nursery``: index in `NodeRecord.nurseries`; ``kind``: adapter, empty for a command."""

    kind: str = ""
    revision: str | None = None
    gpus: tuple[str, ...] = ()
    spares: tuple[str, ...] = ()
    nursery: int | None = None


class NodeRecord(msgspec.Struct, frozen=True, kw_only=True):
    """``config``: the config that runs, in the form of the file. ``instance``: see `shadowsup.supervisor.tree.tag`."""

    schema: int
    instance: str
    config: dict[str, Any]
    config_path: str
    listen: str
    """Where the gateway listens, ports resolved."""
    backend: str | None
    keeper_gpus: tuple[str, ...]
    gpus: list[dict[str, Any]]
    baselines: dict[str, int]
    """Device UUID → bytes in use before the node."""
    overhead_keys: dict[str, dict[str, str]]
    nurseries: list[NurseryRecord]
    workers: dict[str, WorkerRecord]
    began_s: float
    """Seconds since the epoch; for history, decides nothing."""

    def node_config(self) -> NodeConfig:
        """Raises ValueError: the config is not of this version's form."""
        return NodeConfig.model_validate(self.config)


def write(runtime: Path, record: NodeRecord) -> None:
    """Raises OSError: it cannot be written; nothing may be started then, for nobody could adopt it."""
    write_private(runtime / FILE, msgspec.json.format(msgspec.json.encode(record)))


def read(runtime: Path) -> NodeRecord | None:
    """Return the record of the node that runs, or ran, in ``runtime``; None where there is none.

    Raises:
        SupervisorError: it is damaged, or another version's.
    """
    try:
        found = msgspec.json.decode((runtime / FILE).read_bytes(), type=NodeRecord)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise SupervisorError(f"cannot read {runtime / FILE}: {error.strerror}") from error
    except msgspec.MsgspecError as error:
        raise SupervisorError(f"{runtime / FILE} is not the record of a node: {error}") from error
    if found.schema != SCHEMA:
        raise SupervisorError(f"{runtime / FILE} has schema {found.schema}, this version reads {SCHEMA}")
    return found


def dump(config: NodeConfig) -> dict[str, Any]:
    """Return ``config`` in the form of the file, every default filled in. It holds secrets as they are."""
    found: dict[str, Any] = config.model_dump(mode="json")
    return found


def digest(config: NodeConfig) -> str:
    """Return 16 hex digits that are the same for two configs exactly when they say the same (blake2b-64)."""
    return hashlib.blake2b(msgspec.json.encode(dump(config), order="sorted"), digest_size=8).hexdigest()


def differences(running: NodeConfig, wanted: NodeConfig) -> list[str]:
    """Return the settings that differ, dotted, workers by name. No values: some are secret."""
    return sorted(_differences("", _named(dump(running)), _named(dump(wanted))))


def _named(data: dict[str, Any]) -> dict[str, Any]:
    return {**data, "workers": {worker["name"]: worker for worker in data["workers"]}}


def _differences(path: str, one: Any, other: Any) -> list[str]:
    if one == other:
        return []
    if not isinstance(one, dict) or not isinstance(other, dict):
        return [path]
    found: list[str] = []
    for key in one.keys() | other.keys():
        below = f"{path}.{key}" if path else str(key)
        found += [below] if (key in one) is not (key in other) else _differences(below, one[key], other[key])
    return found
