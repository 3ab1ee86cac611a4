"""What the supervisor costs while nothing happens: 64 engines that beat, their processes asleep, against a real supervisor process.

Every part of the node is real, and so are the engines' processes, lifelines and pidfds; but these processes only sleep, and what 64 engines
would say comes from one process (`shadowsup.supervisor.bench.peers`) over 64 sockets. So the engines cost the machine nothing, and what is
measured is the supervisor's process alone.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from shadowsup.supervisor.bench import machine
from shadowsup.supervisor.bench.failover import Progress
from shadowsup.supervisor.bench.figures import percentiles
from shadowsup.supervisor.bench.node import Node, running
from shadowsup.supervisor.client import ControlClient
from shadowsup.supervisor.node_setup import NO_NURSERY

_SLEEPER = """#!/bin/sh
# Stands for a Python: says that the model is here, and sleeps where it should be an engine.
case "$2" in
  *.fetch) echo '{"revision": null}' ;;
  *) exec sleep infinity ;;
esac
"""


async def measure(engines: int, seconds: float, asks: int, progress: Progress = lambda _: None) -> dict[str, Any]:
    """Return the document.

    Args:
        engines: half of them active, each with a shadow.
        seconds: how long the supervisor is watched.
        asks: how often its status is asked for afterwards; a tenth as often by the command line.

    Raises:
        SupervisorError: the node does not come up.
    """
    load = machine.load()
    workers = max(1, engines // 2)
    period_s = 0.2
    with tempfile.TemporaryDirectory(prefix="shadowsup-cost-") as folder:
        python = Path(folder) / "python"
        python.write_text(_SLEEPER)
        python.chmod(0o700)
        async with running(_config(workers, python, period_s), state=None, environment={NO_NURSERY: "1"}) as node:
            progress(f"starting {2 * workers} engines")
            peers = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "shadowsup.supervisor.bench.peers", str(node.runtime_dir), str(2 * workers), str(period_s))
            )
            try:
                for number in range(workers):
                    await node.wait_for("healthy", f"w{number}")
                progress(f"watching the supervisor for {seconds:g} s")
                quiet = await _watch(node, seconds)
                progress("asking for its status")
                status = await _ask(node, asks)
            finally:
                peers.terminate()
                await peers.wait()
    plan = {"engines": 2 * workers, "beats_per_s": 1 / period_s, "seconds": seconds}
    return machine.document("supervisor", load, {"plan": plan, **quiet, **status})


def _config(workers: int, python: Path, period_s: float) -> dict[str, Any]:
    worker = {
        "engine": "transformers",
        "python": str(python),
        "model": "m",
        "shadows": 1,
        "kv": {"size": "1MiB"},
        "health": {"heartbeat": f"{round(period_s * 1000)}ms"},
        "stop": {"timeout": "3s"},
    }
    return {"memkeeper": {"backend": "host"}, "workers": [{"name": f"w{number}", **worker} for number in range(workers)]}


async def _watch(node: Node, seconds: float) -> dict[str, Any]:
    pid = int((await node.status())["node"]["pid"])
    # What the start left to be done is not the cost of doing nothing.
    await asyncio.sleep(min(2.0, seconds))
    used_s, started_s = machine.cpu_s(pid), time.monotonic()
    await asyncio.sleep(seconds)
    share = (machine.cpu_s(pid) - used_s) / (time.monotonic() - started_s)
    memory = psutil.Process(pid).memory_info().rss
    return {"core_percent": round(100 * share, 3), "rss": memory, "threads": psutil.Process(pid).num_threads()}


async def _ask(node: Node, asks: int) -> dict[str, Any]:
    def socket() -> list[float]:
        took = []
        with ControlClient(node.runtime_dir) as client:
            for _ in range(asks):
                started_s = time.perf_counter()
                client.call("status")
                took.append((time.perf_counter() - started_s) * 1e3)
        return took

    by_socket = await asyncio.to_thread(socket)
    by_command = []
    for _ in range(max(1, asks // 10)):
        started_s = time.perf_counter()
        await node.cli("status")
        by_command.append((time.perf_counter() - started_s) * 1e3)
    return {"status_ms": percentiles(by_socket), "status_command_ms": percentiles(by_command)}
