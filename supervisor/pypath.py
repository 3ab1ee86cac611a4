"""``python:`` another interpreter: our engine side on its path, and nothing else of our environment."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


def make_pypath(runtime_dir: Path) -> Path:
    """Create ``runtime_dir/pypath`` with links to the engine side of this package; return it, to be PYTHONPATH. Idempotent.

    Raises:
        SupervisorError: it cannot be written.
    """
    raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class PythonInfo:
    """``missing``: modules of those asked for that it cannot find."""

    executable: str
    version: tuple[int, int, int]
    missing: tuple[str, ...]


def check_python(path: str, modules: tuple[str, ...] = ("zmq", "msgspec", "numpy"), *, timeout_s: float = 30.0) -> PythonInfo:
    """Run the interpreter once and say what it is. Blocking.

    Raises:
        SupervisorError: not there, not a Python, too old, or ``modules`` are missing; the hint has the command that installs them.
    """
    raise NotImplementedError
