"""Mapping of device memory over a fake driver that keeps the driver's rules: handles are mapped whole, unmapped whole, and released."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from shadowsup.memkeeper.backends.cuda_driver import OUT_OF_MEMORY, DriverError
from shadowsup.memkeeper.client import Handle
from shadowsup.memkeeper.errors import StaleHandle
from shadowsup.memkeeper.protocol import Fingerprint, Kind, Manifest
from shadowsup.workers import arena_cuda, checksum, checksum_cuda, cuda_memory
from shadowsup.workers.arena_cuda import CudaArena
from shadowsup.workers.cuda_memory import GRANULARITY, KV_SLAB, MAX_KV_SLABS, Access, DeviceRange, check_manifest, kv_slabs
from shadowsup.workers.errors import WorkerError
from shadowsup.workers.weights_cuda import CudaMemory
from shadowsup.workers.weights_layout import Place

DEVICE, OTHER = "GPU-00000000-0000-0000-0000-000000000001", "GPU-00000000-0000-0000-0000-000000000002"
MIB = 1024 * 1024


@dataclass
class FakeMapper:
    """``segments``: descriptor → size of what it names. ``fail``: name of the call → how many calls of it succeed before one fails."""

    segments: dict[int, int] = field(default_factory=dict)
    fail: dict[str, int] = field(default_factory=dict)
    code: str = "CUDA_ERROR_UNKNOWN"
    device: str = DEVICE
    ordinal: int = 0

    def __post_init__(self) -> None:
        self.reserved: dict[int, int] = {}
        self.mapped: dict[int, tuple[int, Any]] = {}
        self.access: dict[int, Access] = {}
        self.handles: dict[str, int] = {}
        self.memory: dict[int, bytes] = {}
        self.calls: list[str] = []
        self._names = (f"handle{number}" for number in itertools.count())
        self._next = 0x7F0000000000

    def _call(self, name: str) -> None:
        self.calls.append(name)
        if name in self.fail:
            if self.fail[name] == 0:
                del self.fail[name]
                raise DriverError(f"{name} failed: {self.code}", code=self.code)
            self.fail[name] -= 1

    def reserve(self, size: int, alignment: int) -> int:
        self._call("reserve")
        address = -(-self._next // alignment) * alignment
        self._next = address + size + GRANULARITY
        self.reserved[address] = size
        return address

    def free(self, address: int, size: int) -> None:
        self._call("free")
        assert self.reserved.pop(address) == size
        assert not [at for at in self.mapped if address <= at < address + size]

    def create(self, size: int) -> Any:
        self._call("create")
        return self._handle(size)

    def import_fd(self, fd: int) -> Any:
        self._call("import")
        if fd not in self.segments:
            raise DriverError("cuMemImportFromShareableHandle failed", code="CUDA_ERROR_INVALID_VALUE")
        return self._handle(self.segments[fd])

    def _handle(self, size: int) -> str:
        handle = next(self._names)
        self.handles[handle] = size
        return handle

    def release(self, handle: Any) -> None:
        self._call("release")
        del self.handles[handle]

    def map(self, address: int, size: int, handle: Any) -> None:
        self._call("map")
        assert self.handles[handle] == size, "handles are mapped whole"
        start, length = next((at, n) for at, n in self.reserved.items() if at <= address < at + n)
        assert address + size <= start + length
        assert all(at + n <= address or at >= address + size for at, (n, _) in self.mapped.items()), "already mapped"
        self.mapped[address] = (size, handle)

    def set_access(self, address: int, size: int, access: Access) -> None:
        self._call("set_access")
        inside = [at for at in self.mapped if address <= at < address + size]
        assert sum(self.mapped[at][0] for at in inside) == size, "the range must be fully mapped"
        self.access |= dict.fromkeys(inside, access)

    def unmap(self, address: int, size: int) -> None:
        self._call("unmap")
        inside = [at for at in self.mapped if address <= at < address + size]
        assert sum(self.mapped[at][0] for at in inside) == size, "mappings are unmapped whole"
        for at in inside:
            del self.mapped[at]
            self.access.pop(at, None)

    def copy_out(self, address: int, size: int) -> bytes:
        return self.memory.get(address, bytes(size))[:size]

    def copy_in(self, address: int, data: bytes) -> None:
        at = max(start for start in self.mapped if start <= address)
        assert self.access[at] is Access.READ_WRITE
        self.memory[address] = data

    def synchronize(self) -> None:
        self._call("synchronize")


def handle(fd: int, size: int, device: str = DEVICE, generation: int = 3) -> Handle:
    manifest = Manifest(
        segment=f"weights-{generation}-{fd}",
        generation=generation,
        kind=Kind.WEIGHTS,
        set_id="set",
        index=0,
        worker="",
        device=device,
        size=size,
        fingerprint=Fingerprint((("model", "m"),)),
    )
    return Handle(manifest, fd)


# --- the arena -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [GRANULARITY, 256 * MIB, 258 * MIB, 40 * 1024 * MIB + 6 * MIB])
def test_one_scratch_allocation_backs_the_whole_arena(size: int) -> None:
    mapper = FakeMapper()
    arena = CudaArena(size, DEVICE, mapper)
    arena.map_scratch()
    assert len({handle for _, handle in mapper.mapped.values()}) == 1
    assert sum(n for n, _ in mapper.mapped.values()) >= size
    assert sum(mapper.handles.values()) <= arena_cuda.LARGE_SCRATCH
    assert set(mapper.access.values()) == {Access.READ_WRITE}
    arena.close()
    assert (mapper.reserved, mapper.mapped, mapper.handles) == ({}, {}, {})


def test_segments_take_the_place_of_scratch_at_the_same_address_with_one_unmap() -> None:
    mapper = FakeMapper(segments={10: 512 * MIB, 11: 256 * MIB})
    arena = CudaArena(768 * MIB, DEVICE, mapper)
    address = arena.address
    arena.map_scratch()
    mapper.calls.clear()
    arena.map_segments([10, 11], [512 * MIB, 256 * MIB])
    assert mapper.calls.count("unmap") == 1
    assert mapper.calls.index("synchronize") < mapper.calls.index("unmap"), "no kernel may still use what is unmapped"
    assert [(at - address, n) for at, (n, _) in sorted(mapper.mapped.items())] == [(0, 512 * MIB), (512 * MIB, 256 * MIB)]
    assert arena.address == address
    arena.close()


def test_imported_handles_and_scratch_are_released_once_the_segments_are_mapped() -> None:
    mapper = FakeMapper(segments={10: 256 * MIB})
    arena = CudaArena(256 * MIB, DEVICE, mapper)
    arena.map_scratch()
    arena.map_segments([10], [256 * MIB])
    assert mapper.handles == {}
    arena.map_scratch()
    assert len(mapper.handles) == 1, "an arena may be parked again"
    arena.close()


@pytest.mark.parametrize("gib", [1, 16, 40, 140])
def test_scratch_is_mapped_few_times_and_stays_small(gib: int) -> None:
    mapper = FakeMapper()
    arena = CudaArena(gib * 1024 * MIB, DEVICE, mapper)
    arena.map_scratch()
    assert len(mapper.mapped) == arena.scratch_maps <= max(arena_cuda.MAX_MAPS, gib * 2)
    assert sum(mapper.handles.values()) <= arena_cuda.LARGE_SCRATCH
    assert arena.address % cuda_memory.LARGE_PAGE == 0
    arena.close()


def test_a_resting_arena_costs_nothing_and_its_promotion_takes_nothing_away() -> None:
    """P36."""
    mapper = FakeMapper(segments={10: 256 * MIB})
    arena = CudaArena(256 * MIB, DEVICE, mapper)
    arena.map_scratch()
    arena.rest()
    assert (mapper.mapped, mapper.handles) == ({}, {})
    mapper.calls.clear()
    mapper.fail = {"map": 0}
    with pytest.raises(WorkerError, match="cannot map the KV segments"):
        arena.map_segments([10], [256 * MIB])
    assert (mapper.mapped, mapper.handles) == ({}, {}), "it rests again: what fails needs no scratch to fail"
    arena.map_segments([10], [256 * MIB])
    assert "unmap" not in mapper.calls
    arena.close()


def test_a_descriptor_that_is_no_good_leaves_the_scratch_where_it_is() -> None:
    mapper = FakeMapper(segments={10: 256 * MIB})
    arena = CudaArena(512 * MIB, DEVICE, mapper)
    arena.map_scratch()
    before = dict(mapper.mapped)
    mapper.calls.clear()
    with pytest.raises(WorkerError, match=r"does not name device memory any more.*fresh KV segments"):
        arena.map_segments([10, 99], [256 * MIB, 256 * MIB])
    assert mapper.mapped == before
    assert "unmap" not in mapper.calls
    assert len(mapper.handles) == 1, "the import that succeeded is released"
    arena.close()


@pytest.mark.parametrize(("call", "succeed"), [("map", 1), ("set_access", 0)])
def test_a_failure_half_way_restores_the_scratch(call: str, succeed: int) -> None:
    mapper = FakeMapper(segments={10: 256 * MIB, 11: 256 * MIB})
    arena = CudaArena(512 * MIB, DEVICE, mapper)
    arena.map_scratch()
    before = dict(mapper.mapped)
    mapper.fail = {call: succeed}
    with pytest.raises(WorkerError, match=f"cannot map the KV segments: {call} failed"):
        arena.map_segments([10, 11], [256 * MIB, 256 * MIB])
    assert mapper.mapped == before
    assert set(mapper.access) == set(before)
    arena.map_segments([10, 11], [256 * MIB, 256 * MIB])
    arena.close()
    assert (mapper.mapped, mapper.handles) == ({}, {})


def test_segments_must_fill_the_arena_exactly() -> None:
    mapper = FakeMapper(segments={10: 256 * MIB})
    arena = CudaArena(512 * MIB, DEVICE, mapper)
    with pytest.raises(WorkerError, match="do not fill a KV arena"):
        arena.map_segments([10], [256 * MIB])
    with pytest.raises(WorkerError, match="not made of whole units"):
        arena.map_segments([10, 11], [512 * MIB - 4096, 4096])
    arena.close()


def test_an_arena_that_is_no_multiple_of_the_unit_is_refused() -> None:
    with pytest.raises(WorkerError, match="positive multiple of 2097152 bytes"):
        CudaArena(4096, DEVICE, FakeMapper())


def test_no_memory_for_scratch_is_said_with_what_to_do() -> None:
    mapper = FakeMapper(fail={"create": 0}, code=OUT_OF_MEMORY)
    arena = CudaArena(256 * MIB, DEVICE, mapper)
    with pytest.raises(WorkerError, match="free device memory"):
        arena.map_scratch()
    arena.close()


def test_closing_twice_and_after_a_lost_context_is_no_error() -> None:
    mapper = FakeMapper()
    arena = CudaArena(256 * MIB, DEVICE, mapper)
    arena.map_scratch()
    mapper.fail = {"synchronize": 0}
    arena.close()
    arena.close()
    with pytest.raises(WorkerError, match="closed"):
        arena.map_scratch()


def test_device_memory_has_no_host_view() -> None:
    arena = CudaArena(256 * MIB, DEVICE, FakeMapper())
    with pytest.raises(WorkerError, match="device memory"):
        arena.view()
    interface = arena.device_bytes().__cuda_array_interface__
    assert (interface["shape"], interface["data"]) == ((256 * MIB,), (arena.address, False))
    arena.close()


# --- slabs, manifests, ranges ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [GRANULARITY, KV_SLAB - GRANULARITY, KV_SLAB, 3 * KV_SLAB + GRANULARITY, 100 * KV_SLAB + 5 * GRANULARITY])
def test_kv_slabs_are_few_large_and_add_up(size: int) -> None:
    slabs = kv_slabs(size)
    assert sum(slabs) == size
    assert len(slabs) <= MAX_KV_SLABS
    assert all(slab % GRANULARITY == 0 for slab in slabs)
    assert all(slab % cuda_memory.LARGE_PAGE == 0 for slab in slabs[:-1])
    assert len(slabs) == 1 or min(slabs) >= KV_SLAB


def test_kv_of_an_odd_size_is_refused() -> None:
    with pytest.raises(WorkerError, match="multiple"):
        kv_slabs(GRANULARITY + 1)


def test_memory_of_another_device_is_refused_with_both_names() -> None:
    with pytest.raises(WorkerError, match=rf"lies on device {OTHER}, this engine runs on {DEVICE}"):
        check_manifest(handle(1, GRANULARITY, device=OTHER).manifest, DEVICE)
    check_manifest(handle(1, GRANULARITY).manifest, DEVICE)


def test_a_handle_of_an_earlier_run_is_stale() -> None:
    """P32."""
    with pytest.raises(StaleHandle, match="weights-3-1 is of generation 3, only 4 and newer are still good"):
        check_manifest(handle(1, GRANULARITY, generation=3).manifest, DEVICE, generation=4)
    check_manifest(handle(1, GRANULARITY, generation=4).manifest, DEVICE, generation=4)


def test_a_range_that_cannot_be_mapped_is_empty_again() -> None:
    mapper = FakeMapper(segments={10: GRANULARITY}, fail={"map": 1})
    span = DeviceRange(mapper, 2 * GRANULARITY)
    memory = mapper.import_fd(10)
    with pytest.raises(DriverError):
        span.map([(memory, GRANULARITY)] * 2, Access.READ_WRITE)
    assert mapper.mapped == {}
    span.map([(memory, GRANULARITY)] * 2, Access.READ_ONLY)
    span.close()
    span.close()
    assert (mapper.mapped, mapper.reserved) == ({}, {})


# --- weights ---------------------------------------------------------------------------------------------------------------------


def test_readers_map_weights_read_only_and_the_publisher_turns_to_it_in_place() -> None:
    mapper = FakeMapper(segments={10: 2 * GRANULARITY, 11: GRANULARITY})
    handles = [handle(10, GRANULARITY + 4096), handle(11, 8192)]
    writer = CudaMemory(handles, DEVICE, writable=True, mapper=mapper)
    addresses = list(writer.addresses)
    writer.write(Place(1, 4096, 5), b"hello")
    assert writer.read(Place(1, 4096, 5)) == b"hello"
    writer.make_read_only(handles)
    assert writer.addresses == addresses
    reader = CudaMemory(handles, DEVICE, writable=False, mapper=mapper)
    assert set(mapper.access.values()) == {Access.READ_ONLY}
    assert mapper.handles == {}, "mappings keep the memory, not handles"
    writer.close()
    reader.close()
    assert (mapper.mapped, mapper.reserved) == ({}, {})


def test_weights_of_another_device_are_refused_before_the_driver_is_asked() -> None:
    mapper = FakeMapper(segments={10: GRANULARITY})
    with pytest.raises(WorkerError, match="lies on device"):
        CudaMemory([handle(10, GRANULARITY, device=OTHER)], DEVICE, writable=False, mapper=mapper)
    assert mapper.calls == []


def test_weights_whose_descriptor_is_of_a_dead_driver_are_stale_and_nothing_is_left() -> None:
    mapper = FakeMapper(segments={10: GRANULARITY})
    with pytest.raises(StaleHandle, match="does not name device memory any more"):
        CudaMemory([handle(10, GRANULARITY), handle(99, GRANULARITY)], DEVICE, writable=False, mapper=mapper)
    assert (mapper.mapped, mapper.reserved, mapper.handles) == ({}, {}, {})


def test_weights_that_cannot_be_mapped_leave_nothing_behind() -> None:
    mapper = FakeMapper(segments={10: GRANULARITY, 11: GRANULARITY}, fail={"map": 1})
    with pytest.raises(WorkerError, match="cannot map weights on"):
        CudaMemory([handle(10, GRANULARITY), handle(11, GRANULARITY)], DEVICE, writable=False, mapper=mapper)
    assert (mapper.mapped, mapper.reserved, mapper.handles) == ({}, {}, {})


# --- checksums -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [4096, checksum.PIECE, 2 * checksum.PIECE + 12344])
def test_device_checksums_are_those_of_the_host(size: int) -> None:
    torch = pytest.importorskip("torch")
    data = np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8)
    whole = size // checksum.PIECE * checksum.PIECE
    words = torch.from_numpy(data[:whole].view(np.int64).copy())
    assert (checksum_cuda.checksums(words, data[whole:].tobytes()) == checksum.checksums(data)).all()


def test_device_checksums_see_two_words_that_changed_places() -> None:
    torch = pytest.importorskip("torch")
    words = torch.arange(checksum.PIECE // 8, dtype=torch.int64)
    before = checksum_cuda.whole_pieces(words)[0]
    for one, two in ((0, 1), (0, checksum.WORDS), (5, 3 * checksum.WORDS + 5)):
        swapped = words.clone()
        swapped[one], swapped[two] = words[two], words[one]
        assert checksum_cuda.whole_pieces(swapped)[0] != before


def test_the_real_mapper_says_which_devices_it_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_memory, "visible_devices", lambda: ())
    with pytest.raises(WorkerError, match=f"device {DEVICE} is not visible to this engine, which sees no device") as caught:
        cuda_memory.CudaMapper(DEVICE)
    assert caught.value.fatal
