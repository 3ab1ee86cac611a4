"""A config file → `LoadedConfig`, or everything that is wrong with it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from shadowsup.supervisor.config import checks
from shadowsup.supervisor.config.document import Document, Mark, dotted
from shadowsup.supervisor.config.document import Path as Where
from shadowsup.supervisor.config.model import NodeConfig
from shadowsup.supervisor.config.reading import readings
from shadowsup.supervisor.config.validation import validate
from shadowsup.supervisor.errors import ConfigError, Problem


@dataclass(frozen=True)
class LoadedConfig:
    """A config and where it came from."""

    config: NodeConfig
    path: Path
    """Absolute."""
    text: str
    sources: Mapping[Where, Mark] = field(default_factory=dict)
    """Path in the document → position of the value."""
    secrets: frozenset[Where] = frozenset()
    """Values that came from a variable with a secret name."""
    warnings: tuple[Problem, ...] = ()
    """What is allowed but probably not meant."""


def load(path: Path | str, environ: Mapping[str, str] | None = None) -> LoadedConfig:
    """Read and check the config at ``path``; variables come from ``environ``, by default that of this process.

    Raises:
        ConfigError: it cannot be read, or something is wrong; ``problems`` has all of it.
    """
    shown, path = str(path), Path(path)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{shown}: {(error.strerror or 'cannot be read').lower()}") from None
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        before = data[: error.start]
        line, column = before.count(b"\n") + 1, error.start - (before.rfind(b"\n") + 1) + 1
        raise ConfigError.of([Problem(file=shown, line=line, column=column, message="not UTF-8 text")]) from None
    return loads(text, path, shown=shown, environ=environ)


def loads(text: str, path: Path, *, shown: str = "", environ: Mapping[str, str] | None = None) -> LoadedConfig:
    """Check ``text`` as if it were the content of ``path`` (what an editor does before saving). Raises as `load`."""
    variables = os.environ if environ is None else environ
    absolute = path.absolute()
    # With tabs there are several readings: the one that can be read, with the fewest problems, is what was meant.
    attempts = [_checked(document, absolute) for document in readings(text, shown or str(path), variables)]
    document, config, warnings = min(attempts, key=lambda attempt: (attempt[0].data is None, len(attempt[0].problems)))
    if document.problems or config is None:
        raise ConfigError.of(document.problems)
    return LoadedConfig(
        config=config,
        path=absolute,
        text=text,
        sources=document.marks,
        secrets=frozenset(document.secrets),
        warnings=tuple(warnings),
    )


def _checked(document: Document, path: Path) -> tuple[Document, NodeConfig | None, list[Problem]]:
    """Validate a document and check across its fields; problems are added to it. Returns the warnings too."""
    warnings: list[Problem] = []
    if document.data is None:
        return document, None, warnings
    outcome = validate(document, path.parent)
    for finding in checks.check(outcome.config) if outcome.config is not None else ():
        if not outcome.spoils(finding.path, finding.about):
            _record(document, finding, warnings)
    return document, outcome.config, warnings


def _record(document: Document, finding: checks.Finding, warnings: list[Problem]) -> None:
    if finding.problems:
        document.problems += finding.problems
        return
    target = document if not finding.warning else Document(document.file, marks=document.marks, key_marks=document.key_marks)
    problem = target.problem(finding.path, f"{dotted(finding.path) or 'config'}: {finding.message}", finding.hint, key=finding.key)
    if finding.warning:
        warnings.append(problem)
