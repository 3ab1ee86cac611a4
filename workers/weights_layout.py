"""Where each tensor of a weight set lies in its segments, and the index that says so. Arithmetic only: no memory is touched here.

Segment 0 begins with the index: magic, its length, then JSON (tensors, extras, sizes). After it come the extras (config, tokenizer
files, chat template) and one table of checksums for each segment; tensors follow, here and in the other segments. A tensor lies
whole in one segment.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shadowsup.workers import checksum
from shadowsup.workers.errors import WorkerError
from shadowsup.workers.mapping import PAGE, round_up

MAX_SEGMENT = 2 * 1024**3
"""Bytes of one segment, unless one tensor is larger."""

ALIGNMENT = 256
"""Bytes; what torch's allocators and every kernel rely on."""

_MAGIC = b"SUPW\x01\x00\x00\x00"
_LENGTH = struct.Struct("<8sQ")

PREFIX = _LENGTH.size
"""Bytes that `index_length` needs."""


@dataclass(frozen=True)
class TensorSpec:
    """One tensor to keep. ``dtype``: the adapter's own word for it (``bfloat16``, ``q4_1``); ``nbytes`` need not follow from the shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True)
class Place:
    """``offset`` and ``nbytes`` within segment number ``segment``."""

    segment: int
    offset: int
    nbytes: int


@dataclass(frozen=True)
class Layout:
    """``sizes``: bytes of each segment, whole units. ``tables[i]``: the checksums of segment ``i``, 8 bytes a piece, in segment 0.

    ``head``: bytes of segment 0 before its first tensor. Checksums do not cover it (they lie in it); a digest in the manifest does.
    """

    tensors: Mapping[str, tuple[TensorSpec, Place]]
    extras: Mapping[str, Place]
    tables: tuple[Place, ...]
    sizes: tuple[int, ...]
    head: int
    index: bytes


def plan(tensors: Sequence[TensorSpec], extras: Mapping[str, bytes], *, max_segment: int = MAX_SEGMENT, unit: int = PAGE) -> Layout:
    """Lay tensors out in the order given.

    Args:
        max_segment: bytes of a segment, unless one tensor is larger.
        unit: bytes that the size of a segment is a multiple of.

    Raises:
        WorkerError: a name appears twice or a size is negative.
    """
    names = [tensor.name for tensor in tensors]
    if len(set(names)) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise WorkerError(f"weights have two tensors named {twice}", fatal=True)
    if any(tensor.nbytes < 0 for tensor in tensors):
        raise WorkerError("weights have a tensor of negative size", fatal=True)
    # The index holds places and the places depend on the length of the index: lay out with a first guess of the head and again with
    # what came out, until it does not grow any more.
    head = PAGE
    while True:
        layout, needed = _lay_out(tensors, extras, head, max_segment, unit)
        if needed <= head:
            return layout
        head = needed


def covered(layout: Layout, segment: int) -> tuple[int, int]:
    """Return (first, end) of the bytes of ``segment`` that its checksums cover."""
    return (layout.head if segment == 0 else 0), layout.sizes[segment]


def _lay_out(tensors: Sequence[TensorSpec], extras: Mapping[str, bytes], head: int, max_segment: int, unit: int) -> tuple[Layout, int]:
    """Lay out with tensors from ``head`` on. Returns the layout and the bytes that the head really needs."""
    sizes = [head]
    placed: dict[str, tuple[TensorSpec, Place]] = {}
    for tensor in tensors:
        offset = round_up(sizes[-1], ALIGNMENT)
        if offset + tensor.nbytes > max_segment and not (len(sizes) > 1 and sizes[-1] == 0):
            sizes.append(0)
            offset = 0
        placed[tensor.name] = (tensor, Place(len(sizes) - 1, offset, tensor.nbytes))
        sizes[-1] = offset + tensor.nbytes
    pages = tuple(max(unit, round_up(size, unit)) for size in sizes)
    tables_bytes = [8 * checksum.piece_count(size) for size in pages]

    def index_at(start: int) -> tuple[bytes, dict[str, Place], tuple[Place, ...], int]:
        at = start
        tables: list[Place] = []
        for nbytes in tables_bytes:
            tables.append(Place(0, at, nbytes))
            at = round_up(at + nbytes, 64)
        extra_places: dict[str, Place] = {}
        for name, content in extras.items():
            extra_places[name] = Place(0, at, len(content))
            at = round_up(at + len(content), 64)
        return _index(placed, extra_places, tables, pages, head), extra_places, tuple(tables), at

    start = PAGE
    while True:
        index, extra_places, tables, end = index_at(start)
        if _LENGTH.size + len(index) <= start:
            break
        start = round_up(_LENGTH.size + len(index))
    return Layout(placed, extra_places, tables, pages, head, _LENGTH.pack(_MAGIC, len(index)) + index), round_up(end)


def _index(
    tensors: Mapping[str, tuple[TensorSpec, Place]],
    extras: Mapping[str, Place],
    tables: Sequence[Place],
    sizes: Sequence[int],
    head: int,
) -> bytes:
    document = {
        "tensors": [[spec.name, spec.dtype, spec.shape, place.segment, place.offset, place.nbytes] for spec, place in tensors.values()],
        "extras": [[name, place.offset, place.nbytes] for name, place in extras.items()],
        "tables": [[place.offset, place.nbytes] for place in tables],
        "sizes": sizes,
        "head": head,
    }
    return json.dumps(document, separators=(",", ":")).encode()


def index_length(start: bytes) -> int:
    """Return the bytes of the index, its prefix included; ``start``: the first `PREFIX` bytes of segment 0."""
    return int.from_bytes(start[8:PREFIX], "little") + PREFIX


def read(head: bytes, sizes: Sequence[int]) -> Layout:
    """Read the index from the first bytes of segment 0; ``sizes``: what the segments really have.

    Raises:
        WorkerError: this is no index of ours, or it does not fit the segments.
    """
    if len(head) < _LENGTH.size:
        raise WorkerError("kept weights have no index")
    magic, length = _LENGTH.unpack_from(head)
    if magic != _MAGIC or _LENGTH.size + length > len(head):
        raise WorkerError("kept weights have no index of this version")
    raw = head[: _LENGTH.size + length]
    try:
        document = json.loads(raw[_LENGTH.size :])
        tensors = {
            name: (TensorSpec(name, dtype, tuple(shape), nbytes), Place(segment, offset, nbytes))
            for name, dtype, shape, segment, offset, nbytes in document["tensors"]
        }
        extras = {name: Place(0, offset, nbytes) for name, offset, nbytes in document["extras"]}
        tables = tuple(Place(0, offset, nbytes) for offset, nbytes in document["tables"])
        layout = Layout(tensors, extras, tables, tuple(document["sizes"]), document["head"], raw)
    except (ValueError, KeyError, TypeError) as error:
        raise WorkerError("the index of kept weights is damaged") from error
    places = [place for _, place in layout.tensors.values()] + list(layout.extras.values()) + list(layout.tables)
    fits = all(0 <= p.segment < len(sizes) and p.offset >= 0 and p.nbytes >= 0 and p.offset + p.nbytes <= sizes[p.segment] for p in places)
    if list(layout.sizes) != list(sizes) or not fits or len(layout.tables) != len(sizes):
        raise WorkerError("the index of kept weights does not fit their segments")
    return layout
