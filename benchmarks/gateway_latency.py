"""What the gateway adds between an engine and its client: latency for each token, and tokens a second of one core.

    python benchmarks/gateway_latency.py            prints one JSON object

Three processes: this one is the stub engine and the supervisor, one is the gateway as it runs on a node, one is the client (plain
sockets, so that it costs little). The engine puts the time of sending into the text of each token; the client takes the difference.
Latency is measured at a pace an engine may have (``--rate`` steps a second) and compared with the same engine writing the same bytes to
the same client without a gateway: ``added`` is the difference of the medians. Throughput is tokens for each second of the gateway's own
CPU time, so that it holds on a busy machine, too; where the engine sends faster than the gateway writes, tokens of a stream are merged
into one event (``events`` counts them).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import zmq
import zmq.asyncio

from shadowsup.wire import engine as wire
from shadowsup.wire import link
from shadowsup.wire.engine import EngineState, GatewayBeat, Route, Routes, WorkerRoute
from shadowsup.wire.framing import Unpacker, pack
from shadowsup.wire.gateway import GatewaySpec
from shadowsup.wire.link import Accepted, Hello, Submit, Token

STAMP = 16
"""Characters of a time of sending: nanoseconds of the monotonic clock, padded."""


class Engine:
    """Accepts requests and sends steps when told."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.requests: dict[str, Submit | None] = {}
        self.arrived = asyncio.Condition()
        self.left = asyncio.Event()
        """Set when the gateway hung up."""
        self._chars: dict[str, int] = {}
        self._writer: asyncio.StreamWriter | None = None
        self._direct: list[asyncio.StreamWriter] = []

    async def serve_client(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Take a client without a gateway: what there is to compare with."""
        await reader.readuntil(b"}]")
        async with self.arrived:
            self._direct.append(writer)
            self.requests[f"direct-{len(self._direct)}"] = None
            self.arrived.notify_all()

    def step_direct(self, *, last: bool = False) -> None:
        text = f"{time.monotonic_ns():<{STAMP}d}"
        chunk = b'data: {"id":"chatcmpl-000000000000000000000000","object":"chat.completion.chunk","created":1700000000,"model":"m",'
        chunk += b'"choices":[{"index":0,"delta":{"content":"' + text.encode() + b'"},"logprobs":null,"finish_reason":null}]}\n\n'
        for writer in self._direct:
            writer.write(b"%x\r\n" % len(chunk) + chunk + b"\r\n")
        if last:
            for writer in self._direct:
                writer.close()
            self._direct.clear()
            self.requests.clear()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        hello = Hello(worker="bench", engine="bench.1", state=EngineState.ACTIVE, epoch=1, model="m", max_context=1 << 20)
        writer.write(pack(link.encode([hello])))
        unpacker = Unpacker()
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(1 << 16):
                for payload in unpacker.feed(data):
                    for message in link.decode_to_engine(payload):
                        if isinstance(message, Submit):
                            await self._accept(message)
        writer.close()
        self.left.set()

    async def _accept(self, request: Submit) -> None:
        assert self._writer is not None
        self._writer.write(pack(link.encode([Accepted(rid=request.rid, epoch=1, prompt_ids=(1, 2, 3), cached_tokens=0)])))
        async with self.arrived:
            self.requests[request.rid] = request
            self._chars[request.rid] = 0
            self.arrived.notify_all()

    async def wait_for(self, count: int) -> None:
        async with self.arrived:
            await self.arrived.wait_for(lambda: len(self.requests) == count)

    async def step(self, *, last: bool = False) -> None:
        """One token for each request, in one frame."""
        assert self._writer is not None
        text = f"{time.monotonic_ns():<{STAMP}d}"
        events = []
        for rid in self.requests:
            self._chars[rid] += len(text)
            events.append(Token(rid=rid, epoch=1, ids=(7,), text=text, chars=self._chars[rid], finish_reason="length" if last else None))
        self._writer.write(pack(link.encode(events)))
        await self._writer.drain()
        if last:
            self.requests.clear()


async def client(url: tuple[str, int], streams: int) -> None:
    """Read ``streams`` streams to their end; print latencies in ns as JSON."""
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": True}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    late: list[int] = []
    events = 0
    marker = b'"delta":{"content":"'

    async def one() -> None:
        nonlocal events
        reader, writer = await asyncio.open_connection(*url)
        writer.write(head + body)
        while data := await reader.read(1 << 16):
            now = time.monotonic_ns()
            at = data.find(marker)
            while at >= 0:
                events += 1
                # Text that was merged on its way: each token in it has its own time.
                text, end = at + len(marker), data.find(b'"', at + len(marker))
                late.extend(now - int(data[i : i + STAMP]) for i in range(text, end, STAMP) if data[i : i + STAMP].strip().isdigit())
                at = data.find(marker, end)
        writer.close()

    await asyncio.gather(*(one() for _ in range(streams)))
    json.dump({"late": late, "events": events}, sys.stdout)


@contextlib.asynccontextmanager
async def gateway(folder: Path) -> AsyncIterator[tuple[Engine, tuple[str, int], psutil.Process]]:
    engine = Engine(str(folder / "e.sock"))
    server = await asyncio.start_unix_server(engine.serve, engine.path)
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
        started = time.monotonic()
        process = subprocess.Popen(
            [sys.executable, "-m", "shadowsup.supervisor.gateway", str(folder / "spec.json")],
            pass_fds=[listener.fileno()],
            stderr=subprocess.DEVNULL,
        )
        try:
            await router.recv_multipart()
            print(f"gateway up after {time.monotonic() - started:.2f} s", file=sys.stderr)
            row = WorkerRoute(
                worker="bench",
                served_name="m",
                kind="link",
                state="healthy",
                epoch=1,
                engines=(Route(engine="bench.1", socket=engine.path),),
                give_up_after_s=60.0,
            )
            await router.send_multipart([b"gateway", wire.encode(Routes(version=1, workers=(row,)))])
            while True:
                report = wire.decode_report((await router.recv_multipart())[1])
                if isinstance(report, GatewayBeat) and report.epochs:
                    break
            yield engine, listener.getsockname(), psutil.Process(process.pid)
        finally:
            process.terminate()
            process.wait(10)
            await engine.left.wait()
            server.close()
            router.close()
            context.term()


async def measure(
    engine: Engine, url: tuple[str, int], process: psutil.Process | None, streams: int, steps: int, rate: float
) -> dict[str, Any]:
    """Send ``steps`` tokens to each of ``streams`` clients; ``rate`` 0: as fast as they are taken; no ``process``: no gateway."""
    reader = await asyncio.create_subprocess_exec(
        sys.executable, __file__, "--client", json.dumps(url), str(streams), stdout=asyncio.subprocess.PIPE, limit=1 << 30
    )
    await engine.wait_for(streams)
    cpu, started = _cpu_s(process), time.monotonic()
    for step in range(steps):
        last = step == steps - 1
        if process is None:
            engine.step_direct(last=last)
        else:
            await engine.step(last=last)
        if rate:
            await asyncio.sleep(max(0.0, started + (step + 1) / rate - time.monotonic()))
    output, _ = await reader.communicate()
    cpu = _cpu_s(process) - cpu
    read = msgspec.json.decode(output)
    late = sorted(ns / 1e6 for ns in read["late"])
    assert len(late) == streams * steps, (len(late), streams * steps)
    result = {"streams": streams, "tokens": len(late), "events": read["events"], "steps_per_s": rate, "gateway_cpu_s": round(cpu, 3)}
    result |= {"p50_ms": round(statistics.median(late), 3), "p99_ms": round(late[int(len(late) * 0.99)], 3)}
    result["tokens_per_cpu_s"] = round(len(late) / cpu) if cpu else None
    return result


def _cpu_s(process: psutil.Process | None) -> float:
    """Return CPU seconds used so far, from schedstat: cpu_times counts in ticks of 10 ms."""
    return 0.0 if process is None else int(Path(f"/proc/{process.pid}/schedstat").read_text().split()[0]) / 1e9


async def compare(engine: Engine, url: tuple[str, int], process: psutil.Process, streams: int, steps: int, rate: float) -> dict[str, Any]:
    """Measure with the gateway and without."""
    server = await asyncio.start_server(engine.serve_client, "127.0.0.1", 0)
    direct = await measure(engine, server.sockets[0].getsockname(), None, streams, steps, rate)
    server.close()
    through = await measure(engine, url, process, streams, steps, rate)
    return through | {"direct_p50_ms": direct["p50_ms"], "added_p50_ms": round(through["p50_ms"] - direct["p50_ms"], 3)}


async def main(rate: float) -> None:
    with tempfile.TemporaryDirectory(prefix="gwb-") as folder:
        async with gateway(Path(folder)) as (engine, url, process):
            results = [
                await compare(engine, url, process, 1, 500, rate),
                await compare(engine, url, process, 32, 300, rate),
                await measure(engine, url, process, 32, 2000, 0.0),
                await measure(engine, url, process, 256, 200, 0.0),
            ]
            memory = process.memory_info().rss
    json.dump({"cpus": os.cpu_count(), "load": os.getloadavg()[0], "gateway_rss": memory, "runs": results}, sys.stdout, indent=1)
    print()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Latency and throughput of the gateway, with a stub engine.")
    parser.add_argument("--rate", type=float, default=50.0, help="steps a second in the latency runs")
    parser.add_argument("--client", nargs=2, metavar=("URL", "STREAMS"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.client:
        asyncio.run(client(tuple(json.loads(given.client[0])), int(given.client[1])))
    else:
        asyncio.run(main(given.rate))
