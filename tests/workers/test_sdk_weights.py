"""Weights in a real keeper: published once, mapped read-only by everybody, found wrong when they are."""

from __future__ import annotations

import faulthandler
import os
import signal
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from sdk_world import Keeper

from shadowsup.memkeeper.client import KeeperClient
from shadowsup.memkeeper.protocol import Fingerprint, SegmentState
from shadowsup.workers import checksum, weights_layout
from shadowsup.workers.errors import WorkerError
from shadowsup.workers.weights import KeptWeights, TensorSpec, WeightStore
from shadowsup.workers.weights_layout import plan

PRINT = Fingerprint((("model", "m"), ("layout", "1")))
PLAN = [
    TensorSpec("embed", "float32", (100, 30), 12000),
    TensorSpec("empty", "float32", (0,), 0),
    TensorSpec("odd", "q4_1", (7, 11), 1001),
    TensorSpec("big", "bfloat16", (3, 1024, 1024), 6 * 1024 * 1024),
]
EXTRAS = {"config.json": b'{"a": 1}', "tokenizer.json": b"t" * 5000, "none": b""}


@pytest.fixture
def keeper(tmp_path: Path) -> Iterator[str]:
    path = f"/tmp/ss-{os.getpid()}-{os.urandom(3).hex()}.sock"
    process = Keeper(path)
    yield path
    process.kill()
    Path(path).unlink(missing_ok=True)


@pytest.fixture
def clients(keeper: str) -> Iterator[list[KeeperClient]]:
    made = [KeeperClient(keeper, f"chat.{number}") for number in range(3)]
    yield made
    for client in made:
        client.close()


def publish(store: WeightStore) -> KeptWeights:
    assert store.attach(PRINT) is None
    writer = store.publish(PLAN, EXTRAS, PRINT)
    for index, tensor in enumerate(PLAN):
        writer.array(tensor.name)[:] = np.arange(index, tensor.nbytes + index, dtype=np.uint64).astype(np.uint8)
    return writer.seal()


