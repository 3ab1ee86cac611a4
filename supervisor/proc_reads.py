"""Reads of /proc that may hang, with a bound. The environment, command line and maps of a process are read through its address space.

A process in D state may hold the lock of that for ever (a page fault in a file system that does not answer, a driver that hangs), and then
whoever reads waits as long, in D state too, and cannot be ended. So all such reads of one look are made by a thread that is left behind
when it does not come on; the process that it hangs at is left out until the read has returned, and another thread makes the other reads.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")

STALL_S = 0.25
"""A read of /proc takes microseconds. On a machine where one takes longer the process is left out for a moment, and looked at again."""

_hung: dict[object, threading.Thread] = {}
"""Key of a read that hangs → the thread that hangs in it. There is one for each key at most."""


class _Look(Generic[K, V]):
    """A thread that reads one key after the other until it is given up."""

    def __init__(self, keys: list[K], read: Callable[[K], V], found: dict[K, V]) -> None:
        self._keys = keys
        self._read = read
        self._found = found
        self._changed = threading.Condition()
        self._steps = 0
        self._over = False
        self._given_up = False
        self._current: K | None = None
        self._failure: BaseException | None = None
        self.thread = threading.Thread(target=self._run, name="proc", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            while (key := self._next()) is not None:
                value = self._read(key)
                with self._changed:
                    if not self._given_up:
                        self._found[key] = value
        except BaseException as error:
            self._failure = error
        with self._changed:
            self._over = True
            self._changed.notify()

    def _next(self) -> K | None:
        with self._changed:
            self._steps += 1
            self._current = self._keys.pop() if self._keys and not self._given_up else None
            return self._current

    def finish(self, stall_s: float) -> K | None:
        """Wait for its end. Returns the key at which it has hung for ``stall_s``: the rest of the keys is somebody else's then."""
        with self._changed:
            while not self._over:
                before = self._steps
                if not self._changed.wait_for(lambda: self._over, stall_s) and self._steps == before:
                    self._given_up = True
                    return self._current
        self.thread.join()
        if self._failure is not None:
            raise self._failure
        return None


def bounded_reads(keys: Iterable[K], read: Callable[[K], V], stall_s: float = STALL_S) -> dict[K, V]:
    """Return what ``read`` says of each key. Those at which it hangs (or has hung since an earlier call) are left out.

    Blocking, up to twice ``stall_s`` for each key that hangs for the first time.

    Raises:
        whatever ``read`` raises.
    """
    for key in [key for key, thread in _hung.items() if not thread.is_alive()]:
        del _hung[key]
    found: dict[K, V] = {}
    left = [key for key in keys if key not in _hung]
    while left:
        look = _Look(left, read, found)
        hung = look.finish(stall_s)
        if hung is None:
            break
        _hung[hung] = look.thread
    return dict(found)


def hanging() -> frozenset[object]:
    """Return the keys at which a read hangs now."""
    return frozenset(key for key, thread in _hung.items() if thread.is_alive())
