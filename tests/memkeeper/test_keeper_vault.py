"""The vault: nobody is given what it has not, and a killed keeper gets everything back."""

from __future__ import annotations

import asyncio
import mmap
import os
import random
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from keeper_tools import MODEL, OTHER, KeeperProcess, Raw, content, engine_process, leases, publish, said, until

from shadowsup.memkeeper import protocol as p
from shadowsup.memkeeper.channel import OwnedFd
from shadowsup.memkeeper.client import KeeperClient
from shadowsup.memkeeper.errors import KeeperError, StaleHandle
from shadowsup.memkeeper.ledger import LedgerWriter, ledger_size
from shadowsup.memkeeper.server import Keeper
from shadowsup.memkeeper.vault import Vault

Engine = Callable[[str], KeeperClient]
KV: dict[str, Any] = {"kv_sizes": [1 << 16] * 3, "ledger_size": ledger_size(64), "ledger_meta": {"blocks": "64", "block_tokens": "16"}}


@pytest.fixture
async def vault(keeper: KeeperProcess) -> AsyncIterator[Vault]:
    vault = await Vault.connect(keeper.path)
    yield vault
    await vault.close()


async def restart(keeper: KeeperProcess, vault: Vault) -> None:
    keeper.kill()
    await asyncio.wait_for(vault.lost.wait(), 60)
    keeper.start("--restore")
    await vault.restore()


async def comes(condition: Callable[[], bool]) -> None:
    """Wait for what the keeper tells the vault, on a connection of its own."""
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


def held(vault: Vault) -> dict[str, tuple[str, ...]]:
    return {info.manifest.set_id: info.leases for info in vault.segments()}


async def test_the_vault_holds_every_segment_with_its_state(keeper: KeeperProcess, vault: Vault, engine: Engine) -> None:
    client = engine("chat.1")
    set_id = await asyncio.to_thread(publish, client, b"weights")
    kv = await asyncio.to_thread(client.get_kv, "chat", MODEL, **KV)
    assert [info.manifest.kind.value for info in vault.segments()] == ["weights", "kv", "kv", "kv", "ledger"]
    until_sealed = vault.segments()[0]
    assert until_sealed.state is p.SegmentState.SEALED and until_sealed.manifest.meta == {"checksum": "c"}
    assert os.pread(vault.fd(until_sealed.manifest.segment), 7, 0) == b"weights"
    await comes(lambda: held(vault) == {set_id: ("chat.1",), kv.set_id: ("chat.1",)})
    kv.close()


async def test_a_killed_keeper_gets_back_segments_and_leases_and_nobody_is_disturbed(
    keeper: KeeperProcess, vault: Vault, engine: Engine
) -> None:
    first, second = engine("chat.1"), engine("chat.2")
    weights = await asyncio.to_thread(publish, first, b"weights")
    kv = await asyncio.to_thread(first.get_kv, "chat", MODEL, **KV)
    writer = LedgerWriter.take(kv.ledger.fd, owner=1, epoch=1)
    with mmap.mmap(kv[0].fd, kv[0].manifest.size) as memory:
        for round_ in range(3):
            memory[:3] = b"abc"
            await restart(keeper, vault)
            assert memory[:3] == b"abc"
            writer.publish([round_], [[1, round_]], 16, 1)
            assert await asyncio.to_thread(leases, second) == {weights: ("chat.1",), kv.set_id: ("chat.1",)}
            assert not first.stale
            got = await asyncio.to_thread(second.get_weights, MODEL)
            assert got is not None and got.set_id == weights and content(got, 7) == b"weights"
            await asyncio.to_thread(second.drop, weights)
            again = await asyncio.to_thread(second.get_kv, "chat", MODEL, **KV)
            assert again.set_id == kv.set_id and os.pread(again[0].fd, 3, 0) == b"abc"
            await asyncio.to_thread(second.drop, kv.set_id)
            again.close()
            assert keeper.memfds() == 5
    writer.close()
    kv.close()


