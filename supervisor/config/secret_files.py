"""Files that hold secrets: env files and key files. Only their owner may read them, and no message shows a value."""

from __future__ import annotations

import os
import re
from pathlib import Path

from shadowsup.supervisor.config.model import ENV_NAME_PATTERN
from shadowsup.supervisor.errors import ConfigError, Problem

_NAME = re.compile(ENV_NAME_PATTERN)


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
