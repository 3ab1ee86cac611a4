"""The error types of the supervisor side::

    ShadowsupError
     ├── SupervisorError      what a node, its processes or its control socket could not do
     │    ├── NotRunning      no supervisor serves this runtime directory     (exit code 3)
     │    ├── NoAnswer        the supervisor did not answer in time           (exit code 4)
     │    └── AlreadyRunning  this node is supervised already                 (exit code 100)
     └── ConfigError          everything that is wrong with a config file     (exit code 2)

Imports nothing heavy: the CLI loads it for every verb.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

from shadowsup.errors import ShadowsupError


class ExitCode(enum.IntEnum):
    """What ``shadowsup`` exits with."""

    DONE = 0
    FAILED = 1
    USAGE = 2
    NOT_RUNNING = 3
    NO_ANSWER = 4
    SUPERVISED_ALREADY = 100


class SupervisorError(ShadowsupError):
    """The supervisor, or a client of it, cannot do what was asked. ``exit_code`` is what the CLI exits with."""

    exit_code: int = ExitCode.FAILED

    def __init__(self, message: str, hint: str = "", *, exit_code: int | None = None) -> None:
        super().__init__(message, hint)
        if exit_code is not None:
            self.exit_code = exit_code


class NotRunning(SupervisorError):
    """Raised when no supervisor serves the runtime directory."""

    exit_code = ExitCode.NOT_RUNNING


class NoAnswer(SupervisorError):
    """Raised when the supervisor is there but does not answer in time."""

    exit_code = ExitCode.NO_ANSWER


class AlreadyRunning(SupervisorError):
    """Raised by ``start`` when a living supervisor has this runtime directory."""

    exit_code = ExitCode.SUPERVISED_ALREADY


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One thing that is wrong in a config file. ``line`` and ``column`` count from 1; 0 = the file as a whole."""

    file: str
    line: int = 0
    column: int = 0
    path: str = ""
    """Where in the document, for programs: ``workers[0].kv.size``."""
    message: str
    hint: str = ""

    def __str__(self) -> str:
        where = f"{self.file}:{self.line}:{self.column}" if self.line else self.file
        return f"{where}: {self.message}" + (f"\n    {self.hint}" if self.hint else "")

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "file": self.file,
            "line": self.line,
            "column": self.column,
            "path": self.path,
            "message": self.message,
            "hint": self.hint,
        }


class ConfigError(ShadowsupError):
    """Everything that is wrong with a config, in the order of the file. ``problems`` is empty when it is not about one place."""

    exit_code: int = ExitCode.USAGE

    def __init__(self, message: str, hint: str = "", *, problems: tuple[Problem, ...] = ()) -> None:
        super().__init__(message, hint)
        self.problems = problems

    @classmethod
    def of(cls, problems: list[Problem]) -> ConfigError:
        """Return one error for all ``problems`` (at least one), sorted by position."""
        ordered = tuple(sorted(problems, key=lambda p: (p.file, p.line, p.column)))
        count = "1 error" if len(ordered) == 1 else f"{len(ordered)} errors"
        return cls("\n".join(str(problem) for problem in ordered) + f"\n{count}", problems=ordered)
