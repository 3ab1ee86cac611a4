"""Weights in device memory: the publisher loads straight into the segments, so that there is never a second copy of them.

After the seal every mapping, the publisher's own among them, is read-only: a stray write is refused by the driver or ends the writer's
context, and nobody else notices. Buffers that an engine writes after loading must be private copies.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from shadowsup.memkeeper.backends.cuda_driver import DriverError
from shadowsup.memkeeper.client import Handle
from shadowsup.workers import checksum, checksum_cuda, cuda_memory
from shadowsup.workers.cuda_memory import GRANULARITY, Access, CudaMapper, DeviceBytes, DeviceRange, Mapper
from shadowsup.workers.errors import WorkerError
from shadowsup.workers.mapping import round_up
from shadowsup.workers.weights_layout import Place


class CudaMemory:
    """Exported VMM allocations of one device. See `shadowsup.workers.weight_memory.WeightMemory`."""

    def __init__(self, handles: Sequence[Handle], device: str, *, writable: bool, mapper: Mapper | None = None) -> None:
        for handle in handles:
            cuda_memory.check_manifest(handle.manifest, device)
        self.sizes = [handle.manifest.size for handle in handles]
        self.addresses: list[int] = []
        self._mapper: Mapper = CudaMapper(device) if mapper is None else mapper
        self._ranges: list[DeviceRange] = []
        access = Access.READ_WRITE if writable else Access.READ_ONLY
        imported = []
        try:
            imported = cuda_memory.import_all(self._mapper, [handle.fd for handle in handles])
            for memory, size in zip(imported, self.sizes, strict=True):
                span = DeviceRange(self._mapper, size)
                self._ranges.append(span)
                span.map([(memory, round_up(size, GRANULARITY))], access)
                self.addresses.append(span.address)
        except DriverError as error:
            self.close()
            raise WorkerError(f"cannot map weights on {device}: {error.message}") from error
        finally:
            cuda_memory.release_all(self._mapper, imported)

    def read(self, place: Place) -> bytes:
        return self._mapper.copy_out(self.addresses[place.segment] + place.offset, place.nbytes)

    def write(self, place: Place, data: bytes) -> None:
        self._mapper.copy_in(self.addresses[place.segment] + place.offset, data)

    def checksums(self, place: Place) -> npt.NDArray[np.uint64]:
        import torch

        whole = place.nbytes // checksum.PIECE * checksum.PIECE
        rest = self.read(Place(place.segment, place.offset + whole, place.nbytes - whole))
        address = self.addresses[place.segment] + place.offset
        if not whole:
            return checksum.checksums(np.frombuffer(rest, dtype=np.uint8))
        data = torch.as_tensor(DeviceBytes(address, whole), device=torch.device("cuda", self._mapper.ordinal))
        return checksum_cuda.checksums(data.view(torch.int64), rest)

    def make_read_only(self, handles: Sequence[Handle]) -> None:
        try:
            self._mapper.synchronize()
            for span in self._ranges:
                span.set_access(Access.READ_ONLY)
        except DriverError as error:
            raise WorkerError(f"cannot map weights read-only: {error.message}") from error

    def close(self) -> None:
        self.addresses = []
        ranges, self._ranges = self._ranges, []
        for span in ranges:
            try:
                self._mapper.synchronize()
                span.close()
            except DriverError:
                continue  # the context is lost, and with it what was mapped
