"""Being asked to leave: by a signal at any time, or by an order while the step thread is deep in a load."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator

_INSIST_S = 0.05


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
        self._insisting = False
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

    def over(self) -> None:
        """Interrupt nothing any more, whatever unwound how."""
        self._interruptible = False

    def ask(self) -> None:
        """Any thread: end what is interruptible. Elsewhere the step thread sees the order itself."""
        self._asked = True
        if self._interruptible and self._main and not self._insisting:
            self._insisting = True
            threading.Thread(target=self._insist, name="leaving", daemon=True).start()

    def _insist(self) -> None:
        """Signal the step thread until it has left. Once is not enough: a signal that comes just before a system call does not interrupt
        it, and an exception that is raised in a destructor goes no further."""
        step_thread = threading.main_thread().ident
        while self._interruptible and step_thread is not None:
            signal.pthread_kill(step_thread, signal.SIGTERM)
            time.sleep(_INSIST_S)

    def _handle(self, number: int, frame: object) -> None:
        self._asked = True
        if self._interruptible:
            self.ask()
            raise Leave
        if not self._insisting:
            self._on_signal()
