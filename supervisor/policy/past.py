"""What a worker has been through, as far as it decides what comes next: recorded, so that a new supervisor judges as the old one did.

All times are monotonic seconds, which go on from one supervisor to the next and are void after another boot.
"""

from __future__ import annotations

import msgspec

from shadowsup.supervisor.policy.messages import GpuNotice
from shadowsup.supervisor.policy.restart import BookState
from shadowsup.wire.engine import Death


class Past(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Of one worker."""

    service: BookState = BookState()
    """Failed starts of engines that were to serve."""
    shadow: BookState = BookState()
    down: str = ""
    """Why it is down, if not for a quarantine, which is recorded by itself."""
    last_failure: str = ""
    shadow_reason: str = ""
    """Why no more shadows are started."""
    deaths: tuple[tuple[float, Death], ...] = ()
    reloads: tuple[float, ...] = ()
    """When memory was given up because of a device's errors."""
    distrusted: bool = False
    """The next owner takes fresh blocks."""
    verify: bool = False
    """The next engine makes sure of its weights."""
    xids: tuple[GpuNotice, ...] = ()
    """Xid errors that nothing has been done about yet. Nobody tells of them twice; other trouble is in the sensor's next reading."""
    moved: tuple[tuple[str, str], ...] = ()
    """(configured GPU, the spare that stands for it)."""
