"""How a starting node says what it does: a line a step."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import time
from typing import Protocol

import click


class Reporter(Protocol):
    """What `shadowsup.supervisor.node_run.run` reports to."""

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


class JsonLines:
    """Prints JSON, an object a line: events as they are, steps and the log's warnings in the same form, for whoever collects logs."""

    wants_events = True

    def __init__(self) -> None:
        handler = logging.StreamHandler()
        handler.setFormatter(JsonFormatter())
        # Before `prepare_process`, which sets up the log only where nobody else has.
        logging.basicConfig(level=logging.WARNING, handlers=[handler])

    def __call__(self, text: str) -> None:
        from shadowsup.supervisor.voice import EventLine

        line = text if isinstance(text, EventLine) else line_of("node.step", text)
        with contextlib.suppress(BrokenPipeError):
            click.echo(line)
            sys.stdout.flush()


def line_of(event: str, message: str, *, level: str = "info", ts: float | None = None, **more: object) -> str:
    """Return what is no event of the node in the form of one."""
    known = dict.fromkeys(("worker", "engine", "pid", "epoch", "gpu_uuid", "reason"))
    ts = round(time.time() if ts is None else ts, 6)
    return json.dumps({"ts": ts, "level": level, "event": event, **known, **more, "message": message}, ensure_ascii=False)


class JsonFormatter(logging.Formatter):
    """A record of the log as a line of JSON."""

    def format(self, record: logging.LogRecord) -> str:
        level = "error" if record.levelno >= logging.ERROR else "warning" if record.levelno >= logging.WARNING else "info"
        text = record.getMessage()
        if record.exc_info:
            text = f"{text}\n{self.formatException(record.exc_info)}"
        return line_of("node.log", text, level=level, ts=record.created, pid=record.process, logger=record.name)


class Report:
    """The detached side: steps go to the log (stdout) and, as JSON lines, to the process that waits for the start.

    Messages: ``{"step": text}``, ``{"error": message, "hint": hint, "code": exit code}``, ``{"exit": exit code}``.
    """

    def __init__(self, fd: int, log: Reporter | None = None) -> None:
        self._fd = fd
        self._log = log or Lines()
        self.wants_events = getattr(self._log, "wants_events", False)

    def __call__(self, text: str) -> None:
        from shadowsup.supervisor.voice import EventLine

        self._log(text)
        if not isinstance(text, EventLine):
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
