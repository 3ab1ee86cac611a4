"""How a client on this machine reaches the node's gateway: its address, and the key to show."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NamedTuple

from shadowsup.supervisor.errors import ConfigError, SupervisorError

KEY_VARIABLE = "SHADOWSUP_API_KEY"
_ANY = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}


class Address(NamedTuple):
    """``url``: scheme, host and port. ``socket``: path of the Unix socket that it is reached through, or None."""

    url: str
    socket: str | None = None


def address_of(status: dict[str, Any]) -> Address:
    """Return the gateway's address from a node's status.

    Raises:
        SupervisorError: it does not listen yet.
    """
    listen = str((status.get("gateway") or {}).get("listen") or "").split(",")[0]
    if listen.startswith("unix:"):
        return Address("http://localhost", listen.removeprefix("unix:"))
    host, _, port = listen.removeprefix("http://").rpartition(":")
    if not host or port in ("", "0"):
        raise SupervisorError("the gateway does not listen yet", "see shadowsup status")
    return Address(f"http://{_ANY.get(host, host)}:{port}")


def key_of(record: dict[str, Any]) -> str | None:
    """Return the key that the gateway wants: $SHADOWSUP_API_KEY, or the first of the config that the node was started with.

    ``record``: what node.json says. None: there is none, or this user may not read it.
    """
    if os.environ.get(KEY_VARIABLE):
        return os.environ[KEY_VARIABLE]
    if not isinstance(record.get("config"), str):
        return None
    from shadowsup.supervisor.config import load

    try:
        file: Path | None = load(Path(record["config"])).config.gateway.api_key_file
        lines = file.read_text(encoding="utf-8").splitlines() if file is not None else []
    except (ConfigError, OSError, UnicodeDecodeError):
        return None  # it was started with another one; the gateway says what it thinks of us
    return next((line.strip() for line in lines if line.strip() and not line.startswith("#")), None)
