"""The environment of an engine: little is inherited, the config adds to it, and an ``env_file`` brings what must not be shown."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from shadowsup.supervisor.config.model import ENV_NAME_PATTERN, WorkerConfig
from shadowsup.supervisor.errors import ConfigError, Problem

_INHERITED = frozenset({"PATH", "HOME", "LANG", "LD_LIBRARY_PATH"})
_INHERITED_PREFIXES = ("HF_", "CUDA_")
_OURS = frozenset({"CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"})
"""Match ``CUDA_*`` but are set from ``gpus``."""

_NAME = re.compile(ENV_NAME_PATTERN)


def inherited(environ: Mapping[str, str]) -> dict[str, str]:
    """Return what engines inherit: PATH, HOME, LANG, HF_*, *_proxy, LD_LIBRARY_PATH, CUDA_*, and nothing else."""
    return {
        name: value
        for name, value in environ.items()
        if (name in _INHERITED or name.startswith(_INHERITED_PREFIXES) or name.lower().endswith("_proxy")) and name not in _OURS
    }


def read_env_file(path: Path) -> dict[str, str]:
    """Return the variables of an env file: ``NAME=VALUE`` lines, ``#`` comments, optional quotes around a value; nothing is expanded.

    Raises:
        ConfigError: not there, not a file of ours, open to others, or lines of another form. No message shows a value.
    """
    problem = check_secret_file(path)
    if problem is not None:
        raise ConfigError(f"{path}: {problem[0]}", problem[1])
    found: dict[str, str] = {}
    problems: list[Problem] = []
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror if isinstance(error, OSError) else 'not UTF-8'}") from None
    for number, line in enumerate(text.splitlines(), 1):
        stripped = line.strip()
        if not stripped or stripped.startswith("#"):
            continue
        name, equals, value = stripped.removeprefix("export ").partition("=")
        name, value = name.strip(), value.strip()
        if not equals or not _NAME.match(name):
            problems.append(Problem(file=str(path), line=number, column=1, message="not a line of the form NAME=VALUE"))
        elif name in found:
            problems.append(Problem(file=str(path), line=number, column=1, message=f"duplicate variable {name}"))
        else:
            quoted = len(value) >= 2 and value[0] == value[-1] and value[0] in "\"'"
            found[name] = value[1:-1] if quoted else value
    if problems:
        raise ConfigError.of(problems)
    return found


def check_secret_file(path: Path) -> tuple[str, str] | None:
    """Return (what is wrong, what to do) with a file that holds secrets; None if it is a file of ours that only we can read."""
    try:
        status = path.stat()
    except OSError as error:
        return f"{path}: {(error.strerror or 'cannot be read').lower()}", ""
    if not path.is_file():
        return f"{path} is not a file", ""
    if status.st_mode & 0o077:
        return f"{path} is open to other users (mode {status.st_mode & 0o777:04o})", f"chmod 600 {path}"
    if status.st_uid not in (os.geteuid(), 0):
        return f"{path} belongs to another user (uid {status.st_uid})", "make it yours, mode 0600"
    if not os.access(path, os.R_OK):
        return f"{path} cannot be read by this user", ""
    return None


def engine_environment(worker: WorkerConfig, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the whole environment of the worker's engines, but for what the supervisor adds (devices, sockets).

    Raises:
        ConfigError: the env_file cannot be used.
    """
    from_file = read_env_file(worker.env_file) if worker.env_file is not None else {}
    return inherited(environ) | from_file | dict(worker.env)
