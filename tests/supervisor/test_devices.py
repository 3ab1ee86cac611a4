"""GPU inventory through a fake NVML, and the names that a config may use."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest

from shadowsup.memkeeper.device_use import Unanswered
from shadowsup.supervisor.devices import ComputeMode, DeviceError, Gpu, environment, inventory, read_gpus, resolve

A = "GPU-aaaaaaaa-0000-0000-0000-000000000001"
B = "GPU-aaaaaaab-0000-0000-0000-000000000002"
MIG_B1 = "MIG-cccccccc-0000-0000-0000-000000000003"
MIG_B2 = "MIG-cccccccd-0000-0000-0000-000000000004"
GPUS = (
    Gpu(uuid=A, index=0, name="H200", memory=1 << 37),
    Gpu(uuid=B, index=1, name="H200", memory=1 << 37, mig_enabled=True),
    Gpu(uuid=MIG_B1, index=1, name="H200 MIG 1g.18gb", memory=1 << 34, parent=B),
    Gpu(uuid=MIG_B2, index=1, name="H200 MIG 1g.18gb", memory=1 << 34, parent=B),
)


class NvmlError(Exception):
    pass


@dataclass
class FakeNvml:
    """``lost``: indices of GPUs that answer nothing. B is divided into two of at most three instances."""

    lost: set[int] = field(default_factory=set)
    depth: int = 0

    def nvmlInit(self) -> None:
        self.depth += 1

    def nvmlShutdown(self) -> None:
        self.depth -= 1

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Any:
        if index in self.lost:
            raise NvmlError("GPU is lost")
        return (A, B)[index]

    def nvmlDeviceGetUUID(self, handle: Any) -> Any:
        return handle.encode()  # older bindings return bytes

    def nvmlDeviceGetName(self, handle: Any) -> str:
        return "NVIDIA H200"

    def nvmlDeviceGetMemoryInfo(self, handle: Any) -> Any:
        return SimpleNamespace(total=1 << 37)

    def nvmlDeviceGetPciInfo(self, handle: Any) -> Any:
        return SimpleNamespace(busId="00000000:19:00.0")

    def nvmlDeviceGetComputeMode(self, handle: Any) -> int:
        return 0

    def nvmlDeviceGetMigMode(self, handle: Any) -> Sequence[int]:
        if handle == A:
            raise NvmlError("Not Supported")
        return (1, 1)

    def nvmlDeviceGetMaxMigDeviceCount(self, handle: Any) -> int:
        return 3

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: Any, index: int) -> Any:
        if index == 1:
            raise NvmlError("Not Found")
        return (MIG_B1, "", MIG_B2)[index]


def uuids(*names: str) -> list[str]:
    return [gpu.uuid for gpu in resolve(names, GPUS)]


def test_inventory_lists_gpus_in_order_of_index_with_their_mig_instances() -> None:
    nvml = FakeNvml()
    found = inventory(nvml)
    assert [(gpu.index, gpu.uuid, gpu.parent, gpu.mig_enabled) for gpu in found] == [
        (0, A, "", False),
        (1, B, "", True),
        (1, MIG_B1, B, False),
        (1, MIG_B2, B, False),
    ]
    assert nvml.depth == 0


def test_a_lost_gpu_does_not_hide_the_others() -> None:
    assert [gpu.uuid for gpu in inventory(FakeNvml(lost={0}))] == [B, MIG_B1, MIG_B2]


def test_an_index_a_uuid_and_its_beginning_mean_the_same_gpu() -> None:
    """P23."""
    assert uuids("0") == uuids(A) == uuids(A.lower()) == uuids("GPU-aaaaaaaa-0") == [A]


def test_a_mig_instance_is_named_by_its_uuid() -> None:
    assert uuids(MIG_B2, "0") == [MIG_B2, A]


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["7"], "no GPU 7 here; there is 0=GPU-aaaaaaaa"),
        (["GPU-dddddddd"], "no GPU GPU-dddddddd here"),
        (["GPU-aaaaaaa"], "too short"),
        (["MIG-cccccccc", "MIG-cccccccc-0000"], "are the same GPU"),
        (["0", A], "are the same GPU"),
        (["1"], f"divided by MIG.*name an instance: {MIG_B1}, {MIG_B2}"),
        (["cuda:0"], "write 0"),
        (["first"], "is not a GPU id"),
    ],
)
def test_what_cannot_be_resolved_is_refused_with_the_reason(names: list[str], message: str) -> None:
    with pytest.raises(DeviceError, match=message) as caught:
        resolve(names, GPUS)
    assert "nvidia-smi -L" in caught.value.hint


def test_an_ambiguous_beginning_is_refused_with_the_candidates() -> None:
    twins = (*GPUS, Gpu(uuid="GPU-aaaaaaaa-1111-0000-0000-000000000009", index=2, name="H200", memory=1))
    with pytest.raises(DeviceError, match=r"GPU-aaaaaaaa is ambiguous: GPU-aaaaaaaa-0000.*, GPU-aaaaaaaa-1111"):
        resolve(["GPU-aaaaaaaa"], twins)


def test_a_gpu_that_only_one_process_may_use_is_refused() -> None:
    exclusive = (replace(GPUS[0], compute_mode=ComputeMode.EXCLUSIVE_PROCESS),)
    with pytest.raises(DeviceError, match="compute mode exclusive_process") as caught:
        resolve(["0"], exclusive)
    assert caught.value.hint == "nvidia-smi -i 0 -c DEFAULT"


def test_the_engine_sees_its_devices_only_and_counts_as_nvml_does() -> None:
    assert environment([MIG_B2, A]) == {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": f"{MIG_B2},{A}"}
    assert environment([])["CUDA_VISIBLE_DEVICES"] == "", "an engine on the CPU must not make a context on a GPU by accident"


def test_a_machine_without_a_driver_has_no_gpus() -> None:
    if read := read_gpus(60.0):
        pytest.skip(f"this machine has {len(read)} GPUs")


def test_what_the_child_says_is_read_back() -> None:
    def run(command: Sequence[str], timeout_s: float) -> bytes:
        gpu = {"uuid": A, "index": 0, "name": "H200", "memory": 1, "compute_mode": "prohibited"}
        return json.dumps({"gpus": [gpu]}).encode()

    assert read_gpus(run=run) == (Gpu(uuid=A, index=0, name="H200", memory=1, compute_mode=ComputeMode.PROHIBITED),)


@pytest.mark.parametrize("answer", [b"", b"not json", b"[]", b'{"gpus": [{"uuid": 1}]}', b'{"error": "GPU is lost"}'])
def test_nvml_that_fails_or_talks_nonsense_is_an_error_in_words(answer: bytes) -> None:
    with pytest.raises(DeviceError, match="NVML"):
        read_gpus(run=lambda command, timeout_s: answer)


def test_nvml_that_hangs_is_an_error_in_words() -> None:
    def run(command: Sequence[str], timeout_s: float) -> bytes:
        raise Unanswered("no answer in 15 s")

    with pytest.raises(DeviceError, match="no answer in 15 s"):
        read_gpus(run=run)
