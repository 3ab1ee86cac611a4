"""What the ranks of one engine do, each on its own of two devices that all of them see. Skipped where there is one device only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from gpu_rig import MIB, Device, KeeperProcess

from shadowsup.memkeeper.backends.cuda_driver import visible_devices
from shadowsup.memkeeper.client import KeeperClient
from shadowsup.memkeeper.protocol import Fingerprint
from shadowsup.workers import kept_kv
from shadowsup.workers.api import KvGeometry
from shadowsup.workers.arena import KvArena
from shadowsup.workers.vllm.ranks import RankedArena, RankPart
from shadowsup.workers.weights import TensorSpec, WeightStore

# torch warns of this and that as it is imported.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]

SIZE = 512 * MIB
BLOCKS = 64


@pytest.fixture(scope="module")
def devices() -> list[str]:
    """UUIDs, by ordinal."""
    found = visible_devices()
    if len(found) < 2:
        pytest.skip("needs two devices")
    return [one.uuid for one in found[:2]]


@pytest.fixture
def torch() -> Any:
    return pytest.importorskip("torch")


class Here:
    """Ranks that are all in this process."""

    def __init__(self, arenas: Sequence[KvArena]) -> None:
        self._arenas = arenas

    def map(self, fds: Sequence[int], sizes: Sequence[Sequence[int]]) -> None:
        left = list(fds)
        for arena, mine in zip(self._arenas, sizes, strict=True):
            arena.map_segments([left.pop(0) for _ in mine], mine)


def test_one_set_of_blocks_has_a_part_on_each_device_and_graphs_write_there(torch: Any, client: KeeperClient, devices: list[str]) -> None:
    from shadowsup.workers.torch_memory import as_bytes

    arenas = [KvArena.reserve(SIZE, uuid) for uuid in devices]
    views, graphs = [], []
    for ordinal, arena in enumerate(arenas):
        with torch.cuda.device(ordinal):
            arena.map_scratch()
            view = as_bytes(arena.address, arena.size, torch.device("cuda", ordinal))
            assert (view.device.index, view.data_ptr()) == (ordinal, arena.address)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                view[-MIB:].fill_(ordinal + 1)
            torch.cuda.synchronize()
            arena.rest()
            views.append(view)
            graphs.append(graph)
    geometry = KvGeometry(
        blocks=BLOCKS,
        block_tokens=16,
        block_bytes=2 * SIZE // BLOCKS,
        reserve=1,
        fingerprint=(("engine", "test"),),
        parts=tuple((uuid, SIZE) for uuid in devices),
    )
    before = [Device(uuid).used() for uuid in devices]
    kept = kept_kv.KeptKv(client, worker="test", device=devices[0], geometry=geometry, fingerprint=kept_kv.fingerprint(None, geometry))
    try:
        assert [Device(uuid).used() - used >= SIZE for uuid, used in zip(devices, before, strict=True)] == [True, True]
        parts = [
            RankPart(device=uuid, size=SIZE, blocks=BLOCKS, block_tokens=16, block_bytes=SIZE // BLOCKS, reserve=1, fingerprint=())
            for uuid in devices
        ]
        ranks: Any = Here(arenas)
        kept.map_into(RankedArena(ranks, parts))
        for ordinal, (view, graph) in enumerate(zip(views, graphs, strict=True)):
            with torch.cuda.device(ordinal):
                view[-MIB:].zero_()
                graph.replay()
                torch.cuda.synchronize()
                assert view[-MIB:].unique().tolist() == [ordinal + 1]
    finally:
        for arena in arenas:
            arena.close()
        kept.close()


def test_weights_of_the_second_rank_are_published_and_read_on_its_device(
    torch: Any, keeper: KeeperProcess, client: KeeperClient, devices: list[str]
) -> None:
    from shadowsup.workers.torch_memory import view

    fingerprint, where = Fingerprint((("model", "test"), ("rank", "1/2"))), torch.device("cuda", 1)
    store = WeightStore(client, device=devices[1])
    assert store.attach(fingerprint) is None
    with torch.cuda.device(where):
        writer = store.publish([TensorSpec("weight", "bfloat16", (4096, 4096), 2 * 4096 * 4096)], {}, fingerprint)
        view(writer.tensors["weight"], where).fill_(3)
        torch.cuda.synchronize()
        published = writer.seal()
        reader = KeeperClient(keeper.socket, "test.2/1")
        attached = WeightStore(reader, device=devices[1], verify="full").attach(fingerprint)
        assert attached is not None
        seen = view(attached.tensors["weight"], where)
        assert seen.device == where
        assert seen.unique().tolist() == [3]
    assert client.get_weights(fingerprint, devices[0]) is None, "the first device has none of it"
    attached.close()
    published.close()
    reader.close()
