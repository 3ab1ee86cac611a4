"""When is a ``command`` engine ready? Probes by HTTP, by command, by log line, by sd_notify."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Protocol


class Clock(Protocol):
    def monotonic(self) -> float: ...

    async def sleep(self, delay_s: float) -> None: ...


class Probe(Protocol):
    """One look. `detail` says why it was not ready, for people."""

    detail: str

    async def check(self) -> bool: ...


class HttpProbe:
    def __init__(self, url: str, *, timeout_s: float = 2.0) -> None:
        """``http://127.0.0.1:PORT/path``; 2xx and 3xx are ready."""


class ExecProbe:
    def __init__(self, argv: list[str], *, env: Mapping[str, str], cwd: Path | None = None, timeout_s: float = 10.0) -> None:
        """Exit status 0 is ready."""


class LogProbe:
    def __init__(self, matched: Awaitable[str]) -> None:
        """``matched``: `ScribeClient.watch`."""


class NotifySocket:
    """sd_notify. Set ``NOTIFY_SOCKET`` to ``str(path)``."""

    def __init__(self, path: Path, on_status: Callable[[str], None] | None = None) -> None: ...


async def wait_ready(probe: Probe, *, interval_s: float = 0.5, timeout_s: float, clock: Clock | None = None) -> None:
    """Probe until ready.

    Raises:
        SupervisorError: not ready within ``timeout_s``; the message has the last detail.
    """
    raise NotImplementedError
