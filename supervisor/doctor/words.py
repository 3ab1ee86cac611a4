"""Figures for people."""

from __future__ import annotations

from shadowsup.memkeeper.backends.host_memory import size_text


def size(value: int) -> str:
    """Return bytes for people: ``1.5 GiB``."""
    return size_text(value)


def cuda_version(number: int) -> str:
    """Return ``13.0`` for the driver's 13000."""
    return f"{number // 1000}.{number % 1000 // 10}"
