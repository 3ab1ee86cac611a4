"""The error type of the dashboard::

ShadowsupError
 └── TuiError    what the dashboard or its editor cannot do: message, and what to do now
"""

from __future__ import annotations

from shadowsup.errors import ShadowsupError


class TuiError(ShadowsupError):
    """Raised when a file cannot be shown, edited, recorded or replayed. ``exit_code`` is what the command line exits with."""

    exit_code: int = 1
