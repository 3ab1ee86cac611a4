"""Answers of a real vLLM over a failover: the same tokens, text, tool calls, probabilities and counts as if nothing had happened."""

from __future__ import annotations

import asyncio
import json
import re
import secrets
from array import array
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families
from vllm_world import core_of, python

from shadowsup.supervisor.bench.node import Node, engine_of
from shadowsup.supervisor.gateway import held_request
from shadowsup.supervisor.gateway.answer import Answer
from shadowsup.supervisor.gateway.answer_events import Misstep, Retelling
from shadowsup.supervisor.gateway.held_request import Asked, little_endian
from shadowsup.supervisor.gateway.sse import EventSplitter
from shadowsup.wire import staged
from shadowsup.wire.framing import pack
from shadowsup.wire.seal import SEAL, key_of, seal

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.e2e,
    pytest.mark.timeout(240),
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.skipif(python() is None, reason="no interpreter with vLLM (SHADOWSUP_VLLM_PYTHON)"),
]

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
END_OF_THOUGHT = "259"
NO_THOUGHTS = {"chat_template_kwargs": {"enable_thinking": False}}
MESSAGES = [{"role": "user", "content": "hello there"}]
OBJECT = {
    "type": "object",
    "properties": {
        "color": {"enum": ["red", "green", "blue"]},
        "marks": {"type": "array", "items": {"enum": ["x", "y"]}, "minItems": 6, "maxItems": 8},
    },
    "required": ["color", "marks"],
    "additionalProperties": False,
}
SCHEMA = {"response_format": {"type": "json_schema", "json_schema": {"name": "it", "schema": OBJECT}}}
TOOLS = [{"type": "function", "function": {"name": "paint", "parameters": OBJECT}}]
A_CALL = r'<tool_call>\{"name": "paint", "arguments": \{"color": "(red|blue)", "marks": \["[xy]{9}"\]\}\}</tool_call>'


def packed(ids: list[int]) -> str:
    return held_request.packed(array("I", ids))


def chat(**more: Any) -> tuple[str, dict[str, Any]]:
    return CHAT, {"messages": MESSAGES, "max_tokens": 40} | more


def text(**more: Any) -> tuple[str, dict[str, Any]]:
    return TEXT, {"prompt": "hello", "max_tokens": 40, "ignore_eos": True} | more


SEEDED = {"temperature": 1.0, "seed": 5}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "greedy": chat(temperature=0, ignore_eos=True),
    "prompt of ids": text(prompt=[5, 6, 7], temperature=0),
    "seeded": text(**SEEDED),
    "seeded, top-k and top-p": text(temperature=0.9, top_k=20, top_p=0.9, seed=3),
    "presence and frequency penalties": text(temperature=0, presence_penalty=1.5, frequency_penalty=1.5),
    "repetition penalty": text(temperature=0, repetition_penalty=1.7),
    "min_tokens": text(**SEEDED, ignore_eos=False, min_tokens=20, logit_bias={"257": 9}),
    "bad_words": text(temperature=0, bad_words=["w300"]),
    "logprobs of a chat": chat(temperature=0, logprobs=True, top_logprobs=2, ignore_eos=True, **NO_THOUGHTS),
    "logprobs of a completion": text(temperature=0, logprobs=2),
    "reasoning": chat(**SEEDED, logit_bias={END_OF_THOUGHT: 5}, ignore_eos=True),
    "hidden reasoning": chat(**SEEDED, logit_bias={END_OF_THOUGHT: 5}, ignore_eos=True, include_reasoning=False),
    "JSON schema": chat(**SEEDED, **SCHEMA, **NO_THOUGHTS, max_tokens=400),
    "JSON schema after reasoning": chat(**SEEDED, **SCHEMA, logit_bias={END_OF_THOUGHT: 5}, max_tokens=400),
    "regex": text(**SEEDED, structured_outputs={"regex": "(ab|cd){10,12}"}, ignore_eos=False),
    "tool choice required": chat(**SEEDED, tools=TOOLS, tool_choice="required", max_tokens=400, **NO_THOUGHTS),
    "a named tool": chat(**SEEDED, tools=TOOLS, tool_choice={"type": "function", "function": {"name": "paint"}}, max_tokens=400),
    "tool calls in the text": chat(
        **SEEDED, tools=TOOLS, structured_outputs={"regex": f"so({A_CALL}){{2}}"}, max_tokens=400, **NO_THOUGHTS
    ),
    "usage of each event": chat(temperature=0, stream_options={"include_usage": True, "continuous_usage_stats": True}, ignore_eos=True),
}


