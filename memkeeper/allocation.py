"""Makes the memory of a planned set: sizes, arithmetic of what fits, the fds, the empty ledger."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from shadowsup.memkeeper import protocol as p
from shadowsup.memkeeper.backends.base import Backend
from shadowsup.memkeeper.backends.host import DEVICE, HostBackend
from shadowsup.memkeeper.backends.host_memory import size_text
from shadowsup.memkeeper.channel import OwnedFd
from shadowsup.memkeeper.errors import KeeperError, OutOfMemory
from shadowsup.memkeeper.ledger import initialise
from shadowsup.memkeeper.segments import SegmentSet

Segments = dict[str, OwnedFd]
"""Segment id → its fd."""

Holdings = Sequence[tuple[str, int, tuple[str, ...]]]
"""What the keeper has: (what, bytes, leased by whom)."""


@dataclass(frozen=True)
class Job:
    """A set that is being allocated for a connection."""

    connection: int
    planned: SegmentSet


class Allocator:
    """Chooses the backend by device: host memory is there whatever the node's backend is (every ledger is host memory)."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self._host: Backend = backend if backend.name == DEVICE else HostBackend()

    def _of(self, device: str) -> Backend:
        return self._host if device == DEVICE else self.backend

    def round_up(self, sizes: Iterable[int], device: str) -> list[int]:
        """Return sizes as they can be had.

        Raises:
            KeeperError: no such device, or a size that is none.
        """
        granularity = self._of(device).granularity(device)
        sizes = list(sizes)
        if any(size <= 0 for size in sizes):
            raise KeeperError("a segment has at least one byte")
        return [-(-size // granularity) * granularity for size in sizes]

    def require(self, planned: SegmentSet, holdings: Holdings) -> None:
        """Check that the whole set fits.

        Raises:
            OutOfMemory: it does not; says what the keeper holds for whom.
        """
        wanted: dict[str, int] = {}
        for manifest in planned.manifests:
            wanted[manifest.device] = wanted.get(manifest.device, 0) + manifest.size
        for device, size in wanted.items():
            try:
                self._of(device).require(size, device)
            except OutOfMemory as error:
                raise OutOfMemory(f"{error.message}. {_held(holdings)}", error.hint) from None

    def allocate(self, planned: SegmentSet, holdings: Holdings) -> Segments:
        """Create every segment, on a thread of its own.

        Raises:
            OutOfMemory: one did not fit; none is left. Says who uses the memory, and what the keeper holds for whom.
            KeeperError: the ledger cannot be initialised as asked.
        """
        # fallocate undoes its work when a signal interrupts it; signals are for the main thread.
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        segments: Segments = {}
        try:
            for manifest in planned.manifests:
                self._add(manifest, segments)
        except OutOfMemory as error:
            segments.clear()  # first: half a set must not count as used in the figures
            usage = self._of(manifest.device).usage(manifest.device)
            wanted = f"{error.message}, part of {size_text(planned.size)}: {usage}. {_held(holdings)}"
            raise OutOfMemory(wanted, error.hint) from None
        except BaseException:
            segments.clear()  # now, and not when somebody lets go of the exception
            raise
        return segments

    def _add(self, manifest: p.Manifest, segments: Segments) -> None:
        fd = self._of(manifest.device).allocate(manifest.size, f"shadowsup-{manifest.segment}", manifest.device)
        segments[manifest.segment] = OwnedFd(fd)
        if manifest.kind is p.Kind.LEDGER and "blocks" in manifest.meta:
            _initialise(fd, manifest)

    def seal(self, fd: int, device: str) -> None:
        """Raises KeeperError where a mapping that could be written still exists."""
        self._of(device).seal(fd)


def _held(holdings: Holdings) -> str:
    held = "; ".join(f"{what}: {size_text(size)}, leased by {', '.join(who) or 'nobody'}" for what, size, who in holdings)
    return f"The keeper holds {held or 'nothing'}"


def _initialise(fd: int, manifest: p.Manifest) -> None:
    try:
        facts = int(manifest.meta["blocks"]), int(manifest.meta["block_tokens"]), bytes.fromhex(manifest.meta["salt"])
    except (KeyError, ValueError) as error:
        raise KeeperError(f"the ledger's meta is not usable: {error!r}", "blocks and block_tokens decimal, salt 32 hex digits") from None
    blocks, block_tokens, salt = facts
    initialise(fd, blocks=blocks, block_tokens=block_tokens, fingerprint=bytes.fromhex(manifest.fingerprint.digest()), salt=salt)


def open_fd_limit() -> None:
    """Raise the soft limit of open files to the hard one: every segment is an fd, and every fd in flight to a client counts too."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
