from __future__ import annotations

import fcntl
import mmap
import os
from pathlib import Path

import pytest

from shadowsup.memkeeper.backends import BACKENDS, load_backend
from shadowsup.memkeeper.backends.host import HostBackend
from shadowsup.memkeeper.backends.host_memory import Available, available, size_text
from shadowsup.memkeeper.errors import KeeperError, OutOfMemory

GIB = 1 << 30


def test_every_page_is_there_from_the_start() -> None:
    """So that a lack of memory is an error now and no SIGBUS later."""
    fd = HostBackend().allocate(1 << 20, "shadowsup-test", "host")
    assert os.fstat(fd).st_blocks * 512 == 1 << 20
    assert os.pread(fd, 1 << 20, 0) == bytes(1 << 20)
    assert fcntl.fcntl(fd, fcntl.F_GET_SEALS) == fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
    os.close(fd)


def test_sealing_is_final_and_may_be_repeated() -> None:
    backend = HostBackend()
    fd = backend.allocate(4096, "shadowsup-test", "host")
    with mmap.mmap(fd, 4096), pytest.raises(KeeperError, match="a writable mapping"):
        backend.seal(fd)
    backend.seal(fd)
    backend.seal(fd)
    with pytest.raises(PermissionError):
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    os.close(fd)


def test_it_refuses_what_exceeds_what_is_available_before_it_takes_any() -> None:
    """P21: what is there now decides, never a change of it."""
    backend = HostBackend()
    for ask in (backend.require, lambda size, device: backend.allocate(size, "shadowsup-test", device)):
        with pytest.raises(OutOfMemory, match="MemAvailable"):
            ask(available().usable + GIB, "host")


def test_other_devices_are_refused() -> None:
    with pytest.raises(KeeperError, match="no device GPU-1"):
        HostBackend().granularity("GPU-1")


def write_groups(root: Path, limits: dict[str, tuple[str, int, int]]) -> None:
    for name, (limit, current, inactive) in limits.items():
        group = root / name
        group.mkdir(parents=True, exist_ok=True)
        (group / "memory.max").write_text(limit + "\n")
        (group / "memory.current").write_text(f"{current}\n")
        (group / "memory.stat").write_text(f"anon 1\ninactive_file {inactive}\n")


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    proc = tmp_path / "proc"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text(f"MemTotal: {64 * 1024 * 1024} kB\nMemAvailable: {32 * 1024 * 1024} kB\nHugePages_Total: 0\n")
    (proc / "self" / "cgroup").write_text("1:cpu:/other\n0::/node/keeper\n")
    return proc


def test_the_tightest_control_group_counts(tmp_path: Path, proc: Path) -> None:
    write_groups(
        tmp_path / "cgroup", {"node": (str(10 * GIB), 8 * GIB, 1 * GIB), "node/keeper": ("max", 5 * GIB, 0), "elsewhere": ("1", 1, 0)}
    )
    figures = available(proc, tmp_path / "cgroup")
    assert (figures.kernel, figures.group, figures.group_name) == (32 * GIB, 3 * GIB, "/node")
    assert figures.usable == 3 * GIB - 64 * GIB // 50
    assert "control group /node allows 3.0 GiB more" in str(figures)


def test_without_a_limit_the_kernels_figure_counts(tmp_path: Path, proc: Path) -> None:
    figures = available(proc, tmp_path / "cgroup")
    assert figures.group is None and figures.usable == 32 * GIB - 64 * GIB // 50
    (proc / "self" / "cgroup").unlink()
    assert available(proc, tmp_path / "cgroup") == figures


def test_less_than_the_margin_is_nothing() -> None:
    assert Available(kernel=100, group=None, group_name="", margin=200).usable == 0


@pytest.mark.parametrize(
    ("size", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (5 << 20, "5.0 MiB"), (3 * GIB // 2, "1.5 GiB")]
)
def test_sizes_are_for_people(size: int, text: str) -> None:
    assert size_text(size) == text


def test_backends_are_found_by_name() -> None:
    assert load_backend("host").name == "host"
    assert load_backend("auto").name in BACKENDS
    with pytest.raises(KeeperError, match="unknown memory backend 'tape'"):
        load_backend("tape")
