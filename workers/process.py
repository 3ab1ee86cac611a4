"""What an engine does to its own process: limits, signals' defaults, stdio, priority, threads. Nothing here knows about engines."""

from __future__ import annotations

import io
import logging
import os
import resource
import signal
import sys
from collections.abc import Mapping
from pathlib import Path

SWITCH_INTERVAL_S = 0.0005
"""How long a thread in Python code keeps the GIL from one that waits. CPython's 5 ms would be added to every order and beat."""

NICE_VARIABLE = "SHADOWSUP_NICE"
"""Environment: nice value while an engine loads and is parked."""

_CAP_SYS_NICE = 23


def settle() -> None:
    """Set this process up as an engine: no core dump (it would come before every sign of death), prompt I/O threads, logs by the line."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True, errors="backslashreplace")


def log_to_stderr(*, force: bool) -> None:
    """Log as engines do. ``force``: even where something is set up already."""
    logging.basicConfig(
        stream=sys.stderr,
        level=logging.INFO,
        force=force,
        datefmt="%H:%M:%S",
        format="%(asctime)s.%(msecs)03d %(levelname)s %(message)s",
    )


def log_apart() -> None:
    """Log as engines do whatever becomes of the root logger: vLLM, and what it imports, set logging up anew and may disable what is there.

    Call it again where that has happened. Idempotent.
    """
    own = logging.getLogger("shadowsup")
    if not own.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("%(asctime)s.%(msecs)03d %(levelname)s %(message)s", "%H:%M:%S"))
        own.addHandler(handler)
        own.setLevel(logging.INFO)
        own.propagate = False
    for name in ("shadowsup", *(name for name in logging.root.manager.loggerDict if name.startswith("shadowsup."))):
        logging.getLogger(name).disabled = False


def default_signals() -> None:
    """Undo what a parent process set: handlers, wakeup fd, mask. Python's own SIGPIPE (ignored) and SIGINT stay as Python has them."""
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        try:
            signal.signal(number, signal.SIG_DFL)
        except (OSError, ValueError):  # reserved by libc
            continue
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def set_name(name: str) -> None:
    """Name this process for ps and top (15 bytes are shown)."""
    try:
        Path("/proc/self/comm").write_text(name[-15:])
    except OSError:
        pass


def set_threads(environment: Mapping[str, str]) -> None:
    """Give torch, if it is loaded, the threads that the environment asks for; it read the variable when it was imported, which may be
    in a parent process with another one. Without the variable: as many as this process may use cores."""
    torch = sys.modules.get("torch")
    if torch is None:
        return
    try:
        threads = int(environment.get("OMP_NUM_THREADS", ""))
    except ValueError:
        threads = len(os.sched_getaffinity(0))
    torch.set_num_threads(max(1, threads))


def reseed() -> None:
    """Give every generator that was copied by a fork a state of its own."""
    import random

    random.seed()
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(int.from_bytes(os.urandom(4), "little"))
    if (torch := sys.modules.get("torch")) is not None:
        torch.manual_seed(int.from_bytes(os.urandom(7), "little"))


class Priority:
    """Lowered while an engine loads, so that it does not slow the one that serves; restored when it is to serve itself.

    A process without CAP_SYS_NICE (and with the default RLIMIT_NICE) can lower its priority and never raise it again: there nothing is
    lowered.
    """

    def __init__(self, nice: int) -> None:
        self._before = os.getpriority(os.PRIO_PROCESS, 0)
        self.lowered = nice > self._before and _may_raise(self._before)
        if self.lowered:
            self._set(nice)

    @classmethod
    def from_environment(cls) -> Priority:
        """Lower as `NICE_VARIABLE` says (not at all without it)."""
        try:
            return cls(int(os.environ.get(NICE_VARIABLE, "0")))
        except ValueError:
            return cls(0)

    def restore(self) -> None:
        """Idempotent; some microseconds a thread."""
        if self.lowered:
            self.lowered = False
            self._set(self._before)

    @staticmethod
    def _set(nice: int) -> None:
        # On Linux the priority belongs to the thread, and a thread inherits its creator's.
        for entry in Path("/proc/self/task").iterdir():
            try:
                os.setpriority(os.PRIO_PROCESS, int(entry.name), nice)
            except (ProcessLookupError, PermissionError):
                continue


def _may_raise(to: int) -> bool:
    if resource.getrlimit(resource.RLIMIT_NICE)[0] >= 20 - to:
        return True
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return False
    effective = next((line.split()[1] for line in status.splitlines() if line.startswith("CapEff:")), "0")
    return bool(int(effective, 16) >> _CAP_SYS_NICE & 1)
