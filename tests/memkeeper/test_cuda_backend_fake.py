"""The logic of the cuda backend over a fake driver: no GPU is needed, descriptors are memfds."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from shadowsup.memkeeper import device_use
from shadowsup.memkeeper.allocation import Allocator
from shadowsup.memkeeper.backends import cuda_driver
from shadowsup.memkeeper.backends.cuda_driver import OUT_OF_MEMORY, Device, DriverError
from shadowsup.memkeeper.backends.cuda_vmm import CudaVmmBackend
from shadowsup.memkeeper.book import Book
from shadowsup.memkeeper.device_use import DeviceUse, Process, Unanswered
from shadowsup.memkeeper.errors import KeeperError, OutOfMemory
from shadowsup.memkeeper.protocol import Create, Fingerprint, Kind

UNIT = 2 * 1024 * 1024
GIB = 1024**3
FIRST, SECOND = "GPU-00000000-0000-0000-0000-000000000001", "GPU-00000000-0000-0000-0000-000000000002"


@dataclass
class FakeDriver:
    """Two devices of 100 GiB; memory that is created is a memfd of no size, and what it would take is counted."""

    free: dict[int, int] = field(default_factory=lambda: {0: 100 * GIB, 1: 100 * GIB})
    created: list[tuple[int, int]] = field(default_factory=list)
    broken: str = ""

    def devices(self) -> tuple[Device, ...]:
        return tuple(Device(ordinal=i, uuid=uuid, name="fake", total=100 * GIB) for i, uuid in enumerate((FIRST, SECOND)))

    def granularity(self, device: Device) -> int:
        return UNIT

    def create(self, device: Device, size: int) -> int:
        if self.broken:
            raise DriverError(f"cuMemCreate failed: {self.broken}", code=self.broken)
        if size > self.free[device.ordinal]:
            raise DriverError("cuMemCreate failed", code=OUT_OF_MEMORY)
        self.free[device.ordinal] -= size
        self.created.append((device.ordinal, size))
        return os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)


def use_of(uuid: str) -> DeviceUse:
    processes = (Process(4242, "python", 39 * GIB), Process(7, "other", None))
    return DeviceUse(uuid=uuid, total=100 * GIB, used=99 * GIB, processes=processes)


@pytest.fixture
def driver() -> FakeDriver:
    return FakeDriver()


@pytest.fixture
def backend(driver: FakeDriver) -> CudaVmmBackend:
    return CudaVmmBackend(driver, use=use_of, holders=lambda: {4242: "python", 99: "pt_data_worker"})


@pytest.fixture
def opened() -> Iterator[list[int]]:
    fds: list[int] = []
    yield fds
    for fd in fds:
        os.close(fd)


def test_memory_is_created_on_the_device_that_was_named(backend: CudaVmmBackend, driver: FakeDriver, opened: list[int]) -> None:
    opened.append(backend.allocate(4 * UNIT, "kv-1-a", SECOND))
    assert driver.created == [(1, 4 * UNIT)]


def test_a_size_is_rounded_up_to_the_unit_of_the_device(backend: CudaVmmBackend, driver: FakeDriver, opened: list[int]) -> None:
    opened.append(backend.allocate(UNIT + 4096, "weights-1-a", FIRST))
    assert driver.created == [(0, 2 * UNIT)]


def test_an_unknown_device_is_refused_with_those_that_there_are(backend: CudaVmmBackend) -> None:
    with pytest.raises(KeeperError, match=r"GPU-ffff is not visible to the keeper, which sees .*0001, .*0002"):
        backend.allocate(UNIT, "kv-1-a", "GPU-ffff")


def test_out_of_memory_says_what_was_wanted_what_there_is_and_who_holds_it(backend: CudaVmmBackend, driver: FakeDriver) -> None:
    driver.free[0] = 60 * GIB
    book = Book(3, new_id=lambda: "ab", clock=lambda: 0.0)
    request = Create(kind=Kind.WEIGHTS, worker="", fingerprint=Fingerprint(()), device=FIRST, sizes=(40 * GIB, 40 * GIB))
    planned = book.plan_weights(1, request, request.sizes)
    holdings = [("kv of chat", 15 * GIB, ("chat.1", "chat.2"))]
    # On a thread, as in the keeper: it blocks signals there.
    with ThreadPoolExecutor(1) as pool, pytest.raises(OutOfMemory) as caught:
        pool.submit(Allocator(backend).allocate, planned, holdings).result()
    message = str(caught.value)
    for part in (
        "of 40.0 GiB on",
        "part of 80.0 GiB",
        FIRST,
        "100.0 GiB in all, 1.0 GiB free",
        "process 4242 (python) 39.0 GiB",
        "process 7 (other) an unknown amount",
        "60.0 GiB in kept memory and the driver, of no process",
        "device files are open in process 99 (pt_data_worker)",
        "The keeper holds kv of chat: 15.0 GiB, leased by chat.1, chat.2",
    ):
        assert part in message


def test_out_of_memory_does_not_depend_on_nvml(driver: FakeDriver) -> None:
    def hung(uuid: str) -> DeviceUse:
        raise Unanswered("no answer in 3 s")

    backend = CudaVmmBackend(driver, use=hung, holders=dict)
    assert backend.usage(FIRST) == "100.0 GiB in all; what is in use is not known, NVML: no answer in 3 s"


def test_what_can_never_fit_is_refused_before_anything_is_created(backend: CudaVmmBackend, driver: FakeDriver) -> None:
    with pytest.raises(OutOfMemory, match=r"can never fit on .* which has 100\.0 GiB"):
        backend.require(101 * GIB, FIRST)
    backend.require(100 * GIB, FIRST)
    assert driver.created == []


def test_another_driver_error_is_not_called_lack_of_memory(backend: CudaVmmBackend, driver: FakeDriver) -> None:
    driver.broken = "CUDA_ERROR_UNKNOWN"
    with pytest.raises(DriverError) as caught:
        backend.allocate(UNIT, "kv-1-a", FIRST)
    assert caught.value.code == "CUDA_ERROR_UNKNOWN"


def test_sealing_device_memory_is_no_error(backend: CudaVmmBackend, opened: list[int]) -> None:
    opened.append(backend.allocate(UNIT, "weights-1-a", FIRST))
    backend.seal(opened[-1])


def test_a_machine_without_a_driver_is_told_so_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise DriverError("no CUDA driver: not found", "is the NVIDIA driver installed")

    monkeypatch.setattr(cuda_driver, "load", missing)
    with pytest.raises(KeeperError, match="no CUDA driver"):
        CudaVmmBackend().probe()


def test_a_child_that_does_not_answer_is_given_up_in_time() -> None:
    with pytest.raises(Unanswered, match=r"no answer in 0\.2 s"):
        device_use.run_bounded(["sleep", "60"], 0.2)


def test_a_child_that_fails_is_quoted() -> None:
    with pytest.raises(Unanswered, match="ended with status 3: GPU is lost"):
        device_use.run_bounded(["sh", "-c", "echo GPU is lost; exit 3"], 5)


def test_a_child_that_crashes_is_not_an_answer() -> None:
    with pytest.raises(Unanswered, match="ended with status -11"):
        device_use.run_bounded(["sh", "-c", "kill -SEGV $$"], 5)


def test_holders_of_device_files_are_found_and_others_are_not(tmp_path: Path) -> None:
    for pid, target in ((11, "/dev/nvidia0"), (12, "/dev/nvidiactl"), (13, "/dev/null"), (14, "/dev/nvidia-uvm")):
        (tmp_path / str(pid) / "fd").mkdir(parents=True)
        (tmp_path / str(pid) / "fd" / "3").symlink_to(target)
        (tmp_path / str(pid) / "comm").write_text(f"name{pid}\n")
    (tmp_path / "self").mkdir()
    assert device_use.device_file_holders(tmp_path) == {11: "name11", 12: "name12", 14: "name14"}
