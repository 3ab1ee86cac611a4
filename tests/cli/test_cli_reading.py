"""Verbs that look: what they print, in tables that fit and JSON that programs can rely on, and their exit codes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cli_fakes import RECOVERY, STATUS, FakeSupervisor, Refusal, event

from shadowsup.supervisor.cli.output import Column, duration, milliseconds, size, table

Cli = Callable[..., Any]
Spawn = Callable[..., subprocess.Popen[str]]

SEGMENT = {"segment": "kv-1-abcdef0123456789", "kind": "kv", "worker": "chat", "device": "host", "size": 2**28, "state": "leased"}


def test_status_shows_every_part_in_eighty_columns(cli: Cli, folder: Path) -> None:
    with FakeSupervisor(folder, {"status": STATUS}):
        result = cli("--runtime-dir", folder, "status")
    assert result.code == 0
    assert result.err == ""
    assert max(len(line) for line in result.out.splitlines()) <= 80
    for text in (
        "demo",
        "running",
        "up 1h2m",
        "memkeeper",
        "host, 3 segments, 432 MiB",
        "12,345 requests",
        "worker chat",
        "degraded",
        "epoch 2",
    ):
        assert text in result.out
    for text in ("chat.2", "active", "decode", "123456", "0.1s", "chat.3", "shadow", "loading", "4,096 blocks, 3,112 valid", "promote 8.2"):
        assert text in result.out
    for text in ("NVIDIA H200", "16.0 GiB / 141 GiB", "37%", "4 requests resumed"):
        assert text in result.out
    assert "\x1b" not in result.out


def test_status_says_when_nobody_but_the_engines_has_the_blocks_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    from shadowsup.supervisor.cli import status

    monkeypatch.setenv("COLUMNS", "120")
    worker = {"name": "chat", "state": "healthy", "epoch": 2, "kv_given": False}
    assert any("the keeper does not have the blocks in use" in line for line in status._worker(worker))
    assert not any("keeper" in line for line in status._worker({**worker, "kv_given": True}))


def test_status_as_json_is_what_the_supervisor_said(cli: Cli, folder: Path) -> None:
    with FakeSupervisor(folder, {"status": STATUS}):
        result = cli("--runtime-dir", folder, "status", "-o", "json")
    assert json.loads(result.out) == STATUS


def test_status_of_a_node_that_has_said_little_so_far_is_shown(cli: Cli, folder: Path) -> None:
    sparse = {
        "schema": 1,
        "node": {"name": "demo", "state": "starting"},
        "workers": [{"name": "chat", "state": "starting", "reason": "why", "kv": None}],
    }
    with FakeSupervisor(folder, {"status": sparse}):
        result = cli("--runtime-dir", folder, "status")
    assert result.code == 0
    assert "why" in result.out


def test_memory_shows_segments_and_leases(cli: Cli, folder: Path) -> None:
    segments = [
        SEGMENT | {"leases": ["chat.1", "chat.2", "chat.3"]},
        {"manifest": SEGMENT | {"kind": "ledger", "size": 4096}, "state": "frozen", "leases": []},
    ]
    with FakeSupervisor(folder, {"memory": {"schema": 1, "segments": segments}}):
        result = cli("--runtime-dir", folder, "memory")
    assert max(len(line) for line in result.out.splitlines()) <= 80
    assert "chat.1 chat" in result.out
    assert "4.0 KiB" in result.out
    assert result.out.endswith("2 segments, 256 MiB\n")


def test_recoveries_show_the_timeline(cli: Cli, folder: Path) -> None:
    found = {
        "schema": 1,
        "recoveries": [RECOVERY, RECOVERY | {"worker": "other"}, RECOVERY | {"n": 3, "cause": "no progress in decode for 1.2 s"}],
    }
    with FakeSupervisor(folder, {"recoveries": found}):
        result = cli("--runtime-dir", folder, "recoveries", "chat")
        newest = json.loads(cli("--runtime-dir", folder, "recoveries", "-n", 1, "-o", "json").out)
        none = cli("--runtime-dir", folder, "recoveries", "nobody")
    assert [line.split()[:4] for line in result.out.splitlines()[:1]] == [["AT", "WORKER", "KIND", "CAUSE"]]
    assert len(result.out.splitlines()) == 3
    assert max(len(line) for line in result.out.splitlines()) <= 80
    assert "0.4" in result.out
    assert "161" in result.out
    assert [recovery["n"] for recovery in newest["recoveries"]] == [3]
    assert none.out == "no recoveries\n"


def test_events_are_shown_from_a_number_on(cli: Cli, folder: Path) -> None:
    def answer(args: dict[str, Any]) -> dict[str, Any]:
        return {"schema": 1, "events": [event(n) for n in range(1, 6) if n >= args.get("since", 0)]}

    with FakeSupervisor(folder, {"events": answer}):
        every = cli("--runtime-dir", folder, "events")
        late = cli("--runtime-dir", folder, "events", "--since", 4)
        last = cli("--runtime-dir", folder, "events", "-n", 2, "-o", "json")
    assert [line.split()[-1] for line in every.out.splitlines()] == ["e1", "e2", "e3", "e4", "e5"]
    assert [line.split()[-1] for line in late.out.splitlines()] == ["e4", "e5"]
    assert [found["n"] for found in json.loads(last.out)["events"]] == [4, 5]


def test_followed_events_have_no_gap_and_no_repetition(folder: Path, spawn: Spawn) -> None:
    past = [event(n) for n in range(1, 4)]

    def answer(args: dict[str, Any]) -> dict[str, Any]:
        return {"schema": 1, "events": [found for found in past if found["n"] >= args.get("since", 0)]}

    with FakeSupervisor(folder, {"events": answer}) as supervisor:
        process = spawn("--runtime-dir", folder, "events", "-f", "-o", "json")
        assert process.stdout is not None
        seen = [json.loads(process.stdout.readline())["n"] for _ in range(3)]
        assert supervisor.subscribed.wait(60)
        # 4 is published twice; 5 is lost on the way and fetched when 6 shows the gap.
        past.extend(event(n) for n in range(4, 7))
        for number in (4, 4, 6):
            supervisor.publish(event(number))
        seen += [json.loads(process.stdout.readline())["n"] for _ in range(3)]
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert seen == [1, 2, 3, 4, 5, 6]
    assert (out, err, process.returncode) == ("", "", 130)


def test_followed_events_end_with_the_supervisor(folder: Path, spawn: Spawn) -> None:
    with FakeSupervisor(folder, {"events": {"events": [event(1)]}}):
        process = spawn("--runtime-dir", folder, "events", "-f")
        assert process.stdout is not None
        assert "e1" in process.stdout.readline()
    _, err = process.communicate(timeout=60)
    assert process.returncode == 3
    assert "no supervisor is running" in err


# --- exit codes -------------------------------------------------------------------------------------------------------------


def test_a_node_that_is_not_running_is_exit_code_3(cli: Cli, folder: Path) -> None:
    for verb in ("status", "memory", "recoveries", "events", "stop"):
        result = cli("--runtime-dir", folder, verb)
        assert result.code == 3, verb
        assert str(folder) in result.err
        assert result.out == ""


def test_a_dead_socket_is_a_node_that_is_not_running(cli: Cli, folder: Path) -> None:
    import socket

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(folder / "control.sock"))
        listener.listen()
    assert cli("--runtime-dir", folder, "status").code == 3


def test_a_supervisor_that_does_not_answer_is_exit_code_4_and_named(cli: Cli, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shadowsup.supervisor.client.call.__defaults__", (0.1,))
    with FakeSupervisor(folder, {}):
        result = cli("--runtime-dir", folder, "status")
    assert result.code == 4
    assert f"pid {os.getpid()}" in result.err


def test_a_refusal_has_the_words_the_hint_and_the_code_of_the_supervisor(cli: Cli, folder: Path) -> None:
    def answer(_: dict[str, Any]) -> None:
        raise Refusal("no worker 'chatt'", "there are: chat", 2)

    with FakeSupervisor(folder, {"status": STATUS, "failover": answer}):
        result = cli("--runtime-dir", folder, "failover", "chatt")
    assert result.code == 2
    assert result.err == "shadowsup: no worker 'chatt'\n    there are: chat\n"


def test_an_answer_in_another_protocol_is_an_error_in_words(cli: Cli, folder: Path) -> None:
    import threading

    import zmq

    context = zmq.Context()
    router = context.socket(zmq.ROUTER)
    router.bind(f"ipc://{folder / 'control.sock'}")

    def answer() -> None:
        peer, _ = router.recv_multipart()
        router.send_multipart([peer, b"\xff not json"])

    thread = threading.Thread(target=answer)
    thread.start()
    try:
        result = cli("--runtime-dir", folder, "status")
    finally:
        thread.join()
        router.close(0)
        context.term()
    assert result.code == 1
    assert "not of this protocol" in result.err


# --- tables -----------------------------------------------------------------------------------------------------------------


def test_a_table_is_cut_where_it_may_be() -> None:
    text = table((Column("A", shrink=True), Column("N", right=True)), [("x" * 50, 7), (None, 12345)], limit=20)
    assert text.splitlines() == ["A                  N", "xxxxxxxxxxxx…      7", "-              12345"]


def test_figures_for_people() -> None:
    assert [size(value) for value in (0, 1023, 2048, 5 * 2**30, 3 * 2**50, None)] == [
        "0 B",
        "1023 B",
        "2.0 KiB",
        "5.0 GiB",
        "3072.0 TiB",
        "-",
    ]
    assert [duration(value) for value in (0.23, 59.94, 61, 3600, 90061, None)] == ["0.2s", "59.9s", "1m1s", "1h0m", "1d1h", "-"]
    assert [milliseconds(value) for value in (0.42, 12.3, 1250.4, None)] == ["0.4", "12", "1,250", "-"]


def test_colours_only_on_a_terminal_and_not_with_no_color(folder: Path, spawn: Spawn) -> None:
    import pty

    def on_terminal(**environ: str) -> str:
        primary, secondary = pty.openpty()
        process = subprocess.Popen(
            [sys.executable, "-m", "shadowsup.supervisor.cli", "--runtime-dir", str(folder), "status"],
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

    with FakeSupervisor(folder, {"status": STATUS}):
        assert "\x1b[32m" in on_terminal()
        assert "\x1b" not in on_terminal(NO_COLOR="1")
        assert "\x1b" not in on_terminal(TERM="dumb")
