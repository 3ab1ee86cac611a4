"""The arena over real memfds: one range, whatever is behind it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from shadowsup.workers import mapping
from shadowsup.workers.arena import HostArena, KvArena
from shadowsup.workers.errors import WorkerError

PAGE = mapping.PAGE
MIB = 1024 * 1024


@pytest.fixture
def arena() -> Iterator[KvArena]:
    made = KvArena.reserve(8 * MIB)
    try:
        yield made
    finally:
        made.close()


@pytest.fixture
def memory() -> Iterator[list[int]]:
    fds = []
    for size in (3 * MIB, 5 * MIB):
        fds.append(os.memfd_create("kv", os.MFD_CLOEXEC))
        os.posix_fallocate(fds[-1], 0, size)
    yield fds
    for fd in fds:
        os.close(fd)


def mapped_lines(arena: KvArena) -> list[str]:
    lines = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, end = (int(one, 16) for one in line.split()[0].split("-"))
        if start < arena.address + arena.size and end > arena.address:
            lines.append(line)
    return lines


@pytest.mark.parametrize("size", [0, -PAGE, PAGE + 1, 17])
def test_a_size_that_is_no_whole_page_is_refused(size: int) -> None:
    with pytest.raises(WorkerError, match="cannot be mapped") as caught:
        KvArena.reserve(size)
    assert caught.value.fatal


def test_an_address_range_that_cannot_be_had_is_an_error_with_the_kernels_words() -> None:
    with pytest.raises(WorkerError, match="Cannot allocate memory"):
        HostArena(1 << 62)


def test_the_view_is_one_object_over_the_same_addresses_through_every_mapping(arena: KvArena, memory: list[int]) -> None:
    view = arena.view()
    arena.map_scratch()
    view[:] = 7
    arena.map_segments(memory, [3 * MIB, 5 * MIB])
    assert arena.view() is view
    assert (view.size, view.ctypes.data) == (arena.size, arena.address)
    assert not view.any(), "nothing of the scratch is in the segments"
    view[:] = np.arange(8 * MIB, dtype=np.uint64).astype(np.uint8)
    assert os.pread(memory[1], 4, 0) == bytes((3 * MIB + i) % 256 for i in range(4)), "the second begins where the first ends"
    arena.map_scratch()
    view[:] = 9
    assert os.pread(memory[0], 1, 5) == b"\x05", "scratch does not reach the segments"


def test_scratch_of_a_large_range_costs_little_memory_and_few_mappings() -> None:
    arena = HostArena(16 * 1024 * MIB)
    try:
        arena.map_scratch()
        lines = mapped_lines(arena)
        assert len(lines) <= 1100
        arena.view()[:: 64 * MIB] = 1  # every part can be written
        scratch = next(int(fd.name) for fd in Path("/proc/self/fd").iterdir() if "shadowsup-scratch" in str(fd.readlink()))
        assert os.fstat(scratch).st_size <= 64 * MIB
    finally:
        arena.close()
    assert not mapped_lines(arena)


def test_segments_that_do_not_fill_the_range_are_refused_and_the_scratch_stays(arena: KvArena, memory: list[int]) -> None:
    arena.map_scratch()
    arena.view()[0] = 42
    for fds, sizes in (
        (memory, [3 * MIB, 4 * MIB]),
        (memory[:1], [8 * MIB]),
        (memory, [8 * MIB]),
        (memory, [3 * MIB + 1, 5 * MIB - 1]),
        ([memory[0], 9999], [3 * MIB, 5 * MIB]),
    ):
        with pytest.raises(WorkerError):
            arena.map_segments(fds, sizes)
        assert arena.view()[0] == 42


def test_a_mapping_that_fails_half_way_leaves_the_whole_range_on_scratch(arena: KvArena, memory: list[int]) -> None:
    arena.map_scratch()
    readable = os.open(f"/proc/self/fd/{memory[1]}", os.O_RDONLY)  # cannot be mapped writable
    try:
        with pytest.raises(WorkerError, match="Permission denied"):
            arena.map_segments([memory[0], readable], [3 * MIB, 5 * MIB])
    finally:
        os.close(readable)
    assert all("shadowsup-scratch" in line for line in mapped_lines(arena))
    arena.view()[:] = 3
    assert os.pread(memory[0], 1, 0) == b"\x00"


def test_close_is_idempotent_and_ends_the_use(arena: KvArena) -> None:
    arena.map_scratch()
    arena.close()
    arena.close()
    with pytest.raises(WorkerError, match="closed"):
        arena.map_scratch()
