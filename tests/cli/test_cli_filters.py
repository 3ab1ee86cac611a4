"""``--since``, ``--grep`` and ``--invert`` of ``events`` and ``logs``, and logs of several workers as one."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest
from cli_fakes import FakeSupervisor, event

from shadowsup.supervisor.cli.filters import Grep, Since

Cli = Callable[..., Any]


def line(source: str, second: int, text: str) -> str:
    return f"2026-01-31T00:00:{second:02}.000Z {source} | {text}\n"


@pytest.fixture
def written(folder: Path) -> Path:
    logs = folder / "state" / "logs"
    logs.mkdir(parents=True)
    (logs / "chat.log").write_text(line("chat.1", 3, "loading") + line("chat.2", 5, "warm"))
    (logs / "chat.log.1").write_text(line("chat.1", 1, "first") + line("chat.1", 2, "loading weights"))
    (logs / "web.log").write_text(line("web.1", 4, "GET / loading"))
    (logs / "memkeeper.log").write_text(line("memkeeper", 6, "here"))
    (folder / "node.json").write_text(json.dumps({"state_dir": str(folder / "state")}))
    return logs


def said(text: str) -> list[str]:
    return [entry.partition(" | ")[2] for entry in text.splitlines()]


def test_moments_are_understood_in_several_forms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "time", lambda: 1_000_000.0)

    def of(text: str, **options: bool) -> float:
        return Since(**options).convert(text, None, None)

    assert of("10m") == 1_000_000 - 600
    assert of("1h30m") == 1_000_000 - 5400
    assert of("2026-01-31T00:00:03Z") == 1769817603.0
    assert of("2026-01-31T01:00:03+01:00") == 1769817603.0
    assert of("14:05") == time.mktime((*time.localtime(1_000_000)[:3], 14, 5, 0, 0, 0, -1))
    assert of("7", numbers=True) == 7 and isinstance(of("7", numbers=True), int)
    for wrong in ("7", "soon", "10", "25:00", "m"):
        with pytest.raises(click.BadParameter):
            of(wrong)


def test_a_pattern_chooses_or_with_invert_leaves_out() -> None:
    pattern = re.compile(b"a+")
    assert [Grep(pattern)(text) for text in (b"xaay", b"xy")] == [True, False]
    assert [Grep(pattern, invert=True)(text) for text in (b"xaay", b"xy")] == [False, True]
    assert Grep()(b"anything")


def test_the_logs_of_several_workers_are_merged_by_time(written: Path, folder: Path, cli: Cli) -> None:
    both = ["first", "loading weights", "loading", "GET / loading", "warm"]
    assert said(cli("--runtime-dir", folder, "logs", "chat", "web").out) == both
    assert said(cli("--runtime-dir", folder, "logs").out) == [*both, "here"]
    assert said(cli("--runtime-dir", folder, "logs", "web", "memkeeper", "-n", 1).out) == ["here"]


def test_logs_since_a_moment_are_not_cut_and_go_back_over_rotation(written: Path, folder: Path, cli: Cli) -> None:
    assert said(cli("--runtime-dir", folder, "logs", "chat", "--since", "2026-01-31T00:00:02Z").out) == [
        "loading weights",
        "loading",
        "warm",
    ]
    assert said(cli("--runtime-dir", folder, "logs", "chat", "--since", "2026-01-31T00:00:02Z", "-n", 1).out) == ["warm"]
    assert cli("--runtime-dir", folder, "logs", "chat", "--since", "1s").out == ""


def test_logs_that_match_are_counted_after_matching(written: Path, folder: Path, cli: Cli) -> None:
    assert said(cli("--runtime-dir", folder, "logs", "--grep", "load", "-n", 2).out) == ["loading", "GET / loading"]
    assert said(cli("--runtime-dir", folder, "logs", "--grep", "load", "--invert").out) == ["first", "warm", "here"]
    assert said(cli("--runtime-dir", folder, "logs", "--grep", r"web\.1").out) == ["GET / loading"]
    wrong = cli("--runtime-dir", folder, "logs", "--grep", "(")
    assert (wrong.code, "no regular expression" in wrong.err) == (2, True)


def test_followed_logs_are_filtered_too(written: Path, folder: Path, spawn: Callable[..., subprocess.Popen[str]]) -> None:
    process = spawn("--runtime-dir", folder, "logs", "chat", "-f", "--grep", "warm")
    assert process.stdout is not None
    assert process.stdout.readline().endswith("warm\n")
    with (written / "chat.log").open("a") as file:
        file.write(line("chat.2", 7, "noise") + line("chat.2", 8, "warm again"))
    assert process.stdout.readline().endswith("warm again\n")


def test_on_a_terminal_sources_line_up_in_colours_and_not_with_no_color(written: Path, folder: Path) -> None:
    def on_terminal(**environ: str) -> str:
        primary, secondary = pty.openpty()
        process = subprocess.Popen(
            [sys.executable, "-m", "shadowsup.supervisor.cli", "--runtime-dir", str(folder), "logs", "web", "memkeeper"],
            stdout=secondary,
            stderr=secondary,
            env=os.environ | {"TERM": "xterm"} | environ,
        )
        os.close(secondary)
        data = b""
        try:
            while chunk := os.read(primary, 65536):
                data += chunk
        except OSError:  # EIO: the other side is closed
            pass
        os.close(primary)
        process.wait()
        return data.decode()

    assert re.search(r"\x1b\[\d+mweb\.1\x1b\[0m GET", on_terminal())
    assert "\x1b" not in on_terminal(NO_COLOR="1")


def test_events_are_chosen_by_worker_time_and_pattern(cli: Cli, folder: Path) -> None:
    found = [event(n) | {"worker": "chat" if n % 2 else "web", "ts": time.time() - 100 * (6 - n)} for n in range(1, 6)]

    def shown(*arguments: object) -> list[int]:
        with FakeSupervisor(folder, {"events": lambda args: {"events": [each for each in found if each["n"] >= args.get("since", 0)]}}):
            result = cli("--runtime-dir", folder, "events", *arguments, "-o", "json")
        return [each["n"] for each in json.loads(result.out)["events"]]

    assert shown("web") == [2, 4]
    assert shown("web", "chat") == [1, 2, 3, 4, 5]
    assert shown("--since", "250s") == [4, 5]
    assert shown("--since", 3) == [3, 4, 5]
    assert shown("--grep", "e[15]$") == [1, 5]
    assert shown("--grep", "e[15]$", "--invert", "-n", 2) == [3, 4]
    assert shown("--grep", "engine.state") == [1, 2, 3, 4, 5]
