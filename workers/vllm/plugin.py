"""The entry point ``vllm.general_plugins``: puts every seam in place that is not an option of vLLM's.

vLLM calls it in each of its processes; `shadowsup.workers.vllm.server` calls it first. Without a spec in the environment (a vLLM that only
happens to see this package) it does nothing.
"""

from __future__ import annotations

import importlib
import importlib.util
import os

from shadowsup.wire.engine import SPEC_VARIABLE

SEAMS = ("core", "front")
"""Modules with an ``install()``, idempotent."""

REPLAY = "shadowsup.workers.vllm.replay"
"""The gateway's replay; its ``install()`` likewise."""


def register() -> None:
    """Idempotent."""
    if SPEC_VARIABLE not in os.environ:
        return
    for seam in SEAMS:
        importlib.import_module(f"shadowsup.workers.vllm.{seam}").install()
    if importlib.util.find_spec(REPLAY) is not None:
        importlib.import_module(REPLAY).install()
