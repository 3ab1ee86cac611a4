"""Many engines in one process: ``python -m shadowsup.supervisor.bench.peers RUNTIME_DIR COUNT PERIOD_S``.

Speaks for the engines whose processes only sleep (`shadowsup.supervisor.bench.cost`): finds their specs, dials the supervisor with a real
socket each, parks, obeys `Promote`, and from then on beats as a busy engine does, each at its own phase of the period. Runs until it is
terminated.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
from pathlib import Path

import msgspec
import zmq
import zmq.asyncio

from shadowsup.supervisor.paths import NodePaths
from shadowsup.wire import engine as wire
from shadowsup.wire import link
from shadowsup.wire.engine import Beat, EngineSpec, EngineState, KvCounts, Phase, Promote, Promoted
from shadowsup.wire.framing import pack
from shadowsup.wire.link import Hello

LOOK_S = 0.05


class Peer:
    """One engine's end of the beats, and of the link to the gateway."""

    def __init__(self, context: zmq.asyncio.Context, spec: EngineSpec) -> None:
        self._spec = spec
        self._socket = context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.ROUTING_ID, spec.engine.encode())
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.connect(spec.beat_endpoint)
        self._epoch = 0
        self._step = 0

    async def beat(self) -> None:
        active = self._epoch > 0
        self._step += active
        now_s = time.monotonic()
        await self._socket.send(
            wire.encode(
                Beat(
                    engine=self._spec.engine,
                    pid=os.getpid(),
                    sent_s=now_s,
                    state=EngineState.ACTIVE if active else EngineState.PARKED,
                    phase=Phase.DECODE if active else Phase.PARKED,
                    epoch=self._epoch,
                    step=self._step,
                    inflight=8 * active,
                    queued=0,
                    last_step_s=now_s if active else 0.0,
                    tokens_total=8 * self._step,
                    since_s=now_s - 0.01 if active else 0.0,
                    gap_s=0.01 + 0.001 * (self._step % 7) if active else 0.0,
                    gap_phase=Phase.DECODE if active else Phase.IDLE,
                    gap_tokens=8 * active,
                    kv=KvCounts(blocks=4096, valid=self._step % 4096, free=0, quarantined=0, reserve=32),
                )
            )
        )

    async def obey(self) -> None:
        """Take orders; of those, only a promotion changes what a sleeping engine says."""
        while True:
            order = wire.decode_order(await self._socket.recv())
            if isinstance(order, Promote):
                self._epoch = order.epoch
                report = Promoted(
                    engine=self._spec.engine, epoch=order.epoch, header_s=0.0, map_s=0.0, index_s=0.0, blocks_kept=0, blocks_dropped=0
                )
                await self._socket.send(wire.encode(report))
                await self.beat()

    async def serve_link(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        state = EngineState.ACTIVE if self._epoch else EngineState.PARKED
        hello = Hello(worker=self._spec.worker, engine=self._spec.engine, state=state, epoch=self._epoch, model="m", max_context=4096)
        writer.write(pack(link.encode([hello])))
        with contextlib.suppress(ConnectionError):
            await reader.read()
        writer.close()


async def main(runtime: Path, count: int, period_s: float) -> None:
    """Find ``count`` engines and be them."""
    context = zmq.asyncio.Context()
    known: dict[str, Peer] = {}
    folder = NodePaths(runtime=runtime, state=runtime).engines
    async with asyncio.TaskGroup() as tasks:
        while len(known) < count:
            for path in sorted(folder.glob("*.json")):
                if path.name not in known:
                    spec = msgspec.json.decode(path.read_bytes(), type=EngineSpec)
                    peer = known[path.name] = Peer(context, spec)
                    await asyncio.start_unix_server(peer.serve_link, spec.link_socket)
                    await peer.beat()
                    tasks.create_task(peer.obey())
            await asyncio.sleep(LOOK_S)
        due_s = time.monotonic()
        while True:
            for peer in known.values():
                due_s += period_s / count
                await asyncio.sleep(max(0.0, due_s - time.monotonic()))
                await peer.beat()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])))
