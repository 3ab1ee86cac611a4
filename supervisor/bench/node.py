"""A node of one's own, started as a user would start it, in a temporary folder and on a free port."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from shadowsup.supervisor import client
from shadowsup.supervisor.errors import SupervisorError

START = (sys.executable, "-m", "shadowsup.supervisor.cli", "--runtime-dir", "{runtime}", "start", "{config}")
"""How a node is started."""


def free_port() -> int:
    """Return a loopback TCP port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Node:
    """A running node. `cli` asks it as an operator does; `call` costs less, so that asking does not change what is measured."""

    process: asyncio.subprocess.Process
    """The supervisor."""

    def __init__(self, folder: Path, config: Path, port: int, output: Path, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self.folder = folder
        self.config = config
        self.port = port
        self.output = output
        self._command = command
        self._environment = environment

    async def launch(self) -> None:
        """Start a supervisor for this node: the first one, or one after it has died."""
        with self.output.open("ab") as sink:
            self.process = await asyncio.create_subprocess_exec(
                *self._command,
                stdout=sink,
                stderr=sink,
                stdin=asyncio.subprocess.DEVNULL,
                env={**os.environ, "PYTHONUNBUFFERED": "1", **self._environment},
            )

    @property
    def runtime_dir(self) -> Path:
        return self.folder / "run"

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def cli(self, *arguments: str, check: bool = True, timeout_s: float = 60.0) -> tuple[int, str, str]:
        """Run ``shadowsup`` against this node. Returns (exit code, stdout, stderr).

        Raises:
            SupervisorError: ``check`` and a non-zero exit code.
        """
        child = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "shadowsup.supervisor.cli", "--runtime-dir", str(self.runtime_dir), *arguments),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            out, err = await asyncio.wait_for(child.communicate(), timeout_s)
        except TimeoutError:
            child.kill()
            await child.wait()
            raise
        if check and child.returncode:
            raise SupervisorError(f"shadowsup {' '.join(arguments)} exited with {child.returncode}: {err.decode().strip()}")
        return child.returncode or 0, out.decode(), err.decode()

    async def call(self, verb: str, **arguments: Any) -> dict[str, Any]:
        """Make one request to the supervisor.

        Raises:
            SupervisorError: it is not there, does not answer, or refuses.
        """
        answer: dict[str, Any] = await asyncio.to_thread(client.call, self.runtime_dir, verb, **arguments)
        return answer

    async def status(self) -> dict[str, Any]:
        return await self.call("status")

    async def worker(self, name: str | None = None) -> dict[str, Any]:
        for found in (await self.status())["workers"]:
            if name in (None, found["name"]):
                answer: dict[str, Any] = found
                return answer
        raise SupervisorError(f"the node has no worker {name or 'yet'}")

    async def wait_for(
        self, state: str, worker: str | None = None, timeout_s: float = 120.0, hopeless: Callable[[dict[str, Any]], bool] | None = None
    ) -> dict[str, Any]:
        """Wait until a worker's state is ``state``; return its part of the status. ``hopeless``: whether to give up at this status of it.

        Raises:
            SupervisorError: the node died, the state did not come in time, or it is hopeless.
        """
        deadline = time.monotonic() + timeout_s
        seen = "nothing"
        while time.monotonic() < deadline:
            if self.process.returncode is not None:
                raise SupervisorError(f"the node exited with {self.process.returncode}: {self.tail()}")
            found: dict[str, Any] | None = None
            with contextlib.suppress(SupervisorError):
                found = await self.worker(worker)
                seen = found["state"]
                if seen == state:
                    return found
            if found is not None and hopeless is not None and hopeless(found):
                raise SupervisorError(
                    f"the worker is {seen} ({found['reason'] or 'no reason given'}), after {found['restarts']} restarts: {self.tail()}"
                )
            await asyncio.sleep(0.1)
        raise SupervisorError(f"the worker is {seen}, not {state}, after {timeout_s:.0f} s: {self.tail()}")

    def tail(self, lines: int = 20) -> str:
        return "\n".join(self.output.read_text(errors="replace").splitlines()[-lines:])


async def engine_of(node: Node, role: str, worker: str | None = None) -> dict[str, Any]:
    """Return the worker's (first) engine in ``role``, as the status has it, with its ``id`` and ``pid``.

    Raises:
        SupervisorError: there is none.
    """
    for engine in (await node.worker(worker))["engines"]:
        if engine["role"] == role and engine["pid"]:
            found: dict[str, Any] = engine
            return found
    raise SupervisorError(f"the worker has no {role} engine")


async def engine_pid(node: Node, role: str, worker: str | None = None) -> int:
    """Return the pid of `engine_of`."""
    return int((await engine_of(node, role, worker))["pid"])


@contextlib.asynccontextmanager
async def running(
    config: dict[str, Any] | Path,
    *,
    state: str | None = "healthy",
    hopeless: Callable[[dict[str, Any]], bool] | None = None,
    timeout_s: float = 180.0,
    keep: bool = False,
    folder: Path | None = None,
    start: Sequence[str] = START,
    environment: Mapping[str, str] | None = None,
) -> AsyncIterator[Node]:
    """Start a node and stop it at the end.

    Args:
        config: its content, or a file that is read; the node gets a folder and a port of its own.
        state: of every worker, to wait for. ``hopeless``: whether to give up at the status of one.
        folder: the caller's, instead of a temporary one.
        start: the command line, with ``{config}`` and ``{runtime}`` where these paths go.
        environment: added to this process's.

    Raises:
        SupervisorError: it did not reach ``state`` in ``timeout_s``, that is hopeless, or it did not stop cleanly.
    """
    content: dict[str, Any] = yaml.safe_load(config.read_text()) if isinstance(config, Path) else json.loads(json.dumps(config))
    keep = keep or folder is not None
    folder = folder or Path(tempfile.mkdtemp(prefix="shadowsup-bench-"))
    port = free_port()
    content.setdefault("version", 1)
    content.setdefault("node", {}).update(name=content.get("node", {}).get("name", "bench"), state_dir=str(folder / "state"))
    content.setdefault("gateway", {})["listen"] = f"127.0.0.1:{port}"
    path = folder / "node.yaml"
    path.write_text(yaml.safe_dump(content))
    command = [word.format(config=path, runtime=folder / "run") for word in start]
    node = Node(folder, path, port, folder / "start.log", command, environment or {})
    await node.launch()
    try:
        if state is not None:
            for worker in content["workers"]:
                await node.wait_for(state, worker["name"], timeout_s, hopeless)
        yield node
    finally:
        process = node.process
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
            try:
                await asyncio.wait_for(process.wait(), 60.0)
            except TimeoutError:
                process.kill()
                await process.wait()
                raise SupervisorError(f"the node did not stop within 60 s: {node.tail()}") from None
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)
