"""What must not be shown: values whose name has TOKEN, KEY, SECRET or PASSWORD in it."""

from __future__ import annotations

from collections.abc import Sequence

REDACTED = "***"
_WORDS = ("TOKEN", "KEY", "SECRET", "PASSWORD")


def is_secret_name(name: str) -> bool:
    """Tell whether a variable, an argument or a header of this name holds a secret."""
    upper = name.upper()
    return any(word in upper for word in _WORDS)


def redact(name: str, value: object) -> object:
    """Return what may be shown of ``value``. Numbers and switches are shown (``max_tokens: 512``)."""
    return REDACTED if is_secret_name(name) and isinstance(value, str) and value else value


def redact_command(command: Sequence[str]) -> list[str]:
    """Return a command line that may be shown: ``--api-key X``, ``--api-key=X`` and ``API_KEY=X`` lose their value.

    A value that is a number is shown (``--max-tokens 512``).
    """
    shown: list[str] = []
    hide_next = False
    for argument in command:
        if hide_next and not argument.startswith("-"):
            shown.append(argument if argument.isdigit() else REDACTED)
            hide_next = False
            continue
        name, equals, value = argument.partition("=")
        hide_next = argument.startswith("-") and not equals and is_secret_name(name)
        secret = bool(equals) and is_secret_name(name) and not value.isdigit()
        shown.append(f"{name}={REDACTED}" if secret else argument)
    return shown
