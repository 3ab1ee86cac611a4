"""What a client of the keeper is given: fds with their manifests."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass

from shadowsup.memkeeper import protocol as p
from shadowsup.memkeeper.errors import KeeperError


@dataclass(eq=False)
class Handle:
    """One segment. Owns ``fd``: `close` it when it is mapped and not needed for another mapping; the lease is not tied to it."""

    manifest: p.Manifest
    fd: int

    def open_readonly(self) -> int:
        """Return a new fd (the caller's) that can only be read. A shared mapping of it can never become writable, which is what sealing
        asks of every mapping that exists (`KeeperClient.seal`) and what kernels before 6.7 ask of mappings of sealed memory.
        """
        return os.open(f"/proc/self/fd/{self.fd}", os.O_RDONLY | os.O_CLOEXEC)

    def close(self) -> None:
        """Idempotent."""
        if self.fd >= 0:
            fd, self.fd = self.fd, -1
            os.close(fd)


class HandleSet(list[Handle]):
    """The segments of one set by index; a KV set ends with its ledger.

    Attributes:
        created: the set is new, nothing has been written into it.
    """

    def __init__(self, handles: Iterable[Handle], *, created: bool = False) -> None:
        super().__init__(handles)
        self.created = created

    @property
    def set_id(self) -> str:
        return self[0].manifest.set_id

    @property
    def slabs(self) -> list[Handle]:
        return [handle for handle in self if handle.manifest.kind is p.Kind.KV]

    @property
    def ledger(self) -> Handle:
        """Raises KeeperError when this is no KV set."""
        for handle in self:
            if handle.manifest.kind is p.Kind.LEDGER:
                return handle
        raise KeeperError(f"set {self.set_id} has no ledger")

    def close(self) -> None:
        """Close every fd. Idempotent."""
        for handle in self:
            handle.close()
