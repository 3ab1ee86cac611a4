"""The segments of one weight set, mapped in this process: what `shadowsup.workers.weights` needs of them, whatever they are made of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from shadowsup.workers import checksum, mapping
from shadowsup.workers.errors import WorkerError
from shadowsup.workers.weights_layout import Place

if TYPE_CHECKING:
    from shadowsup.memkeeper.client import Handle


class WeightMemory(Protocol):
    """``sizes`` in bytes and ``addresses`` by segment; no addresses once closed. A `Place` lies whole in one segment."""

    sizes: list[int]
    addresses: list[int]

    def read(self, place: Place) -> bytes: ...

    def write(self, place: Place, data: bytes) -> None:
        """Only before `make_read_only`, only where the memory was opened writable."""

    def checksums(self, place: Place) -> npt.NDArray[np.uint64]:
        """Return `shadowsup.workers.checksum.checksums` of the bytes."""

    def make_read_only(self, handles: Sequence[Handle]) -> None:
        """Let nothing of this process write any more; addresses stay.

        Raises:
            WorkerError: the system or the driver refuses.
        """

    def close(self) -> None:
        """Unmap. Idempotent."""


def unit_of(device: str) -> int:
    """Return the bytes that the size of a segment on ``device`` is a multiple of."""
    if device == "host":
        return mapping.PAGE
    from shadowsup.workers.cuda_memory import GRANULARITY

    return GRANULARITY


def open_memory(handles: Sequence[Handle], device: str, *, writable: bool) -> WeightMemory:
    """Map the segments of a set on ``device``. The caller keeps the handles and may close them.

    Raises:
        WorkerError: they cannot be mapped, or lie on another device.
        StaleHandle: a descriptor does not name memory any more.
    """
    if device == "host":
        return HostMemory(handles, writable=writable)
    from shadowsup.workers.weights_cuda import CudaMemory

    return CudaMemory(handles, device, writable=writable)


class HostMemory:
    """memfds. See `WeightMemory`."""

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

    def _bytes(self, place: Place) -> npt.NDArray[np.uint8]:
        return mapping.as_array(self.addresses[place.segment] + place.offset, place.nbytes)

    def read(self, place: Place) -> bytes:
        return self._bytes(place).tobytes()

    def write(self, place: Place, data: bytes) -> None:
        self._bytes(place)[:] = np.frombuffer(data, dtype=np.uint8)

    def checksums(self, place: Place) -> npt.NDArray[np.uint64]:
        return checksum.checksums(self._bytes(place))

    def close(self) -> None:
        for address, size in zip(self.addresses, self.sizes, strict=False):
            mapping.unmap(address, size)
        self.addresses = []
