"""API keys from a file, which may be changed while the gateway runs."""

from __future__ import annotations

import hmac
import logging
from pathlib import Path

from shadowsup.supervisor.gateway.errors import ApiError

log = logging.getLogger(__name__)


class ApiKeys:
    """Checks ``Authorization: Bearer KEY`` against a file with one key a line.

    A file that cannot be read, or holds no key, lets nobody in: the operator asked for keys. Once read, the keys stay in force when the
    file vanishes for a moment, as it does when an editor replaces it.

    Args:
        path: the file; None: everybody may.
    """

    def __init__(self, path: str | None) -> None:
        self._path = None if path is None else Path(path)
        self._keys: tuple[bytes, ...] = ()
        self._version: tuple[int, ...] | None = None
        self._refresh()

    @property
    def required(self) -> bool:
        return self._path is not None

    def check(self, authorization: str | None) -> None:
        """Let a request pass.

        Raises:
            ApiError: 401.
        """
        if self._path is None:
            return
        self._refresh()
        scheme, _, key = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise ApiError(401, "This server needs an API key: send 'Authorization: Bearer KEY'", code="missing_api_key")
        given = key.strip().encode("utf-8", "surrogateescape")
        known = False
        for each in self._keys:  # all of them, whichever is right: the time taken tells nothing
            known |= hmac.compare_digest(each, given)
        if not known:
            raise ApiError(401, "Incorrect API key provided", code="invalid_api_key")

    def _refresh(self) -> None:
        if self._path is None:
            return
        try:
            found = self._path.stat()
            version = (found.st_mtime_ns, found.st_size, found.st_ino)
            if version == self._version:
                return
            lines = self._path.read_text().splitlines()
        except (OSError, UnicodeDecodeError) as error:
            if self._version != ():
                log.error("cannot read the API keys, keeping the %d known: %s", len(self._keys), error)
                self._version = ()
            return
        self._version = version
        self._keys = tuple(line.strip().encode() for line in lines if line.strip() and not line.strip().startswith("#"))
        log.info("%d API keys in force", len(self._keys))
        if not self._keys:
            log.error("the API key file %s holds no key: every request is refused", self._path)