async def test_a_restarted_keeper_serves_nobody_before_it_is_restored(keeper: KeeperProcess, vault: Vault, engine: Engine) -> None:
    client = engine("chat.1")
    set_id = await asyncio.to_thread(publish, client, b"weights")
    keeper.kill()
    await asyncio.wait_for(vault.lost.wait(), 60)
    keeper.start("--restore")
    early = Raw(keeper.path, p.Hello(client="chat.2", pid=1))
    assert early.silent()
    await vault.restore()
    assert await asyncio.to_thread(leases, client) == {set_id: ("chat.1",)}
    early.read(p.Welcome)
    early.close()


async def test_a_publisher_goes_on_over_a_keeper_that_dies(keeper: KeeperProcess, vault: Vault, engine: Engine) -> None:
    publisher, reader = engine("chat.1"), engine("chat.2")
    assert await asyncio.to_thread(publisher.get_weights, MODEL) is None
    handles = await asyncio.to_thread(publisher.create, MODEL, [4096])
    waiting = asyncio.create_task(asyncio.to_thread(reader.get_weights, MODEL))
    await restart(keeper, vault)
    os.pwrite(handles[0].fd, b"all", 0)
    await asyncio.to_thread(publisher.seal, handles.set_id)
    got = await asyncio.wait_for(waiting, 60)
    assert got is not None and got.set_id == handles.set_id and content(got, 3) == b"all"
    handles.close()


async def test_a_publisher_that_died_with_the_keeper_is_replaced(quick_keeper: Callable[..., Keeper], tmp_path: Path) -> None:
    """The vault has half-written weights whose publisher never comes back: after a while they are freed, and who waits publishes."""
    quick_keeper(restoring=True, expect_s=0.2)
    fd = os.memfd_create("half-written", os.MFD_CLOEXEC)
    manifest = p.Manifest(
        segment="weights-1-a", generation=1, kind=p.Kind.WEIGHTS, set_id="set-1-a", index=0, worker="", device="host", size=4096,
        fingerprint=MODEL,
    )  # fmt: skip
    vault = Raw(tmp_path / "keeper.sock", p.Hello(client="supervisor", pid=1, vault=True))
    assert vault.read(p.Welcome).restoring  # type: ignore[union-attr]
    info = p.SegmentInfo(manifest=manifest, state=p.SegmentState.WRITING, leases=("chat.1",), created_s=1.0)
    vault.channel.send(p.encode(p.Restore(segments=(info,))), [OwnedFd(fd)])
    vault.send(p.Restored())
    client = KeeperClient(tmp_path / "keeper.sock", "chat.2")
    assert await asyncio.to_thread(client.get_weights, MODEL) is None
    client.close()
    assert vault.read(p.Forget).segments == ("weights-1-a",)  # type: ignore[union-attr]
    vault.close()


async def test_a_set_that_the_vault_has_only_in_part_is_not_restored(quick_keeper: Callable[..., Keeper], tmp_path: Path) -> None:
    """The keeper died while it deposited: nobody was ever given the set."""
    quick_keeper(restoring=True)
    manifest = p.Manifest(
        segment="kv-1-a", generation=1, kind=p.Kind.KV, set_id="set-1-a", index=0, of=2, worker="chat", device="host", size=4096,
        fingerprint=MODEL,
    )  # fmt: skip
    vault = Raw(tmp_path / "keeper.sock", p.Hello(client="supervisor", pid=1, vault=True))
    info = p.SegmentInfo(manifest=manifest, state=p.SegmentState.LEASED, leases=("chat.1",), created_s=1.0)
    vault.channel.send(p.encode(p.Restore(segments=(info,))), [OwnedFd(os.memfd_create("part", os.MFD_CLOEXEC))])
    vault.send(p.Restored())
    assert vault.read(p.Forget).segments == ("kv-1-a",)  # type: ignore[union-attr]
    vault.close()


async def test_many_segments_are_restored(keeper: KeeperProcess, vault: Vault, engine: Engine) -> None:
    client = engine("chat.1")
    assert await asyncio.to_thread(client.get_weights, MODEL) is None
    handles = await asyncio.to_thread(client.create, MODEL, [4096] * 600)
    await restart(keeper, vault)
    infos = await asyncio.to_thread(client.list)
    assert [info.manifest for info in infos] == [handle.manifest for handle in handles]
    handles.close()


