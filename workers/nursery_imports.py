"""What a nursery imports: what its engines need at once, and, while it serves already, what may leave it unable to fork.

Some modules initialise a device or start threads when they are imported, which depends on their version and on what is installed beside
them. A child imports those first; only if it could still be forked does the nursery do so, too.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import os
import re
import signal
import sys
import time
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import NoReturn

from shadowsup.workers import process, registry

_NVML_THREAD = re.compile(r"cuda[0-9a-f]{8,}")
"""NVML, too, leaves a thread of the driver's behind, even when it was shut down (driver 580); vLLM asks it which GPU there is when it is
imported. A child without that thread initialises NVML and CUDA anew: so vLLM's own EngineCore does, forked from its API server."""

_CUDA_NOT_INITIALISED = 3
"""CUDA_ERROR_NOT_INITIALIZED."""

_PR_SET_PDEATHSIG = 1
"""include/uapi/linux/prctl.h"""

_HARMLESS = ("jemalloc_bg_thd",)
"""Names of threads that hold nothing over a fork: jemalloc (pyarrow's, which scikit-learn and so transformers import where they are
installed) takes its locks before a fork, and a child does without the thread."""


def preload(name: str) -> float:
    """Import what ``name`` stands for and return how long it took, in seconds.

    Raises:
        ImportError: a module that was asked for by its own name is not there. What a kind stands for differs between the versions of
            its libraries: one that is missing is said and skipped, for engines import for themselves what they need.
    """
    started = time.perf_counter()
    for module in registry.preload_modules(name):
        try:
            importlib.import_module(module)
        except ImportError as error:
            if name not in registry.PRELOADS:
                raise
            print(f"nursery: {module} is not preloaded: {error}", file=sys.stderr)
    freeze()
    return time.perf_counter() - started


def freeze() -> None:
    """Children share these pages until somebody writes to them; the collector would, in every child."""
    gc.collect()
    gc.freeze()


def attempt(group: Iterable[str], max_threads: int) -> NoReturn:
    """In a child: import ``group`` and exit, with status 0 if a child of this process could use a device and would miss no thread."""
    code = 1
    try:
        process.default_signals()
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        for module in group:
            _import(module)
        code = int(cuda_is_initialised() or threads() > max_threads)
    except BaseException as error:
        print(f"nursery: {type(error).__name__}: {error}", file=sys.stderr)
    finally:
        os._exit(code)


class Later:
    """Groups of modules to import when nothing else is to be done, module by module, each group if its trial went well."""

    def __init__(self, groups: Iterable[tuple[str, ...]]) -> None:
        self._groups = deque(groups)
        self._modules: deque[str] = deque()

    @property
    def untried(self) -> tuple[str, ...]:
        """The group to be tried next; empty: there is none, or one that was tried is being imported."""
        return self._groups[0] if self._groups and not self._modules else ()

    @property
    def due(self) -> bool:
        """Whether there is a module to import."""
        return bool(self._modules)

    def tried(self, *, harmless: bool) -> None:
        """The trial of `untried` is over."""
        group = self._groups.popleft()
        if harmless:
            self._modules.extend(group)
        else:
            print(f"nursery: {', '.join(group)} are not preloaded: no engine could be forked after that", file=sys.stderr)

    def import_one(self) -> None:
        """Import the module that is due."""
        _import(self._modules.popleft())
        if not self._modules:
            freeze()


def _import(module: str) -> None:
    try:
        importlib.import_module(module)
    except Exception as error:  # an engine that needs the module will say it again
        print(f"nursery: {module} is not preloaded: {type(error).__name__}: {error}", file=sys.stderr)


def threads() -> int:
    """Return the threads of this process, Python's or not, that a child could miss."""
    missed = [name for name in thread_names() if name not in _HARMLESS]
    if any(map(_NVML_THREAD.fullmatch, missed)) and not cuda_is_initialised():
        missed = [name for name in missed if not _NVML_THREAD.fullmatch(name)]
    return len(missed)


def cuda_is_initialised() -> bool:
    """Return whether this process has called cuInit: no child of it could use a device. Asking initialises nothing."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return bool(driver.cuCtxGetCurrent(ctypes.byref(ctypes.c_void_p())) != _CUDA_NOT_INITIALISED)


def thread_names() -> list[str]:
    return sorted(entry.joinpath("comm").read_text().strip() for entry in Path("/proc/self/task").iterdir())
