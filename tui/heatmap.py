"""The block map of a KV arena, drawn as a heatmap. Pure: the answer of ``blocks`` in, lines out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shadowsup.tui.words import Cell, Part, count, percent

_HEATS = 5
_FULL = "█▓▒"
OPEN, RESERVE, QUARANTINED = "·", "r", "✖"


def heatmap(found: Mapping[str, Any], width: int) -> list[Cell]:
    """Return the head, the legend and the map, ``width`` cells a line.

    A cell is shown by what most of its blocks are; valid ones by their age, the ones used last the brightest and the fullest.
    """
    cells: Mapping[str, Any] = found.get("cells") or {}
    blocks = int(found.get("blocks") or 0)
    if not blocks:
        return [(("no blocks", "dim"),)]
    kinds = [list(cells.get(name) or []) for name in ("valid", "open", "reserve", "quarantined")]
    ages = list(cells.get("age") or [])
    lines: list[Cell] = [_head(found, blocks), _legend(found), ()]
    row: list[Part] = []
    for number, (valid, open_, reserve, quarantined) in enumerate(zip(*kinds, strict=True)):
        row.append(_cell(valid, open_, reserve, quarantined, ages[number] if number < len(ages) else -1))
        if len(row) == width:
            lines.append(_joined(row))
            row = []
    if row:
        lines.append(_joined(row))
    return lines


def _cell(valid: int, open_: int, reserve: int, quarantined: int, age: int) -> Part:
    # What needs attention is seen even where it is the smaller part.
    if quarantined and quarantined * 4 >= valid + open_:
        return QUARANTINED, "bad"
    if valid and valid >= open_ and valid >= reserve:
        heat = min(_HEATS - 1, max(0, age) * _HEATS // 100)
        return _FULL[min(2, heat // 2)], f"heat{heat}"
    if reserve > open_:
        return RESERVE, "accent"
    return OPEN, "dim"


def _joined(cells: list[Part]) -> Cell:
    parts: list[Part] = []
    for text, tone in cells:
        if parts and parts[-1][1] == tone:
            parts[-1] = (parts[-1][0] + text, tone)
        else:
            parts.append((text, tone))
    return tuple(parts)


def _head(found: Mapping[str, Any], blocks: int) -> Cell:
    valid, reserve, quarantined = (int(found.get(name) or 0) for name in ("valid", "reserve", "quarantined"))
    inflight, free = found.get("inflight"), found.get("free")
    return (
        (f"{count(blocks)} blocks  ", "strong"),
        (f"{percent(valid / blocks)} valid ({count(valid)})  ", ""),
        (f"{count(inflight)} being written  " if inflight is not None else "", ""),
        (f"{count(free)} free  " if free is not None else f"{count(found.get('open'))} open  ", ""),
        (f"{reserve} reserve  ", ""),
        (f"{quarantined} quarantined" if quarantined else "", "bad"),
        (f"  epoch {found.get('epoch')}, {'fenced' if found.get('fenced') else 'NOT fenced yet'}", "dim"),
    )


def _legend(found: Mapping[str, Any]) -> Cell:
    return (
        ("█", "heat0"),
        ("▓", "heat2"),
        ("▒", "heat4"),
        (" valid, from used last to oldest   ", "dim"),
        (OPEN, "dim"),
        (" free or being written   ", "dim"),
        (RESERVE, "accent"),
        (" reserve   ", "dim"),
        (QUARANTINED, "bad"),
        (" quarantined until the fence   ", "dim"),
        (f"a cell is {found.get('per_cell', 1)} blocks", "dim"),
    )
