"""What happens in a nursery's child between fork() and the engine: it becomes a process as fresh as if it had been started.

It never returns into the nursery: every way out of `become` is `os._exit`.
"""

from __future__ import annotations

import gc
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import msgspec

from shadowsup.wire.engine import EngineSpec
from shadowsup.workers import process
from shadowsup.workers.errors import ExitCode

DRIVER_FILES = "/dev/nvidia"
"""Who asks torch for devices initialises NVML for good, and a child inherits that with the device files it has open: without them its
nvmlInit fails with NVMLError_OperatingSystem (driver 580). CUDA opens its own, so memory still goes with the process that made it."""


@dataclass(frozen=True)
class Inheritance:
    """The descriptors a child is given. ``lifeline``: a spare's line to the supervisor is in its place."""

    lifeline: int
    stdout: int
    stderr: int


def become(spec: EngineSpec, env: Mapping[str, str], given: Inheritance, start: Callable[[EngineSpec], None]) -> NoReturn:
    """Be the engine ``spec``. ``start`` is `shadowsup.workers.main.start`; should it return, the process ends with status 0."""
    code = ExitCode.FAILED
    try:
        os.setsid()
        process.default_signals()
        lifeline = take_descriptors(given)
        os.environ.clear()
        os.environ.update(env)
        process.reseed()
        process.set_threads(env)
        gc.enable()
        start(msgspec.structs.replace(spec, lifeline_fd=lifeline))
        code = ExitCode.STOPPED
    except BaseException:
        traceback.print_exc()
    finally:
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(code)


def take_descriptors(given: Inheritance) -> int:
    """Put stdin (empty), stdout and stderr in place and close everything else but the lifeline and `DRIVER_FILES`.

    Returns where the lifeline is.
    """
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(given.stdout, 1)
    os.dup2(given.stderr, 2)
    # New objects over them: the old ones remember what their files were (seekable, buffering).
    sys.stdin = sys.__stdin__ = open(0, closefd=False)  # type: ignore[misc]  # noqa: SIM115
    sys.stdout = sys.__stdout__ = open(1, "w", closefd=False)  # type: ignore[misc]  # noqa: SIM115
    sys.stderr = sys.__stderr__ = open(2, "w", closefd=False)  # type: ignore[misc]  # noqa: SIM115
    for fd in sorted(int(entry.name) for entry in Path("/proc/self/fd").iterdir()):
        if fd > 2 and fd != given.lifeline:
            try:
                if not str(Path(f"/proc/self/fd/{fd}").readlink()).startswith(DRIVER_FILES):
                    os.close(fd)
            except OSError:  # that of the listing
                continue
    return given.lifeline
