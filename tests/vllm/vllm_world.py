"""Where vLLM is, and a node that serves with it."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

import psutil

BLOCK = 32
"""Tokens; what a CPU build takes."""


def python() -> str | None:
    """Return an interpreter with vLLM: ``SHADOWSUP_VLLM_PYTHON``, or this one; None: there is none."""
    named = os.environ.get("SHADOWSUP_VLLM_PYTHON")
    if named:
        return named
    return sys.executable if importable() else None


def importable() -> bool:
    """Return whether vLLM is in this environment. The folder of these tests, which has its name, is no package with a file."""
    spec = importlib.util.find_spec("vllm")
    return spec is not None and spec.origin is not None


def config(model: Path, *, shadows: int, ceiling: str = "5s", ranks: int = 1) -> dict[str, Any]:
    return {
        "version": 1,
        "workers": [
            {
                "name": "chat",
                "engine": "vllm",
                "python": python(),
                "model": str(model),
                "dtype": "float32",
                "shadows": shadows,
                "tensor_parallel": ranks,
                "kv": {"size": "64MiB", "block_tokens": BLOCK},
                "args": {
                    "max_model_len": 2048,
                    "max_num_batched_tokens": 2048,
                    "max_num_seqs": 16,
                    "enforce_eager": True,
                    "enable_prompt_tokens_details": True,
                    "enable_auto_tool_choice": True,
                    "tool_call_parser": "hermes",
                    "reasoning_parser": "qwen3",
                },
                "env": {
                    "OMP_NUM_THREADS": "1",
                    "VLLM_NO_USAGE_STATS": "1",
                    "HF_HUB_OFFLINE": "1",
                    "DO_NOT_TRACK": "1",
                    # Each engine would compile for some seconds before it is up.
                    "TORCH_COMPILE_DISABLE": "1",
                    # vLLM binds each rank to a NUMA node of its own, which a small machine has not.
                    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
                },
                "health": {"hang": {"ceiling": ceiling}},
            }
        ],
    }


def core_of(leader: int) -> psutil.Process:
    """Return the EngineCore of the engine whose API server is ``leader``."""
    (core,) = psutil.Process(leader).children()
    return core


def ranks_of(leader: int) -> list[psutil.Process]:
    """Return the ranks of that engine, in order, where they are processes of their own."""
    found = [child for child in core_of(leader).children() if not any("resource_tracker" in word for word in child.cmdline())]
    return sorted(found, key=lambda child: child.pid)


def prompt(number: int, tokens: int) -> list[int]:
    """Return token ids that share no block with those of another ``number``."""
    return [(number * 37 + at * at + at // 7) % 250 for at in range(tokens)]
