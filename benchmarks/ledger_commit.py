"""How long one commit of KV blocks to the ledger takes: ``python benchmarks/ledger_commit.py [--blocks N] [--commit N]`` prints JSON.

A commit is `LedgerWriter.publish` with its owner check, into shared memory, for blocks spread at random over the ledger.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time

import numpy as np

from shadowsup.memkeeper.ledger import Follower, LedgerReader, LedgerWriter, initialise, ledger_size


def measure(blocks: int, commit: int, rounds: int) -> dict[str, float]:
    """Return microseconds of each operation."""
    fd = os.memfd_create("ledger-benchmark", os.MFD_CLOEXEC)
    os.ftruncate(fd, ledger_size(blocks))
    initialise(fd, blocks=blocks, block_tokens=16, fingerprint=bytes(16), salt=bytes(16))
    writer = LedgerWriter.take(fd, owner=1, epoch=1)
    reader = LedgerReader(fd)
    follower = Follower(reader)
    rng = np.random.default_rng(0)
    took: dict[str, list[float]] = {"publish": [], "invalidate": [], "follow": [], "take": []}

    def timed(what: str, start: float) -> None:
        took[what].append((time.perf_counter() - start) * 1e6)

    for number in range(rounds):
        ids = rng.permutation(blocks)[:commit]
        hashes = rng.integers(0, 2**63, (commit, 2), dtype=np.uint64)
        start = time.perf_counter()
        writer.publish(ids, hashes, 16, number)
        timed("publish", start)
        start = time.perf_counter()
        follower.update()
        timed("follow", start)
        if number % 2:
            start = time.perf_counter()
            writer.invalidate(ids)
            timed("invalidate", start)
    for epoch in range(2, 12):
        start = time.perf_counter()
        successor = LedgerWriter.take(fd, owner=epoch, epoch=epoch)
        timed("take", start)
        successor.close()
    writer.close()
    reader.close()
    os.close(fd)
    return {
        f"{what}_{name}_us": round(figure, 1)
        for what, times in took.items()
        for name, figure in (("best", min(times)), ("median", statistics.median(times)))
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=16384)
    parser.add_argument("--commit", type=int, default=256, help="blocks published at once")
    parser.add_argument("--rounds", type=int, default=2000)
    options = parser.parse_args()
    figures = {"blocks": options.blocks, "commit": options.commit, "rounds": options.rounds}
    print(json.dumps({"schema": 1, **figures, **measure(options.blocks, options.commit, options.rounds)}, indent=2))


if __name__ == "__main__":
    main()
