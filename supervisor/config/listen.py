"""The address the gateway listens on."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass


@dataclass(frozen=True)
class ListenAddress:
    """``host`` and ``port`` for TCP, or ``path`` of a Unix socket. ``host`` is an IP address without brackets, or ``localhost``."""

    host: str = ""
    port: int = 0
    path: str = ""

    @property
    def is_unix(self) -> bool:
        return bool(self.path)

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can connect."""
        return self.is_unix or self.host == "localhost" or ipaddress.ip_address(self.host).is_loopback

    @property
    def url(self) -> str:
        """``http://127.0.0.1:8000``, ``http://[::1]:8000`` or ``unix:/path``."""
        if self.is_unix:
            return f"unix:{self.path}"
        return f"http://[{self.host}]:{self.port}" if ":" in self.host else f"http://{self.host}:{self.port}"


_HOST_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?(\.[A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?)*\Z")


def parse_listen(text: str) -> ListenAddress:
    """Take ``HOST:PORT``, ``[IPv6]:PORT`` or ``unix:/path`` apart.

    Raises:
        ValueError: what is wrong, with an example.
    """
    if text.startswith("unix:"):
        path = text.removeprefix("unix:")
        if not path.startswith("/"):
            raise ValueError(f"{text!r}: the path of a Unix socket must be absolute, like unix:/run/shadowsup/http.sock")
        if len(path.encode()) > 107:
            raise ValueError(f"{text!r}: the path has {len(path.encode())} bytes; Linux allows 107 for a Unix socket")
        return ListenAddress(path=path)
    if "://" in text:
        raise ValueError(f"{text!r} is a URL; write HOST:PORT, like 127.0.0.1:8000")
    host, colon, port_text = text.rpartition(":")
    if not colon:
        example = f"127.0.0.1:{text}" if text.isdigit() else f"{text}:8000"
        raise ValueError(f"{text!r} has no port; write HOST:PORT, like {example}")
    if not host:
        raise ValueError(f"{text!r} has no host; write 127.0.0.1{text} for this machine only, 0.0.0.0{text} for all addresses")
    if not (port_text.isascii() and port_text.isdigit()) or int(port_text) > 65535:
        raise ValueError(f"{text!r}: {port_text!r} is not a port (0 to 65535)")
    port = int(port_text)
    if host.startswith("[") and host.endswith("]"):
        inner = host[1:-1]
        try:
            ipaddress.IPv6Address(inner)
        except ValueError:
            raise ValueError(f"{text!r}: {inner!r} is not an IPv6 address") from None
        return ListenAddress(host=inner, port=port)
    if ":" in host:
        raise ValueError(f"{text!r}: an IPv6 address goes in brackets and quotes, like '[{host}]:{port_text}'")
    try:
        ipaddress.IPv4Address(host)
    except ValueError:
        if host != "localhost":
            told = "a host name may have several addresses; write the IP address" if _HOST_NAME.match(host) else "write an IP address"
            raise ValueError(f"{text!r}: {host!r} is not an IP address; {told} or localhost") from None
    return ListenAddress(host=host, port=port)
