"""Memory of one process alone, behind the interfaces of kept memory: what an engine has that nobody keeps anything for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

import numpy as np
import numpy.typing as npt

from shadowsup.memkeeper.backends import load_backend
from shadowsup.memkeeper.client import KeeperClient
from shadowsup.memkeeper.handles import Handle, HandleSet
from shadowsup.memkeeper.ledger import Entries, LedgerWriter
from shadowsup.memkeeper.protocol import Fingerprint, Kind, Manifest
from shadowsup.workers import kept_kv, weights_layout
from shadowsup.workers.arena import KvArena
from shadowsup.workers.weight_memory import unit_of
from shadowsup.workers.weights import KeptWeights, TensorSpec, WeightStore, WeightWriter


class _NoKeeper:
    """What `WeightWriter` and `KeptWeights` ask of a keeper."""

    def drop(self, set_id: str) -> None:
        """Nobody else has it: it goes with its mapping."""


class PrivateWeights(WeightStore):
    """Weights that are loaded anew by each process, as an engine does that has no keeper. See `WeightStore`."""

    def __init__(self, device: str) -> None:
        super().__init__(cast(KeeperClient, _NoKeeper()), device=device)

    def attach(self, fingerprint: Fingerprint) -> KeptWeights | None:
        self.fingerprint = fingerprint
        return None

    def publish(self, plan: Sequence[TensorSpec], extras: Mapping[str, bytes], fingerprint: Fingerprint) -> WeightWriter:
        layout = weights_layout.plan(plan, extras, unit=unit_of(self._device))
        handles = _allocate(Kind.WEIGHTS, layout.sizes, self._device, fingerprint)
        return _PrivateWriter(self._keeper, handles, layout, extras, self._device)


class _PrivateWriter(WeightWriter):
    """Nobody will attach: no checksums, no sealing."""

    def seal(self) -> KeptWeights:
        for name, content in self._extras.items():
            self._memory.write(self._layout.extras[name], content)
        self._handles.close()
        return KeptWeights(self._keeper, "private", self._memory, self._layout, self._device, published=True)


def map_private(arena: KvArena, size: int, device: str) -> None:
    """Put memory of this process behind the whole arena, for good.

    Raises:
        OutOfMemory: there is not so much.
        WorkerError: it cannot be mapped.
    """
    slabs = kept_kv.slab_sizes(size, device)
    handles = _allocate(Kind.KV, slabs, device, Fingerprint(()))
    try:
        arena.map_segments([handle.fd for handle in handles], slabs)
    finally:
        handles.close()


def _allocate(kind: Kind, sizes: Sequence[int], device: str, fingerprint: Fingerprint) -> HandleSet:
    backend = load_backend("host" if device == "host" else "cuda")
    handles = HandleSet(())
    for index, size in enumerate(sizes):
        manifest = Manifest(
            segment=f"private-{kind.value}-{index}",
            generation=0,
            kind=kind,
            set_id="private",
            index=index,
            of=len(sizes),
            worker="",
            device=device,
            size=size,
            fingerprint=fingerprint,
        )
        handles.append(Handle(manifest, backend.allocate(size, f"shadowsup-plain-{kind.value}", device)))
    return handles


class NoLedger:
    """What an adapter asks of `LedgerWriter`, without a ledger: the prefix index lives in the process and dies with it."""

    epoch = 1

    class _Header:
        salt = bytes(16)

    def as_writer(self) -> LedgerWriter:
        return cast(LedgerWriter, self)

    def header(self) -> _Header:
        return self._Header()

    def check(self) -> None: ...

    def publish(self, ids: npt.ArrayLike, hashes: npt.ArrayLike, tokens: npt.ArrayLike, last_use: npt.ArrayLike) -> None: ...

    def invalidate(self, ids: npt.ArrayLike) -> None: ...

    def touch(self, ids: npt.ArrayLike, last_use: npt.ArrayLike) -> None: ...

    def set_reserve(self, ids: npt.ArrayLike) -> None: ...

    def clear_reserve(self, ids: npt.ArrayLike) -> None: ...

    def reserve(self) -> npt.NDArray[np.intp]:
        return np.zeros(0, np.intp)

    def entries(self) -> Entries:
        none = np.zeros(0, np.intp)
        return Entries(
            ids=none,
            hashes=np.zeros((0, 2), np.uint64),
            tokens=np.zeros(0, np.uint32),
            last_use=np.zeros(0, np.uint64),
            flags=np.zeros(0, np.uint8),
        )
