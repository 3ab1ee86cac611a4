"""The error types of kept memory::

KeeperError
 ├── StaleHandle     a segment id of an earlier generation
 ├── OutOfMemory     the backend cannot create a segment
 └── LedgerLost      another engine owns the ledger
"""

from __future__ import annotations

from shadowsup.errors import ShadowsupError


class KeeperError(ShadowsupError):
    """The keeper refused, or cannot be reached."""


class StaleHandle(KeeperError):
    """Raised when a segment id names a segment that was freed or belongs to an earlier keeper generation."""


class OutOfMemory(KeeperError):
    """Raised when a segment cannot be created; the message has the arithmetic and who holds what."""


class LedgerLost(KeeperError):
    """Raised by a writer that finds another owner or epoch in the ledger header. The only right answer is to exit."""
