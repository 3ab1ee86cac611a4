"""Kept weights: published once, then mapped read-only by every engine of the same fingerprint, the publisher among them.

An adapter asks `WeightStore.attach`. None means that it is the publisher: it says what it will write (`WeightStore.publish`), fills the
writable memory it is given, and seals. Tensors keep their addresses across sealing: the read-only mapping replaces the writable one in
place, so tensors that were built over it need not be built again, and a write to them afterwards is a segmentation fault.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shadowsup.memkeeper.client import HandleSet, KeeperClient
from shadowsup.memkeeper.protocol import Fingerprint
from shadowsup.workers import checksum, mapping, weights_layout
from shadowsup.workers.errors import WorkerError
from shadowsup.workers.weight_memory import WeightMemory, open_memory, unit_of
from shadowsup.workers.weights_layout import Layout, Place, TensorSpec

__all__ = ["KeptTensor", "KeptWeights", "TensorSpec", "WeightStore", "WeightWriter"]

_SAMPLE_PIECES = 16
"""Pieces of 4 MiB of each segment that ``verify: sample`` reads."""


@dataclass(frozen=True)
class KeptTensor:
    """Where a tensor lies in this process; aligned to 256 bytes.

    Wrap ``(ctypes.c_char * nbytes).from_address(address)`` on the host, `shadowsup.workers.cuda_memory.DeviceBytes` on a device.
    """

    address: int
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    device: str = "host"

    def array(self) -> npt.NDArray[np.uint8]:
        """Return the bytes (host memory only), shape ``(nbytes,)``.

        Raises:
            WorkerError: this is device memory.
        """
        if self.device != "host":
            raise WorkerError(f"a tensor on {self.device} has no host array", "wrap its address in DeviceBytes")
        return mapping.as_array(self.address, self.nbytes)


class KeptWeights:
    """A sealed set, mapped read-only. ``extras``: small files that came with it. ``published``: by this process."""

    def __init__(self, keeper: KeeperClient, set_id: str, memory: WeightMemory, layout: Layout, device: str, *, published: bool) -> None:
        self._keeper = keeper
        self._memory = memory
        self._layout = layout
        self.set_id = set_id
        self.published = published
        self.nbytes = sum(layout.sizes)
        self.tensors: Mapping[str, KeptTensor] = _tensors(memory, layout, device)
        self.extras: Mapping[str, bytes] = {name: memory.read(place) for name, place in layout.extras.items()}

    @property
    def digest(self) -> str:
        """Of all bytes: names, shapes, extras, and a checksum of every piece (shape and content equal, digest equal)."""
        return _digest(self._memory, self._layout)

    def close(self) -> None:
        """Unmap and give the lease back. No tensor over it may be touched afterwards. Idempotent."""
        if self._memory.addresses:
            self._memory.close()
            self._keeper.drop(self.set_id)


class WeightWriter:
    """A set being published. Fill every tensor (`array`, or `address` of `tensors`), then `seal`."""

    def __init__(self, keeper: KeeperClient, handles: HandleSet, layout: Layout, extras: Mapping[str, bytes], device: str) -> None:
        self._keeper = keeper
        self._handles = handles
        self._layout = layout
        self._extras = extras
        self._device = device
        try:
            self._memory = open_memory(handles, device, writable=True)
        except Exception:
            handles.close()
            keeper.drop(handles.set_id)
            raise
        self.tensors: Mapping[str, KeptTensor] = _tensors(self._memory, layout, device)

    def array(self, name: str) -> npt.NDArray[np.uint8]:
        """Return the writable bytes of tensor ``name``, shape ``(nbytes,)``; read-only (by fault) once sealed."""
        return self.tensors[name].array()

    def seal(self) -> KeptWeights:
        """Write the index and checksums, go over to read-only mappings at the same addresses, and let others attach.

        Raises:
            KeeperError: the keeper refuses (somebody still has the segments mapped writable) or is gone.
            WorkerError: the read-only mapping fails.
        """
        layout, memory, set_id = self._layout, self._memory, self._handles.set_id
        try:
            memory.write(Place(0, 0, len(layout.index)), layout.index)
            for name, content in self._extras.items():
                memory.write(layout.extras[name], content)
            for segment, table in enumerate(layout.tables):
                first, end = weights_layout.covered(layout, segment)
                sums = memory.checksums(Place(segment, first, end - first))
                memory.write(Place(0, table.offset, sums.nbytes), sums.tobytes())
            digest = _digest(memory, layout)
            memory.make_read_only(self._handles)
            self._keeper.seal(set_id, {"head": digest, "checksum": checksum.NAME})
        except Exception:
            self.abort()
            raise
        self._handles.close()
        return KeptWeights(self._keeper, set_id, memory, layout, self._device, published=True)

    def abort(self) -> None:
        """Give up: unmap and let the keeper free the segments. Idempotent."""
        if self._memory.addresses:
            self._memory.close()
            set_id = self._handles.set_id
            self._handles.close()
            self._keeper.drop(set_id)


class _Damaged(WorkerError):
    """Kept bytes are not those that were published."""


class WeightStore:
    """Weights of one device in the keeper. ``fingerprint``: that of the last set attached or published here."""

    def __init__(self, keeper: KeeperClient, *, device: str = "host", verify: str = "none") -> None:
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
        while (handles := self._keeper.get_weights(fingerprint, self._device)) is not None:
            try:
                return self._attach(handles)
            except _Damaged as error:
                # Nobody gets this set again; the next answer is another engine's good copy, or that we publish one.
                logging.getLogger(__name__).error("%s; loading them anew", error.message)
                self._keeper.drop(handles.set_id, discard=True)
        return None

    def _attach(self, handles: HandleSet) -> KeptWeights:
        digest = handles[0].manifest.meta.get("head", "")
        try:
            memory = open_memory(handles, self._device, writable=False)
        finally:
            handles.close()  # a mapping keeps its memory; the lease is with the connection
        try:
            layout = weights_layout.read(_head(memory), memory.sizes)
            _verify(memory, layout, digest, self._verify)
        except WorkerError as error:
            memory.close()
            raise _Damaged(error.message) from error
        return KeptWeights(self._keeper, handles.set_id, memory, layout, self._device, published=False)

    def publish(self, plan: Sequence[TensorSpec], extras: Mapping[str, bytes], fingerprint: Fingerprint) -> WeightWriter:
        """Create the segments for ``plan`` and ``extras``. Only after `attach` returned None.

        Raises:
            OutOfMemory: the keeper cannot create them.
            KeeperError: the keeper refuses or is gone.
            WorkerError: two tensors share a name, or the segments cannot be mapped.
        """
        layout = weights_layout.plan(plan, extras, unit=unit_of(self._device))
        handles = self._keeper.create(fingerprint, layout.sizes, device=self._device)
        self.fingerprint = fingerprint
        return WeightWriter(self._keeper, handles, layout, extras, self._device)


def _tensors(memory: WeightMemory, layout: Layout, device: str) -> dict[str, KeptTensor]:
    return {
        name: KeptTensor(memory.addresses[place.segment] + place.offset, spec.dtype, spec.shape, spec.nbytes, device)
        for name, (spec, place) in layout.tensors.items()
    }


def _head(memory: WeightMemory) -> bytes:
    """Return as much of segment 0 as its index takes; its length stands in the first bytes."""
    start = memory.read(Place(0, 0, min(memory.sizes[0], weights_layout.PREFIX)))
    return memory.read(Place(0, 0, min(memory.sizes[0], weights_layout.index_length(start))))


def _digest(memory: WeightMemory, layout: Layout) -> str:
    """Return the digest of the head: index, checksums and extras. With it in the manifest, all else hangs on the manifest."""
    return hashlib.blake2b(memory.read(Place(0, 0, layout.head)), digest_size=16).hexdigest()


def _verify(memory: WeightMemory, layout: Layout, digest: str, mode: str) -> None:
    """Raises WorkerError when the bytes are not those that were published."""
    if _digest(memory, layout) != digest:
        raise WorkerError("the index of kept weights differs from what was published")
    if mode == "none":
        return
    for segment, table in enumerate(layout.tables):
        first, end = weights_layout.covered(layout, segment)
        count = checksum.piece_count(end - first)
        published = np.frombuffer(memory.read(Place(0, table.offset, 8 * count)), dtype=np.uint64)
        starts = [first + piece * checksum.PIECE for piece in range(count)]
        if mode == "full":  # in one go: a device is as slow with one piece as with a thousand
            damaged = np.flatnonzero(memory.checksums(Place(segment, first, end - first)) != published).tolist()
        else:
            places = {
                piece: Place(segment, starts[piece], min(checksum.PIECE, end - starts[piece]))
                for piece in checksum.sample(count, _SAMPLE_PIECES)
            }
            damaged = [piece for piece, place in places.items() if memory.checksums(place)[0] != published[piece]]
        if damaged:
            start = starts[damaged[0]]
            raise WorkerError(f"kept weights are damaged: segment {segment}, bytes {start} to {min(start + checksum.PIECE, end)}")
