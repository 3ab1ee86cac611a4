"""What this version was tested with, as data: read by ``doctor`` and by the compatibility page of the documents.

A range is of releases, both ends included, by major and minor number: every patch release of them counts. Outside it nothing is refused;
it has not been tried.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Sequence
from dataclasses import dataclass


class Standing(str, enum.Enum):
    """Where a version lies."""

    OLDER = "older"
    TESTED = "tested"
    NEWER = "newer"
    UNKNOWN = "unknown"


@dataclass(frozen=True, kw_only=True)
class Tested:
    """One thing that a node is built on.

    ``name``: as people call it. ``package``: its distribution, where it is one. ``low``, ``high``: the range. ``needs``: what
    ``pip install`` is given for a version within. ``role``: what it is needed for.
    """

    name: str
    package: str = ""
    low: str
    high: str
    needs: str = ""
    role: str

    def standing(self, version: str) -> Standing:
        """Return where ``version`` lies in the range."""
        numbers = release(version)
        if not numbers:
            return Standing.UNKNOWN
        low, high = release(self.low), release(self.high)
        if numbers[: len(low)] < low:
            return Standing.OLDER
        return Standing.NEWER if numbers[: len(high)] > high else Standing.TESTED

    @property
    def span(self) -> str:
        """The range for people."""
        return self.low if self.low == self.high else f"{self.low} to {self.high}"


PYTHON = Tested(name="Python", low="3.11", high="3.12", role="supervisor, and engines that name no other interpreter")
DRIVER = Tested(name="NVIDIA driver", low="580", high="580", role="GPUs; the memory keeper needs CUDA's virtual memory management")
TRANSFORMERS = Tested(
    name="transformers", package="transformers", low="5.17", high="5.24", needs="transformers>=5.17,<5.25", role="engine: transformers"
)
TORCH = Tested(name="PyTorch", package="torch", low="2.11", high="2.13", needs="torch>=2.11,<2.14", role="engine: transformers and loops")
VLLM = Tested(name="vLLM", package="vllm", low="0.26", high="0.32", needs="vllm>=0.26,<0.33", role="engine: vllm")

TABLE: Sequence[Tested] = (PYTHON, DRIVER, TORCH, TRANSFORMERS, VLLM)

SDK = ("pyzmq", "msgspec", "numpy")
"""What the engine side of shadowsup needs in an interpreter that ``python:`` names, in whatever version (on a GPU cuda-bindings, too)."""

ENGINES: dict[str, tuple[Tested, ...]] = {"transformers": (TORCH, TRANSFORMERS), "vllm": (VLLM,), "loop": (TORCH,)}
"""Engine of the config → what its interpreter needs."""


def release(version: str) -> tuple[int, ...]:
    """Return the numbers that a version begins with: ``2.13.0+cpu`` → (2, 13, 0); () when it begins with none."""
    match = re.match(r"\d+(?:\.\d+)*", version.strip())
    return tuple(int(number) for number in match[0].split(".")) if match else ()