def dies_of(action: Callable[[], object]) -> int:
    """Run ``action`` in a forked child; return the signal it dies of, 0 for none."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads: the child uses none
        pid = os.fork()
    if pid == 0:
        try:
            faulthandler.disable()
            action()
        finally:
            os._exit(0)
    _, status = os.waitpid(pid, 0)
    return os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0


def test_what_one_publishes_the_other_reads_without_a_file(clients: list[KeeperClient]) -> None:
    first = publish(WeightStore(clients[0]))
    second = WeightStore(clients[1], verify="full").attach(PRINT)
    assert second is not None and (first.published, second.published) == (True, False)
    assert second.extras == EXTRAS
    for tensor in PLAN:
        here, there = first.tensors[tensor.name], second.tensors[tensor.name]
        assert (there.dtype, there.shape, there.nbytes) == (tensor.dtype, tensor.shape, tensor.nbytes)
        assert here.address % weights_layout.ALIGNMENT == there.address % weights_layout.ALIGNMENT == 0
        assert np.array_equal(here.array(), there.array())
    assert [one.state for one in clients[2].list()] == [SegmentState.SEALED]
    first.close()
    assert second.tensors["odd"].array()[-1] == (1000 + 2) % 256, "it goes with the last lease, not with its publisher"
    second.close()


def test_nobody_can_write_to_sealed_weights_and_addresses_stay(clients: list[KeeperClient]) -> None:
    store = WeightStore(clients[0])
    assert store.attach(PRINT) is None
    writer = store.publish(PLAN, EXTRAS, PRINT)
    before = {name: tensor.address for name, tensor in writer.tensors.items()}
    writer.array("embed")[:] = 1
    kept = writer.seal()
    assert {name: tensor.address for name, tensor in kept.tensors.items()} == before
    assert kept.tensors["embed"].array()[5] == 1
    other = WeightStore(clients[1]).attach(PRINT)
    assert other is not None
    for one in (kept, other):
        assert dies_of(partial(one.tensors["embed"].array().fill, 2)) == signal.SIGSEGV
    rights = [line.split()[1] for line in Path("/proc/self/maps").read_text().splitlines() if "weights" in line and "memfd" in line]
    assert rights == ["r--s"] * 2
    kept.close()
    other.close()


def test_another_fingerprint_is_a_miss(clients: list[KeeperClient]) -> None:
    kept = publish(WeightStore(clients[0]))
    for items in ((("model", "m"), ("layout", "2")), (("layout", "1"), ("model", "m")), (("model", "m"),)):
        store = WeightStore(clients[1])
        assert store.attach(Fingerprint(items)) is None
        assert store.fingerprint == Fingerprint(items)
    kept.close()


def test_a_publisher_that_gives_up_leaves_nothing_and_the_next_one_publishes(clients: list[KeeperClient]) -> None:
    store = WeightStore(clients[0])
    assert store.attach(PRINT) is None
    store.publish(PLAN, EXTRAS, PRINT).abort()
    assert clients[2].list() == ()
    publish(WeightStore(clients[1])).close()


@pytest.mark.parametrize(("verify", "noticed"), [("none", False), ("sample", True), ("full", True)])
def test_damaged_weights_are_discarded_and_published_anew(clients: list[KeeperClient], verify: str, noticed: bool) -> None:
    store = WeightStore(clients[0])
    assert store.attach(PRINT) is None
    writer = store.publish(PLAN, EXTRAS, PRINT)
    real = checksum.checksums
    # Nothing can change sealed memory, so the wrong bytes go in before sealing, behind the back of the checksum.
    checksum.checksums = lambda data: real(data) ^ np.uint64(1)
    try:
        bad = writer.seal()
    finally:
        checksum.checksums = real
    reader = WeightStore(clients[1], verify=verify)
    attached = reader.attach(PRINT)
    assert (attached is None) is noticed
    if attached is None:
        writer = reader.publish(PLAN, EXTRAS, PRINT)
        attached = writer.seal()
        again = WeightStore(clients[2], verify="full").attach(PRINT)
        assert again is not None
        again.close()
    attached.close()
    bad.close()


def test_a_damaged_index_is_noticed_whatever_is_verified(clients: list[KeeperClient]) -> None:
    store = WeightStore(clients[0])
    assert store.attach(PRINT) is None
    layout = plan(PLAN, EXTRAS)
    handles = clients[0].create(PRINT, layout.sizes)
    os.pwrite(handles[0].fd, layout.index[:-1] + b"]", 0)
    clients[0].seal(handles.set_id, {"head": "0" * 32})
    handles.close()
    assert WeightStore(clients[1]).attach(PRINT) is None


def test_tensors_are_spread_over_segments_and_lie_whole_in_one() -> None:
    tensors = [TensorSpec(f"t{index}", "u8", (3000,), 3000) for index in range(10)] + [TensorSpec("giant", "u8", (50000,), 50000)]
    layout = plan(tensors, EXTRAS, max_segment=16384)
    assert len(layout.sizes) > 3
    assert all(size <= 16384 for size in layout.sizes[:-1]) and layout.sizes[-1] >= 50000
    spans = sorted((place.segment, place.offset, place.offset + place.nbytes) for _, place in layout.tensors.values())
    assert all(one[0] < two[0] or one[2] <= two[1] for one, two in pairwise(spans)), "they overlap"
    assert all(end <= layout.sizes[segment] for segment, _, end in spans)
    assert all(place.offset >= layout.head for _, place in layout.tensors.values() if place.segment == 0)
    again = weights_layout.read(layout.index + b"rest", layout.sizes)
    assert (again.tensors, again.extras, again.tables, again.head) == (layout.tensors, layout.extras, layout.tables, layout.head)


def test_an_index_larger_than_a_page_is_laid_out_and_read() -> None:
    tensors = [TensorSpec(f"model.layers.{index}.mlp.down_proj.weight", "bfloat16", (64, 2), 256) for index in range(3000)]
    layout = plan(tensors, {"tokenizer.json": b"x" * 100_000})
    assert layout.head > 100_000 + len(layout.index)
    assert weights_layout.read(layout.index, layout.sizes).tensors == layout.tensors


@pytest.mark.parametrize("wrong", [b"", b"nonsense" * 4, b"SUPW\x01\x00\x00\x00" + (10).to_bytes(8, "little") + b"{}        "])
def test_what_is_no_index_is_refused(wrong: bytes) -> None:
    with pytest.raises(WorkerError):
        weights_layout.read(wrong, [4096])


def test_two_tensors_of_one_name_are_refused() -> None:
    with pytest.raises(WorkerError, match="two tensors named a"):
        plan([TensorSpec("a", "u8", (1,), 1), TensorSpec("a", "u8", (1,), 1)], {})


def test_checksums_see_every_bit_order_and_length() -> None:
    random = np.random.default_rng(0)
    for size in (0, 1, 7, 8, 9, 4096, 131072 * 2 + 5):
        data = random.integers(0, 256, size, dtype=np.uint8)
        base = checksum.checksum(data)
        assert base == checksum.checksum(data.copy())
        assert base != checksum.checksum(np.append(data, np.uint8(0)))
        for at in {0, size // 2, size - 1} if size else ():
            for bit in (0, 7):
                data[at] ^= 1 << bit
                assert checksum.checksum(data) != base, (size, at, bit)
                data[at] ^= 1 << bit
    words = random.integers(0, 2**63, 40000, dtype=np.uint64)
    swapped = words.copy()
    swapped[[3, 30000]] = swapped[[30000, 3]]
    signs = words.copy()
    signs[[5, 9]] ^= np.uint64(1 << 63)
    rows = {checksum.checksum(one.view(np.uint8)) for one in (words, swapped, signs, np.roll(words, 1))}
    assert len(rows) == 4


def test_a_sample_has_both_ends_and_no_more_than_wanted() -> None:
    assert checksum.sample(5, 16) == [0, 1, 2, 3, 4]
    picked = checksum.sample(1000, 16)
    assert (picked[0], picked[-1], len(picked)) == (0, 999, 16)
