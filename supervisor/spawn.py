"""Starting a process: its own session, no core dumps, signals at their defaults, no fds but those named, errors in words.

The work is `subprocess`'s (vfork, exec errors through a pipe); nothing runs between fork and exec here, because a Python function there
may deadlock in a process with threads, and ZeroMQ has some.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import signal
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from shadowsup.supervisor.errors import SupervisorError


@dataclass(frozen=True, kw_only=True)
class SpawnPlan:
    """How to start one process.

    ``env`` is its whole environment. ``stdout``/``stderr``: fds, duplicated into the process and not closed here; None = /dev/null.
    ``pass_fds`` keep their numbers. ``nice``: 0 to 19, for good (a process without privilege cannot take it back; see `Child.renice`).
    """

    what: str
    argv: Sequence[str]
    env: Mapping[str, str]
    cwd: Path | None = None
    nice: int = 0
    pass_fds: Sequence[int] = ()
    stdout: int | None = None
    stderr: int | None = None


def spawn(plan: SpawnPlan, extra_fds: Sequence[int] = ()) -> tuple[int, int]:
    """Start the process and return (pid, pidfd); the caller reaps it, through the pidfd. Main thread only.

    Raises:
        SupervisorError: no such program, no permission, no such folder, out of processes or memory.
    """
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError("processes are spawned from the main thread")
    if not plan.argv:
        raise SupervisorError(f"cannot start {plan.what}: its command is empty")
    try:
        with _no_core_dumps(), _default_signals():
            process = subprocess.Popen(
                [os.fspath(word) for word in plan.argv],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL if plan.stdout is None else plan.stdout,
                stderr=subprocess.DEVNULL if plan.stderr is None else plan.stderr,
                env=dict(plan.env),
                cwd=plan.cwd,
                pass_fds=(*plan.pass_fds, *extra_fds),
                close_fds=True,
                restore_signals=True,
                start_new_session=True,
            )
    except (OSError, ValueError) as error:
        raise _explain(plan, error) from error
    # From here on the exit status is ours to collect, through the pidfd: this keeps Popen from polling the pid when it is freed.
    process.returncode = 0
    # It cannot be gone from the process table before we have reaped it, so this pid is that process. Out of fds is the one thing left.
    try:
        pidfd = os.pidfd_open(process.pid)
    except OSError as error:
        os.kill(process.pid, signal.SIGKILL)
        os.waitpid(process.pid, 0)
        raise SupervisorError(f"cannot watch {plan.what}: {error.strerror}", "raise the limit of open files (ulimit -n)") from error
    if plan.nice:
        _set_nice(process.pid, plan.nice)
    return process.pid, pidfd


def _set_nice(pid: int, nice: int) -> None:
    # Two scales, see `Child.renice`: that of the session's scheduling group and that of the processes in it.
    with contextlib.suppress(OSError):
        Path(f"/proc/{pid}/autogroup").write_text(str(nice))
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PGRP, pid, nice)


@contextlib.contextmanager
def _no_core_dumps() -> Iterator[None]:
    """A core dump comes before the exit is seen: tens of GB of it would be the longest part of a failover."""
    soft, hard = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_CORE, (soft, hard))


def _swallow(_number: int, _frame: object) -> None:
    """A handler: unlike "ignore" it does not survive exec."""


@contextlib.contextmanager
def _default_signals() -> Iterator[None]:
    """Exec keeps blocked and ignored signals (a supervisor started by nohup or in the background has some): unblock, un-ignore."""
    mask = signal.pthread_sigmask(signal.SIG_SETMASK, ())
    ignored = [number for number in signal.valid_signals() if signal.getsignal(number) is signal.SIG_IGN]
    for number in ignored:
        signal.signal(number, _swallow)
    try:
        yield
    finally:
        for number in ignored:
            signal.signal(number, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _explain(plan: SpawnPlan, error: OSError | ValueError) -> SupervisorError:
    program = plan.argv[0]
    start = f"cannot start {plan.what}"
    if isinstance(error, OSError):
        if plan.cwd is not None and not plan.cwd.is_dir():
            return SupervisorError(f"{start}: there is no folder {plan.cwd}")
        match error.errno:
            case errno.ENOENT if "/" in program and Path(program).exists():
                return SupervisorError(f"{start}: the interpreter that {program} names in its first line does not exist")
            case errno.ENOENT:
                where = "" if "/" in program else f" on PATH={plan.env.get('PATH', '')}"
                return SupervisorError(f"{start}: there is no program {program}{where}", "check the spelling, or give the full path")
            case errno.EACCES:
                return SupervisorError(f"{start}: {program} may not be executed", f"is it a program? (chmod +x {program})")
            case errno.ENOEXEC:
                return SupervisorError(
                    f"{start}: {program} is not a program for this machine", "a script needs a first line such as #!/bin/sh"
                )
            case errno.E2BIG:
                return SupervisorError(f"{start}: its arguments and environment are too long")
            case errno.EAGAIN:
                return SupervisorError(f"{start}: too many processes", "raise the limit (ulimit -u, TasksMax, pids.max)")
            case errno.ENOMEM:
                return SupervisorError(f"{start}: out of memory")
            case errno.EMFILE | errno.ENFILE:
                return SupervisorError(f"{start}: too many open files", "raise the limit (ulimit -n)")
        return SupervisorError(f"{start}: {error.strerror or error}")
    return SupervisorError(f"{start}: {error}")
