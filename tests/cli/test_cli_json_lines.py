"""Events, steps, warnings and output as JSON: one object a line, all in one form."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shadowsup.supervisor.cli.filters import Grep
from shadowsup.supervisor.cli.logs import JsonWriter
from shadowsup.supervisor.cli.reporter import JsonFormatter

FIELDS = {"ts", "level", "event", "worker", "engine", "pid", "epoch", "gpu_uuid", "reason", "message"}
COMMAND = [sys.executable, "-m", "shadowsup.supervisor.cli"]


def objects(text: str) -> list[dict[str, Any]]:
    """Return the objects, each checked for its form."""
    found = [json.loads(line) for line in text.splitlines()]
    for each in found:
        assert set(each) >= FIELDS
        assert isinstance(each["ts"], float) and each["level"] in ("info", "warning", "error")
        assert all(each[name] is None or isinstance(each[name], str) for name in ("worker", "engine", "gpu_uuid", "reason"))
    return found


@pytest.mark.e2e
@pytest.mark.timeout(120)
def test_a_node_tells_its_life_in_json(tmp_path: Path, folder: Path, spawn: Callable[..., subprocess.Popen[str]]) -> None:
    text = (Path(__file__).parents[2] / "configs" / "command.yaml").read_text()
    config = tmp_path / "command.yaml"
    config.write_text(text.replace("127.0.0.1:8000", "127.0.0.1:0").replace("cwd: /tmp", f"cwd: {tmp_path}"))
    environ = {"SHADOWSUP_RUNTIME_DIR": str(folder / "run"), "HOME": str(tmp_path)}
    node = spawn("start", config, "--log-format", "json", **environ)
    assert node.stdout is not None
    told = ""
    while '"gateway is running' not in told or '"web is healthy"' not in told:
        line = node.stdout.readline()
        assert line, told
        told += line

    def run(*words: str) -> str:
        done = subprocess.run([*COMMAND, *words], env=os.environ | environ, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        return done.stdout

    run("kill", "web.1")
    output = objects(run("logs", "web", "-o", "json"))
    assert any(each["engine"] == "web.1" and each["worker"] == "web" and "GET /" in each["message"] for each in output)
    assert all(each["event"] == "output" for each in output)
    run("stop")
    told += node.stdout.read()  # to its end; communicate() would pass by what is in the buffer
    assert node.wait(60) == 0
    events = objects(told)
    by_name: dict[str, list[dict[str, Any]]] = {}
    for each in events:
        by_name.setdefault(each["event"], []).append(each)
    (verdict,) = by_name["engine.verdict"]
    assert (verdict["engine"], verdict["reason"], verdict["level"]) == ("web.1", "engine process died", "warning")
    assert any(each["reason"] for each in by_name["worker.state"] if "recovering" in each["message"])
    assert "worker web has stopped" in [each["message"] for each in by_name["node.step"]]
    assert by_name["node.stopped"]
    assert [each["n"] for each in events if "n" in each] == list(range(1, len([e for e in events if "n" in e]) + 1))


def test_warnings_of_the_log_have_the_same_form() -> None:
    try:
        raise ValueError("bad\nthing")
    except ValueError:
        record = logging.LogRecord("shadowsup.x", logging.ERROR, __file__, 1, "it %s", ("broke",), sys.exc_info())
    (line,) = objects(JsonFormatter().format(record))
    assert (line["level"], line["event"], line["logger"], line["pid"]) == ("error", "node.log", "shadowsup.x", os.getpid())
    assert line["message"].startswith("it broke\nTraceback")


def test_whatever_an_engine_prints_is_a_message_and_nothing_more(capsys: pytest.CaptureFixture[str]) -> None:
    printed = ['{"event": "engine.verdict", "level": "error"}', "a | b", '\x1b[31mred\x1b[0m \\ "quoted"', ""]
    lines = [f"2026-01-02T03:04:05.678Z chat.12 | {text}\n".encode() for text in printed]
    JsonWriter(Grep())([*lines, b"2026-01-02T03:04:05.678Z gateway | x\n", b"no mark \xff\n"])
    *own, part, unmarked = objects(capsys.readouterr().out)
    assert [each["message"] for each in own] == printed
    assert {(each["event"], each["level"], each["worker"], each["engine"], each["ts"]) for each in own} == {
        ("output", "info", "chat", "chat.12", 1767323045.678)
    }
    assert (part["worker"], part["source"], part["message"]) == (None, "gateway", "x")
    assert unmarked["message"] == "no mark �"
