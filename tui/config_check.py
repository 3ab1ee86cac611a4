"""What is wrong with the text in the editor, as ``shadowsup validate`` would say it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from shadowsup.supervisor.config.loader import loads
from shadowsup.supervisor.errors import ConfigError, Problem


@dataclass(frozen=True)
class Findings:
    """In the order of the file. With an error the text is no config."""

    errors: tuple[Problem, ...] = ()
    warnings: tuple[Problem, ...] = ()

    @property
    def all(self) -> list[tuple[str, Problem]]:
        """Return (severity, problem), by place."""
        found = [("error", problem) for problem in self.errors] + [("warning", problem) for problem in self.warnings]
        return sorted(found, key=lambda entry: (entry[1].line, entry[1].column))


def check(text: str, path: Path, environ: Mapping[str, str]) -> Findings:
    """Check ``text`` as if it were the content of ``path``; ``environ``: what its variables mean."""
    try:
        loaded = loads(text, path, shown=path.name, environ=environ)
    except ConfigError as error:
        return Findings(error.problems or (Problem(file=path.name, line=1, column=1, message=error.message, hint=error.hint),))
    return Findings(warnings=loaded.warnings)


def environment_of(pid: int | None) -> Mapping[str, str]:
    """Return the environment of the supervisor, by which it will read the file; where that may not be seen, our own."""
    try:
        data = Path(f"/proc/{pid}/environ").read_bytes() if pid else b""
    except OSError:
        data = b""
    found = dict(entry.split("=", 1) for entry in data.decode(errors="surrogateescape").split("\0") if "=" in entry)
    return found or dict(os.environ)
