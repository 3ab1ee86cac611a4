"""The root of the error tree.

Each package derives one type from it::

    ShadowsupError
     ├── ConfigError        shadowsup.supervisor.config
     ├── SupervisorError    shadowsup.supervisor
     ├── KeeperError        shadowsup.memkeeper
     └── WorkerError        shadowsup.workers
"""

from __future__ import annotations


class ShadowsupError(Exception):
    """Something the user can act on: what happened, and what to do now.

    Args:
        message: what happened and where, one sentence, no trailing full stop.
        hint: what to do now; empty when there is nothing to add.
    """

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message} ({self.hint})" if self.hint else self.message
