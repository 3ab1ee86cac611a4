"""Device memory of a real keeper: it costs no context, outlives whoever made it, cannot be written by readers, and runs out in words."""

from __future__ import annotations

import os
import signal
import time

import pytest
from gpu_child import Engine
from gpu_rig import GIB, MIB, Child, Device, KeeperProcess, eventually, export, start_engine

from shadowsup.memkeeper import device_use
from shadowsup.memkeeper.client import HandleSet, KeeperClient
from shadowsup.memkeeper.errors import OutOfMemory, StaleHandle
from shadowsup.memkeeper.protocol import Fingerprint
from shadowsup.workers import cuda_memory
from shadowsup.workers.cuda_memory import CudaMapper, kv_slabs

pytestmark = pytest.mark.gpu

SLACK = 16 * MIB
"""Bytes by which NVML's figure may differ: page tables and bookkeeping of the driver."""


@pytest.fixture
def nvml(device: str) -> Device:
    return Device(device)


def get_kv(client: KeeperClient, device: str, size: int) -> HandleSet:
    return client.get_kv("chat", Fingerprint((("test", "1"),)), kv_slabs(size), 1 << 20, device=device)


def test_the_keeper_has_no_context_and_gives_everything_back(
    keeper: KeeperProcess, client: KeeperClient, device: str, nvml: Device
) -> None:
    before = nvml.used()
    handles = get_kv(client, device, 4 * GIB)
    assert abs(nvml.used() - before - 4 * GIB) <= SLACK, "the memory is there, and nothing else"
    assert keeper.process.pid not in nvml.pids()
    assert {handle.manifest.device for handle in handles.slabs} == {device}
    assert handles.ledger.manifest.device == "host"
    handles.close()
    client.close()
    keeper.stop()
    assert eventually(lambda: nvml.used() <= before + SLACK), f"{(nvml.used() - before) / MIB:.0f} MiB are left"


def test_memory_outlives_a_keeper_that_is_killed(keeper: KeeperProcess, client: KeeperClient, device: str, nvml: Device) -> None:
    before = nvml.used()
    handles = get_kv(client, device, GIB)
    slab = handles.slabs[0]
    writer, _ = start_engine(device)
    writer.ask("map", [slab.fd], sizes=[GIB], access="read-write")
    writer.ask("fill", span=0, offset=GIB - MIB, size=MIB, value=0x42)
    writer.close()
    keeper.process.kill()
    keeper.process.wait()
    reader, _ = start_engine(device)
    reader.ask("map", [slab.fd], sizes=[GIB], access="read-only")
    assert reader.ask("digest", span=0, offset=GIB - MIB, size=MIB)["distinct"] == [0x42]
    reader.close()
    handles.close()
    client.close()
    assert eventually(lambda: nvml.used() <= before + SLACK)


def test_lack_of_memory_is_said_at_once_with_who_holds_what(client: KeeperClient, device: str, nvml: Device) -> None:
    before = nvml.used()
    held = get_kv(client, device, 4 * GIB)
    started = time.monotonic()
    wanted = (nvml.total() - 2 * GIB) // GIB * GIB
    with pytest.raises(OutOfMemory) as caught:
        client.get_kv("other", Fingerprint((("test", "2"),)), kv_slabs(wanted), 1 << 20, device=device)
    assert time.monotonic() - started < 10
    message = str(caught.value)
    assert device in message
    assert " free; " in message
    assert "in kept memory and the driver" in message
    assert eventually(lambda: nvml.used() <= before + 4 * GIB + SLACK), "what was created of the set is freed again"
    held.close()


def test_readers_cannot_write_and_one_that_tries_harms_only_itself(exporter: Child, device: str) -> None:
    (fd,), _ = export(exporter, 64 * MIB)
    writer, reader, bystander = (start_engine(device)[0] for _ in range(3))
    writer.ask("map", [fd], sizes=[64 * MIB], access="read-write")
    writer.ask("fill", span=0, offset=0, size=64 * MIB, value=0x11)
    for child in (reader, bystander):
        child.ask("map", [fd], sizes=[64 * MIB], access="read-only")
    os.close(fd)
    assert reader.ask("fill", span=0, offset=0, size=MIB, value=0)["refused"] != ""
    reader.ask("prepare")
    reader.ask("scribble", span=0, offset=0, size=4096, for_s=0.01)
    assert reader.ask("synchronize")["state"] != ""
    assert bystander.ask("digest", span=0, offset=0, size=MIB)["distinct"] == [0x11]
    assert bystander.ask("synchronize")["state"] == ""
    for child in (writer, reader, bystander):
        child.close()


def test_the_publisher_itself_cannot_write_after_turning_read_only(exporter: Child, device: str) -> None:
    (fd,), _ = export(exporter, 64 * MIB)
    writer, _ = start_engine(device)
    writer.ask("map", [fd], sizes=[64 * MIB], access="read-write")
    writer.ask("fill", span=0, offset=0, size=64 * MIB, value=0x11)
    writer.ask("access", span=0, access="read-only")
    assert writer.ask("fill", span=0, offset=0, size=MIB, value=0)["refused"] != ""
    assert writer.ask("digest", span=0, offset=0, size=MIB)["distinct"] == [0x11]
    writer.close()
    os.close(fd)


def test_a_descriptor_of_anything_else_is_a_stale_handle(engine: Engine) -> None:
    fd = os.memfd_create("not-device-memory", os.MFD_CLOEXEC)
    with pytest.raises(StaleHandle, match="does not name device memory"):
        cuda_memory.import_all(engine.mapper, [fd])
    os.close(fd)


def test_a_device_that_is_not_visible_is_refused_by_name() -> None:
    with pytest.raises(Exception, match="GPU-ffffffff-0000-0000-0000-000000000000 is not visible to this engine, which sees 0=GPU-"):
        CudaMapper("GPU-ffffffff-0000-0000-0000-000000000000")


def test_a_forgotten_child_of_a_dead_engine_is_found_by_its_device_files(device: str) -> None:
    child, _ = start_engine(device)
    forgotten = child.ask("fork")["pid"]
    child.close()
    assert forgotten in device_use.device_file_holders()
    pidfd = os.pidfd_open(forgotten)
    signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    assert eventually(lambda: forgotten not in device_use.device_file_holders())
    os.close(pidfd)


def test_nvml_in_a_child_says_who_uses_the_device(device: str) -> None:
    child, first = start_engine(device)
    use = device_use.query(device, timeout_s=20)
    assert use.uuid == device
    assert first["pid"] in {process.pid for process in use.processes}
    assert 0 < use.used < use.total
    child.close()
