"""Being asked to leave: by a signal at any time, or by an order while the step thread is deep in a load."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator


class Leave(BaseException):
    """The engine was asked to go. No Exception: an adapter that catches those must not swallow it while it loads."""


class Leaving:
    """Made on the step thread. Where that is not the process's main thread, signals are left alone and nothing is interrupted.

    Args:
        on_signal: called for SIGTERM and SIGINT while nothing is interruptible; must only note it and wake the step thread.
    """

    def __init__(self, on_signal: Callable[[], None]) -> None:
        self._on_signal = on_signal
        self._interruptible = False
        self._asked = False
        self._main = threading.current_thread() is threading.main_thread()

    @contextlib.contextmanager
    def signals(self) -> Iterator[None]:
        """Handle SIGTERM and SIGINT while this lasts."""
        if not self._main:
            yield
            return
        before = {number: signal.signal(number, self._handle) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @contextlib.contextmanager
    def interruptible(self) -> Iterator[None]:
        """While this lasts, being asked to leave raises `Leave` on the step thread, wherever that is.

        Raises:
            Leave: on entry, when that was asked before.
        """
        self._interruptible = True
        try:
            if self._asked:
                raise Leave
            yield
        finally:
            self._interruptible = False

    def ask(self) -> None:
        """Any thread: end what is interruptible. Elsewhere the step thread sees the order itself."""
        self._asked = True
        if self._interruptible and self._main:
            # A signal gets the step thread out of system calls, and between two bytecodes.
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)

    def _handle(self, number: int, frame: object) -> None:
        self._asked = True
        if self._interruptible:
            self._interruptible = False  # once: what follows is the way out
            raise Leave
        self._on_signal()
