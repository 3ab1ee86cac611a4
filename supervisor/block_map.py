"""What the KV blocks of a worker hold, place by place: a summary of its ledger, read without a lock and without touching a block."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from shadowsup.memkeeper.errors import KeeperError
from shadowsup.memkeeper.ledger import RESERVE, LedgerReader, Snapshot
from shadowsup.memkeeper.protocol import Kind
from shadowsup.supervisor.errors import SupervisorError
from shadowsup.supervisor.node_worker import WorkerOwner
from shadowsup.supervisor.protocol import SCHEMA

if TYPE_CHECKING:
    from shadowsup.supervisor.node import Node

CELLS = 512
MAX_CELLS = 4096


def blocks(node: Node, owner: WorkerOwner, cells: int = CELLS) -> dict[str, Any]:
    """Return the map of a worker's KV arena in at most ``cells`` cells of equal size.

    Raises:
        SupervisorError: the worker has no ledger now.
    """
    active = owner.policy.active
    beat = active.vitals.beat if active is not None else None
    fenced = active is None or active.fence_sent or active.promoted_s is None
    found = summary(_snapshot(node, owner.name), max(1, min(cells, MAX_CELLS)), fenced=fenced)
    free = beat.kv.free if beat is not None and beat.kv is not None else None
    # The ledger is an index: a block that is not in it is free, or a request is writing it. How many are which, the engine's beat says.
    found["free"] = None if free is None else min(free, found["open"])
    found["inflight"] = None if free is None else found["open"] - found["free"]
    return {"schema": SCHEMA, "worker": owner.name, "fenced": fenced, **found}


def _snapshot(node: Node, worker: str) -> Snapshot:
    vault = node.parts.keeper.vault if node.parts.keeper is not None else None
    ledgers = [s for s in vault.segments() if s.manifest.kind is Kind.LEDGER and s.manifest.worker == worker] if vault is not None else []
    current = [s for s in ledgers if not s.superseded] or ledgers
    if vault is None or not current:
        raise SupervisorError(f"worker {worker} has no KV memory now", "it gets some when its first engine is promoted")
    try:
        reader = LedgerReader(vault.fd(current[-1].manifest.segment))
        try:
            return reader.snapshot()
        finally:
            reader.close()
    except KeeperError as error:
        raise SupervisorError(f"the ledger of {worker} cannot be read: {error.message}", error.hint) from None


def summary(snapshot: Snapshot, cells: int, *, fenced: bool) -> dict[str, Any]:
    """Count blocks by cell.

    Returns:
        ``per_cell``: blocks a cell (the last may have fewer); ``valid``, ``reserve``, ``quarantined``, ``open`` in all, and ``cells`` with
        lists of the same by cell, and ``age``: the mean age of the cell's valid blocks, 0 (used last) to 99, -1 where there is none.
    """
    valid = snapshot.valid
    reserve = ~valid & ((snapshot.flags & RESERVE) != 0)
    rest = ~valid & ~reserve
    quarantined = rest if not fenced else np.zeros_like(rest)
    open_ = rest if fenced else np.zeros_like(rest)
    per_cell = max(1, -(-len(valid) // cells))
    starts = np.arange(0, len(valid), per_cell)
    counts = {name: np.add.reduceat(mask, starts, dtype=np.int64) for name, mask in _masks(valid, reserve, quarantined, open_)}
    return {
        "epoch": snapshot.epoch,
        "owner": snapshot.owner,
        "blocks": len(valid),
        "per_cell": per_cell,
        **{name: int(found.sum()) for name, found in counts.items()},
        "cells": {**{name: found.tolist() for name, found in counts.items()}, "age": _ages(snapshot, starts, counts["valid"]).tolist()},
    }


def _masks(
    valid: NDArray[np.bool_], reserve: NDArray[np.bool_], quarantined: NDArray[np.bool_], open_: NDArray[np.bool_]
) -> list[tuple[str, NDArray[np.bool_]]]:
    return [("valid", valid), ("reserve", reserve), ("quarantined", quarantined), ("open", open_)]


def _ages(snapshot: Snapshot, starts: NDArray[np.intp], valid: NDArray[np.int64]) -> NDArray[np.int64]:
    """``last_use`` is a clock of uses, not of time, so an age is a place between the oldest and the newest use."""
    used = snapshot.last_use[snapshot.valid].astype(np.float64)
    if not len(used):
        return np.full(len(starts), -1, np.int64)
    newest, span = used.max(), max(1.0, float(used.max() - used.min()))
    age = np.where(snapshot.valid, (newest - snapshot.last_use.astype(np.float64)) / span, 0.0)
    mean = np.add.reduceat(age, starts) / np.maximum(valid, 1)
    return np.where(valid > 0, np.clip(mean * 99, 0, 99), -1).astype(np.int64)
