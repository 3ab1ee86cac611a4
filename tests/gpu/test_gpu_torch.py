"""What torch does over kept device memory: graphs that follow the mapping, checksums at bandwidth, weights without a second copy."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from gpu_child import Engine
from gpu_rig import GIB, MIB, Child, Device, KeeperProcess, eventually, export

from shadowsup.memkeeper.client import KeeperClient
from shadowsup.memkeeper.protocol import Fingerprint
from shadowsup.workers import arena_cuda, checksum, checksum_cuda
from shadowsup.workers.arena import KvArena
from shadowsup.workers.arena_cuda import CudaArena
from shadowsup.workers.cuda_memory import Access, DeviceBytes, DeviceRange
from shadowsup.workers.errors import WorkerError
from shadowsup.workers.weights import TensorSpec, WeightStore

# torch warns of this and that as it is imported.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]

SIZE = 512 * MIB
FINGERPRINT = Fingerprint((("model", "test"), ("dtype", "bfloat16")))


@pytest.fixture
def torch() -> Any:
    return pytest.importorskip("torch")


@pytest.fixture
def arena(device: str) -> Iterator[CudaArena]:
    made = KvArena.reserve(SIZE, device)
    assert isinstance(made, CudaArena)
    made.map_scratch()
    yield made
    made.close()


def test_graphs_captured_while_parked_write_the_real_blocks_after_promotion(
    torch: Any, engine: Engine, exporter: Child, arena: CudaArena
) -> None:
    block = torch.as_tensor(arena.device_bytes(), device="cuda")[SIZE - MIB :].view(torch.float32)
    block.zero_()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        block.add_(1)
    graph.replay()
    torch.cuda.synchronize()
    assert block[0].item() == 1
    fds = [export(exporter, SIZE // 2)[0][0] for _ in range(2)]
    elsewhere = DeviceRange(engine.mapper, SIZE // 2)
    handle = engine.mapper.import_fd(fds[1])
    elsewhere.map([(handle, SIZE // 2)], Access.READ_WRITE)
    engine.mapper.release(handle)
    engine.spans.append(elsewhere)
    engine.fill(len(engine.spans) - 1, 0, SIZE // 2, 0)
    arena.map_segments(fds, [SIZE // 2] * 2)
    graph.replay()
    graph.replay()
    torch.cuda.synchronize()
    seen = np.frombuffer(engine.mapper.copy_out(elsewhere.address + SIZE // 2 - MIB, MIB), np.float32)
    assert (seen == 2).all()
    engine.spans.pop().close()
    for fd in fds:
        os.close(fd)


def test_an_arena_at_rest_takes_its_graphs_along_to_the_real_blocks(torch: Any, exporter: Child, arena: CudaArena, device: str) -> None:
    block = torch.as_tensor(arena.device_bytes(), device="cuda")[:MIB]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        block.fill_(9)
    nvml = Device(device)
    before = nvml.used()
    arena.rest()
    assert eventually(lambda: before - nvml.used() >= arena_cuda.SCRATCH), "scratch costs nothing while it rests"
    (fd,), _ = export(exporter, SIZE)
    arena.map_segments([fd], [SIZE])
    graph.replay()
    torch.cuda.synchronize()
    assert block.unique().tolist() == [9]
    os.close(fd)


def test_a_promotion_that_fails_leaves_a_parked_engine_that_works(torch: Any, exporter: Child, arena: CudaArena) -> None:
    block = torch.as_tensor(arena.device_bytes(), device="cuda")[:MIB]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        block.fill_(7)
    (good,), _ = export(exporter, SIZE // 2)
    bad = os.memfd_create("bad", os.MFD_CLOEXEC)
    with pytest.raises(WorkerError, match="cannot import the KV segments"):
        arena.map_segments([good, bad], [SIZE // 2] * 2)
    graph.replay()
    torch.cuda.synchronize()
    assert block.unique().tolist() == [7]
    # A handle of the wrong size passes the import and fails in the middle of the mapping.
    (short,), _ = export(exporter, SIZE // 4)
    with pytest.raises(WorkerError, match="cannot map the KV segments"):
        arena.map_segments([good, short], [SIZE // 2] * 2)
    block.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert block.unique().tolist() == [7]
    for fd in (good, bad, short):
        os.close(fd)


@pytest.mark.parametrize("pieces", [1, 3, 130])
def test_device_checksums_are_the_hosts(torch: Any, pieces: int) -> None:
    words = torch.randint(-(2**62), 2**62, (pieces * checksum.PIECE // 8,), dtype=torch.int64, device="cuda")
    wanted = checksum.checksums(words.cpu().numpy().view(np.uint8))
    assert (checksum_cuda.whole_pieces(words) == wanted).all()
    assert checksum_cuda.kernel_available(), "the kernel was not used"
    by_torch = checksum_cuda.by_torch(words, pieces).cpu().numpy().view(np.uint64)
    assert len(set((wanted - by_torch).tolist())) == 1, "they differ by the term of the length only"


def test_the_checksum_runs_at_a_terabyte_a_second(torch: Any) -> None:
    words = torch.empty(8 * GIB // 8, dtype=torch.int64, device="cuda").random_(-(2**62), 2**62)
    checksum_cuda.whole_pieces(words)
    best = 1e9
    for _ in range(5):
        started = time.perf_counter()
        checksum_cuda.whole_pieces(words)
        best = min(best, time.perf_counter() - started)
    assert 8 * GIB / best >= 1e12, f"{8 * GIB / best / 1e12:.2f} TB/s"


def test_weights_are_published_in_place_verified_and_read_only(
    torch: Any, keeper: KeeperProcess, client: KeeperClient, device: str
) -> None:
    nvml = Device(device)
    specs = [TensorSpec(f"layer.{n}", "bfloat16", (8192, 8192), 2 * 8192 * 8192) for n in range(20)]
    nbytes = sum(spec.nbytes for spec in specs)
    store = WeightStore(client, device=device)
    assert store.attach(FINGERPRINT) is None
    torch.empty(1, device="cuda")
    before = nvml.used()
    writer = store.publish(specs, {"config.json": b"{}"}, FINGERPRINT)
    for number, kept in enumerate(writer.tensors.values()):
        view = torch.as_tensor(DeviceBytes(kept.address, kept.nbytes), device="cuda").view(torch.bfloat16).view(kept.shape)
        view.fill_(number + 1)
    torch.cuda.synchronize()
    published = writer.seal()
    assert nvml.used() - before <= 1.05 * nbytes, "there was a second copy"
    reader = KeeperClient(keeper.socket, "test.2")
    attached = WeightStore(reader, device=device, verify="full").attach(FINGERPRINT)
    assert attached is not None
    assert attached.extras == {"config.json": b"{}"}
    assert nvml.used() - before <= 1.05 * nbytes, "attaching copied"
    for number, kept in enumerate(attached.tensors.values()):
        view = torch.as_tensor(DeviceBytes(kept.address, kept.nbytes), device="cuda").view(torch.bfloat16).view(kept.shape)
        assert (view[0, 0].item(), view[-1, -1].item()) == (number + 1, number + 1)
    with pytest.raises(WorkerError, match="no host array"):
        attached.tensors["layer.0"].array()
    attached.close()
    published.close()
    reader.close()


def test_damaged_weights_are_found_by_a_full_check_and_given_to_nobody(
    torch: Any, engine: Engine, client: KeeperClient, device: str
) -> None:
    store = WeightStore(client, device=device, verify="full")
    assert store.attach(FINGERPRINT) is None
    writer = store.publish([TensorSpec("weight", "uint8", (64 * MIB,), 64 * MIB)], {}, FINGERPRINT)
    writer.seal().close()
    handles = client.get_weights(FINGERPRINT, device)
    assert handles is not None
    sizes = [handle.manifest.size for handle in handles]
    engine.map([handle.fd for handle in handles], sizes, "read-write")
    span = engine.spans[-1]
    data = bytearray(engine.mapper.copy_out(span.address + 40 * MIB, 1))
    data[0] ^= 1
    engine.mapper.copy_in(span.address + 40 * MIB, bytes(data))
    engine.spans.pop().close()
    set_id = handles.set_id
    handles.close()
    client.drop(set_id)
    assert store.attach(FINGERPRINT) is None, "one bit was changed"