@dataclass
class Told:
    """What a client has heard in the end."""

    texts: dict[str, str] = field(default_factory=dict)
    finish: tuple[str | None, Any] = (None, None)
    logprobs: list[Any] = field(default_factory=list)
    usage: tuple[int, int] = (0, 0)
    ids: list[int] = field(default_factory=list)

    def event(self, value: dict[str, Any]) -> None:
        if usage := value.get("usage"):
            self.usage = (usage["prompt_tokens"], usage["completion_tokens"])
        for choice in value["choices"]:
            self.ids += choice.get("token_ids") or []
            if choice.get("finish_reason"):
                self.finish = (choice["finish_reason"], choice.get("stop_reason"))
            self._add("text", choice.get("text"))
            for name, said in (choice.get("delta") or {}).items():
                for call in said if name == "tool_calls" else ():
                    self._add(f"calls {call['index']}", "1" if call.get("id") else "")
                    self._add(f"name {call['index']}", (call.get("function") or {}).get("name"))
                    self._add(f"arguments {call['index']}", (call.get("function") or {}).get("arguments"))
                self._add(name, said if name != "tool_calls" else None)
            logprobs = choice.get("logprobs") or {}
            self.logprobs += logprobs.get("content") or []
            if "tokens" in logprobs:
                columns = (logprobs[name] for name in ("tokens", "text_offset", "token_logprobs"))
                self.logprobs += [list(row) for row in zip(*columns, strict=True)]

    def _add(self, name: str, said: str | None) -> None:
        if said:
            self.texts[name] = self.texts.get(name, "") + said


class Engine:
    """The server of the active engine, asked as the gateway asks it."""

    def __init__(self, session: aiohttp.ClientSession, path: str) -> None:
        self._session = session
        self._path = path

    async def tell_ahead(self, path: str, asked: Asked, answer: Answer, told: Told, until: int | None = None) -> None:
        """As `tell`, but have the request wait there first, tell it half of the output, and only then let it go on."""
        replay, key = answer.replay(), secrets.token_hex(8)
        assert replay is not None
        headers = {"Content-Type": "application/json", "X-Request-Id": key}
        ahead, events, half = Retelling(replay.prompt_ids), EventSplitter(), len(replay.pieces) // 2
        first, last = replay.pieces[:half], replay.pieces[half:]
        parts = [(replay.output_ids[: sum(first)], first), (replay.output_ids[sum(first) :], last)]
        (half_ids, half_pieces), (rest_ids, rest_pieces) = [tuple(little_endian(one) for one in part) for part in parts]
        body = asked.written_ahead(key, key, replay.prompt_ids)
        async with (
            line_to(self._path) as (reader, writer),
            self._session.post("http://localhost" + path, data=body, headers=headers) as response,
        ):
            assert response.status == 200, await response.text()
            while True:  # until it waits
                writer.write(pack(staged.encode([staged.Told(key=key, output=half_ids, pieces=half_pieces)])))
                writer.write(pack(staged.encode([staged.Told(key="nobody", output=b"", pieces=b"")])))
                frames = [frame async for frame in _frames(reader, b"nobody")]
                if key.encode() not in b"".join(frames):
                    break
                await asyncio.sleep(0.01)
            while len(ahead.said.ids) < sum(first):
                for event in events.feed(await response.content.readany()):
                    ahead.take(event)
            writer.write(pack(staged.encode([staged.Go(key=key, request=key, epoch=1, output=rest_ids, pieces=rest_pieces)])))
            answer.next_engine(ahead)
            async for chunk in response.content.iter_any():
                for event in events.feed(chunk):
                    said = answer.take(event)
                    if said and not answer.done:
                        told.event(json.loads(said.removeprefix(b"data: ")))
                    if until is not None and answer.output_tokens >= until:
                        return

    async def tell(self, path: str, asked: Asked, answer: Answer, told: Told, until: int | None = None) -> None:
        """Have it go on with ``answer``, and hang up after ``until`` tokens."""
        rid = secrets.token_hex(8)
        replay = answer.replay()
        answer.next_engine()
        body = asked.written_for(rid, 1, replay)
        headers = {"Content-Type": "application/json", "X-Request-Id": rid}
        events = EventSplitter()
        async with self._session.post("http://localhost" + path, data=body, headers=headers) as response:
            assert response.status == 200, await response.text()
            async for chunk in response.content.iter_any():
                for event in events.feed(chunk):
                    said = answer.take(event)
                    if said and not answer.done:
                        told.event(json.loads(said.removeprefix(b"data: ")))
                    if until is not None and answer.output_tokens >= until:
                        return


