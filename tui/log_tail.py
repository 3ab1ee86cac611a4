"""The lines of all log files of a node, merged by time: the last ones first, then what is written."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from shadowsup.errors import ShadowsupError
from shadowsup.supervisor.cli.log_files import Follower, last_lines, stamp_of

BACKLOG = 10_000
"""Lines of the past to begin with."""
LOOK_FOR_FILES_S = 2.0
MAX_LINE = 4096
"""Bytes of a line that are kept: one that is longer is no line for people."""


class LogTail:
    """Not thread-safe; every call may wait for the disk.

    Args:
        where: answers the verb ``logs``; raises ShadowsupError while the supervisor is away.
    """

    def __init__(self, where: Callable[[], Any], backlog: int = BACKLOG) -> None:
        self._where = where
        self._backlog = backlog
        self._folder: Path | None = None
        self._followers: dict[Path, Follower] = {}
        self._looked_s = float("-inf")
        self._begun = False

    def read(self) -> Sequence[bytes]:
        """Return the lines that are new, without their ends."""
        if not self._begun:
            return self._begin()
        now_s = time.monotonic()
        if now_s - self._looked_s >= LOOK_FOR_FILES_S:
            self._looked_s = now_s
            for path in self._files():
                self._followers.setdefault(path, Follower(path))
        lines = [_named(path, line) for path, follower in self._followers.items() for line in follower.read()]
        if len(self._followers) > 1:
            lines.sort(key=stamp_of)
        return [line[:MAX_LINE].rstrip(b"\r\n") for line in lines]

    def close(self) -> None:
        """Idempotent."""
        for follower in self._followers.values():
            follower.close()
        self._followers.clear()

    def _begin(self) -> Sequence[bytes]:
        with contextlib.suppress(ShadowsupError):
            paths = self._where().get("paths") or []
            self._folder = Path(paths[0]).parent if paths else None
        if self._folder is None:
            return []
        self._begun = True
        self._followers = {path: Follower(path) for path in self._files()}
        # The end is marked first: what is written meanwhile comes once, from the followers.
        ends = {path: follower.seek_end() for path, follower in self._followers.items()}
        # Who writes without a time (the supervisor in the background) comes first, since nothing says when it was.
        bare = {path: end for path, end in ends.items() if path.stem in _UNSTAMPED}
        stamped = {path: end for path, end in ends.items() if path.stem not in _UNSTAMPED}
        lines = [_named(path, line) for path, end in bare.items() for line in last_lines({path: end}, self._backlog)]
        lines += last_lines(stamped, self._backlog)
        return [line[:MAX_LINE].rstrip(b"\r\n") for line in lines]

    def _files(self) -> list[Path]:
        with contextlib.suppress(OSError):
            if self._folder is not None:
                return sorted(path for path in self._folder.iterdir() if path.suffix == ".log")
        return []


_UNSTAMPED = ("supervisor", "scribe")
"""Files that the scribe does not write."""


def _named(path: Path, line: bytes) -> bytes:
    return b"- %s | %s" % (path.stem.encode(), line) if path.stem in _UNSTAMPED else line
