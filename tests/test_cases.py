"""The kinds of failure that people report of engines and process managers: each is tried by a test that names it, or said not to apply.

A test names its case in its name (``test_p02_…``) or in its docstring. What the cases are:

- P01 a leader dies and its children keep the GPU
- P02 a dead supervisor's orphans are doubled
- P04 a grandchild leaves session and group
- P05 a forked child keeps the device open
- P06 D state
- P09 pidfd_open on a dying pid
- P10 a tree kill hits a stranger
- P11 a restart storm
- P13 a stop during backoff is undone
- P15 the clock jumps
- P16 the log is removed, the disk full
- P18 a flood of output
- P20 /health is fine while the engine is wedged
- P21 a wait for a change of memory
- P22 SIGKILL too early
- P23 short, wrong, duplicate GPU ids
- P24 a taken port
- P25 a config error wins silently
- P28 a re-executed manager forgets its services
- P30 NVML hangs or crashes
- P31 /dev/shm is littered
- P32 a stale handle
- P33 one reader's exit frees what another uses
- P34 a standby dies unseen
- P35 two successors
- P36 memory is reclaimed on the promotion path
- P37 an index outlives its bytes
- P38 replaying guided decoding
- P39 exit status 0
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

TESTS = Path(__file__).parent
PACKAGES = ("shadowsup", "supervisor", "memkeeper", "workers", "tui")
CASES = (1, 2, 4, 5, 6, 9, 10, 11, 13, 15, 16, 18, 20, 21, 22, 23, 24, 25, 28, 30, 31, 32, 33, 34, 35, 36, 37, 38, 39)
NOT_HERE: dict[int, str] = {}
"""Case → why it cannot happen here. There is none: those whose cause this machine cannot make are shown by a fake at the edge of the OS."""


def cases_of(tree: ast.AST) -> set[int]:
    found: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
            words = f"{node.name.upper()} {ast.get_docstring(node) or ''}"
            found |= {int(number) for number in re.findall(r"(?<![A-Z0-9])P(\d\d)(?!\d)", words.replace("_", " "))}
    return found


def test_every_case_is_tried_by_a_test_that_names_it() -> None:
    named: set[int] = set()
    for path in TESTS.rglob("test_*.py"):
        named |= cases_of(ast.parse(path.read_text()))
    missing = sorted(set(CASES) - named - set(NOT_HERE))
    assert [f"P{number:02}" for number in missing] == []


def test_the_search_finds_names_and_docstrings_of_tests_only() -> None:
    text = 'def test_p06_x(): pass\ndef test_y():\n  """P31, P5, XP07."""\ndef helper():\n  """P09"""\n'
    assert cases_of(ast.parse(text)) == {6, 31}


WALL_CLOCK = re.compile(r"^(time\.(time|time_ns|localtime|ctime)|datetime\.(datetime\.)?(now|utcnow|today))$")
FOR_PEOPLE = {
    "supervisor/bench/plain_server.py": "created, in an answer",
    "supervisor/cli/filters.py": "--since of people",
    "supervisor/cli/recoveries.py": "times as people read them",
    "supervisor/cli/reload.py": "times as people read them",
    "supervisor/cli/reporter.py": "stamps of lines",
    "supervisor/figures.py": "start_time, a metric",
    "supervisor/gateway/gateway.py": "created, in an answer",
    "supervisor/gateway/generate.py": "created, in an answer",
    "supervisor/journal.py": "ts of events",
    "supervisor/recovery.py": "ts of recoveries",
    "supervisor/replan.py": "began_s, history",
    "supervisor/reload.py": "ts of reloads",
    "supervisor/revisions.py": "ts of revisions",
    "supervisor/scribe.py": "stamps of lines",
    "supervisor/scribe_file.py": "stamps of lines",
    "supervisor/status.py": "time_s of a status",
    "workers/vllm/replay/stage.py": "arrival_time, in vLLM's metrics",
    "tui/feed.py": "ts of an observation",
    "tui/recording.py": "ts of records",
    "tui/words.py": "times as people read them",
}
"""Where the time of day is asked, and what for. Whatever is decided is decided by a monotonic clock."""


def test_p15_the_time_of_day_is_asked_only_for_what_people_read() -> None:
    """P15: a clock that jumps cannot change what is done: the only code that reads it writes a time stamp."""
    asking = set()
    for package in PACKAGES:
        for path in (TESTS.parent / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Call) and WALL_CLOCK.match(ast.unparse(node.func)):
                    asking.add(path.relative_to(TESTS.parent).as_posix())
    assert sorted(asking - set(FOR_PEOPLE)) == []