@asynccontextmanager
async def line_to(path: str) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """Yield a connection on which an engine is told what becomes of what waits there."""
    reader, writer = await asyncio.open_unix_connection(staged.socket_of(path))
    try:
        yield reader, writer
    finally:
        writer.close()
        await writer.wait_closed()


async def _frames(reader: asyncio.StreamReader, last: bytes) -> AsyncIterator[bytes]:
    """Yield what is answered up to the answer with ``last`` in it."""
    said = b""
    while last not in said:
        said = await reader.read(1 << 16)
        assert said
        yield said


async def engine(node: Node) -> tuple[aiohttp.ClientSession, Engine]:
    active = await engine_of(node, "active")
    session = aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(node.runtime_dir / f"link-{active['id']}.sock")))
    return session, Engine(session, str(node.runtime_dir / f"link-{active['id']}.sock"))


def asked_for(engine: Engine, path: str, body: dict[str, Any]) -> Asked:
    given = {"model": "chat", "stream": True, "return_token_ids": True, "stream_options": {"include_usage": True}} | body
    asked = Asked(path == CHAT, given, b"", key_of(Path(engine._path).parent))
    assert asked.followed, asked.obstacle
    return asked


async def undisturbed(engine: Engine, path: str, body: dict[str, Any]) -> Told:
    """What a server says that gives each token an event of its own. Those that a busy one puts into one are one piece for its parsers,
    which may say something else of them."""
    for _ in range(20):
        asked, told = asked_for(engine, path, body), Told()
        answer = Answer(asked)
        await engine.tell(path, asked, answer, told)
        if max(answer.since(0, 0)[1]) == 1:
            break
    return told


