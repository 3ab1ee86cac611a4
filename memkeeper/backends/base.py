"""What the keeper asks of a memory backend."""

from __future__ import annotations

from typing import Protocol


class Backend(Protocol):
    """Creates memory that is an fd: whoever holds it holds the memory, and whoever maps it shares it.

    `allocate` is called on a worker thread, one call at a time; everything else on the keeper's loop.
    """

    name: str

    def probe(self) -> None:
        """Find out whether this machine can.

        Raises:
            KeeperError: it cannot, and why.
        """

    def granularity(self, device: str) -> int:
        """Return the bytes that a segment's size is a multiple of.

        Raises:
            KeeperError: no such device.
        """

    def require(self, size: int, device: str) -> None:
        """Check that ``size`` bytes more can be had now; called for a whole set before its first segment.

        Raises:
            OutOfMemory: they cannot; the message has the arithmetic.
        """

    def allocate(self, size: int, name: str, device: str) -> int:
        """Return the fd (close-on-exec, the caller's) of ``size`` bytes, zeroed, backed by memory from the start.

        Args:
            size: bytes, a multiple of `granularity`.
            name: for people who look at ``/proc``; not unique.
            device: device UUID, or ``host``.

        Raises:
            OutOfMemory: the memory is not there.
        """

    def usage(self, device: str) -> str:
        """Return how much memory there is and who uses it, for people; called on a worker thread when memory has run out."""

    def seal(self, fd: int) -> None:
        """Make the content final where the kernel can enforce it. Idempotent.

        Raises:
            KeeperError: a mapping that is or could become writable still exists.
        """
