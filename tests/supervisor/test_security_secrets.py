"""Secrets of a config in a whole node: they reach the engine that they are for, and nothing that is shown or logged."""

from __future__ import annotations

import contextlib
import json
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from node_world import FakeNode, running

from shadowsup.supervisor.environment import is_inherited

FROM_FILE, FROM_ENV, INHERITED, ARGUMENT = "s3cret-of-the-file", "s3cret-of-env", "s3cret-of-the-supervisor", "s3cret-argument"

SERVER = """
import os, sys, http.server
print("started", sorted(os.environ), flush=True)
class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
    def log_message(self, *_): pass
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Answer).serve_forever()
"""


def server(folder: Path) -> dict[str, Any]:
    secrets = folder / "secrets.env"
    secrets.write_text(f"PLAIN_NAME={FROM_FILE}\n")
    secrets.chmod(0o600)
    command = [sys.executable, "-c", SERVER, "{port}", "--api-key", ARGUMENT]
    return {
        "name": "server",
        "engine": "command",
        "command": command,
        "ready": {"http": "/"},
        "env": {"MY_TOKEN": FROM_ENV, "HARMLESS": "yes"},
        "env_file": str(secrets),
    }


def cli(node: FakeNode, *words: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "shadowsup.supervisor.cli", "--runtime-dir", str(node.runtime), *words],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "COLUMNS": "200"},
    )
    return done.stdout + done.stderr


def test_secrets_reach_the_engine_and_nothing_that_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", INHERITED)
    monkeypatch.setenv("SOMETHING_ELSE", "not for engines")
    with running(tmp_path, server(tmp_path)) as node:
        pid = node.worker_is("healthy", "server")["engines"][0]["pid"]
        node.call("kill", engine="server.1")
        node.until(lambda s: any(e["id"] == "server.2" and e["state"] == "active" for w in s["workers"] for e in w["engines"]))
        pid = node.engine("active")["pid"]
        pairs = [pair.partition(b"=") for pair in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0") if pair]
        environment = {name.decode(): value.decode() for name, _, value in pairs}
        shown = {verb: json.dumps(node.call(verb)) for verb in ("status", "memory", "recoveries", "events", "logs")}
        shown["inspect"] = json.dumps(node.call("inspect", worker="server"))
        for words in (["status"], ["events"], ["recoveries"], ["logs"], ["plan", str(node.config)], ["config", "show", str(node.config)]):
            shown[" ".join(words[:2])] = cli(node, *words)
        for path in node.runtime.rglob("*"):
            with contextlib.suppress(FileNotFoundError):  # a file that takes the place of another has its own name for a moment
                assert not path.is_file() or stat.S_IMODE(path.stat().st_mode) == 0o600, path
    revisions = set((node.state / "revisions").glob("*"))
    assert revisions and all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in revisions)  # the config as its owner wrote it
    kept = {path.name: path.read_text() for path in node.state.rglob("*") if path.is_file() and path not in revisions}
    assert {"events.jsonl", "server.log"} <= set(kept)
    assert environment["PLAIN_NAME"] == FROM_FILE
    assert environment["MY_TOKEN"] == FROM_ENV
    assert environment["HF_TOKEN"] == INHERITED
    assert "SOMETHING_ELSE" not in environment
    ours = {"PORT", "SHADOWSUP_ENGINE", "PYTHONUNBUFFERED", "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"}
    assert {name for name in environment if not is_inherited(name)} <= {"PLAIN_NAME", "MY_TOKEN", "HARMLESS", *ours}
    for where, text in {**shown, **kept, "output": node.output.read_text()}.items():
        told = [secret for secret in (FROM_FILE, FROM_ENV, INHERITED, ARGUMENT) if secret in text]
        assert told == [], f"{where} shows {told}"


def test_an_env_file_that_others_may_read_is_refused_before_anything_starts(tmp_path: Path) -> None:
    worker = server(tmp_path)
    (tmp_path / "secrets.env").chmod(0o640)
    config = tmp_path / "node.json"
    config.write_text(json.dumps({"version": 1, "node": {"state_dir": str(tmp_path / "state")}, "workers": [worker]}))
    done = subprocess.run(
        [sys.executable, "-m", "shadowsup.supervisor.cli", "--runtime-dir", str(tmp_path / "run"), "start", str(config)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "chmod 600" in done.stderr
    assert not (tmp_path / "run").exists()
