"""Memory that only engines hold any more is found by its name, opened anew, and taken whole or not at all. Real processes and memfds."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from shadowsup.memkeeper import protocol as p
from shadowsup.memkeeper.vault import Vault
from shadowsup.supervisor import fd_rescue
from shadowsup.supervisor import identity as ids
from shadowsup.supervisor.fd_store import Index

SIZE = 4096
HOLDER = """
import fcntl, os, sys
for name in sys.argv[1:]:
    name, _, wrong = name.partition("!")
    fd = os.memfd_create(name, os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 8192 if wrong == "size" else 4096)
    if wrong != "seals":
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    os.write(fd, name.encode())
print("up", flush=True)
sys.stdin.read()
"""


def segment(kind: p.Kind, index: int, *, set_id: str = "set-1", worker: str = "chat", superseded: bool = False) -> p.SegmentInfo:
    manifest = p.Manifest(
        segment=f"{kind.value}-7-{set_id}{index}",
        generation=7,
        kind=kind,
        set_id=set_id,
        index=index,
        worker=worker,
        device="host",
        size=SIZE,
        fingerprint=p.Fingerprint(()),
    )
    return p.SegmentInfo(manifest=manifest, state=p.SegmentState.LEASED, leases=(), created_s=1.0, superseded=superseded)


@contextmanager
def holder(*names: str) -> Iterator[ids.Identity]:
    """A process that has memfds of these names open; ``NAME!size`` and ``NAME!seals`` are not what they are called."""
    argv = [sys.executable, "-c", HOLDER, *(f"shadowsup-{name}" for name in names)]
    process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None and process.stdout.readline()
        identity = ids.of(process.pid)
        assert identity is not None
        yield identity
    finally:
        process.kill()
        process.communicate()


async def rescued(tmp_path: Path, names: list[str], *infos: p.SegmentInfo, stale: bool = False) -> tuple[tuple[int, int], set[str]]:
    vault = Vault(tmp_path / "keeper.sock")
    try:
        with holder(*names) as identity:
            engine = ids.Identity(pid=identity.pid, start_time=identity.start_time - stale, boot_id=identity.boot_id)
            counts = fd_rescue.fill(vault, Index(generation=7, segments=infos), [engine], ["chat"])
        return counts, {info.manifest.segment for info in vault.segments()}
    finally:
        await vault.close()


async def test_a_set_is_taken_back_whole_or_not_at_all(tmp_path: Path) -> None:
    kv, ledger = segment(p.Kind.KV, 0), segment(p.Kind.LEDGER, 1)
    names = [kv.manifest.segment, ledger.manifest.segment]
    assert await rescued(tmp_path, names, kv, ledger) == ((2, 0), set(names))
    assert await rescued(tmp_path, names[:1], kv, ledger) == ((0, 2), set())


async def test_what_is_not_what_its_name_says_is_left(tmp_path: Path) -> None:
    kv, ledger = segment(p.Kind.KV, 0), segment(p.Kind.LEDGER, 1)
    names = [kv.manifest.segment, ledger.manifest.segment]
    for wrong in ("size", "seals"):
        assert await rescued(tmp_path, [names[0], f"{names[1]}!{wrong}"], kv, ledger) == ((0, 2), set())
    assert await rescued(tmp_path, names, kv, ledger, stale=True) == ((0, 2), set()), "another process came by its pid"


async def test_what_nobody_would_be_given_is_left(tmp_path: Path) -> None:
    old, other = segment(p.Kind.KV, 0, superseded=True), segment(p.Kind.KV, 0, set_id="set-2", worker="another")
    names = [old.manifest.segment, other.manifest.segment]
    assert await rescued(tmp_path, names, old, other) == ((0, 0), set())
