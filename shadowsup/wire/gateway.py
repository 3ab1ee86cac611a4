"""What the supervisor tells a gateway process: ``python -m shadowsup.supervisor.gateway SPEC.json``."""

from __future__ import annotations

import msgspec


class GatewaySpec(msgspec.Struct, frozen=True, kw_only=True):
    """Written as JSON (0600). The listening sockets are the supervisor's (in its vault), inherited as ``listen_fds``.

    A gateway that dies is replaced over the same sockets, so that the port is never free in between.
    """

    node: str
    runtime_dir: str
    listen_fds: tuple[int, ...]
    beat_endpoint: str
    heartbeat_s: float = 0.2
    api_key_file: str | None = None
    """One key a line; empty lines and lines from ``#`` are skipped. None: no authentication."""
    max_inflight: int = 256
    """Requests admitted at once over all workers; then 429 with Retry-After."""
    keepalive_s: float = 10.0
    """While a stream is held, a server-sent comment this often."""
    handover: str = ""
    """Unix socket at which a new supervisor gets the listening sockets; empty: none."""
    retune: str = ""
    """Unix socket at which the supervisor gives other settings; empty: none."""
    max_body: int = 16 * 1024 * 1024
    """Bytes of one request body; more is a 413."""


class Retune(msgspec.Struct, frozen=True, kw_only=True):
    """Settings for a gateway that runs (`shadowsup.supervisor.gateway.retune`); what they mean is said in `GatewaySpec`."""

    api_key_file: str | None = None
    max_inflight: int = 256


class Retuned(msgspec.Struct, frozen=True, kw_only=True):
    """They are in use. ``error``: why not; nothing was changed then."""

    error: str = ""
