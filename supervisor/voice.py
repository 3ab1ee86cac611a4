"""What the supervisor says to people: its steps and its log, from a thread of its own.

A terminal that was stopped (Ctrl-S), a pager that nobody scrolls, a disk that hangs: whoever prints waits for them. The loop must not, and
a full disk must not end a stop halfway either.
"""

from __future__ import annotations

import contextlib
import logging
import logging.handlers
import queue
import threading
from collections.abc import Callable, Iterator

BACKLOG = 10_000
"""Things to say that may wait; what comes when they do is dropped."""
CLOSE_S = 1.0
"""How long the end waits for what is unsaid."""

Say = Callable[[str], None]


class EventLine(str):
    """An event of the node, as JSON, where others are words for people."""

    __slots__ = ()


@contextlib.contextmanager
def apart(reporter: Say) -> Iterator[Say]:
    """Yield a function that hands a step to ``reporter`` and never waits or raises; the root logger's handlers are called there, too."""
    waiting: queue.Queue[str | logging.LogRecord | None] = queue.Queue(BACKLOG)
    root = logging.getLogger()
    handlers = list(root.handlers)

    def run() -> None:
        while (item := waiting.get()) is not None:
            if isinstance(item, str):
                with contextlib.suppress(OSError, ValueError):  # the disk is full, nobody reads, it is closed
                    reporter(item)
            else:
                for handler in handlers:
                    if item.levelno >= handler.level:
                        handler.handle(item)

    def say(text: str) -> None:
        with contextlib.suppress(queue.Full):
            waiting.put_nowait(text)

    # A daemon: at the end of the process nobody waits for a terminal that stands still.
    thread = threading.Thread(target=run, name="voice", daemon=True)
    thread.start()
    root.handlers[:] = [_Handler(waiting)]
    try:
        yield say
    finally:
        root.handlers[:] = handlers
        with contextlib.suppress(queue.Full):
            waiting.put_nowait(None)
        thread.join(CLOSE_S)


class _Handler(logging.handlers.QueueHandler):
    """Drops what does not fit."""

    def enqueue(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(queue.Full):
            self.queue.put_nowait(record)
