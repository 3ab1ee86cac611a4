"""The error type of the engine side, and what an engine's exit status means."""

from __future__ import annotations

import enum

from shadowsup.errors import ShadowsupError
from shadowsup.memkeeper.errors import LedgerLost
from shadowsup.workers.leaving import Leave


class WorkerError(ShadowsupError):
    """An engine cannot go on. ``fatal``: trying again cannot help (no such model, bad argument), so the supervisor does not."""

    def __init__(self, message: str, hint: str = "", *, fatal: bool = False) -> None:
        super().__init__(message, hint)
        self.fatal = fatal


class ExitCode(enum.IntEnum):
    """Status of an engine process that ended by itself."""

    STOPPED = 0
    """It was asked to: `Stop`, `Release`, SIGTERM."""
    FAILED = 1
    """It could not go on; another try may do better."""
    FATAL = 2
    """Another try fails the same way: bad spec, no such model."""
    LEDGER_LOST = 3
    """Another engine owns the ledger; this one wrote and sent nothing more."""


def exit_code(error: BaseException) -> ExitCode:
    """Return the status of an engine that ends because of ``error``."""
    if isinstance(error, Leave):
        return ExitCode.STOPPED
    if isinstance(error, LedgerLost):
        return ExitCode.LEDGER_LOST
    return ExitCode.FATAL if isinstance(error, WorkerError) and error.fatal else ExitCode.FAILED
