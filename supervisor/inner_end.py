"""How the inner process of an engine ended: vLLM's EngineCore, a child of the API server, which is the engine's first process.

The first process's status says nothing of an engine whose inner process died: the whole tree is killed at once, so that status is our own
SIGKILL. But whether an engine crashed or was killed from outside decides whether its requests are suspects.
"""

from __future__ import annotations

import os

from shadowsup.supervisor import exit_status
from shadowsup.supervisor import identity as ids


class InnerEnd:
    """Of one engine.

    Attributes:
        first: it died before the first process did, so that its end is the engine's; False: the other way round, None: neither did yet.
    """

    def __init__(self) -> None:
        self.first: bool | None = None
        self._identity: ids.Identity | None = None
        self._pidfd: int | None = None

    def outer_died(self) -> None:
        """The first process died."""
        if self.first is None:
            self.first = False

    def died(self, pid: int) -> None:
        """The inner process died a moment ago, and nobody has had the time to reap it."""
        if self.first is None:
            self.first = True
            self._identity = ids.of(pid)
            try:
                self._pidfd = ids.open_identity(self._identity) if self._identity is not None else None
            except OSError:  # out of descriptors: while it is a zombie its status is known without one
                self._pidfd = None

    def status(self) -> int | None:
        """Return its status, as `subprocess` has it; None: it has not ended, or nobody can tell."""
        if self._identity is None:
            return None
        return exit_status.of(self._pidfd if self._pidfd is not None else -1, self._identity)

    def close(self) -> None:
        """Idempotent."""
        fd, self._pidfd = self._pidfd, None
        if fd is not None:
            os.close(fd)
