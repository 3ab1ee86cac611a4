"""Keeps a parked engine on its worker's newest KV set.

When blocks cannot be trusted, a successor takes fresh ones; shadows that were parked before then hold a set that nobody uses. They must
hold the new one by the time they are promoted themselves, without asking the keeper at that moment, and without waiting for it while an
order may come. So a thread of its own asks.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from shadowsup.memkeeper.client import HandleSet
from shadowsup.memkeeper.errors import KeeperError
from shadowsup.workers.kept_kv import KeptKv

ASK_S = 1.0
"""How often the keeper is asked. A question costs about 0.1 ms there and on this thread."""

log = logging.getLogger("shadowsup.engine")


class KvWatch:
    """Runs from `start` to `stop`.

    Args:
        wake: rings the step loop, which then calls `catch_up`.
    """

    def __init__(self, kv: KeptKv, wake: Callable[[], None], *, ask_s: float = ASK_S) -> None:
        self._kv = kv
        self._wake = wake
        self._ask_s = ask_s
        self._lock = threading.Lock()  # guards what follows
        self._found: HandleSet | None = None
        self._left: str | None = None
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kv-watch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def catch_up(self) -> bool:
        """Step thread: go over to a newer set if one was found. Returns whether that was so. Never waits."""
        with self._lock:
            found, self._found = self._found, None
            if found is None:
                return False
            self._left = self._kv.follow_to(found)
        return True

    def stop(self) -> None:
        """End asking, without waiting for an answer that is under way: what it brings is given back. Idempotent."""
        with self._lock:
            self._stopping.set()
            found, self._found = self._found, None
        if found is not None:
            found.close()

    def _run(self) -> None:
        while not self._stopping.wait(self._ask_s):
            try:
                self._drop_left()
                if self._found is None:
                    self._hand_over(self._kv.replaced())
            except KeeperError as error:  # it will be back; until then what is held is the newest that is known
                log.info("cannot ask for newer KV: %s", error)
        try:
            self._drop_left()  # one that was promoted just after it went over: what it left would be held for as long as it serves
        except KeeperError as error:
            log.info("cannot give back older KV: %s", error)

    def _drop_left(self) -> None:
        with self._lock:
            left, self._left = self._left, None
        if left is not None:
            self._kv.drop(left)

    def _hand_over(self, found: HandleSet | None) -> None:
        if found is None:
            return
        with self._lock:
            if self._stopping.is_set():
                found.close()
                return
            self._found = found
        self._wake()
