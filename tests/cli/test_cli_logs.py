"""``logs``: files of a node that runs, or did; followed over rotation."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cli_fakes import FakeSupervisor, Refusal

from shadowsup.supervisor.cli.logs import Follower, last_lines

Cli = Callable[..., Any]
Spawn = Callable[..., subprocess.Popen[str]]


def line(second: int, text: str) -> str:
    return f"2026-01-31T00:00:{second:02}.000Z {text}\n"


@pytest.fixture
def written(folder: Path) -> Path:
    """A node whose supervisor is gone, with output."""
    logs = folder / "state" / "logs"
    logs.mkdir(parents=True)
    (logs / "chat.log").write_text(line(3, "chat 3") + line(5, "chat 5"))
    (logs / "chat.log.1").write_text(line(1, "chat 1") + line(2, "chat 2"))
    (logs / "chat.2.log").write_text(line(4, "engine 4"))
    (logs / "chatty.log").write_text(line(6, "chatty 6"))
    (folder / "node.json").write_text(json.dumps({"name": "demo", "pid": 1, "state_dir": str(folder / "state")}))
    return logs


def said(text: str) -> list[str]:
    return [entry.split(" ", 1)[1] for entry in text.splitlines()]


def test_the_output_of_a_worker_is_shown_in_order_of_time(written: Path, folder: Path, cli: Cli) -> None:
    assert said(cli("--runtime-dir", folder, "logs", "chat").out) == ["chat 1", "chat 2", "chat 3", "engine 4", "chat 5"]
    assert said(cli("--runtime-dir", folder, "logs", "chat", "-n", 2).out) == ["engine 4", "chat 5"]
    assert said(cli("--runtime-dir", folder, "logs", "-n", 1).out) == ["chatty 6"]
    assert cli("--runtime-dir", folder, "logs", "-n", 0).out == ""


def test_a_running_supervisor_says_where_the_files_are(written: Path, folder: Path, cli: Cli) -> None:
    (folder / "node.json").unlink()
    with FakeSupervisor(folder, {"logs": lambda args: {"paths": [str(written / f"{args['worker']}.log")]}}):
        assert said(cli("--runtime-dir", folder, "logs", "chat").out)[-1] == "chat 5"


def test_a_worker_that_there_is_not_is_told(written: Path, folder: Path, cli: Cli) -> None:
    result = cli("--runtime-dir", folder, "logs", "nobody")
    assert result.code == 1
    assert "no output of nobody" in result.err

    def refuse(_: dict[str, Any]) -> None:
        raise Refusal("no worker 'nobody'", exit_code=2)

    with FakeSupervisor(folder, {"logs": refuse}):
        assert cli("--runtime-dir", folder, "logs", "nobody").code == 2


def test_without_any_trace_of_the_node_it_is_not_running(folder: Path, cli: Cli) -> None:
    assert cli("--runtime-dir", folder, "logs").code == 3


def test_output_that_is_no_text_comes_through_unchanged(written: Path, folder: Path, spawn: Spawn) -> None:
    (written / "chat.log").write_bytes(b"\xff\x00\n")
    process = subprocess.run(
        [sys.executable, "-m", "shadowsup.supervisor.cli", "--runtime-dir", str(folder), "logs", "chat", "-n", "9"],
        capture_output=True,
        check=True,
    )
    assert b"\xff\x00\n" in process.stdout


def test_following_shows_what_comes_and_ends_quietly(written: Path, folder: Path, spawn: Spawn) -> None:
    process = spawn("--runtime-dir", folder, "logs", "chat", "-f", "-n", 1)
    assert process.stdout is not None
    assert process.stdout.readline().endswith("chat 5\n")
    with (written / "chat.log").open("a") as file:
        file.write(line(7, "chat 7") + "half a line")
    assert process.stdout.readline().endswith("chat 7\n")
    with (written / "chat.log").open("a") as file:
        file.write(" and its end\n")
    assert process.stdout.readline() == "half a line and its end\n"
    (written / "chat.log").rename(written / "chat.log.1")
    (written / "chat.log").write_text(line(8, "after rotation"))
    assert process.stdout.readline().endswith("after rotation\n")
    (written / "chat.3.log").write_text(line(9, "a new engine"))
    assert process.stdout.readline().endswith("a new engine\n")
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (out, err, process.returncode) == ("", "", 130)


def test_a_follower_loses_nothing_between_its_last_look_and_a_rotation(tmp_path: Path) -> None:
    path = tmp_path / "x.log"
    path.write_text("one\n")
    follower = Follower(path)
    try:
        follower.seek_end()
        with path.open("a") as file:
            file.write("two\nthr")
        path.rename(tmp_path / "x.log.1")
        assert follower.read() == [b"two\n"]  # the new file is not there yet
        path.write_text("four\n")
        assert follower.read() == [b"thr\n", b"four\n"]
        path.write_text("")
        assert follower.read() == []
        with path.open("a") as file:
            file.write("five\n")
        assert follower.read() == [b"five\n"]
        path.unlink()
        assert follower.read() == []
        path.write_text("six\n")
        assert follower.read() == [b"six\n"]
    finally:
        follower.close()


def test_the_last_lines_are_found_in_large_files_and_over_rotated_ones(tmp_path: Path) -> None:
    path = tmp_path / "x.log"
    path.write_bytes(b"".join(b"%06d\n" % n for n in range(50_000, 60_000)))
    (tmp_path / "x.log.1").write_bytes(b"".join(b"%06d\n" % n for n in range(49_000, 50_000)))
    (tmp_path / "x.log.2").write_bytes(b"048998\n048999")
    found = last_lines({path: path.stat().st_size}, 11_001)
    assert (found[0], found[-1], len(found)) == (b"048999\n", b"059999\n", 11_001)
    assert last_lines({path: path.stat().st_size}, 20_000)[0] == b"048998\n"
    assert last_lines({path: 14}, 1) == [b"050001\n"]
