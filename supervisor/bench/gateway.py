"""What the gateway adds between an engine and its client: latency for each token, and tokens a second of one core.

Three processes: this one is the stub engine and the supervisor, one is the gateway as it runs on a node, one is the clients. The engine
puts the time of sending into the text of each token, the clients take the difference. Latency is measured at a pace that an engine may
have and compared with the same engine writing the same bytes to the same clients with nothing in between: what is *added* is the
difference of the percentiles. Throughput is tokens for each second of the gateway's own CPU time, so that it means the same on a busy
machine; where the engine sends faster than the gateway writes, tokens of a stream are merged into one event (``events`` counts them).
Where the package ``sglang-router`` is installed, it is measured in the gateway's place, too.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import psutil
import zmq
import zmq.asyncio

from shadowsup.supervisor.bench import machine
from shadowsup.supervisor.bench.failover import Progress
from shadowsup.supervisor.bench.figures import percentiles
from shadowsup.supervisor.bench.gateway_stub import StubEngine
from shadowsup.supervisor.bench.node import free_port
from shadowsup.supervisor.errors import SupervisorError
from shadowsup.wire import engine as wire
from shadowsup.wire.engine import GatewayBeat, Route, Routes, WorkerRoute
from shadowsup.wire.gateway import GatewaySpec

UP_S = 30.0


@dataclass(frozen=True, kw_only=True)
class Target:
    """Where clients connect. ``pid``: of what is between them and the engine; None: nothing."""

    name: str
    host: str
    port: int
    pid: int | None = None


async def measure(steps: int, rate: float, progress: Progress = lambda _: None) -> dict[str, Any]:
    """Return the document.

    Args:
        steps: tokens of each stream in the latency runs; of 32 streams in the throughput runs, four times as many.
        rate: steps a second in the latency runs.
    """
    load = machine.load()
    engine = StubEngine()
    async with contextlib.AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="shadowsup-gw-")))
        server = await asyncio.start_server(engine.serve_http, "127.0.0.1", 0)
        stack.callback(server.close)
        port = server.sockets[0].getsockname()[1]
        targets = [Target(name="direct", host="127.0.0.1", port=port)]
        targets.append(await stack.enter_async_context(_gateway(folder, engine)))
        router = await stack.enter_async_context(_sglang_router(port, progress))
        if router is not None:
            targets.append(router)
        latency, throughput = [], []
        for streams in (1, 32):
            runs = {}
            for target in targets:
                progress(f"latency, {streams} stream{'s' * (streams > 1)}: {target.name}")
                runs[target.name] = await _run(engine, target, streams, steps, rate)
            latency.append({"streams": streams, "runs": runs, "added_ms": _added(runs)})
        for streams in (32, 256):
            for target in targets:
                progress(f"throughput, {streams} streams: {target.name}")
                throughput.append(
                    {"streams": streams, "target": target.name, **await _run(engine, target, streams, 128 * steps // streams, 0.0)}
                )
        memory = {target.name: psutil.Process(target.pid).memory_info().rss for target in targets if target.pid is not None}
    result = {"plan": {"steps": steps, "steps_per_s": rate}, "latency": latency, "throughput": throughput, "rss": memory}
    return machine.document("gateway", load, result)


def _added(runs: dict[str, dict[str, Any]]) -> dict[str, dict[str, float]]:
    direct = runs["direct"]["late_ms"]
    return {
        name: {rank: round(run["late_ms"][rank] - direct[rank], 3) for rank in ("p50", "p99")}
        for name, run in runs.items()
        if name != "direct"
    }


async def _run(engine: StubEngine, target: Target, streams: int, steps: int, rate: float) -> dict[str, Any]:
    """Send ``steps`` tokens to each of ``streams`` clients of ``target``; ``rate`` 0: as fast as they are taken."""
    clients = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "shadowsup.supervisor.bench.gateway_client", target.host, str(target.port), str(streams)),
        stdout=asyncio.subprocess.PIPE,
        limit=1 << 30,
    )
    try:
        async with asyncio.timeout(UP_S):
            await engine.wait_for(streams)
        used_s, started_s = machine.cpu_s(target.pid) if target.pid else 0.0, time.monotonic()
        for step in range(steps):
            await engine.step(last=step == steps - 1)
            if rate:
                await asyncio.sleep(max(0.0, started_s + (step + 1) / rate - time.monotonic()))
        output, _ = await clients.communicate()
    except BaseException:
        clients.kill()
        await clients.wait()
        raise
    took_s = time.monotonic() - started_s
    used_s = machine.cpu_s(target.pid) - used_s if target.pid else 0.0
    read = msgspec.json.decode(output)
    tokens = len(read["late"])
    if tokens != streams * steps:
        raise SupervisorError(f"{target.name}: {tokens} tokens came of {streams * steps}")
    return {
        "tokens": tokens,
        "events": read["events"],
        "late_ms": percentiles([ns / 1e6 for ns in read["late"]]),
        "tokens_per_s": round(tokens / took_s),
        "cpu_s": round(used_s, 3),
        "tokens_per_cpu_s": round(tokens / used_s) if used_s else None,
    }


@contextlib.asynccontextmanager
async def _gateway(folder: Path, engine: StubEngine) -> AsyncIterator[Target]:
    """Run a gateway whose only engine is ``engine``."""
    path = str(folder / "engine.sock")
    server = await asyncio.start_unix_server(engine.serve_link, path)
    context = zmq.asyncio.Context()
    router = context.socket(zmq.ROUTER)
    router.setsockopt(zmq.LINGER, 0)
    endpoint = f"ipc://{folder}/beat.sock"
    router.bind(endpoint)
    with socket.create_server(("127.0.0.1", 0), backlog=1024) as listener:
        spec = GatewaySpec(
            node="bench", runtime_dir=str(folder), listen_fds=(listener.fileno(),), beat_endpoint=endpoint, max_inflight=10_000
        )
        (folder / "spec.json").write_bytes(msgspec.json.encode(spec))
        process = subprocess.Popen(
            [sys.executable, "-m", "shadowsup.supervisor.gateway", str(folder / "spec.json")],
            pass_fds=[listener.fileno()],
            stderr=subprocess.DEVNULL,
        )
        try:
            async with asyncio.timeout(UP_S):
                await router.recv_multipart()
                row = WorkerRoute(
                    worker="bench",
                    served_name="m",
                    kind="link",
                    state="healthy",
                    epoch=1,
                    engines=(Route(engine="bench.1", socket=path),),
                    give_up_after_s=60.0,
                )
                await router.send_multipart([b"gateway", wire.encode(Routes(version=1, workers=(row,)))])
                while True:
                    report = wire.decode_report((await router.recv_multipart())[1])
                    if isinstance(report, GatewayBeat) and report.epochs:
                        break
            yield Target(name="gateway", host="127.0.0.1", port=listener.getsockname()[1], pid=process.pid)
        finally:
            process.terminate()
            process.wait(10)
            async with asyncio.timeout(UP_S):
                await engine.left.wait()
            server.close()
            router.close()
            context.term()


@contextlib.asynccontextmanager
async def _sglang_router(engine_port: int, progress: Progress) -> AsyncIterator[Target | None]:
    """Run sglang-router in front of the engine's HTTP, if it is installed and comes up; else yield None and say why."""
    if importlib.util.find_spec("sglang_router") is None:
        progress("sglang-router is not installed: left out")
        yield None
        return
    port, metrics = free_port(), free_port()
    command = [sys.executable, "-m", "sglang_router.launch_router", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--worker-urls", f"http://127.0.0.1:{engine_port}", "--policy", "round_robin", "--prometheus-port", str(metrics)]
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, stdin=subprocess.DEVNULL)
        try:
            up = await _serves(process, port)
            if not up:
                output.seek(0)
                progress(f"sglang-router did not come up, left out: {output.read().decode(errors='replace').strip()[-500:]}")
            yield Target(name="sglang-router", host="127.0.0.1", port=port, pid=process.pid) if up else None
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


async def _serves(process: subprocess.Popen[bytes], port: int) -> bool:
    """Wait until the router says that its worker is healthy; False when it ends or takes too long."""
    deadline = time.monotonic() + UP_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            await asyncio.sleep(0.1)
            continue
        writer.write(b"GET /readiness HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        answer = await reader.readline()
        writer.close()
        if b" 200 " in answer:
            return True
        await asyncio.sleep(0.1)
    return False
