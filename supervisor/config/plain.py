"""Plain (unquoted) YAML scalars: what they mean here, and which of them YAML readers disagree about.

Resolved by the core schema of YAML 1.2 (https://yaml.org/spec/1.2.2/#103-core-schema), but what YAML 1.1 reads differently is a trap.
"""

from __future__ import annotations

import re
from typing import Any

_NULL = {"", "~", "null", "Null", "NULL"}
_BOOL = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
_INT = re.compile(r"[-+]?(0|[1-9][0-9]*)\Z")
_FLOAT = re.compile(r"[-+]?([0-9]+\.[0-9]*|\.[0-9]+)([eE][-+][0-9]+)?\Z")
_TRAPS: tuple[tuple[str, str, str], ...] = (
    (r"yes|on", "a boolean to some YAML readers", "true"),
    (r"no|off", "a boolean to some YAML readers", "false"),
    (r"[-+]?0o?[0-9_]+", "an octal number to some YAML readers", "the number without the leading 0"),
    (r"[-+]?0[xb][0-9a-f_]+", "a number to some YAML readers", "it in decimal"),
    (r"[-+]?[0-9]+(:[0-5]?[0-9])+(\.[0-9]*)?", "a number in base 60 to some YAML readers", "a duration with units, like 90s"),
    (r"[-+]?[0-9]+_[0-9_]*", "a number to some YAML readers", "it without _"),
    (r"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)e[-+]?[0-9]+", "a number to some YAML readers", "the number with point and sign, like 1.0e+3"),
    (r"[0-9]{4}-[0-9]{1,2}-[0-9]{1,2}([t \t].*)?", "a date to some YAML readers", ""),
    (r"[-+]?\.(inf|nan)", "not a finite number", ""),
)
"""Pattern (whole scalar, any case), what else it is, what to write if that was meant."""

_COMPILED = tuple((re.compile(rf"({pattern})\Z", re.IGNORECASE), what, instead) for pattern, what, instead in _TRAPS)


def plain(text: str) -> Any:
    """Resolve an unquoted scalar: null, true, false, decimal numbers; all else is text."""
    if text in _NULL:
        return None
    if text in _BOOL:
        return _BOOL[text]
    if _INT.match(text):
        return int(text)
    if _FLOAT.match(text):
        return float(text)
    return text


def trap(text: str) -> tuple[str, str] | None:
    """Return (what it is, what to write) when YAML readers disagree about an unquoted scalar."""
    if _FLOAT.match(text) or _INT.match(text):
        return None
    for pattern, what, instead in _COMPILED:
        if pattern.match(text):
            return what, f'write "{text}" for the text' + (f", or {instead}" if instead else "")
    return None
