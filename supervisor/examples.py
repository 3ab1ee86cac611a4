"""The example files that come with the program: configs, dashboard, alert rules, completions, unit."""

from __future__ import annotations

from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path

from shadowsup.supervisor.errors import ExitCode, SupervisorError

_PACKAGE = "shadowsup.configs"


def root() -> Traversable:
    """Return the folder of the examples: of the installed package, or of the checkout that this runs from."""
    try:
        return resources.files(_PACKAGE)
    except ModuleNotFoundError:
        return Path(__file__).resolve().parents[1] / "configs"


def names() -> list[str]:
    """Return the names of all examples, as paths: ``node.yaml``, ``prometheus/alerts.yaml``."""
    return sorted(_walk(root(), ""))


def _walk(folder: Traversable, prefix: str) -> list[str]:
    found = []
    for entry in folder.iterdir():
        if entry.name.startswith(("__", ".")):
            continue
        found += _walk(entry, f"{prefix}{entry.name}/") if entry.is_dir() else [f"{prefix}{entry.name}"]
    return found


def read(name: str) -> str:
    """Return an example; its name may be shortened to its last part.

    Raises:
        SupervisorError: (exit code 2) there is no such example.
    """
    there = names()
    matches = [each for each in there if each == name] or [each for each in there if each.rpartition("/")[2] == name]
    if len(matches) != 1:
        raise SupervisorError(f"there is no example {name!r}", f"there are: {', '.join(there)}", exit_code=ExitCode.USAGE)
    found = root()
    for part in matches[0].split("/"):
        found = found / part
    return found.read_text(encoding="utf-8")