async def test_nobody_is_given_a_set_before_the_vault_has_acknowledged_it(keeper: KeeperProcess, engine: Engine) -> None:
    vault = Raw(keeper.path, p.Hello(client="supervisor", pid=1, vault=True))
    vault.read(p.Welcome)
    client = engine("chat.1")
    with ThreadPoolExecutor() as threads:
        call = threads.submit(client.get_kv, "chat", MODEL, **KV)
        deposit = vault.read(p.Deposit)
        assert isinstance(deposit, p.Deposit) and len(deposit.manifests) == 4
        assert len(engine("chat.2").list()) == 4  # others are served meanwhile
        assert not call.done()
        vault.send(p.Deposited(number=deposit.number))
        call.result(60).close()
        vault.close()


async def test_a_vault_that_goes_away_keeps_nobody_waiting(keeper: KeeperProcess, engine: Engine) -> None:
    vault = Raw(keeper.path, p.Hello(client="supervisor", pid=1, vault=True))
    vault.read(p.Welcome)
    with ThreadPoolExecutor() as threads:
        call = threads.submit(engine("chat.1").get_kv, "chat", MODEL, **KV)
        vault.read(p.Deposit)
        vault.close()
        call.result(60).close()


async def test_a_vault_that_does_not_acknowledge_counts_as_gone(
    quick_keeper: Callable[..., Keeper], tmp_path: Path, engine: Engine
) -> None:
    quick_keeper(ack_s=0.1)
    vault = Raw(tmp_path / "keeper.sock", p.Hello(client="supervisor", pid=1, vault=True))
    vault.read(p.Welcome)
    (await asyncio.to_thread(engine("chat.1").get_kv, "chat", MODEL, **KV)).close()
    assert vault.closed_by_keeper()
    vault.close()


async def test_a_new_supervisor_takes_over_all_that_the_keeper_has(keeper: KeeperProcess, engine: Engine) -> None:
    client = engine("chat.1")
    set_id = await asyncio.to_thread(publish, client, b"weights")
    kv = await asyncio.to_thread(client.get_kv, "chat", MODEL, **KV)
    first = await Vault.connect(keeper.path)
    assert set(held(first)) == {set_id, kv.set_id}
    second = await Vault.connect(keeper.path)
    await asyncio.wait_for(first.lost.wait(), 60)
    assert [info.manifest for info in second.segments()] == [info.manifest for info in first.segments()]
    await first.close()
    await restart(keeper, second)
    assert set(await asyncio.to_thread(leases, client)) == {set_id, kv.set_id}
    await second.close()
    kv.close()


async def test_a_vault_that_connects_again_lets_go_what_was_freed_meanwhile(keeper: KeeperProcess, vault: Vault, engine: Engine) -> None:
    client = engine("chat.1")
    old = await asyncio.to_thread(client.get_kv, "chat", MODEL, **KV)
    rival = await Vault.connect(keeper.path)
    await asyncio.wait_for(vault.lost.wait(), 60)
    await rival.free(worker="chat")
    assert len(vault.segments()) == 4
    await vault.restore()
    assert vault.segments() == []
    await rival.close()
    old.close()


async def test_free_by_order_leaves_memory_to_its_holders_only(keeper: KeeperProcess, vault: Vault, engine: Engine) -> None:
    chat, code = engine("chat.1"), engine("code.1")
    shared = await asyncio.to_thread(publish, chat, b"shared")
    own = await asyncio.to_thread(publish, chat, b"own", OTHER)
    got = await asyncio.to_thread(code.get_weights, MODEL)
    assert got is not None
    kv = await asyncio.to_thread(chat.get_kv, "chat", MODEL, **KV)
    with mmap.mmap(kv[0].fd, kv[0].manifest.size) as memory:
        memory[:3] = b"abc"
        await vault.free(worker="chat")
        assert set(held(vault)) == {shared}  # another worker uses these weights
        assert own not in await asyncio.to_thread(leases, chat)
        assert keeper.memfds() == 1
        assert memory[:3] == b"abc"
    await vault.free(set_id=shared)
    assert vault.segments() == [] and keeper.memfds() == 0
    assert content(got, 6) == b"shared"
    with pytest.raises(StaleHandle):
        await vault.free(set_id=shared)
    with pytest.raises(KeeperError, match="either a worker or a set"):
        await vault.free()
    kv.close()


