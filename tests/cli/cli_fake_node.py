"""``shadowsup`` with a node that starts nothing: ``python cli_fake_node.py ARGUMENTS``. ``FAKE_NODE`` says how it behaves.

``ok``: serves, healthy a moment later; ``fail``: cannot be brought up; ``crash``: killed while starting; ``bug``: raises something else;
``down``: serves, but its worker is down; ``end``: ends by itself with status 7.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
import types
from pathlib import Path
from typing import Any

from cli_fakes import STATUS, FakeSupervisor

from shadowsup.supervisor.cli.app import run
from shadowsup.supervisor.errors import SupervisorError


def fake_run(loaded: Any, runtime_dir: Path, *, reporter: Any) -> int:
    how = os.environ.get("FAKE_NODE", "ok")
    reporter("first step")
    if how == "fail":
        raise SupervisorError("port 8000 is taken by pid 1 (init)", "choose another gateway.listen")
    if how == "crash":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "bug":
        raise RuntimeError("a bug")
    if how == "end":
        return 7
    record = {
        "name": loaded.config.node.name,
        "pid": os.getpid(),
        "config": str(loaded.path),
        "state_dir": str(loaded.config.node.state_dir),
    }
    (runtime_dir / "node.json").write_text(json.dumps(record))
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    signal.signal(signal.SIGINT, lambda *_: stop.set())
    healthy_s = time.monotonic() + 0.3

    def status(_: dict[str, Any]) -> dict[str, Any]:
        state = "down" if how == "down" else "healthy" if time.monotonic() > healthy_s else "starting"
        worker = STATUS["workers"][0] | {"state": state, "reason": "exits at once" if how == "down" else ""}
        return STATUS | {"node": STATUS["node"] | {"pid": os.getpid()}, "workers": [worker]}

    def order(_: dict[str, Any]) -> dict[str, Any]:
        stop.set()
        return {"message": "stopping"}

    with FakeSupervisor(runtime_dir, {"status": status, "stop": order}):
        reporter("serving chat")
        while not stop.wait(0.05):
            pass
        time.sleep(0.1)  # the answer goes out
    (runtime_dir / "node.json").unlink()
    return 0


node_run = types.ModuleType("shadowsup.supervisor.node_run")
node_run.run = fake_run  # type: ignore[attr-defined]
sys.modules["shadowsup.supervisor.node_run"] = node_run

if __name__ == "__main__":
    sys.exit(run())
