"""Prometheus' text format, as far as it takes to pass on what others expose with one label more. Pure.

Format: https://prometheus.io/docs/instrumenting/exposition_formats/ (version 0.0.4).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

OURS = "shadowsup_"
"""Families that begin so are not taken from anybody: they would pass for ours."""
_SUFFIXES = ("_bucket", "_sum", "_count", "_total", "_created")
_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
_TAKEN_LABEL = re.compile(r"(?<![a-zA-Z0-9_])worker=(?=\")")


@dataclass
class Family:
    """One metric: its lines ``# HELP`` and ``# TYPE``, and its samples of every worker."""

    help: str = ""
    type: str = ""
    samples: list[str] = field(default_factory=list)


def merge(expositions: Iterable[tuple[str, str]]) -> Iterator[str]:
    """Yield the lines of one exposition made of several.

    Args:
        expositions: (worker, text). A family that several have is told once, with the samples of all, as the format demands.

    A label ``worker`` that is there already becomes ``exported_worker``, as Prometheus itself does. Lines that are no samples are left out.
    """
    families: dict[str, Family] = {}
    for worker, text in expositions:
        _read(text, f'worker="{_escaped(worker)}"', families)
    for family in families.values():
        if family.samples:
            yield from filter(None, (family.help, family.type))
            yield from family.samples


def _read(text: str, label: str, families: dict[str, Family]) -> None:
    name, family = "", Family()
    for line in text.splitlines():
        if line.startswith("#"):
            words = line.split(" ", 3)
            if len(words) >= 3 and words[1] in ("HELP", "TYPE") and not words[2].startswith(OURS):
                if words[2] != name:
                    name = words[2]
                    family = families.setdefault(name, Family())
                if words[1] == "HELP":
                    family.help = family.help or line
                else:
                    family.type = family.type or line
            continue
        match = _NAME.match(line)
        if match is None or match[0].startswith(OURS):
            continue
        if match[0] != name and _base(match[0], name) != name:
            name = match[0]
            family = families.setdefault(name, Family())
        sample = _labelled(line, match.end(), label)
        if sample is not None:
            family.samples.append(sample)


def _base(sample: str, family: str) -> str:
    """Return ``family`` when the sample is a part of it (``x_bucket`` of ``x``; ``x_total`` of ``x_total``)."""
    return family if family and any(sample == family + suffix for suffix in _SUFFIXES) else sample


def _labelled(line: str, end: int, label: str) -> str | None:
    rest = line[end:]
    if rest[:1] in (" ", "\t"):
        return f"{line[:end]}{{{label}}}{rest}" if rest.strip() else None
    if not rest.startswith("{"):
        return None
    close = _closing(rest)
    if close < 0:
        return None
    labels = _without_worker(rest[1:close].strip().rstrip(","))
    return f"{line[:end]}{{{label}{',' if labels else ''}{labels}}}{rest[close + 1 :]}"


def _closing(rest: str) -> int:
    """Return where the brace that opens ``rest`` closes; -1: nowhere. One in quotes is part of a value."""
    quoted, skip = False, False
    for index, char in enumerate(rest):
        if skip:
            skip = False
        elif char == "\\" and quoted:
            skip = True
        elif char == '"':
            quoted = not quoted
        elif char == "}" and not quoted:
            return index
    return -1


def _without_worker(labels: str) -> str:
    if "worker=" not in labels:
        return labels
    # Only outside quotes: every second piece between unescaped quotes is a value.
    pieces = re.split(r'((?<!\\)(?:\\\\)*")', labels)
    quoted = False
    for index, piece in enumerate(pieces):
        if piece.endswith('"') and index % 2:
            quoted = not quoted
        elif not quoted and index + 1 < len(pieces):
            pieces[index] = _TAKEN_LABEL.sub("exported_worker=", piece + '"')[:-1]
    return "".join(pieces)


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