async def test_orders_are_the_vaults_and_leases_are_engines(keeper: KeeperProcess) -> None:
    engine = Raw(keeper.path, p.Hello(client="chat.1", pid=1))
    engine.read(p.Welcome)
    engine.send(p.Free(worker="chat"))
    assert "not for a connection of this kind" in engine.read(p.Refused).message  # type: ignore[union-attr]
    vault = Raw(keeper.path, p.Hello(client="supervisor", pid=1, vault=True))
    vault.read(p.Welcome)
    vault.send(p.GetWeights(fingerprint=MODEL))
    assert "not for a connection of this kind" in vault.read(p.Refused).message  # type: ignore[union-attr]
    engine.close()
    vault.close()


async def test_engines_outlive_their_keeper_and_calls_wait_for_the_next(keeper: KeeperProcess, vault: Vault, engine: Engine) -> None:
    client = engine("chat.1")
    set_id = await asyncio.to_thread(publish, client, b"weights")
    keeper.kill()
    await asyncio.wait_for(vault.lost.wait(), 60)
    until(lambda: not client.connected)
    call = asyncio.create_task(asyncio.to_thread(leases, client))
    keeper.start("--restore")
    await vault.restore()
    assert await asyncio.wait_for(call, 60) == {set_id: ("chat.1",)}


async def test_a_call_without_a_keeper_ends_with_words(tmp_path: Path) -> None:
    client = KeeperClient(tmp_path / "nobody.sock", "chat.1", patience_s=0.1)
    with pytest.raises(KeeperError, match="no keeper at"):
        client.list()
    client.close()
    with pytest.raises(KeeperError, match="closed"):
        client.list()
    with pytest.raises(KeeperError, match="no keeper answered"):
        await Vault.connect(tmp_path / "nobody.sock", timeout_s=0.1)


async def test_what_an_engine_dropped_is_not_leased_after_a_restart(keeper: KeeperProcess, vault: Vault, engine: Engine) -> None:
    leaver = engine_process(keeper.path, "chat.1", "keeper.get_kv('chat', MODEL, [4096], 4096).close()\nsay('leased')")
    assert await asyncio.to_thread(said, leaver) == "leased"  # the vault acknowledges meanwhile
    keeper.kill()
    leaver.kill()
    leaver.communicate()
    await asyncio.wait_for(vault.lost.wait(), 60)
    keeper.start("--restore")
    await vault.restore()
    client = engine("chat.1")  # the same id, holding nothing
    assert list((await asyncio.to_thread(leases, client)).values()) == [()]


async def test_calls_in_progress_survive_kills_of_the_keeper_at_any_instant(keeper: KeeperProcess, vault: Vault, engine: Engine) -> None:
    """An engine publishes set after set and takes fresh KV while the keeper is killed again and again: no call fails, nothing is lost."""
    client, dice = engine("chat.1"), random.Random(3)
    done = threading.Event()
    published: list[tuple[p.Fingerprint, str, bytes]] = []

    def work() -> str:
        kv = ""
        while not done.is_set():
            model, text = p.Fingerprint(items=(("n", str(len(published))),)), str(len(published)).encode()
            published.append((model, publish(client, text, model), text))
            old, kv_set = kv, client.get_kv("chat", MODEL, fresh=True, **KV)
            kv_set.close()
            kv = kv_set.set_id
            if old in leases(client):
                client.drop(old)
        return kv

    working = asyncio.create_task(asyncio.to_thread(work))
    for _ in range(8):
        await asyncio.sleep(dice.uniform(0.0, 0.1))  # any instant will do
        await restart(keeper, vault)
    done.set()
    kv = await asyncio.wait_for(working, 60)
    reader = engine("chat.2")
    for model, set_id, text in published:
        got = await asyncio.to_thread(reader.get_weights, model)
        assert got is not None and got.set_id == set_id and content(got, len(text)) == text
    await comes(lambda: {info.manifest.set_id for info in vault.segments()} == {kv, *(set_id for _, set_id, _ in published)})
    assert keeper.memfds() == len(vault.segments()) == len(published) + 4
