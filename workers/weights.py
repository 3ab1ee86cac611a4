"""Kept weights: published once, then mapped read-only by every engine of the same fingerprint, the publisher among them.

An adapter asks `WeightStore.attach`. None means that it is the publisher: it says what it will write (`WeightStore.publish`), fills the
writable memory it is given, and seals. Tensors keep their addresses across sealing: the read-only mapping replaces the writable one in
place, so tensors that were built over it need not be built again, and a write to them afterwards is a segmentation fault.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from shadowsup.memkeeper.protocol import Fingerprint, Kind
from shadowsup.workers import checksum, mapping, weights_layout
from shadowsup.workers.errors import WorkerError
from shadowsup.workers.weights_layout import Layout, Place, TensorSpec

if TYPE_CHECKING:
    from shadowsup.memkeeper.client import Handle

__all__ = ["KeptTensor", "KeptWeights", "TensorSpec", "Verify", "WeightKeeper", "WeightStore", "WeightWriter"]

_SAMPLE_PIECES = 16
"""Pieces of 4 MiB of each segment that ``verify: sample`` reads."""

Verify = str
"""``none | sample | full``, as in the config."""


class WeightKeeper(Protocol):
    """What is needed of `shadowsup.memkeeper.client.KeeperClient`."""

    def get_weights(self, fingerprint: Fingerprint, device: str = "host") -> list[Handle] | None: ...

    def create(
        self, kind: Kind, *, worker: str, fingerprint: Fingerprint, device: str, sizes: Sequence[int], meta: Mapping[str, str] | None = None
    ) -> list[Handle]: ...

    def seal(self, set_id: str, meta: Mapping[str, str] | None = None) -> None: ...

    def drop(self, set_id: str) -> None: ...


@dataclass(frozen=True)
class KeptTensor:
    """Where a tensor lies in this process. Wrap ``(ctypes.c_char * nbytes).from_address(address)``; aligned to 256 bytes."""

    address: int
    dtype: str
    shape: tuple[int, ...]
    nbytes: int

    def array(self) -> npt.NDArray[np.uint8]:
        """Return the bytes, shape ``(nbytes,)``."""
        return mapping.as_array(self.address, self.nbytes)


class _Mapped:
    """The segments of one set, mapped in this process."""

    def __init__(self, handles: Sequence[Handle], *, writable: bool) -> None:
        self.sizes = [handle.manifest.size for handle in handles]
        self.addresses: list[int] = []
        try:
            for handle, size in zip(handles, self.sizes, strict=True):
                if writable:
                    self.addresses.append(mapping.map_fd(handle.fd, size, mapping.PROT_READ | mapping.PROT_WRITE))
                else:
                    with mapping.read_only_fd(handle.fd) as reader:
                        self.addresses.append(mapping.map_fd(reader, size, mapping.PROT_READ))
        except OSError as error:
            self.close()
            raise WorkerError(f"cannot map weights: {error.strerror}", "check ulimit -v and vm.max_map_count") from error

    def make_read_only(self, handles: Sequence[Handle]) -> None:
        """Replace the writable mappings in place; then nothing of this process hinders F_SEAL_WRITE."""
        try:
            for handle, address, size in zip(handles, self.addresses, self.sizes, strict=True):
                with mapping.read_only_fd(handle.fd) as reader:
                    mapping.map_fd(reader, size, mapping.PROT_READ, address=address)
        except OSError as error:
            raise WorkerError(f"cannot map weights read-only: {error.strerror}") from error

    def bytes_of(self, place: Place) -> npt.NDArray[np.uint8]:
        return mapping.as_array(self.addresses[place.segment] + place.offset, place.nbytes)

    def tensor(self, spec: TensorSpec, place: Place) -> KeptTensor:
        return KeptTensor(self.addresses[place.segment] + place.offset, spec.dtype, spec.shape, spec.nbytes)

    def close(self) -> None:
        for address, size in zip(self.addresses, self.sizes, strict=False):
            mapping.unmap(address, size)
        self.addresses = []


class KeptWeights:
    """A sealed set, mapped read-only. ``extras``: small files that came with it. ``published``: by this process."""

    def __init__(self, keeper: WeightKeeper, set_id: str, mapped: _Mapped, layout: Layout, *, published: bool) -> None:
        self._keeper = keeper
        self._mapped = mapped
        self.set_id = set_id
        self.published = published
        self.nbytes = sum(layout.sizes)
        self.tensors: Mapping[str, KeptTensor] = {name: mapped.tensor(spec, place) for name, (spec, place) in layout.tensors.items()}
        self.extras: Mapping[str, bytes] = {name: mapped.bytes_of(place).tobytes() for name, place in layout.extras.items()}

    def close(self) -> None:
        """Unmap and give the lease back. No tensor over it may be touched afterwards. Idempotent."""
        if self._mapped.addresses:
            self._mapped.close()
            self._keeper.drop(self.set_id)


class WeightWriter:
    """A set being published. Fill every tensor (`array`, or `address` of `tensors`), then `seal`."""

    def __init__(self, keeper: WeightKeeper, handles: list[Handle], layout: Layout, extras: Mapping[str, bytes]) -> None:
        self._keeper = keeper
        self._handles = handles
        self._layout = layout
        self._extras = extras
        try:
            self._mapped = _Mapped(handles, writable=True)
        except WorkerError:
            _close_all(handles)
            raise
        self.tensors: Mapping[str, KeptTensor] = {name: self._mapped.tensor(spec, place) for name, (spec, place) in layout.tensors.items()}

    def array(self, name: str) -> npt.NDArray[np.uint8]:
        """Return the writable bytes of tensor ``name``, shape ``(nbytes,)``; read-only (by fault) once sealed."""
        return self.tensors[name].array()

    def seal(self) -> KeptWeights:
        """Write the index and checksums, go over to read-only mappings at the same addresses, and let others attach.

        Raises:
            KeeperError: the keeper refuses (somebody still has the segments mapped writable) or is gone.
            WorkerError: the read-only mapping fails.
        """
        layout, mapped = self._layout, self._mapped
        mapped.bytes_of(Place(0, 0, len(layout.index)))[:] = np.frombuffer(layout.index, dtype=np.uint8)
        for name, content in self._extras.items():
            mapped.bytes_of(layout.extras[name])[:] = np.frombuffer(content, dtype=np.uint8)
        for segment, table in enumerate(layout.tables):
            first, end = weights_layout.covered(layout, segment)
            sums = checksum.checksums(mapped.bytes_of(Place(segment, first, end - first)))
            mapped.bytes_of(Place(0, table.offset, sums.nbytes)).view(np.uint64)[:] = sums
        set_id = self._handles[0].manifest.set_id
        try:
            mapped.make_read_only(self._handles)
            self._keeper.seal(set_id, {"head": _digest(mapped, layout), "checksum": "multilinear-64"})
        except Exception:
            self.abort()
            raise
        _close_all(self._handles)
        return KeptWeights(self._keeper, set_id, mapped, layout, published=True)

    def abort(self) -> None:
        """Give up: unmap and let the keeper free the segments. Idempotent."""
        if self._mapped.addresses:
            self._mapped.close()
            set_id = self._handles[0].manifest.set_id
            _close_all(self._handles)
            self._keeper.drop(set_id)


class WeightStore:
    """Weights of one device in the keeper. ``fingerprint``: that of the last set attached or published here."""

    def __init__(self, keeper: WeightKeeper, *, device: str = "host", verify: Verify = "none") -> None:
        self._keeper = keeper
        self._device = device
        self._verify = verify
        self.fingerprint: Fingerprint | None = None

    def attach(self, fingerprint: Fingerprint) -> KeptWeights | None:
        """Return the kept set with this fingerprint, mapped read-only; None makes the caller its publisher.

        While somebody else publishes it, this waits. Kept bytes that fail verification are condemned and count as a miss.

        Raises:
            KeeperError: the keeper refuses or is gone.
            WorkerError: the set cannot be mapped.
        """
        self.fingerprint = fingerprint
        handles = self._keeper.get_weights(fingerprint, self._device)
        if handles is None:
            return None
        set_id = handles[0].manifest.set_id
        try:
            mapped = _Mapped(handles, writable=False)
        finally:
            digest = handles[0].manifest.meta.get("head", "")
            _close_all(handles)  # a mapping keeps its memory; the lease is with the connection
        try:
            layout = weights_layout.read(_head(mapped), mapped.sizes)
            _verify(mapped, layout, digest, self._verify)
        except WorkerError:
            mapped.close()
            self._keeper.drop(set_id)
            raise
        return KeptWeights(self._keeper, set_id, mapped, layout, published=False)

    def publish(self, plan: Sequence[TensorSpec], extras: Mapping[str, bytes], fingerprint: Fingerprint) -> WeightWriter:
        """Create the segments for ``plan`` and ``extras``. Only after `attach` returned None.

        Raises:
            OutOfMemory: the keeper cannot create them.
            KeeperError: the keeper refuses or is gone.
            WorkerError: two tensors share a name, or the segments cannot be mapped.
        """
        layout = weights_layout.plan(plan, extras)
        handles = self._keeper.create(Kind.WEIGHTS, worker="", fingerprint=fingerprint, device=self._device, sizes=layout.sizes)
        self.fingerprint = fingerprint
        return WeightWriter(self._keeper, handles, layout, extras)


def _head(mapped: _Mapped) -> bytes:
    """Return as much of segment 0 as its index takes; its length stands in the first 16 bytes."""
    start = mapped.bytes_of(Place(0, 0, min(mapped.sizes[0], 16))).tobytes()
    length = 16 + int.from_bytes(start[8:16], "little")
    return mapped.bytes_of(Place(0, 0, min(mapped.sizes[0], length))).tobytes()


def _digest(mapped: _Mapped, layout: Layout) -> str:
    """Return the digest of the head: index, checksums and extras. With it in the manifest, all else hangs on the manifest."""
    return hashlib.blake2b(mapped.bytes_of(Place(0, 0, layout.head)).data, digest_size=16).hexdigest()


def _verify(mapped: _Mapped, layout: Layout, digest: str, mode: Verify) -> None:
    """Raises WorkerError when the bytes are not those that were published."""
    if _digest(mapped, layout) != digest:
        raise WorkerError("the index of kept weights differs from what was published", "they are loaded anew")
    if mode == "none":
        return
    for segment, table in enumerate(layout.tables):
        first, end = weights_layout.covered(layout, segment)
        count = checksum.piece_count(end - first)
        sums = mapped.bytes_of(Place(0, table.offset, 8 * count)).view(np.uint64)
        for piece in checksum.sample(count, _SAMPLE_PIECES) if mode == "sample" else range(count):
            start = first + piece * checksum.PIECE
            data = mapped.bytes_of(Place(segment, start, min(checksum.PIECE, end - start)))
            if checksum.checksum(data) != int(sums[piece]):
                raise WorkerError(
                    f"kept weights are damaged: segment {segment}, bytes {start} to {start + data.size}", "they are loaded anew"
                )


def _close_all(handles: Sequence[Handle]) -> None:
    for handle in handles:
        handle.close()
