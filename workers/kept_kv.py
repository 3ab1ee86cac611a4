"""A worker's KV segments and ledger, held by a parked engine so that its promotion needs nobody: not the keeper, not the supervisor."""

from __future__ import annotations

import os

from shadowsup.memkeeper.client import HandleSet, KeeperClient
from shadowsup.memkeeper.ledger import LedgerReader, LedgerWriter, initialise, ledger_size
from shadowsup.memkeeper.protocol import Fingerprint, Kind
from shadowsup.workers.api import KvGeometry
from shadowsup.workers.arena import KvArena
from shadowsup.workers.errors import WorkerError
from shadowsup.workers.mapping import round_up

MAX_SLAB = 64 * 1024**3
"""Bytes of one KV segment in host memory: few large handles, each mapped whole."""

HASHING = "blake2b-128-chained-1"
"""How blocks are named; part of the fingerprint, so that an index made in another way is a miss."""


_ASK_TIMEOUT_S = 5.0


def fingerprint(weights: Fingerprint | None, geometry: KvGeometry) -> Fingerprint:
    """Return what the bytes of the KV and the meaning of its ledger depend on."""
    own = (
        ("kv.blocks", str(geometry.blocks)),
        ("kv.block_tokens", str(geometry.block_tokens)),
        ("kv.block_bytes", str(geometry.block_bytes)),
        ("kv.hash", HASHING),
    )
    return Fingerprint((*(weights.items if weights else ()), *geometry.fingerprint, *own))


def slab_sizes(size: int, device: str) -> tuple[int, ...]:
    """Return the sizes of the segments for ``size`` bytes of blocks on ``device``: what mapping asks for, so a little more may come out."""
    if device == "host":
        total = round_up(size)
        return tuple(min(MAX_SLAB, total - start) for start in range(0, total, MAX_SLAB))
    from shadowsup.workers.cuda_memory import GRANULARITY, kv_slabs

    return kv_slabs(round_up(size, GRANULARITY))


def rehearse() -> None:
    """Take a small ledger of one's own, so that a promotion does nothing for the first time: numpy imports parts of itself at their first
    use (``np.unique`` alone: 5 ms)."""
    import numpy.ma

    assert numpy.ma
    blocks = 8
    fd = os.memfd_create("shadowsup-rehearsal", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, ledger_size(blocks))
        initialise(fd, blocks=blocks, block_tokens=1, fingerprint=bytes(16), salt=bytes(16))
        for epoch in (1, 2):
            writer = LedgerWriter.take(fd, owner=1, epoch=epoch)
            writer.set_reserve([1])
            writer.publish([0], [[1, 2]], 1, 1)
            writer.invalidate([0])
            writer.entries()
            writer.close()
    finally:
        os.close(fd)


