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


_BY_CODE: dict[str, type[KeeperError]] = {"stale": StaleHandle, "out_of_memory": OutOfMemory}


def refusal(code: str, message: str, hint: str = "") -> KeeperError:
    """Return the error that the keeper's ``Refused.code`` stands for."""
    return _BY_CODE.get(code, KeeperError)(message, hint)


def refusal_code(error: KeeperError) -> str:
    """Inverse of `refusal`."""
    return next((code for code, kind in _BY_CODE.items() if isinstance(error, kind)), "refused")
