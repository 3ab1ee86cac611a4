"""The clients of the gateway's benchmark: ``python -m shadowsup.supervisor.bench.gateway_client HOST PORT STREAMS``.

A process of its own, on plain sockets so that it costs little: it reads every stream to its end and prints when each token came, in ns
after it was sent.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Any

from shadowsup.supervisor.bench.gateway_stub import STAMP

_MARKER = b'"delta":{"content":"'


def stamps(event: bytes) -> list[int]:
    """Return the times in the text of one event: several where tokens were merged on their way, none where it has no text."""
    start = event.find(_MARKER)
    if start < 0:
        return []
    text = event[start + len(_MARKER) : event.find(b'"', start + len(_MARKER))]
    return [int(text[at : at + STAMP]) for at in range(0, len(text), STAMP)]


async def read(host: str, port: int, streams: int) -> dict[str, Any]:
    """Read ``streams`` streams; return the latencies in ns and the number of events they came in."""
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": True}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\nConnection: close\r\n"
    request = f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
    late: list[int] = []
    events = 0

    async def one() -> None:
        nonlocal events
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(request)
        rest = b""
        while data := await reader.read(1 << 16):
            now = time.monotonic_ns()
            *whole, rest = (rest + data).split(b"\n\n")
            for event in whole:
                found = stamps(event)
                late.extend(now - sent for sent in found)
                events += bool(found)
        writer.close()

    await asyncio.gather(*(one() for _ in range(streams)))
    return {"late": late, "events": events}


if __name__ == "__main__":
    json.dump(asyncio.run(read(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))), sys.stdout)
