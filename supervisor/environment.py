"""The environment of an engine: what it inherits, what the config adds, and what is never shown."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


def engine_environment(inherited: Mapping[str, str], *, env: Mapping[str, str], env_file: Path | None, extra: Mapping[str, str]) -> dict[str, str]:
    """Return the allowed part of ``inherited``, then ``env_file``, then ``env``, then ``extra`` (ours: tag, PYTHONPATH), later ones win.

    Raises:
        SupervisorError: the file cannot be read, others may read it, or a line of it is not ``NAME=value``.
    """
    raise NotImplementedError


def read_env_file(path: Path) -> dict[str, str]:
    """Raises SupervisorError, with file:line."""
    raise NotImplementedError


def is_secret(name: str) -> bool:
    """Return whether a variable of this name must never be shown."""
    raise NotImplementedError


def redact(env: Mapping[str, str]) -> dict[str, str]:
    """Return ``env`` for showing: values of secret names replaced by ``***``."""
    raise NotImplementedError
