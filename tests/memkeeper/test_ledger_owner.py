"""Who owns the ledger: races between real processes, real kills, and what the header says."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator

import numpy as np
import pytest
from ledger_tools import FINGERPRINT, SALT, new_ledger

from shadowsup.memkeeper.errors import KeeperError, LedgerLost
from shadowsup.memkeeper.ledger import Follower, LedgerReader, LedgerWriter, initialise, ledger_size


@pytest.fixture
def fd() -> Iterator[int]:
    fd = new_ledger(512)
    yield fd
    os.close(fd)


RACER = """
import sys
from shadowsup.memkeeper.errors import LedgerLost
from shadowsup.memkeeper.ledger import LedgerWriter

fd, owner = int(sys.argv[1]), int(sys.argv[2])
sys.stdout.write("ready\\n")
sys.stdout.flush()
for line in sys.stdin:
    epoch = int(line)
    try:
        LedgerWriter.take(fd, owner=owner, epoch=epoch, expect_epoch=epoch - 1).close()
        print("won", flush=True)
    except LedgerLost:
        print("lost", flush=True)
"""


def test_of_racing_successors_exactly_one_wins(fd: int) -> None:
    """The fd is inherited, so all processes share one open file description: a lock on that would exclude nobody."""
    racers = [
        subprocess.Popen(
            [sys.executable, "-c", RACER, str(fd), str(owner)], pass_fds=[fd], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for owner in (1, 2, 3)
    ]
    reader = LedgerReader(fd)
    try:
        winners = set()
        for racer in racers:
            assert racer.stdout and racer.stdout.readline() == "ready\n"
        for epoch in range(1, 151):
            for racer in racers if epoch % 2 else reversed(racers):
                assert racer.stdin
                racer.stdin.write(f"{epoch}\n")
                racer.stdin.flush()
            outcomes = [racer.stdout.readline().strip() for racer in racers if racer.stdout]
            assert sorted(outcomes) == ["lost", "lost", "won"]
            winner = outcomes.index("won") + 1
            assert (reader.header().epoch, reader.header().owner) == (epoch, winner)
            winners.add(winner)
    finally:
        reader.close()
        for racer in racers:
            racer.communicate()


def test_a_taker_that_is_killed_under_the_lock_does_not_block_the_next(fd: int) -> None:
    hold = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import sys, time\nfrom shadowsup.memkeeper.ledger_layout import exclusive\n"
            "with exclusive(int(sys.argv[1]), 1.0):\n    print('held', flush=True)\n    sys.stdin.read()",
            str(fd),
        ],
        pass_fds=[fd],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert hold.stdout and hold.stdout.readline() == "held\n"
    with pytest.raises(LedgerLost, match="another engine has been taking the ledger"):
        LedgerWriter.take(fd, owner=2, epoch=1, wait_s=0.05)
    hold.kill()
    hold.communicate()
    LedgerWriter.take(fd, owner=2, epoch=1, wait_s=0.0).close()


KILLED = """
import os, random, signal, sys, time
import numpy as np
from shadowsup.memkeeper.ledger import Follower, LedgerReader, LedgerWriter, initialise, ledger_size

BLOCKS = 512
fd = os.memfd_create("ledger"); os.ftruncate(fd, ledger_size(BLOCKS))
initialise(fd, blocks=BLOCKS, block_tokens=16, fingerprint=bytes(16), salt=bytes(16))
import mmap
content = np.frombuffer(mmap.mmap(-1, BLOCKS * 8), np.uint64)   # shared with the children
rng = random.Random(7)
reader = LedgerReader(fd); follower = Follower(reader)
kept = 0
for epoch in range(1, 61):
    ready, tell = os.pipe()
    child = os.fork()
    if child == 0:
        dice = np.random.default_rng(epoch)
        dice.permutation(BLOCKS)
        writer = LedgerWriter.take(fd, owner=epoch, epoch=epoch)
        os.write(tell, b"1")
        number = epoch << 40
        while True:
            ids = dice.permutation(BLOCKS)[: dice.integers(1, 257)]
            writer.invalidate(ids)
            values = np.arange(number, number + len(ids), dtype=np.uint64); number += len(ids)
            content[ids] = values
            writer.publish(ids, np.stack([values, ~values], axis=1), values % 1000, number)
    os.close(tell)
    assert os.read(ready, 1) == b"1"
    os.close(ready)
    deadline = time.perf_counter() + rng.uniform(0, 0.02)   # any instant will do
    while time.perf_counter() < deadline:
        follower.update()
        sane = follower.hashes[follower.valid]
        assert (sane[:, 0] == ~sane[:, 1]).all()
    os.kill(child, signal.SIGKILL); os.waitpid(child, 0)
    snapshot = reader.snapshot()
    ids = np.flatnonzero(snapshot.valid)
    assert (snapshot.hashes[ids, 0] == content[ids]).all()
    assert (snapshot.hashes[ids, 1] == ~content[ids]).all()
    assert (snapshot.tokens[ids] == content[ids] % 1000).all()
    kept += len(ids)
