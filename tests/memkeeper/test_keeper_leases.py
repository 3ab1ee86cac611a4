"""Weights and KV as engines see them: one publisher, many readers, leases that end with their process."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from keeper_tools import MODEL, OTHER, KeeperProcess, content, engine_process, leases, publish, said, until

from shadowsup.memkeeper.client import KeeperClient
from shadowsup.memkeeper.errors import KeeperError, StaleHandle
from shadowsup.memkeeper.ledger import LedgerReader, LedgerWriter, ledger_size
from shadowsup.memkeeper.protocol import SegmentState

Engine = Callable[[str], KeeperClient]
KV = {"kv_sizes": [1 << 16, 1 << 16], "ledger_size": ledger_size(64), "ledger_meta": {"blocks": "64", "block_tokens": "16"}}


def test_the_first_who_asks_publishes_and_the_others_read_what_was_sealed(keeper: KeeperProcess, engine: Engine) -> None:
    first, second, third = engine("chat.1"), engine("chat.2"), engine("code.1")
    assert first.get_weights(MODEL) is None
    with ThreadPoolExecutor() as threads:
        waiting = [threads.submit(client.get_weights, MODEL) for client in (second, third)]
        handles = first.create(MODEL, [5000])
        assert handles.created and handles[0].manifest.size == 8192
        with mmap.mmap(handles[0].fd, 8192) as memory:
            memory[:5] = b"bytes"
        assert not any(call.done() for call in waiting)
        first.seal(handles.set_id, {"checksum": "abc"})
        handles.close()
        for call in waiting:
            got = call.result(60)
            assert got is not None and got.set_id == handles.set_id and not got.created
            assert got[0].manifest.meta == {"checksum": "abc"}
            assert content(got, 5) == b"bytes"
    assert leases(first) == {handles.set_id: ("chat.1", "chat.2", "code.1")}


def test_another_fingerprint_or_device_is_a_miss(keeper: KeeperProcess, engine: Engine) -> None:
    publish(engine("chat.1"), b"x")
    assert engine("chat.2").get_weights(OTHER) is None


def test_a_publisher_that_dies_frees_what_it_wrote_and_the_next_who_waits_publishes(keeper: KeeperProcess, engine: Engine) -> None:
    publisher = engine_process(
        keeper.path, "chat.1", "assert keeper.get_weights(MODEL) is None\nkeeper.create(MODEL, [1 << 20] * 3)\nsay('writing')"
    )
    assert said(publisher) == "writing"
    second, third = engine("chat.2"), engine("chat.3")
    (state,) = {info.state for info in second.list()}
    assert state is SegmentState.WRITING
    with ThreadPoolExecutor() as threads:
        call = threads.submit(second.get_weights, MODEL)
        publisher.kill()
        publisher.communicate()
        assert call.result(60) is None
        assert keeper.memfds() == 0
        late = threads.submit(third.get_weights, MODEL)
        handles = second.create(MODEL, [100])
        second.seal(handles.set_id)
        got = late.result(60)
    assert got is not None and got.set_id == handles.set_id
    got.close()
    handles.close()


def test_a_publisher_that_dies_before_it_creates_anything_is_replaced(keeper: KeeperProcess, engine: Engine) -> None:
    publisher = engine_process(keeper.path, "chat.1", "assert keeper.get_weights(MODEL) is None\nsay('mine')")
    assert said(publisher) == "mine"
    with ThreadPoolExecutor() as threads:
        call = threads.submit(engine("chat.2").get_weights, MODEL)
        publisher.kill()
        publisher.communicate()
        assert call.result(60) is None


def test_one_reader_that_leaves_frees_nothing_for_the_other(keeper: KeeperProcess, engine: Engine) -> None:
    """P33."""
    set_id = publish(engine("chat.1"), b"kept")
    reader = engine_process(keeper.path, "chat.2", "assert keeper.get_weights(MODEL)\nsay('reading')")
    assert said(reader) == "reading"
    other = engine("chat.3")
    got = other.get_weights(MODEL)
    assert got is not None
    reader.kill()
    reader.communicate()
    until(lambda: leases(other)[set_id] == ("chat.1", "chat.3"))
    assert content(got, 4) == b"kept"
    assert keeper.memfds() == 1


def test_sealed_weights_stay_when_their_last_reader_is_gone(keeper: KeeperProcess, engine: Engine) -> None:
    """That is what a respawn without a shadow maps."""
    client = KeeperClient(keeper.path, "chat.1")
    set_id = publish(client, b"kept")
    client.close()
    other = engine("chat.2")
    until(lambda: leases(other) == {set_id: ()})
    got = other.get_weights(MODEL)
    assert got is not None and content(got, 4) == b"kept"


def test_discarded_weights_are_given_to_nobody_and_go_with_their_last_lease(keeper: KeeperProcess, engine: Engine) -> None:
    first, second = engine("chat.1"), engine("chat.2")
    wrong = publish(first, b"wrong")
    got = second.get_weights(MODEL)
    assert got is not None
    got.close()
    second.drop(wrong, discard=True)
    right = publish(second, b"right")
    assert set(leases(second)) == {wrong, right}
    first.drop(wrong)
    assert set(leases(second)) == {right}
    assert keeper.memfds() == 1


def test_sealing_is_refused_while_the_memory_is_mapped_writable_and_enforced_after(keeper: KeeperProcess, engine: Engine) -> None:
    client = engine("chat.1")
    assert client.get_weights(MODEL) is None
    handles = client.create(MODEL, [4096])
    fd = handles[0].fd
    memory = mmap.mmap(fd, 4096)
    with pytest.raises(KeeperError, match="a writable mapping of the segment still exists"):
        client.seal(handles.set_id)
    memory.close()
    reading = handles[0].open_readonly()
    with mmap.mmap(reading, 4096, prot=mmap.PROT_READ):  # a mapping that can never be written is no obstacle
        client.seal(handles.set_id)
    client.seal(handles.set_id)  # asked again after a lost answer
    os.close(reading)
    with pytest.raises(PermissionError):
        mmap.mmap(fd, 4096)
    with pytest.raises(PermissionError):
        os.pwrite(fd, b"x", 0)
    handles.close()


def test_segments_are_named_and_cannot_change_their_size(keeper: KeeperProcess, engine: Engine) -> None:
    client = engine("chat.1")
    assert client.get_weights(MODEL) is None
    handles = client.create(MODEL, [4096])
    assert str(Path(f"/proc/self/fd/{handles[0].fd}").readlink()).startswith("/memfd:shadowsup-weights-")
    assert not os.get_inheritable(handles[0].fd)
    for size in (0, 8192):
        with pytest.raises(PermissionError):
            os.ftruncate(handles[0].fd, size)
    handles.close()


def test_only_the_publisher_creates_and_seals(keeper: KeeperProcess, engine: Engine) -> None:
    first, second = engine("chat.1"), engine("chat.2")
    assert first.get_weights(MODEL) is None
    with pytest.raises(KeeperError, match="another client publishes"):
        second.create(MODEL, [10])
    handles = first.create(MODEL, [10])
    with pytest.raises(KeeperError, match="not this client's to seal"):
        second.seal(handles.set_id)
    with pytest.raises(KeeperError, match="created these weights already"):
        first.create(MODEL, [10])
    with pytest.raises(KeeperError, match="publishing these weights"):
        first.get_weights(MODEL)
    handles.close()


def test_a_set_of_more_segments_than_one_message_takes_comes_whole_and_in_order(keeper: KeeperProcess, engine: Engine) -> None:
    client = engine("chat.1")
    assert client.get_weights(MODEL) is None
    handles = client.create(MODEL, [4096] * 600)
    assert [handle.manifest.index for handle in handles] == list(range(600))
    for handle in handles:
        os.pwrite(handle.fd, handle.manifest.index.to_bytes(4, "little"), 0)
    client.seal(handles.set_id)
    handles.close()
    got = engine("chat.2").get_weights(MODEL)
    assert got is not None
    assert [int.from_bytes(os.pread(handle.fd, 4, 0), "little") for handle in got] == list(range(600))
    got.close()


def test_an_id_of_another_keeper_is_refused_with_words(keeper: KeeperProcess, engine: Engine) -> None:
    client = engine("chat.1")
    set_id = publish(client, b"x")
    keeper.kill()
    keeper.start()
    assert client.list() == ()
    assert len(client.stale) == 1
    with pytest.raises(StaleHandle, match=r"is of generation \d+; this keeper is generation \d+ and does not have it"):
        client.seal(set_id)
    client.drop(set_id)  # what it held itself, it may let go
    with pytest.raises(StaleHandle):
        client.drop(set_id)
    with pytest.raises(StaleHandle, match="there is no set"):
        client.seal("nonsense")


def test_kv_and_ledger_are_created_once_and_found_by_the_next_engine(keeper: KeeperProcess, engine: Engine) -> None:
    first, second = engine("chat.1"), engine("chat.2")
    kv = first.get_kv("chat", MODEL, **KV)
    assert kv.created and len(kv.slabs) == 2
    reader = LedgerReader(kv.ledger.fd)
    header = reader.header()
    assert (header.blocks, header.block_tokens, header.salt.hex()) == (64, 16, kv.ledger.manifest.meta["salt"])
    assert header.matches(bytes.fromhex(MODEL.digest()))
    reader.close()
    writer = LedgerWriter.take(kv.ledger.fd, owner=1, epoch=4)
    again = second.get_kv("chat", MODEL, **KV)
    assert not again.created and again.set_id == kv.set_id
    assert again.ledger.manifest.meta == kv.ledger.manifest.meta
    infos = second.list()
    assert {(info.state, info.epoch, info.owner, info.leases) for info in infos} == {(SegmentState.LEASED, 4, 1, ("chat.1", "chat.2"))}
    first.drop(kv.set_id)
    second.drop(kv.set_id)
    assert {info.state for info in second.list()} == {SegmentState.FROZEN}  # kept: the next engine of the worker finds it
    writer.close()
    kv.close()
    again.close()


@pytest.mark.parametrize("change", ["fresh", "fingerprint", "size"])
def test_a_new_kv_set_replaces_the_old_one_which_goes_with_its_last_lease(keeper: KeeperProcess, engine: Engine, change: str) -> None:
    first, second = engine("chat.1"), engine("chat.2")
    old = first.get_kv("chat", MODEL, **KV)
    other_worker = first.get_kv("code", MODEL, **KV)
    options = {"fresh": {"fresh": True}, "size": {"kv_sizes": [1 << 17]}, "fingerprint": {}}[change]
    new = second.get_kv("chat", OTHER if change == "fingerprint" else MODEL, **{**KV, **options})
    assert new.created and new.set_id != old.set_id
    assert set(leases(second)) == {old.set_id, new.set_id, other_worker.set_id}
    first.drop(old.set_id)
    assert set(leases(second)) == {new.set_id, other_worker.set_id}
    for handles in (old, new, other_worker):
        handles.close()


def test_a_kv_set_beside_another_leaves_that_as_good_as_it_was(keeper: KeeperProcess, engine: Engine) -> None:
    """While new settings are tried, an engine with the old ones that comes up must find the blocks that are in use."""
    old, new, late = engine("chat.1"), engine("chat.2"), engine("chat.3")
    first = old.get_kv("chat", MODEL, **KV)
    beside = new.get_kv("chat", OTHER, beside=True, **KV)
    again = late.get_kv("chat", MODEL, **KV)
    assert beside.created and beside.set_id != first.set_id
    assert again.set_id == first.set_id and not again.created
    new.drop(beside.set_id)
    assert set(leases(old)) == {first.set_id, beside.set_id}, "it stays until it is freed by order"
    for handles in (first, beside, again):
        handles.close()


def test_wrong_requests_are_refused_with_words_and_the_connection_goes_on(keeper: KeeperProcess, engine: Engine) -> None:
    client = engine("chat.1")
    with pytest.raises(KeeperError, match="no device GPU-123"):
        client.get_kv("chat", MODEL, [4096], 4096, device="GPU-123")
    with pytest.raises(KeeperError, match="at least one byte"):
        client.get_kv("chat", MODEL, [0], 4096)
    with pytest.raises(KeeperError, match="a worker and at least one slab"):
        client.get_kv("", MODEL, [4096], 4096)
    with pytest.raises(KeeperError, match="ledger's meta is not usable"):
        client.get_kv("chat", MODEL, [4096], 1 << 16, ledger_meta={"blocks": "many"})
    with pytest.raises(KeeperError, match="cannot hold a ledger"):
        client.get_kv("chat", MODEL, [4096], 4096, ledger_meta={"blocks": "1000", "block_tokens": "16"})
    assert client.list() == ()
    assert keeper.memfds() == 0


def test_many_threads_share_a_client(keeper: KeeperProcess, engine: Engine) -> None:
    client = engine("chat.1")
    publish(client, b"shared")

    def use(number: int) -> bytes:
        if number % 2:
            assert len(client.list()) == 1
        got = client.get_weights(MODEL)
        assert got is not None
        return content(got, 6)

    with ThreadPoolExecutor(8) as threads:
        assert set(threads.map(use, range(64))) == {b"shared"}


def test_a_forked_child_does_not_keep_its_parents_lease(keeper: KeeperProcess, engine: Engine) -> None:
    parent = engine_process(
        keeper.path,
        "chat.1",
        "kv = keeper.get_kv('chat', MODEL, [4096], 4096)\nif os.fork() == 0:\n    say(os.getpid())\n    sys.stdin.read()\n    os._exit(0)",
    )
    child = int(said(parent))
    watcher = engine("chat.2")
    assert list(leases(watcher).values()) == [("chat.1",)]
    parent.kill()
    parent.wait()
    until(lambda: list(leases(watcher).values()) == [()])
    os.kill(child, 0)  # it lives still
    parent.communicate()
