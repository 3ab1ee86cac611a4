"""How a starting node says what it does: a line a step."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from typing import Protocol

import click


class Reporter(Protocol):
    """What `shadowsup.supervisor.node.run` reports to."""

    def __call__(self, text: str) -> None:
        """Say one step, for people."""


class Lines:
    """Prints each step with the seconds since the start, to stdout. A reader that went away does not stop the node."""

    def __init__(self) -> None:
        self._began_s = time.monotonic()

    def __call__(self, text: str) -> None:
        with contextlib.suppress(BrokenPipeError):
            click.echo(f"[{time.monotonic() - self._began_s:6.2f}] {text}")
            sys.stdout.flush()


class Report:
    """The detached side: steps go to the log (stdout) and, as JSON lines, to the process that waits for the start.

    Messages: ``{"step": text}``, ``{"error": message, "hint": hint, "code": exit code}``, ``{"exit": exit code}``.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._log = Lines()

    def __call__(self, text: str) -> None:
        self._log(text)
        self._tell({"step": text})

    def failed(self, message: str, hint: str, code: int) -> None:
        self._tell({"error": message, "hint": hint, "code": code})

    def ended(self, code: int) -> None:
        self._tell({"exit": code})

    def _tell(self, message: dict[str, object]) -> None:
        if self._fd < 0:
            return
        try:
            os.write(self._fd, json.dumps(message).encode() + b"\n")
        except OSError:  # nobody waits any more
            os.close(self._fd)
            self._fd = -1