print("kept", kept)
"""


def test_real_engines_killed_while_they_publish_leave_only_true_entries() -> None:
    done = subprocess.run([sys.executable, "-c", KILLED], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[1]) > 60 * 100


def test_a_follower_of_a_live_owner_never_sees_half_an_entry(fd: int) -> None:
    writer_process = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import sys\nimport numpy as np\nfrom shadowsup.memkeeper.ledger import LedgerWriter\n"
            "writer = LedgerWriter.take(int(sys.argv[1]), owner=1, epoch=1)\ndice = np.random.default_rng(1)\nnumber = 0\n"
            "print('go', flush=True)\n"
            "while True:\n"
            "    ids = dice.permutation(512)[:200]\n"
            "    values = np.arange(number, number + 200, dtype=np.uint64)\n"
            "    number += 200\n"
            "    writer.publish(ids, np.stack([values, ~values], axis=1), values % 1000, 1)\n",
            str(fd),
        ],
        pass_fds=[fd],
        stdout=subprocess.PIPE,
    )
    assert writer_process.stdout and writer_process.stdout.readline() == b"go\n"
    reader = LedgerReader(fd)
    follower = Follower(reader)
    seen = 0
    try:
        while seen < 100_000:
            seen += len(follower.update())
            for view in (follower, reader.snapshot()):
                hashes, tokens = view.hashes[view.valid], view.tokens[view.valid]
                assert (hashes[:, 0] == ~hashes[:, 1]).all()
                assert (tokens == hashes[:, 0] % np.uint64(1000)).all()
    finally:
        writer_process.kill()
        writer_process.communicate()
    follower.update()
    snapshot = reader.snapshot()
    assert (follower.valid == snapshot.valid).all()
    assert (follower.hashes[follower.valid] == snapshot.hashes[snapshot.valid]).all()
    reader.close()


def test_whoever_lost_the_ledger_is_told_at_every_store(fd: int) -> None:
    former = LedgerWriter.take(fd, owner=1, epoch=1)
    LedgerWriter.take(fd, owner=2, epoch=2).close()
    for store in (
        lambda: former.publish([1], [[1, 2]], 16, 1),
        lambda: former.invalidate([1]),
        lambda: former.touch([1], 1),
        lambda: former.set_reserve([1]),
        lambda: former.clear_reserve([1]),
        former.check,
    ):
        with pytest.raises(LedgerLost, match="owner 2 took the ledger in epoch 2 from owner 1 of epoch 1"):
            store()
    former.close()


@pytest.mark.parametrize("epoch", [2, 3])
def test_an_epoch_that_is_not_newer_does_not_get_the_ledger(fd: int, epoch: int) -> None:
    LedgerWriter.take(fd, owner=1, epoch=3).close()
    with pytest.raises(LedgerLost):
        LedgerWriter.take(fd, owner=2, epoch=epoch)


def test_a_successor_that_expects_another_epoch_does_not_get_the_ledger(fd: int) -> None:
    LedgerWriter.take(fd, owner=1, epoch=3).close()
    with pytest.raises(LedgerLost, match="is in epoch 3, owner 2 expected 2"):
        LedgerWriter.take(fd, owner=2, epoch=5, expect_epoch=2)


def test_epochs_may_skip(fd: int) -> None:
    """A promotion that failed before the swap leaves a gap; the banks still alternate."""
    for epoch in (1, 3, 5, 6, 10):
        writer = LedgerWriter.take(fd, owner=epoch, epoch=epoch)
        assert len(writer.entries().ids) == (0 if epoch == 1 else 1)
        writer.publish([epoch], [[epoch, 0]], 16, epoch)
        writer.invalidate([old for old in range(512) if old != epoch])
        writer.close()


def test_nothing_is_trusted_before_the_first_owner(fd: int) -> None:
    reader = LedgerReader(fd)
    assert reader.header().epoch == 0
    assert not reader.snapshot().valid.any()
    assert reader.counts() == (512, 0, 0)
    assert len(Follower(reader).update()) == 0
    reader.close()


def test_another_fingerprint_is_a_miss(fd: int) -> None:
    reader = LedgerReader(fd)
    assert reader.header().matches(FINGERPRINT)
    assert not reader.header().matches(b"g" * 16)
    reader.close()


def test_initialising_twice_changes_nothing_and_other_facts_are_refused(fd: int) -> None:
    writer = LedgerWriter.take(fd, owner=1, epoch=1)
    writer.publish([7], [[1, 2]], 16, 1)
    initialise(fd, blocks=512, block_tokens=16, fingerprint=FINGERPRINT, salt=SALT)
    assert writer.entries().ids.tolist() == [7]
    with pytest.raises(KeeperError, match="another geometry, fingerprint or salt"):
        initialise(fd, blocks=512, block_tokens=16, fingerprint=FINGERPRINT, salt=b"t" * 16)
    writer.close()


def test_memory_that_is_no_ledger_is_refused() -> None:
    fd = os.memfd_create("no-ledger", os.MFD_CLOEXEC)
    with pytest.raises(KeeperError, match="not a ledger"):
        LedgerReader(fd)
    os.ftruncate(fd, ledger_size(8))
    with pytest.raises(KeeperError, match="not an initialised ledger"):
        LedgerReader(fd)
    with pytest.raises(KeeperError, match="cannot hold"):
        initialise(fd, blocks=4096, block_tokens=16, fingerprint=FINGERPRINT, salt=SALT)
    initialise(fd, blocks=8, block_tokens=16, fingerprint=FINGERPRINT, salt=SALT)
    os.ftruncate(fd, 4096)  # shorter than its header says: reading on would be a SIGBUS
    with pytest.raises(KeeperError):
        LedgerReader(fd)
    os.close(fd)


def test_wrong_arguments_are_refused_before_anything_is_stored(fd: int) -> None:
    writer = LedgerWriter.take(fd, owner=1, epoch=1)
    writer.set_reserve([9])
    for ids, hashes in (([512], [[1, 2]]), ([-1], [[1, 2]]), ([1, 2], [[1, 2]]), ([1], [1, 2]), ([9], [[1, 2]])):
        with pytest.raises(KeeperError):
            writer.publish(ids, hashes, 16, 1)
    assert len(writer.entries().ids) == 0
    writer.publish([1], [[1, 2]], 16, 1)
    with pytest.raises(KeeperError, match="a valid block cannot be set aside"):
        writer.set_reserve([1])
    with pytest.raises(KeeperError, match="out of range"):
        LedgerWriter.take(fd, owner=0, epoch=2)
    writer.close()


def test_the_lock_is_free_after_a_take(fd: int) -> None:
    for epoch in (1, 2, 3):
        LedgerWriter.take(fd, owner=1, epoch=epoch, wait_s=0.0).close()


def test_a_parked_engine_pays_for_what_changed_only(fd: int) -> None:
    writer = LedgerWriter.take(fd, owner=1, epoch=1)
    reader = LedgerReader(fd)
    follower = Follower(reader)
    ids = np.arange(300)
    writer.publish(ids, np.stack([ids, ids], axis=1), 16, 1)
    assert follower.update().tolist() == ids.tolist()
    assert len(follower.update()) == 0
    writer.invalidate([5])
    writer.publish([400], [[4, 4]], 16, 2)
    writer.touch([7], 9)
    assert follower.update().tolist() == [5, 400]
    assert (not follower.valid[5]) and follower.valid[400] and follower.last_use[7] == 9
    LedgerWriter.take(fd, owner=2, epoch=2).close()
    assert len(follower.update()) == 0  # a take-over changes no entry
    assert follower.epoch == 2
    reader.close()
    writer.close()


def test_a_commit_of_256_blocks_takes_at_most_100_microseconds() -> None:
    fd = new_ledger(16384)
    writer = LedgerWriter.take(fd, owner=1, epoch=1)
    dice = np.random.default_rng(0)
    best = float("inf")
    for number in range(500):
        ids = dice.permutation(16384)[:256]
        hashes = dice.integers(0, 2**63, (256, 2), dtype=np.uint64)
        start = time.perf_counter()
        writer.publish(ids, hashes, 16, number)
        best = min(best, time.perf_counter() - start)
    writer.close()
    os.close(fd)
    assert best <= 100e-6
