"""The documents as the tests read them: blocks of code, and the comment before each that says how it is tried."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
OWN_TESTS = {"cli", "design", "own-loop"}
"""Pages whose commands other tests run: tests/cli and tests/workers."""
MADE = {"configuration", "compatibility", "benchmarks"}
"""Made when the site is built."""
_FENCE = re.compile(r"(?:<!--\s*(?P<mark>[^>]*?)\s*-->\n)?^```(?P<language>\w+)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """``how``: ``node``, ``alone``, ``session``; ``not`` with a ``reason``; empty when nothing says."""

    page: str
    line: int
    language: str
    text: str
    how: str = ""
    reason: str = ""

    def __str__(self) -> str:
        return f"{self.page}-{self.line}"


def blocks(path: Path) -> Iterator[Block]:
    text = path.read_text()
    for match in _FENCE.finditer(text):
        mark = match["mark"] or ""
        key, _, value = mark.partition(":")
        how = value.strip() if key == "run" else "not" if key == "not run" else ""
        yield Block(
            page=path.stem,
            line=text.count("\n", 0, match.start("text")),
            language=match["language"],
            text=match["text"],
            how=how,
            reason=value.strip() if how == "not" else "",
        )


def pages() -> list[Path]:
    """Return the written pages that the index names."""
    named = set((DOCS / "index.md").read_text().split())
    return [path for path in sorted(DOCS.glob("*.md")) if path.stem in named | {"index"} and path.stem not in OWN_TESTS | MADE]


BLOCKS = [block for path in pages() for block in blocks(path)]
