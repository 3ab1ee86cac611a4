"""One answer at a time: the request to the gateway, its stream on stdout, and the node's events beside it for the mark of a failover."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from shadowsup.supervisor.cli.gateway_address import Address
from shadowsup.supervisor.cli.output import dim, plural
from shadowsup.supervisor.errors import SupervisorError
from shadowsup.supervisor.runtime_dir import socket_names

if TYPE_CHECKING:
    import aiohttp

_DATA = b"data: "
_DONE = b"[DONE]"
CONNECT_S = 10.0
_KEY_HINT = "set SHADOWSUP_API_KEY to a key of gateway.api_key_file"


class Cancelled(Exception):
    """Raised when the user has stopped an answer."""


@dataclass
class Conversation:
    """Who is talked to, and what was said. ``options``: of each request. ``model``: the name that clients use."""

    runtime_dir: Path
    address: Address
    key: str | None
    worker: str
    model: str
    options: dict[str, Any] = field(default_factory=dict)
    system: str | None = None
    messages: list[dict[str, str]] = field(default_factory=list)

    def reset(self) -> None:
        """Forget what was said."""
        self.messages.clear()

    def request(self, question: str) -> dict[str, Any]:
        """Return the body of a request for the answer to ``question``."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        messages = [*system, *self.messages, {"role": "user", "content": question}]
        usage = {"stream": True, "stream_options": {"include_usage": True}}
        return {"model": self.model, "messages": messages, **usage, **self.options}


@dataclass
class Statistics:
    """Of one answer. Monotonic seconds; ``pieces``: events with text."""

    began_s: float
    first_s: float | None = None
    last_s: float | None = None
    longest_s: float = 0.0
    pieces: int = 0
    failovers: int = 0
    usage: dict[str, Any] = field(default_factory=dict)

    def piece(self, now_s: float) -> None:
        if self.first_s is None:
            self.first_s = now_s
        elif self.last_s is not None:
            self.longest_s = max(self.longest_s, now_s - self.last_s)
        self.last_s = now_s
        self.pieces += 1

    def line(self) -> str:
        """Return all of it in one line."""
        tokens = int(self.usage.get("completion_tokens") or self.pieces)
        parts = [plural(tokens, "token")]
        if self.first_s is not None and self.last_s is not None:
            if self.last_s > self.first_s and tokens > 1:
                parts.append(f"{(tokens - 1) / (self.last_s - self.first_s):.1f} tokens/s")
            parts.append(f"first after {self.first_s - self.began_s:.2f} s")
            parts.append(f"longest pause {self.longest_s:.2f} s")
        prompt = self.usage.get("prompt_tokens")
        if prompt is not None:
            cached = (self.usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
            parts.append(f"{cached} of {prompt} prompt tokens cached")
        parts.append(plural(self.failovers, "failover"))
        return ", ".join(parts)


def ask(conversation: Conversation, question: str, *, show_stats: bool) -> None:
    """Ask, show the answer as it comes, and add both to the conversation (what came, if it was cancelled).

    Raises:
        Cancelled: Ctrl-C.
        SupervisorError: the gateway cannot be reached, or it answers with an error.
    """
    said: list[str] = []
    stats = Statistics(began_s=time.monotonic())
    try:
        asyncio.run(_answer(conversation, question, said, stats))
    except KeyboardInterrupt:
        raise Cancelled from None
    finally:
        if said:
            click.echo("" if said[-1].endswith("\n") else "\n", nl=False)
            sys.stdout.flush()
            conversation.messages.append({"role": "user", "content": question})
            conversation.messages.append({"role": "assistant", "content": "".join(said)})
    if show_stats:
        click.echo(dim(stats.line()), err=True)


async def _answer(conversation: Conversation, question: str, said: list[str], stats: Statistics) -> None:
    import aiohttp

    def mark(text: str) -> None:
        stats.failovers += 1
        if stats.pieces:
            click.echo(dim(f"⟨{text}⟩"), nl=False, err=not sys.stdout.isatty())
            sys.stdout.flush()

    watching = asyncio.create_task(_watch(conversation.runtime_dir, conversation.worker, mark))
    address = conversation.address
    headers = {"Authorization": f"Bearer {conversation.key}"} if conversation.key else {}
    connector = aiohttp.UnixConnector(address.socket) if address.socket else aiohttp.TCPConnector()
    timeout = aiohttp.ClientTimeout(total=None, connect=CONNECT_S)
    try:
        async with (
            aiohttp.ClientSession(connector=connector, timeout=timeout, read_bufsize=2**20) as session,
            session.post(f"{address.url}/v1/chat/completions", json=conversation.request(question), headers=headers) as response,
        ):
            if response.status != 200:
                raise _error(await response.read(), f"the gateway answers with status {response.status}")
            async for event in _events(response):
                if "error" in event:
                    raise _error(json.dumps(event).encode(), "the answer failed")
                if event.get("usage"):
                    stats.usage = event["usage"]
                for choice in event.get("choices") or []:
                    text = (choice.get("delta") or {}).get("content")
                    if text:
                        stats.piece(time.monotonic())
                        said.append(text)
                        click.echo(text, nl=False)
                        sys.stdout.flush()
    except aiohttp.ClientConnectorError as error:
        raise SupervisorError(
            f"cannot reach the gateway at {address.socket or address.url}: {error.strerror}", "see shadowsup status"
        ) from None
    except (aiohttp.ClientError, TimeoutError) as error:
        raise SupervisorError(f"the answer broke off: {error or type(error).__name__}", "see shadowsup events") from None
    finally:
        watching.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watching


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    """Yield the server-sent events of a stream until its end.

    Raises:
        SupervisorError: it ends without saying so.
    """
    async for line in response.content:
        if not line.startswith(_DATA):
            continue  # a comment that keeps the connection alive, or the line between two events
        data = line[len(_DATA) :].strip()
        if data == _DONE:
            return
        try:
            event = json.loads(data)
        except ValueError:
            raise SupervisorError("the gateway sent something else than JSON", "is it another server?") from None
        if isinstance(event, dict):
            yield event
    raise SupervisorError("the answer broke off", "see shadowsup events")


def _error(body: bytes, otherwise: str) -> SupervisorError:
    try:
        error = json.loads(body)["error"]
        message = str(error["message"]) if isinstance(error, dict) else str(error)
    except (ValueError, KeyError, TypeError):
        message = otherwise
    return SupervisorError(message, _KEY_HINT if "key" in message.lower() else "")


async def _watch(runtime_dir: Path, worker: str, mark: Callable[[str], None]) -> None:
    """Call ``mark`` when an engine of ``worker`` takes over. Events are published as they happen, before the successor's first token."""
    import zmq
    import zmq.asyncio

    context = zmq.asyncio.Context()
    subscriber = context.socket(zmq.SUB)
    try:
        subscriber.setsockopt(zmq.LINGER, 0)
        subscriber.setsockopt(zmq.SUBSCRIBE, b"event")
        subscriber.connect(f"ipc://{runtime_dir / socket_names(runtime_dir)[1]}")
        while True:
            event = json.loads((await subscriber.recv_multipart())[-1])
            if event.get("worker") != worker or event.get("event") != "engine.state":
                continue
            if (event.get("data") or {}).get("state") == "active":
                mark(f"{event.get('engine')} takes over")
    finally:
        subscriber.close()
        context.term()
