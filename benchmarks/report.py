"""Write the results in ``benchmarks/results/*.json`` into the README, between its markers.

python benchmarks/report.py            rewrites the block
python benchmarks/report.py --check    exits with 1 when the block is not what the files say
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shadowsup.supervisor.bench.tables import Table, setting, tables

ROOT = Path(__file__).parents[1]
BEGIN, END = "<!-- results -->", "<!-- /results -->"
ORDER = ("failover", "failover-8-streams", "throughput", "neighbour", "gateway", "supervisor")
"""Names of the files, without their ending."""


def documents(folder: Path) -> list[dict[str, Any]]:
    """Return the results that there are, in order."""
    files = [folder / f"{name}.json" for name in ORDER]
    return [json.loads(file.read_text()) for file in files if file.exists()]


def block(found: Sequence[dict[str, Any]]) -> str:
    """Return what stands between the markers; nothing where there are no results."""
    if not found:
        return ""
    about = "By `shadowsup bench`; [benchmarks/README.md](benchmarks/README.md) says what each figure means and what it does not."
    text = f"\n## Measured\n\n{about}\n"
    for document in found:
        for table in tables(document):
            text += f"\n**{table.title}**\n\n{_markdown(table)}\n"
            text += "".join(f"\n{note}" for note in table.notes) + ("\n" if table.notes else "")
        text += f"\n<sub>{setting(document)}.</sub>\n"
    return text + "\n"


def _markdown(table: Table) -> str:
    rows = [table.columns, ["---", *(["---:"] * (len(table.columns) - 1))], *table.rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def replaced(readme: str, text: str) -> str:
    """Return ``readme`` with ``text`` between the markers.

    Raises:
        ValueError: it has no markers, or several.
    """
    if readme.count(BEGIN) != 1 or readme.count(END) != 1:
        raise ValueError(f"the README needs exactly one {BEGIN} and one {END}")
    before, _, rest = readme.partition(BEGIN)
    return f"{before}{BEGIN}\n{text}{END}{rest.partition(END)[2]}"


def main(arguments: Sequence[str], root: Path = ROOT) -> int:
    parser = argparse.ArgumentParser(description="Write the results into the README.")
    parser.add_argument("--check", action="store_true", help="change nothing; exit with 1 when the README is stale")
    options = parser.parse_args(arguments)
    path = root / "README.md"
    before = path.read_text()
    after = replaced(before, block(documents(root / "benchmarks" / "results")))
    if before == after:
        return 0
    if options.check:
        print("README.md does not show what benchmarks/results has: run python benchmarks/report.py", file=sys.stderr)
        return 1
    path.write_text(after)
    print("README.md was brought up to date")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
