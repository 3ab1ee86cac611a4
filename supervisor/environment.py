"""The environment of an engine: what it inherits, what the config adds, and what is never shown."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Mapping
from pathlib import Path

from shadowsup.supervisor.errors import SupervisorError

# NCCL's, NVSHMEM's and the like are a machine's: which links and interfaces its GPUs may use among each other.
_INHERITED = re.compile(
    r"PATH|HOME|LANG|LC_[A-Z]+|TMPDIR|LD_LIBRARY_PATH|(?:HF|CUDA|NCCL|NVSHMEM|TORCH_SYMM_MEM)_\w+|[a-z]+_proxy|[A-Z]+_PROXY"
)
_SECRET = re.compile(r"TOKEN|KEY|SECRET|PASSWORD", re.IGNORECASE)
_NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)

REDACTED = "***"


def is_inherited(name: str) -> bool:
    """Return whether engines get this variable from the supervisor's own environment."""
    return _INHERITED.fullmatch(name) is not None


def engine_environment(
    inherited: Mapping[str, str], *, env: Mapping[str, str], env_file: Path | None, extra: Mapping[str, str]
) -> dict[str, str]:
    """Return the allowed part of ``inherited``, then ``env_file``, then ``env``, then ``extra`` (ours: tag, PYTHONPATH); later ones win.

    Raises:
        SupervisorError: as `read_env_file`.
    """
    found = {name: value for name, value in inherited.items() if is_inherited(name)}
    if env_file is not None:
        found |= read_env_file(env_file)
    return found | dict(env) | dict(extra)


def read_env_file(path: Path) -> dict[str, str]:
    """Read lines ``NAME=value``, with ``#`` comments, an optional ``export`` and quotes around the value. Nothing is expanded.

    Raises:
        SupervisorError: it cannot be read, others may read it, or a line is something else; never quotes a value.
    """
    path = path.expanduser()
    try:
        with path.open(encoding="utf-8") as file:
            mode = os.fstat(file.fileno()).st_mode
            if stat.S_IMODE(mode) & 0o077:
                raise SupervisorError(f"others may read {path} (mode {stat.S_IMODE(mode):04o})", f"chmod 600 {path}")
            lines = file.read().splitlines()
    except OSError as error:
        raise SupervisorError(f"cannot read env_file {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise SupervisorError(f"env_file {path} is not text in UTF-8") from error
    found: dict[str, str] = {}
    for number, line in enumerate(lines, start=1):
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        name, equals, value = text.removeprefix("export ").partition("=")
        name, value = name.strip(), value.strip()
        if not equals or not _NAME.fullmatch(name):
            raise SupervisorError(f"{path}:{number}: this line is not NAME=value")
        if value[:1] in ("'", '"'):
            if len(value) < 2 or value[-1] != value[0]:
                raise SupervisorError(f"{path}:{number}: the quote of {name} is not closed")
            value = value[1:-1]
        if "\0" in value:
            raise SupervisorError(f"{path}:{number}: {name} has a null byte")
        if name in found:
            raise SupervisorError(f"{path}:{number}: {name} is set twice")
        found[name] = value
    return found


def is_secret(name: str) -> bool:
    """Return whether the value of a variable of this name must never be shown."""
    return _SECRET.search(name) is not None


def redact(env: Mapping[str, str]) -> dict[str, str]:
    """Return ``env`` for showing: values of secret names are `REDACTED`."""
    return {name: REDACTED if is_secret(name) else value for name, value in env.items()}