async def test_whatever_was_asked_for_goes_on_where_it_stopped(node: Node) -> None:
    session, active = await engine(node)
    async with session:
        cases = dict(CASES)
        stop = (await undisturbed(active, *text(temperature=0, presence_penalty=1.0))).texts["text"][50:54]
        cases["stop strings"] = text(temperature=0, presence_penalty=1.0, stop=[stop, "a long one that never comes"])
        cases["stop string that is shown"] = text(temperature=0, presence_penalty=1.0, stop=[stop], include_stop_str_in_output=True)
        wrong: dict[str, Any] = {}

        async def cut_at(cuts: tuple[int, ...], ahead: bool, path: str, body: dict[str, Any]) -> tuple[Answer, Told]:
            asked = asked_for(active, path, body)
            answer, told = Answer(asked), Told()
            for cut in (*cuts, None):
                if answer.finished:  # the last event had several tokens
                    told.event(json.loads(answer.end().split(b"\n\n")[0].removeprefix(b"data: ")))
                    break
                tell = active.tell_ahead if ahead and answer.output_tokens else active.tell
                await tell(path, asked, answer, told, cut)
            return answer, told

        async def cut_up(name: str, path: str, body: dict[str, Any]) -> None:
            want = await undisturbed(active, path, body)
            count = want.usage[1]
            assert count > 15, name
            for cuts, ahead in (((1, 4), False), ((1, 4), True), ((count // 2,), False), ((count // 2,), True), ((count - 1,), False)):
                for _ in range(4):
                    answer, told = await cut_at(cuts, ahead, path, body)
                    if told == want or max(answer.since(0, 0)[1]) == 1:
                        break
                if told != want:
                    wrong[f"{name}, cut at {cuts}, ahead: {ahead}"] = (told, want)

        await asyncio.gather(*(cut_up(name, *case) for name, case in cases.items()))
        assert not wrong, "\n".join(f"{name}:\n  {told}\n  {want}" for name, (told, want) in wrong.items())


async def test_what_waits_is_let_go_once_and_a_client_that_leaves_takes_it_along(node: Node) -> None:
    session, active = await engine(node)
    async with session, line_to(active._path) as (reader, writer):
        path, body = chat(temperature=0, ignore_eos=True)
        asked = asked_for(active, path, body)
        answer = Answer(asked)
        await active.tell(path, asked, answer, Told(), 5)
        replay = answer.replay()
        assert replay is not None

        async def unknown(message: staged.Go | staged.Told) -> bool:
            writer.write(pack(staged.encode([message, staged.Told(key="nobody", output=b"", pieces=b"")])))
            return message.key.encode() in b"".join([frame async for frame in _frames(reader, b"nobody")])

        for key, stays in (("stays", True), ("leaves", False)):
            headers = {"Content-Type": "application/json", "X-Request-Id": key}
            sent = asked.written_ahead(key, key, replay.prompt_ids)
            response = await session.post("http://localhost" + path, data=sent, headers=headers)
            await response.content.readuntil(b"\n\n")  # it waits
            if stays:
                ids, pieces = little_endian(replay.output_ids), little_endian(replay.pieces)
                go = staged.Go(key=key, request=key, epoch=1, output=ids, pieces=pieces)
                assert not await unknown(go)
                assert b"[DONE]" in await response.read()
                assert await unknown(go)
            else:
                assert not await unknown(staged.Told(key=key, output=b"", pieces=b""))
                response.close()
                async with asyncio.timeout(10):
                    while not await unknown(staged.Told(key=key, output=b"", pieces=b"")):  # noqa: ASYNC110
                        await asyncio.sleep(0.01)


async def test_nothing_runs_on_of_what_is_refused_when_it_is_let_go(node: Node) -> None:
    session, active = await engine(node)
    async with session, line_to(active._path) as (_, writer):
        path, body = chat(temperature=0, ignore_eos=True, max_tokens=1500, **NO_THOUGHTS)
        answer, told = Answer(asked_for(active, path, body)), Told()
        await active.tell(path, asked_for(active, path, body), answer, told, 20)
        replay = answer.replay()
        assert replay is not None
        asked = asked_for(active, path, body | {"stop": [told.texts["content"][5:9]]})  # the output has it: it cannot have been delivered
        headers = {"Content-Type": "application/json", "X-Request-Id": "refused"}
        sent = asked.written_ahead("refused", "refused", replay.prompt_ids)
        before = await generated(session)
        async with session.post("http://localhost" + path, data=sent, headers=headers) as response:
            ids, pieces = little_endian(replay.output_ids), little_endian(replay.pieces)
            go = staged.Go(key="refused", request="refused", epoch=1, output=ids, pieces=pieces)
            await response.content.readuntil(b"\n\n")  # it waits
            writer.write(pack(staged.encode([go])))
            said = await response.text()
        assert "the output that was delivered has the stop string" in said
        async with asyncio.timeout(30):
            while (await metric(session, "num_requests_running")) > 0:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert await generated(session) - before < 1000


async def metric(session: aiohttp.ClientSession, name: str) -> float:
    async with session.get("http://localhost/metrics") as response:
        lines = (await response.text()).splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"vllm:{name}{{"))


async def generated(session: aiohttp.ClientSession) -> float:
    return await metric(session, "generation_tokens_total")


async def test_output_that_is_replayed_is_no_prompt(node: Node) -> None:
    """The control: had it been appended to the prompt, the penalties would have forgotten it."""
    session, active = await engine(node)
    async with session:
        path, body = text(prompt=[5, 6, 7], temperature=0, presence_penalty=1.5)
        want = (await undisturbed(active, path, body)).ids
        forgot = (await undisturbed(active, path, body | {"prompt": [5, 6, 7, *want[:30]], "max_tokens": 30})).ids
        assert want[:30] + forgot != want


async def test_a_second_request_of_the_same_epoch_and_a_false_claim_are_refused(node: Node) -> None:
    session, _ = await engine(node)
    ours = {"shadowsup_request": "once", "shadowsup_epoch": 1}
    bad = {"shadowsup_prompt": "AAAAAA==", "shadowsup_output": packed([2**31 - 1]), "shadowsup_pieces": packed([1])}
    async with session:
        for xargs, known in (
            (ours, None),
            (ours, "has been here"),
            (ours | {"shadowsup_epoch": 2, "shadowsup_output": "AAAA", "shadowsup_prompt": "AAAA"}, "base64"),
            (ours | {"shadowsup_epoch": 3, "shadowsup_output": "AAAAAA==", "shadowsup_prompt": "AAAAAA=="}, "ids"),
            (ours | {"shadowsup_epoch": 4} | bad, "Internal server error"),
            (ours | {"shadowsup_epoch": 5}, None),  # that id has ended the one request and no engine
        ):
            xargs = xargs | {SEAL: seal(key_of(node.runtime_dir), xargs)}
            body = {"model": "chat", "prompt": "x", "max_tokens": 2, "stream": True, "vllm_xargs": xargs}
            async with session.post(f"http://localhost{TEXT}", json=body) as response:
                said = await response.text()
            assert ('"error"' in said) is (known is not None) and (known or "") in said, said


FORGED: tuple[dict[str, Any], ...] = (
    {"shadowsup_output": packed([2**31 - 1])},
    {"shadowsup_output": packed([5, 6]), "shadowsup_pieces": packed([2]), "shadowsup_prompt": packed([1, 2])},
    {"shadowsup_held": 1},
    {"shadowsup_held_before": 1, "shadowsup_output": packed([5])},
    {"shadowsup_more": 10**6},
    {"shadowsup_stage": "k", "shadowsup_request": "r", "shadowsup_epoch": 0, "shadowsup_prompt": packed([1, 2])},
    {"shadowsup_request": "r", "shadowsup_epoch": 1, "shadowsup_output": packed([5]), "shadowsup_pieces": packed([1])}
    | {"shadowsup_prompt": packed([1, 2]), "shadowsup_seal": "0" * 32},
)
"""What clients could say in the gateway's place."""


async def test_a_client_that_uses_the_names_of_the_replay_has_what_it_would_have_without_them(node: Node) -> None:
    """On every path that takes extra arguments, past the gateway, whose refusal is only a courtesy."""
    session, _ = await engine(node)
    pid = (await engine_of(node, "active"))["pid"]
    plain: dict[str, Any] = {"model": "chat", "temperature": 0, "max_tokens": 6}
    paths: dict[str, dict[str, Any]] = {
        CHAT: plain | {"messages": MESSAGES, "return_token_ids": True},
        TEXT: plain | {"prompt": "hello", "ignore_eos": True, "return_token_ids": True},
        "/v1/responses": {"model": "chat", "temperature": 0, "max_output_tokens": 6, "input": "hello"},
        "/v1/messages": plain | {"messages": MESSAGES},
    }

    def said(answer: dict[str, Any]) -> Any:
        if "choices" in answer:
            return [(choice["token_ids"], choice.get("text"), choice.get("message")) for choice in answer["choices"]]
        parts = answer["content"] if "content" in answer else [part for item in answer["output"] for part in item["content"]]
        return [part.get("text") or part.get("thinking") for part in parts]

    async with session:
        for path, body in paths.items():

            async def ask(body: dict[str, Any], path: str = path) -> Any:
                async with asyncio.timeout(20), session.post(f"http://localhost{path}", json=body) as response:
                    assert response.status == 200, f"{path}: {await response.text()}"
                    return said(await response.json())

            want = await ask(body)
            assert want
            for forged in FORGED:
                assert await ask(body | {"vllm_xargs": {"mine": 1} | forged}) == want, f"{path} with {forged}"
    async with aiohttp.ClientSession() as session:
        for path, body in paths.items():
            async with session.post(f"{node.url}{path}", json=body | {"vllm_xargs": FORGED[0]}) as response:
                assert response.status == 400 and "this gateway's own" in await response.text()
            async with session.post(f"{node.url}{path}", json=body) as response:
                assert response.status == 200, await response.text()
    assert (await engine_of(node, "active"))["pid"] == pid


async def test_a_replay_of_what_was_never_said_is_noticed(node: Node) -> None:
    session, active = await engine(node)
    async with session:
        path, body = text(temperature=0)
        asked = asked_for(active, path, body)
        answer = Answer(asked)
        await active.tell(path, asked, answer, Told(), 5)
        answer._delivered.fields["text", 0][0] = "something else"
        with pytest.raises(Misstep):
            await active.tell(path, asked, answer, Told())


async def test_vllms_own_metrics_are_passed_on_with_the_name_of_the_worker(node: Node) -> None:
    async with aiohttp.ClientSession() as session:
        async with session.post(f"{node.url}{TEXT}", json={"model": "chat", "prompt": "x", "max_tokens": 2}) as response:
            assert response.status == 200
        async with session.get(f"{node.url}/metrics") as response:
            families = list(text_string_to_metric_families(await response.text()))
    names = [family.name for family in families]
    assert len(names) == len(set(names)), "one family each, or Prometheus takes none of it"
    samples = [sample for family in families for sample in family.samples]
    assert len({(sample.name, *sorted(sample.labels.items())) for sample in samples}) == len(samples)
    theirs = [sample for sample in samples if sample.name.startswith("vllm:")]
    assert {sample.labels["worker"] for sample in theirs} == {"chat"}
    assert {"vllm:generation_tokens_total", "vllm:num_requests_running", "vllm:time_to_first_token_seconds_bucket"} <= {
        one.name for one in theirs
    }
    assert {"shadowsup_worker_state", "shadowsup_worker_metrics_up"} <= set(names)


STREAMS: dict[str, dict[str, Any]] = {
    "chat": {"temperature": 0, "presence_penalty": 1.2, "max_tokens": 150, "extra_body": {"ignore_eos": True}},
    "seeded": {"temperature": 1, "seed": 3, "max_tokens": 150, "extra_body": {"ignore_eos": True}},
    "reasoning": SEEDED | {"max_tokens": 150, "logit_bias": {END_OF_THOUGHT: 4}, "extra_body": {"ignore_eos": True}},
    "schema": SEEDED | SCHEMA | {"max_tokens": 400, "extra_body": NO_THOUGHTS},
    "tools": SEEDED | {"tools": TOOLS, "tool_choice": "required", "max_tokens": 400, "extra_body": NO_THOUGHTS},
}


async def listen(client: openai.AsyncOpenAI, given: dict[str, Any], begun: asyncio.Event) -> Told:
    """Stream a chat with the openai client; ``begun`` is set once some of it has come."""
    told, heads, count = Told(), set(), 0
    stream = await client.chat.completions.create(
        model="chat",
        messages=MESSAGES,  # type: ignore[arg-type]
        stream=True,
        stream_options={"include_usage": True},
        **given,
    )
    async for event in stream:
        count += 1
        if count > 4:
            begun.set()
        heads.add((event.id, event.created))
        told.event(event.model_dump(exclude_none=True))
    begun.set()
    assert len(heads) == 1
    assert told.texts.pop("role") == "assistant"
    return told


async def test_the_openai_client_notices_no_death(node: Node) -> None:
    async with openai.AsyncOpenAI(base_url=f"{node.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        before = {name: await listen(client, given, asyncio.Event()) for name, given in STREAMS.items()}
        assert json.loads(before["schema"].texts["content"])["color"] in ("red", "green", "blue")
        assert before["tools"].finish[0] == "tool_calls" and before["reasoning"].texts["reasoning"]
        await node.wait_for("healthy", "chat", 150)
        active = await engine_of(node, "active")
        begun = [asyncio.Event() for _ in STREAMS]
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(listen(client, given, event)) for given, event in zip(STREAMS.values(), begun, strict=True)]
            for event in begun:
                await event.wait()
            core_of(active["pid"]).kill()
        across = dict(zip(STREAMS, (task.result() for task in tasks), strict=True))
        assert across == before
        assert (await engine_of(node, "active"))["id"] != active["id"]
        after = {name: await listen(client, given, asyncio.Event()) for name, given in STREAMS.items()}
        assert after == before
        several = await client.completions.create(model="chat", prompt="x", n=2, max_tokens=3)
        assert [choice.index for choice in several.choices] == [0, 1]
    async with aiohttp.ClientSession() as session, session.get(f"{node.url}/metrics") as response:
        metrics = await response.text()
    replays = re.search(r'shadowsup_gateway_replays_total\{worker="chat"\} (\S+)', metrics)
    assert replays is not None and float(replays[1]) >= 1
    await node.wait_for("healthy", "chat", 150)
