"""The error type of the engine side."""

from __future__ import annotations

from shadowsup.errors import ShadowsupError


class WorkerError(ShadowsupError):
    """An engine cannot go on. ``fatal``: trying again cannot help (no such model, bad argument), so the supervisor does not."""

    def __init__(self, message: str, hint: str = "", *, fatal: bool = False) -> None:
        super().__init__(message, hint)
        self.fatal = fatal
