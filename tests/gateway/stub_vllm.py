"""A server that answers as vLLM's does, with our plugin in it: deterministic tokens, the same events, and the ability to die anywhere."""

from __future__ import annotations

import asyncio
import base64
import json
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web

from shadowsup.wire import staged
from shadowsup.wire.framing import Unpacker, pack
from shadowsup.wire.seal import key_of, ours, sealed

PROMPT = [11, 12, 13]
REASONING = ["Let", " me", " think"]
TOOL = ['{"ci', 'ty": ', '"Ulm"}']
TEXT = ["Hel", "lo", "", " wör", "ld", "\n\n", '"token_ids":[1]', "!"]
"""The third token is held back by the parser: it is an event only because its id was asked for."""


def unpacked(text: str) -> list[int]:
    data = base64.b64decode(text)
    return list(struct.unpack(f"<{len(data) // 4}I", data))


def _function(index: int, arguments: str, name: str | None = None, call_id: str | None = None) -> dict[str, Any]:
    if name is None:
        return {"tool_calls": [{"index": index, "function": {"arguments": arguments}}]}
    return {"tool_calls": [{"id": call_id, "type": "function", "index": index, "function": {"name": name, "arguments": arguments}}]}


@dataclass
class StubVllm:
    """One engine's server.

    ``number`` tells engines apart: it is in ``created`` and in the ids of tool calls, which real engines draw anew, too.
    """

    folder: Path
    number: int
    asked: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    gates: asyncio.Queue[str] | None = None
    """Where set, each event waits for a word: "go", "die" (the connection breaks), "half" (after half of it)."""
    fails: list[tuple[int, dict[str, Any]]] = field(default_factory=list)
    """Answers to the next requests in place of what they ask for."""
    abort_after: int | None = None
    """After so many events every stream ends as in a server that shuts down."""
    left: asyncio.Event = field(default_factory=asyncio.Event)
    cut: set[str] = field(default_factory=set)
    """Requests that the first engine broke off at byte ``X-Cut``. For them it is dead from then on, unless it ``revives``."""
    breaks: asyncio.Event = field(default_factory=asyncio.Event)
    """When it dies; what it had sent until then has reached the gateway."""
    revives: bool = False
    dead: bool = False
    spared: asyncio.Event = field(default_factory=asyncio.Event)
    """Until then requests with ``X-Slow`` wait."""
    without_plugin: bool = False
    lies: bool = False
    """Replays other text than was delivered."""
    seen: set[tuple[str, int]] = field(default_factory=set)
    ahead: dict[str, asyncio.Queue[staged.ToServer]] = field(default_factory=dict)
    """By key: requests that wait, and what is said of each."""
    told: list[staged.ToServer] = field(default_factory=list)
    ahead_fault: str = ""
    """What goes wrong with requests that wait: "refuses", "another prompt", "forgets", "breaks" or "lies"."""

    def __post_init__(self) -> None:
        self.breaks.set()

    async def start(self) -> StubVllm:
        app = web.Application(client_max_size=1 << 26)
        app.router.add_route("*", "/{path:.*}", self._answer)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.05)
        await self._runner.setup()
        self.path = str(self.folder / f"vllm{self.number}.sock")
        await web.UnixSite(self._runner, self.path).start()
        self._line = await asyncio.start_unix_server(self._listen, staged.socket_of(self.path))
        return self

    @property
    def upstream(self) -> str:
        return f"unix:{self.path}"

    def die(self) -> None:
        """Break every connection and answer nobody any more."""
        self.dead = True
        server = self._runner.server
        for connection in list(server.connections) if isinstance(server, web.Server) else ():
            if connection.transport is not None:
                connection.transport.abort()

    async def stop(self) -> None:
        """As after a SIGKILL."""
        self.die()
        self._line.close()
        await self._runner.cleanup()
        Path(self.path).unlink(missing_ok=True)

    async def _answer(self, http: web.Request) -> web.StreamResponse:
        raw = await http.read()
        body = json.loads(raw) if raw and http.content_type == "application/json" else {}
        self.asked.append(body)
        self.headers.append(dict(http.headers))
        if self.dead:
            assert http.transport is not None
            http.transport.abort()
            return web.Response()
        if "X-Poison" in http.headers:
            self.die()
            return web.Response()
        if "X-Slow" in http.headers:
            await self.spared.wait()
        if self.fails:
            status, error = self.fails.pop(0)
            return web.json_response(error, status=status)
        xargs = body.get("vllm_xargs") or {}
        xargs = xargs if isinstance(xargs, dict) else {}
        if any(map(ours, xargs)) and not sealed(key_of(self.folder), xargs):
            return web.json_response({"error": {"message": "not sealed", "type": "BadRequestError", "code": 400}}, status=400)
        if "shadowsup_request" in xargs:
            once = (xargs["shadowsup_request"], xargs["shadowsup_epoch"])
            if once in self.seen:
                return web.json_response({"error": {"message": "a duplicate", "type": "Conflict", "code": 409}}, status=409)
            self.seen.add(once)
        if not body.get("stream"):
            return await self._plain(http, body)
        if "shadowsup_stage" in xargs:
            return await self._wait(http, body, xargs)
        events = self.events(http.path.endswith("chat/completions"), body, http.headers["X-Request-Id"])
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(http)
        assert http.transport is not None
        if self.gates is None:
            cut, rid = int(http.headers.get("X-Cut", -1)), http.headers["X-Request-Id"]
            data = b"".join(events)
            if rid in self.cut and not self.revives:
                http.transport.abort()
                return response
            if 0 <= cut < len(data) and self.number == 1 and rid not in self.cut:
                self.cut.add(rid)
                if cut:
                    await response.write(data[:cut])
                await self.breaks.wait()
                http.transport.abort()
                return response
            await response.write(data)
            await response.write_eof()
            return response
        try:
            for event in events:
                match await self.gates.get():
                    case "go":
                        await response.write(event)
                    case "half":
                        self.dead = True
                        await response.write(event[: len(event) // 2])
                        http.transport.abort()
                        return response
                    case _:
                        self.dead = True
                        http.transport.abort()
                        return response
        except asyncio.CancelledError:
            self.left.set()
            raise
        await response.write_eof()
        return response

    async def _wait(self, http: web.Request, body: dict[str, Any], xargs: dict[str, Any]) -> web.StreamResponse:
        if self.ahead_fault == "refuses":
            return web.json_response({"error": {"message": "no", "type": "x", "code": 400}}, status=400)
        assert unpacked(xargs["shadowsup_prompt"]) == PROMPT and not xargs.keys() & {"shadowsup_output", "shadowsup_pieces"}
        key, chat = xargs["shadowsup_stage"], http.path.endswith("chat/completions")
        whole = self.events(chat, {**body, "vllm_xargs": {}}, http.headers["X-Request-Id"])
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(http)
        queue = self.ahead[key] = asyncio.Queue()
        try:
            if chat:
                await response.write(whole[0].replace(b"[11,", b"[12,") if self.ahead_fault == "another prompt" else whole[0])
            events, at = whole[chat:], 0
            while True:
                said = await queue.get()
                ids = list(struct.unpack(f"<{len(said.output) // 4}I", said.output))
                pieces = struct.unpack(f"<{len(said.pieces) // 4}I", said.pieces)
                assert ids == list(range(100 + at, 100 + at + len(ids))) and sum(pieces) == len(ids)
                if self.ahead_fault == "breaks" and isinstance(said, staged.Go):
                    assert http.transport is not None
                    http.transport.abort()
                    return response
                again = b"".join(events[at : at + len(ids)])  # what a real one says in one event
                await response.write(again.replace(b"Hel", b"Nay") if self.ahead_fault == "lies" else again)
                at += len(ids)
                if isinstance(said, staged.Go):
                    self.seen.add((said.request, said.epoch))
                    await response.write(b"".join(events[at:]))
                    await response.write_eof()
                    return response
        finally:
            del self.ahead[key]

    async def _listen(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        unpacker = Unpacker()
        while data := await reader.read(1 << 16):
            for frame in unpacker.feed(data):
                for message in staged.decode_for_server(frame):
                    self.told.append(message)
                    if self.ahead_fault == "forgets" or message.key not in self.ahead:
                        writer.write(pack(staged.encode([staged.Unknown(key=message.key)])))
                    else:
                        self.ahead[message.key].put_nowait(message)
        writer.close()

    async def _plain(self, http: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if self.gates is not None:
            try:
                word = await self.gates.get()
            except asyncio.CancelledError:
                self.left.set()
                raise
            if word == "die":
                self.dead = True
                assert http.transport is not None
                http.transport.abort()
                return web.Response()
            if word == "abort":
                return web.json_response({"choices": [{"index": 0, "finish_reason": "abort", "message": {"content": "Hel"}}]})
        if "messages" not in body:
            return web.json_response({"path": http.path, "from": self.number})
        choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "".join(TEXT)}}
        usage = {"prompt_tokens": len(PROMPT), "completion_tokens": len(TEXT), "total_tokens": len(PROMPT) + len(TEXT)}
        return web.json_response({"id": "x", "created": self.number, "choices": [choice], "usage": usage})

    # What it says

    def events(self, chat: bool, body: dict[str, Any], rid: str) -> list[bytes]:
        head: dict[str, Any] = {
            "id": ("chatcmpl-" if chat else "cmpl-") + rid,
            "object": "chat.completion.chunk" if chat else "text_completion",
            "created": 1000 + self.number,
            "model": body["model"],
        }
        wants_ids = bool(body.get("return_token_ids"))
        deltas = self._chat_deltas(body) if chat else [{"text": text} for text in TEXT]
        xargs = body.get("vllm_xargs")
        ours = xargs if isinstance(xargs, dict) and not self.without_plugin else {}
        done, several = unpacked(ours.get("shadowsup_output", "")), unpacked(ours.get("shadowsup_pieces", ""))
        assert sum(several) == len(done) and done == list(range(100, 100 + len(done)))
        events: list[bytes] = []
        if chat:
            opening = {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
            events.append(_event(head | {"choices": [opening], "prompt_token_ids": PROMPT if wants_ids else None}))
        if done:
            events.append(self._choice(head, _merged(deltas[: len(done)], self.lies), done, 0, len(deltas), wants_ids, chat))
        for at in range(len(done), len(deltas)):
            if not wants_ids and deltas[at] == {}:
                continue
            if self.abort_after is not None and at >= self.abort_after:
                choice = {"index": 0, "delta": {}, "finish_reason": "abort", "token_ids": []}
                return [*events, _event(head | {"choices": [choice]}), b"data: [DONE]\n\n"]
            events.append(self._choice(head, deltas[at], [100 + at], at, len(deltas), wants_ids, chat))
        if (body.get("stream_options") or {}).get("include_usage"):
            usage = {"prompt_tokens": len(PROMPT), "total_tokens": len(PROMPT) + len(deltas), "completion_tokens": len(deltas)}
            events.append(_event(head | {"choices": [], "usage": usage}))
        return [*events, b"data: [DONE]\n\n"]

    def _chat_deltas(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        deltas: list[dict[str, Any]] = [{"content": text} if text else {} for text in TEXT]
        if body.get("include_reasoning") is not None:
            deltas = [{"reasoning": text} for text in REASONING] + deltas
        if body.get("tools"):
            first = _function(0, "", "weather", f"call-{self.number}")
            second = _function(1, "{}", "time", f"call-{self.number}b")
            deltas += [{}, first, *(_function(0, text) for text in TOOL), second]
        return deltas

    def _choice(
        self, head: dict[str, Any], delta: dict[str, Any], ids: list[int], at: int, total: int, wants_ids: bool, chat: bool
    ) -> bytes:
        last = at + len(ids) == total
        choice: dict[str, Any] = {"index": 0} | ({"delta": delta} if chat else delta)
        choice |= {"logprobs": None, "finish_reason": "stop" if last else None, "token_ids": ids if wants_ids else None}
        if not chat and at == 0:
            choice["prompt_token_ids"] = PROMPT if wants_ids else None
        return _event(head | {"choices": [choice]})


def _merged(deltas: list[dict[str, Any]], lies: bool) -> dict[str, Any]:
    """One delta that says all of ``deltas``, as the plugin makes it."""
    whole: dict[str, Any] = {}
    calls: dict[int, dict[str, Any]] = {}
    for delta in deltas:
        for key, value in delta.items():
            if key != "tool_calls":
                whole[key] = whole.get(key, "") + value
                continue
            for call in value:
                known = calls.setdefault(call["index"], call | {"function": {"arguments": ""}})
                known["function"] |= {k: v for k, v in call["function"].items() if k == "name"}
                known["function"]["arguments"] += call["function"]["arguments"]
    if calls:
        whole["tool_calls"] = list(calls.values())
    if lies:
        whole = dict.fromkeys(whole, "other")
    return whole


def _event(value: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode() + b"\n\n"
