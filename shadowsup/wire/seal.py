"""What tells a gateway's own words in a request from a client's: a keyed digest over all of them.

The gateway puts fields of its own among those that clients may give (`shadowsup.supervisor.gateway.held_request`), and engines have many
paths on which a client can give any. So an engine believes such fields only under a seal, and drops them otherwise. The key is a file of
the runtime directory that only the node's user can read; it is made by whoever needs it first and stays as long as the node, whichever of
its processes are replaced.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
from collections.abc import Mapping
from pathlib import Path

PREFIX = "shadowsup_"
"""Names of fields that are the gateway's begin with this."""
SEAL = PREFIX + "seal"

FILE = "claims.key"
KEY_BYTES = 32
_DIGEST_BYTES = 16


def key_of(runtime: Path) -> bytes:
    """Return the key of the node in this runtime directory; make it if there is none yet.

    Raises:
        OSError: it can be neither read nor made, or it is not a key.
    """
    path = runtime / FILE
    try:
        return _read(path)
    except FileNotFoundError:
        pass
    temporary = runtime / f".{FILE}.{secrets.token_hex(8)}"
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(secrets.token_bytes(KEY_BYTES))
        os.link(temporary, path)  # whole, or not at all; of several who do this at once one succeeds
    except FileExistsError:
        pass
    finally:
        temporary.unlink()
    return _read(path)


def _read(path: Path) -> bytes:
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as file:
        key = file.read(KEY_BYTES + 1)
    if len(key) != KEY_BYTES:
        raise OSError(f"{path} is not a key: it must have {KEY_BYTES} bytes")
    return key


def ours(name: object) -> bool:
    """Return whether a field of this name is the gateway's."""
    return str(name).startswith(PREFIX)


def seal(key: bytes, fields: Mapping[str, object]) -> str:
    """Return the seal over those of ``fields`` that are the gateway's; others may be among them.

    Raises:
        TypeError: one is neither text nor a whole number; the gateway writes no others.
    """
    digest = hashlib.blake2b(key=key, digest_size=_DIGEST_BYTES)
    for name in sorted(name for name in fields if ours(name) and name != SEAL):
        value = fields[name]
        if type(value) not in (str, int):
            raise TypeError(f"{name} is neither text nor a whole number")
        for part in (name, type(value).__name__, str(value)):
            data = part.encode()
            digest.update(len(data).to_bytes(8, "little"))
            digest.update(data)
    return digest.hexdigest()


def sealed(key: bytes, fields: Mapping[str, object]) -> bool:
    """Return whether those of ``fields`` that are the gateway's are as the holder of ``key`` wrote them."""
    said = fields.get(SEAL)
    if not isinstance(said, str):
        return False
    try:
        return hmac.compare_digest(said.encode(), seal(key, fields).encode())
    except (TypeError, ValueError):  # also text that is not Unicode, or a number too long to be written
        return False