class KeptKv:
    """The lease and descriptors of one worker's KV.

    Args:
        beside: a set of another fingerprint that the worker has stays as good as ours, see `GetKv`.

    Raises:
        OutOfMemory: the keeper cannot create the segments.
        KeeperError: the keeper refuses or is not there.
    """

    def __init__(
        self,
        keeper: KeeperClient,
        *,
        worker: str,
        device: str,
        geometry: KvGeometry,
        fingerprint: Fingerprint,
        beside: bool = False,
    ) -> None:
        self._keeper = keeper
        self._worker = worker
        self._device = device
        self._geometry = geometry
        self._fingerprint = fingerprint
        parts = geometry.parts or ((device, geometry.size),)
        of_parts = [(where, slab_sizes(size, where)) for where, size in parts]
        self._devices = tuple(where for where, sizes in of_parts for _ in sizes)
        self._slabs = tuple(size for _, sizes in of_parts for size in sizes)
        self.size = sum(self._slabs)
        """Bytes of the arena that these slabs fill."""
        self._handles = self._get(fresh=False, beside=beside)
        self.reader = LedgerReader(self._handles.ledger.fd)

    @property
    def set_id(self) -> str:
        """The keeper's id of the set that is held."""
        return self._handles.set_id

    def take(self, *, owner: int, epoch: int) -> LedgerWriter:
        """Become the owner of the ledger in ``epoch``: from then on, and not before, the blocks may be written.

        Raises:
            LedgerLost: its header is at this epoch or beyond.
        """
        return LedgerWriter.take(self._handles.ledger.fd, owner=owner, epoch=epoch)

    def map_into(self, arena: KvArena) -> None:
        """Put the blocks behind ``arena``.

        Raises:
            WorkerError: they cannot be mapped; the arena is backed by scratch again.
        """
        slabs = self._handles.slabs
        arena.map_segments([slab.fd for slab in slabs], [slab.manifest.size for slab in slabs])

    def renew(self, *, owner: int, epoch: int) -> None:
        """Leave the blocks that cannot be trusted and take fresh ones, with an empty ledger.

        The old ledger is emptied first, in ``epoch``: a shadow that still holds it must not be promoted over what it says.

        Raises:
            LedgerLost: somebody is the owner in this epoch, or a later one, already.
            OutOfMemory: the keeper cannot create fresh segments.
            KeeperError: the keeper refuses or is not there.
        """
        writer = self.take(owner=owner, epoch=epoch)
        writer.invalidate(writer.entries().ids)
        writer.close()
        self._close_handles()
        self._keeper.drop(self._handles.set_id)  # before: both sets may not fit
        self._handles = self._get(fresh=True)
        self.reader = LedgerReader(self._handles.ledger.fd)

    def replaced(self) -> HandleSet | None:
        """Ask the keeper whether this worker has a newer set with this fingerprint (another engine took fresh blocks); any thread.

        Returns:
            the newer set, for `follow_to`; None while ours is the newest, or the keeper does not know better.

        Raises:
            KeeperError: the keeper refuses or is not there.
        """
        ours = self._handles.set_id
        newest = {
            one.manifest.set_id
            for one in self._keeper.list(timeout_s=_ASK_TIMEOUT_S)
            if one.manifest.kind is Kind.LEDGER and one.manifest.worker == self._worker and not one.superseded
            if one.manifest.fingerprint == self._fingerprint
        }
        if not newest or ours in newest:
            return None
        handles = self._get(fresh=False, timeout_s=_ASK_TIMEOUT_S)
        if handles.set_id == ours or handles.created:
            handles.close()
            return None
        return handles

    def follow_to(self, handles: HandleSet) -> str:
        """Hold ``handles`` in place of what was held; parked engines only. Returns the id of the old set, whose lease is to be dropped."""
        old = self._handles.set_id
        self._close_handles()
        self._handles = handles
        self.reader = LedgerReader(handles.ledger.fd)
        return old

    def drop(self, set_id: str) -> None:
        """End the lease on a set that is not held any more; any thread.

        Raises:
            KeeperError: the keeper refuses or is not there.
        """
        self._keeper.drop(set_id)

    def close(self) -> None:
        """Close the descriptors; what is mapped stays mapped, the lease ends with the keeper's connection. Idempotent."""
        self._close_handles()

    def _get(self, *, fresh: bool, beside: bool = False, timeout_s: float | None = None) -> HandleSet:
        handles = self._keeper.get_kv(
            self._worker,
            self._fingerprint,
            self._slabs,
            ledger_size(self._geometry.blocks),
            device=self._device,
            ledger_meta={"blocks": str(self._geometry.blocks), "block_tokens": str(self._geometry.block_tokens)},
            fresh=fresh,
            beside=beside,
            devices=self._devices if self._geometry.parts else (),
            timeout_s=timeout_s,
        )
        if self._device != "host":
            from shadowsup.workers.cuda_memory import check_manifest

            try:
                for slab, device in zip(handles.slabs, self._devices, strict=True):
                    check_manifest(slab.manifest, device)
            except WorkerError:
                handles.close()
                raise
        return handles

    def _close_handles(self) -> None:
        self.reader.close()
        self._handles.close()
