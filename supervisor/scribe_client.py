"""The supervisor's side of the scribe: give it pipes, ask it for output."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class StreamStats:
    """Counters of one stream, bytes. ``dropped``: not written (disk full or too slow), since the scribe took it."""

    stream: str
    source: str
    path: str
    received: int
    written: int
    dropped: int
    ended: bool


class ScribeClient:
    """Needs a running loop. Keeps a dup of every read end, so that a scribe that died can be replaced without a broken pipe."""

    on_ended: Callable[[str], None] | None
    """Called with the stream when all its writers are gone and everything was read."""
    on_lost: Callable[[], None] | None
    """The scribe's connection is gone: start another, then `connect` again."""

    def __init__(self, socket_path: Path) -> None: ...

    async def connect(self, timeout_s: float = 10.0) -> None:
        """Dial; hand a fresh scribe every stream we hold, take over from a living one every stream it holds.

        Raises:
            SupervisorError: nobody answers.
        """
        raise NotImplementedError

    async def open(
        self, stream: str, *, source: str, path: Path, max_size: int = 64 << 20, keep: int = 5, tail_lines: int = 200
    ) -> int:
        """Make a pipe, give its read end to the scribe and return the write end, for a spawn (stdout and stderr); the caller closes it.

        ``stream``: unique name, e.g. the engine id. ``source``: what each line is marked with. Without a connection the pipe is kept
        and handed over at the next `connect`: output waits in the pipe meanwhile.
        """
        raise NotImplementedError

    async def tail(self, stream: str, lines: int = 50) -> list[str]:
        """Return the last lines (as written by the process, no prefix), also of a stream that has ended."""
        raise NotImplementedError

    async def watch(self, stream: str, pattern: str) -> str:
        """Wait for a line that ``re.search`` finds ``pattern`` in (the lines kept so far count) and return it."""
        raise NotImplementedError

    async def stats(self) -> list[StreamStats]:
        raise NotImplementedError

    async def close(self, *, stop: bool = False) -> None:
        """Drop the connection; ``stop``: the scribe drains what is in the pipes, writes it and exits first."""
        raise NotImplementedError
