"""What a client sees: OpenAI's shapes, its errors, and who may ask."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

import aiohttp
import openai
import pytest
from gateway.harness import CHAT, Node, NodeMaker, events, next_event, text_of, text_to_the_end
from gateway.stub_engine import StubEngine

from shadowsup.wire.link import Submit, Token

STREAM = CHAT | {"stream": True}


async def reply(engine: StubEngine, *texts: str, finish: str = "stop", cached: int = 0) -> Submit:
    """Answer the next request with ``texts``, a token each."""
    request = await engine.submit()
    engine.accept(request, cached)
    end = 0
    for number, text in enumerate(texts):
        end += len(text)
        engine.say(request, text, (number,), end, finish if number == len(texts) - 1 else None)
    return request


async def test_a_chat_that_is_not_streamed(node: Node) -> None:
    engine = await node.serving()
    asked = node.post(CHAT)
    request = await reply(engine, "Hel", "lo", cached=2)
    response = await asked
    body = await response.json()
    assert response.status == 200 and response.headers["x-request-id"] == request.rid
    assert body == {
        "id": f"chatcmpl-{request.rid}",
        "object": "chat.completion",
        "created": body["created"],
        "model": "m",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Hello", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
        "usage": {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5, "prompt_tokens_details": {"cached_tokens": 2}},
    }


async def test_a_streamed_chat(node: Node) -> None:
    engine = await node.serving()
    asked = node.post(STREAM)
    request = await reply(engine, "Hé\n", "\u2028", finish="length")
    response = await asked
    assert response.content_type == "text/event-stream" and response.headers["Cache-Control"] == "no-cache"
    stream = events(response)
    opening = await next_event(stream)
    head = {"id": f"chatcmpl-{request.rid}", "object": "chat.completion.chunk", "created": opening["created"], "model": "m"}
    delta = {"role": "assistant", "content": "", "refusal": None}
    assert opening == head | {"choices": [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}]}
    assert await text_to_the_end(stream) == ("Hé\n\u2028", "length")


@pytest.mark.parametrize("stream", [False, True])
async def test_token_ids_are_returned_to_who_asks(node: Node, stream: bool) -> None:
    engine = await node.serving()
    asked = node.post(CHAT | {"stream": stream, "return_token_ids": True})
    request = await engine.submit()
    engine.accept(request, 0)
    engine.say(request, "a", (7,), 1)
    engine.say(request, "", (8,), 1)
    engine.say(request, "", (9,), 1, "stop")
    response = await asked
    if stream:
        lines = [line.removeprefix("data: ") async for line in events(response) if "[DONE]" not in line]
        ids = [choice.get("token_ids", ()) for line in lines for choice in json.loads(line)["choices"]]
        assert [token for part in ids for token in part] == [7, 8, 9]
    else:
        body = await response.json()
        assert body["choices"][0]["token_ids"] == [7, 8, 9]
        assert len(body["prompt_token_ids"]) == 3


async def test_completions_take_text_or_token_ids(node: Node) -> None:
    engine = await node.serving()
    for prompt, text, ids in (("ab", "ab", None), (["ab"], "ab", None), ([5, 6], None, (5, 6)), ([[5, 6]], None, (5, 6))):
        for stream in (False, True):
            asked = node.post({"model": "m", "prompt": prompt, "stream": stream}, "/v1/completions")
            request = await reply(engine, "x", "y")
            assert (request.prompt, request.prompt_ids, request.messages) == (text, ids, None)
            assert request.sampling.max_tokens == 16
            response = await asked
            if stream:
                got = events(response)
                first = await next_event(got)
                assert first["object"] == "text_completion"
                assert first["choices"][0] == {"index": 0, "text": text_of(first), "logprobs": None, "finish_reason": None}
                rest, reason = await text_to_the_end(got)
                assert (text_of(first) + rest, reason) == ("xy", "stop")
            else:
                body = await response.json()
                assert body["id"] == f"cmpl-{request.rid}" and body["object"] == "text_completion"
                assert body["choices"] == [{"index": 0, "text": "xy", "logprobs": None, "finish_reason": "stop"}]


async def test_every_parameter_reaches_the_engine(node: Node) -> None:
    engine = await node.serving()
    body = CHAT | {
        "max_completion_tokens": 9,
        "min_tokens": 2,
        "temperature": 0,
        "top_p": 0.5,
        "top_k": 40,
        "seed": -7,
        "stop": ["a", "b"],
        "presence_penalty": 1,
        "frequency_penalty": -1.5,
        "ignore_eos": True,
    }
    harmless = {"user": "u", "metadata": {"a": "b"}, "store": False, "service_tier": "auto", "safety_identifier": "s"}
    neutral = {"n": 1, "logprobs": False, "logit_bias": {}, "response_format": {"type": "text"}, "tools": None, "tool_choice": "none"}
    asked = node.post(body | harmless | neutral | {"prompt_cache_key": "k"})
    sampling = (await reply(engine, "x")).sampling
    assert (await asked).status == 200
    assert (sampling.max_tokens, sampling.min_tokens, sampling.temperature, sampling.top_p) == (9, 2, 0.0, 0.5)
    assert (sampling.top_k, sampling.seed, sampling.stop, sampling.ignore_eos) == (40, -7, ("a", "b"), True)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (1.0, -1.5)


async def test_a_request_without_a_seed_is_given_one(node: Node) -> None:
    engine = await node.serving()
    asked = [node.post(CHAT) for _ in range(2)]
    seeds = {(await reply(engine, "x")).sampling.seed for _ in asked}
    assert len(seeds) == 2
    for task in asked:
        (await task).close()


async def test_messages_come_as_a_chat_template_takes_them(node: Node) -> None:
    engine = await node.serving()
    messages = [
        {"role": "developer", "content": "d"},
        {"role": "user", "name": "bob", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": "c", "refusal": None, "tool_calls": None, "audio": None, "annotations": []},
    ]
    asked = node.post(CHAT | {"messages": messages})
    request = await reply(engine, "x")
    assert (await asked).status == 200
    assert request.messages == (
        {"role": "system", "content": "d"},
        {"role": "user", "content": "a\nb", "name": "bob"},
        {"role": "assistant", "content": "c"},
    )


async def test_the_openai_client_works_unchanged(node: Node) -> None:
    engine = await node.serving()
    async with openai.AsyncOpenAI(base_url=node.url + "/v1", api_key="none", max_retries=0) as client:
        assert [model.id async for model in client.models.list()] == ["m"]
        assert (await client.models.retrieve("m")).owned_by == "shadowsup"
        with pytest.raises(openai.NotFoundError, match="does not exist"):
            await client.models.retrieve("x")

        task = asyncio.create_task(client.chat.completions.create(**CHAT))  # type: ignore[call-overload]
        await reply(engine, "Hel", "lo", cached=1)
        whole = await task
        assert whole.choices[0].message.content == "Hello" and whole.choices[0].finish_reason == "stop"
        assert whole.usage.prompt_tokens_details.cached_tokens == 1

        task = asyncio.create_task(client.chat.completions.create(**STREAM, stream_options={"include_usage": True}))  # type: ignore[call-overload]
        await reply(engine, "Hel", "lo", cached=1)
        chunks = [chunk async for chunk in await task]
        assert chunks[0].choices[0].delta.role == "assistant"
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "Hello"
        assert chunks[-1].choices == [] and chunks[-1].usage.total_tokens == 5

        task = asyncio.create_task(client.completions.create(model="m", prompt="p"))
        await reply(engine, "Hel", "lo")
        assert (await task).choices[0].text == "Hello"

        with pytest.raises(openai.BadRequestError) as refused:
            await client.chat.completions.create(**CHAT, tools=[{"type": "function", "function": {"name": "f"}}])  # type: ignore[call-overload]
        assert refused.value.param == "tools"

        task = asyncio.create_task(client.chat.completions.create(**STREAM))  # type: ignore[call-overload]
        request = await engine.submit()
        engine.accept(request)
        engine.say(request, "a", (1,), 1)
        stream = await task
        engine.reject(request, 500, "the step failed")
        with pytest.raises(openai.APIError, match="the step failed"):
            async for _ in stream:
                pass


async def test_curl_works_unchanged(node: Node) -> None:
    engine = await node.serving()
    command = ["curl", "-sSN", node.url + "/v1/chat/completions", "-d", json.dumps(STREAM)]  # as a form: curl's default
    curl = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    await reply(engine, "hi")
    out, _ = await curl.communicate()
    assert curl.returncode == 0 and out.endswith(b"data: [DONE]\n\n") and b'"content":"hi"' in out


BAD = [
    ({"temperature": 2.5}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"top_p": -0.1}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"max_tokens": 3, "max_completion_tokens": 4}, "max_completion_tokens"),
    ({"max_tokens": 3, "min_tokens": 4}, "min_tokens"),
    ({"seed": 2**63}, "seed"),
    ({"stop": ["a", 1]}, "stop"),
    ({"stop": ""}, "stop"),
    ({"stop": ["x"] * 17}, "stop"),
    ({"n": 2}, "n"),
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"includes": True}}, "stream_options"),
    ({"metadata": {"a": 1}}, "metadata"),
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": [{"content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": ["user"], "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": 1}]}]}, "messages[0].content[0].text"),
    ({"messages": [{"role": "user", "content": "x", "tool_calls": [1]}]}, "messages[0].tool_calls"),
    ({"messages": [{"role": "user", "content": "x", "colour": 1}]}, "messages[0].colour"),
    *(
        ({name: value}, name)
        for name, value in {
            "tools": [],
            "tool_choice": "auto",
            "parallel_tool_calls": True,
            "functions": [],
            "response_format": {"type": "json_object"},
            "logprobs": True,
            "top_logprobs": 3,
            "logit_bias": {"5": 1},
            "modalities": ["text", "audio"],
            "audio": {},
            "prediction": {},
            "store": True,
            "service_tier": "flex",
            "best_of": 2,
            "echo": True,
            "temprature": 1,
        }.items()
    ),
]


async def test_a_bad_or_unsupported_parameter_is_a_400_that_names_it(node: Node) -> None:
    """P38."""
    await node.serving()
    for change, param in BAD:
        response = await node.post(CHAT | change)
        error = (await response.json())["error"]
        assert response.status == 400, (change, error)
        assert error["type"] == "invalid_request_error" and error["param"] is not None, (change, error)
        assert error["param"].startswith(param) and param.split(".")[0] in error["message"], (change, error)
        assert set(error) == {"message", "type", "param", "code"}


async def test_completions_refuse_what_they_do_not_do(node: Node) -> None:
    await node.serving()
    for change, param in (
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"prompt": [[1], [2]]}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt[1]"),
        ({"prompt": [-1]}, "prompt[0]"),
        ({"prompt": [True]}, "prompt[0]"),
        ({"prompt": None}, "prompt"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"best_of": 2}, "best_of"),
        ({"echo": True}, "echo"),
        ({"echo": 0}, "echo"),
        ({"suffix": "x"}, "suffix"),
        ({"logprobs": 0}, "logprobs"),
        ({"messages": []}, "messages"),
    ):
        response = await node.post({"model": "m", "prompt": "x"} | change, "/v1/completions")
        error = (await response.json())["error"]
        assert (response.status, error["param"]) == (400, param), (change, error)


async def test_a_typo_is_answered_with_the_parameter_that_was_meant(node: Node) -> None:
    await node.serving()
    error = (await (await node.post(CHAT | {"max_token": 3})).json())["error"]
    assert "did you mean 'max_tokens'?" in error["message"] and error["code"] == "unknown_parameter"


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b'{"model": "m",\n "n": }', "line 2 column 7"),
        (b"", "line 1 column 1"),
        (b"[]", "must be a JSON object, not an array"),
        (b'{"model": "m", "model": "n"}', 'the key "model" is there twice'),
        (b'{"model": "m", "messages": [{"role": "user", "content": "a", "content": "b"}]}', "(in messages[0])"),
        (b'{"model": "m", "temperature": NaN}', "NaN is not JSON (at temperature)"),
        (b'{"model": "m", "a": {"b": [1, -Infinity]}}', "-Infinity is not JSON (at a.b[1])"),
        (b'{"model": "m", "temperature": 1e999}', "1e999 is out of range (at temperature)"),
        (b'{"model": "m", "seed": ' + b"9" * 5000 + b"}", "too many digits"),
        (b'{"model": "m\xff"}', "byte 12 is not UTF-8"),
        (b'{"model": "m", "user": "\\ud800"}', "half a surrogate pair in a string (at user)"),
        (b'{"model": ' + b"[" * 100_000, "nested too deeply"),
    ],
)
async def test_json_that_is_not_sound_is_a_400_that_says_where(node: Node, body: bytes, words: str) -> None:
    await node.serving()
    async with node.http.post(node.url + "/v1/chat/completions", data=body) as response:
        error = (await response.json())["error"]
        assert response.status == 400 and words in error["message"], error
        assert error["code"] == "invalid_json"


async def test_whole_surrogate_pairs_are_text_like_any_other(node: Node) -> None:
    engine = await node.serving()
    body = json.dumps(CHAT | {"messages": [{"role": "user", "content": "😀"}]}).encode()
    assert b"\\ud83d" in body
    asked = asyncio.create_task(node.http.post(node.url + "/v1/chat/completions", data=body))
    request = await reply(engine, "x")
    assert request.messages == ({"role": "user", "content": "😀"},)
    assert (await asked).status == 200


async def test_an_unknown_model_is_a_404_that_lists_what_there_is(node: Node) -> None:
    await node.serving()
    response = await node.post(CHAT | {"model": "gpt-9"})
    error = (await response.json())["error"]
    assert (response.status, error["code"], error["param"]) == (404, "model_not_found", "model")
    assert "gpt-9" in error["message"] and "this node serves m" in error["message"]
    for model in (None, 5, ""):
        response = await node.post(CHAT | {"model": model})
        assert response.status == 400 and (await response.json())["error"]["param"] == "model"


async def test_the_workers_name_is_a_model_too(node: Node) -> None:
    engine = await node.serving()
    asked = node.post(CHAT | {"model": "chat"})
    await reply(engine, "x")
    assert (await (await asked).json())["model"] == "m"


async def test_workers_of_one_model_share_its_requests(node: Node) -> None:
    one, two = await node.engine("a.1", "a"), await node.engine("b.1", "b")
    one.activate(1)
    two.activate(1)
    rows = [node.row(one, worker="a"), node.row(two, worker="b"), node.row(worker="c", state="down")]
    await node.supervisor.route(*rows)
    await node.supervisor.beat(lambda beat: len(beat.epochs) == 2)
    asked = [node.post(CHAT) for _ in range(4)]
    requests = [(one, await one.submit()), (two, await two.submit()), (one, await one.submit()), (two, await two.submit())]
    for engine, request in requests:
        engine.accept(request)
        engine.say(request, "x", (1,), 1, "stop")
    assert [(await task).status for task in asked] == [200] * 4
    async with node.http.get(node.url + "/v1/models") as response:
        assert [model["id"] for model in (await response.json())["data"]] == ["m"]


async def test_paths_and_methods_that_are_not_there(node: Node) -> None:
    await node.serving()
    for method, path, status in (
        ("GET", "/", 404),
        ("POST", "/v1/embeddings", 404),
        ("GET", "/v1/chat/completions", 405),
        ("POST", "/livez", 405),
        ("GET", "/v1/models/%0Ax", 404),
    ):
        async with node.http.request(method, node.url + path) as response:
            assert response.status == status and (await response.json())["error"]["message"], path


async def test_too_large_a_body_is_a_413(make_node: NodeMaker) -> None:
    node = await make_node(max_body=1000)
    await node.serving()
    response = await node.post(CHAT | {"user": "x" * 1000})
    assert response.status == 413 and (await response.json())["error"]["code"] == "request_too_large"


async def test_more_than_max_inflight_are_asked_to_come_back(make_node: NodeMaker) -> None:
    node = await make_node(max_inflight=2)
    engine = await node.serving()
    asked = [node.post(CHAT), node.post(CHAT)]
    requests = [await engine.submit(), await engine.submit()]
    refused = await node.post(CHAT)
    assert refused.status == 429 and refused.headers["Retry-After"] == "1"
    assert (await refused.json())["error"]["type"] == "rate_limit_error"
    for request in requests:
        engine.accept(request)
        engine.say(request, "x", (1,), 1, "stop")
    assert [(await task).status for task in asked] == [200, 200]
    asked = [node.post(CHAT)]
    await reply(engine, "x")
    assert (await asked[0]).status == 200


async def test_keys_are_checked_and_read_again_when_the_file_changes(make_node: NodeMaker, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("# one a line\n\nfirst\nsecond # not a comment\n")
    node = await make_node(api_key_file=str(keys))
    await node.serving()

    async def status(authorization: str | None, path: str = "/v1/models") -> int:
        headers = {} if authorization is None else {"Authorization": authorization}
        async with node.http.get(node.url + path, headers=headers) as response:
            if response.status == 401:
                assert response.headers["WWW-Authenticate"] == "Bearer" and "error" in await response.json()
            return response.status

    given = (None, "Bearer first", "bearer  first ", "Bearer wrong", "Basic first", "Bearer", "Bearer # one a line", "Bearer \xff")
    assert [await status(each) for each in given] == [401, 200, 200, 401, 401, 401, 401, 401]
    assert [await status(None, path) for path in ("/livez", "/readyz", "/metrics", "/elsewhere")] == [200, 200, 200, 401]
    replacement = tmp_path / "new"
    replacement.write_text("third\n")
    replacement.replace(keys)
    assert [await status(f"Bearer {key}") for key in ("first", "third")] == [401, 200]
    keys.unlink()
    assert await status("Bearer third") == 200
    keys.write_text("")
    os.utime(keys, ns=(1, 1))
    assert await status("Bearer third") == 401


async def test_livez_readyz_and_metrics(node: Node) -> None:
    async def get(path: str) -> aiohttp.ClientResponse:
        return await node.http.get(node.url + path)

    assert (await get("/livez")).status == 200
    assert (await get("/readyz")).status == 503
    engine = await node.serving()
    ready = await get("/readyz")
    assert ready.status == 200 and (await ready.json())["workers"]["chat"]["serving"] is True
    asked = node.post(CHAT)
    await reply(engine, "a", "b")
    await (await asked).read()
    await node.supervisor.beat(lambda beat: beat.inflight == 0)
    metrics = await (await get("/metrics")).text()
    for line in (
        'shadowsup_gateway_requests_total{endpoint="/v1/chat/completions",status="200",worker="chat"} 1.0',
        'shadowsup_gateway_tokens_total{worker="chat"} 2.0',
        'shadowsup_gateway_serving{worker="chat"} 1.0',
        'shadowsup_gateway_epoch{worker="chat"} 1.0',
        'shadowsup_gateway_first_text_seconds_count{worker="chat"} 1.0',
    ):
        assert line in metrics
    await node.supervisor.route(node.row(state="recovering", epoch=2))
    assert (await get("/readyz")).status == 200  # requests are held, not refused
    await node.supervisor.route(node.row(state="down", epoch=2))
    assert (await get("/readyz")).status == 503


async def test_requests_that_come_before_the_first_routes_wait_for_them(node: Node) -> None:
    asked = node.post(CHAT)
    listed = asyncio.create_task(node.http.get(node.url + "/v1/models"))
    await node.supervisor.beat(lambda beat: beat.connections == 2)
    engine = await node.serving()
    await reply(engine, "x")
    assert (await asked).status == 200 and len((await (await listed).json())["data"]) == 1


async def test_a_slow_reader_is_cut_off_and_nobody_waits_for_it(node: Node) -> None:
    engine = await node.serving()
    port = int(node.url.rpartition(":")[2])
    body = json.dumps(STREAM)
    _, writer = await asyncio.open_connection("127.0.0.1", port, limit=1024)  # and reads no more than that
    writer.write(f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode())
    slow = await engine.submit()
    engine.accept(slow)
    asked = node.post(STREAM)
    quick = await engine.submit()
    engine.accept(quick)
    stream = events(await _after(engine, asked, quick))
    await next_event(stream)
    assert text_of(await next_event(stream)) == "0"
    chars, count = 0, 1
    text = "x" * 50_000
    while engine.frames.empty():
        chars += len(text)
        slow_event = Token(rid=slow.rid, epoch=1, ids=(1,), text=text, chars=chars)
        engine.send(slow_event, Token(rid=quick.rid, epoch=1, ids=(1,), text="1", chars=count + 1))
        count += 1
        assert set(text_of(await next_event(stream))) == {"1"}  # the other goes on all the while
        assert chars < 64 << 20, "the gateway takes text without bound"
    assert await engine.cancelled() == slow.rid
    engine.say(quick, "", (), count, "stop")
    assert (await text_to_the_end(stream))[1] == "stop"
    writer.close()
    await asyncio.wait([asyncio.ensure_future(writer.wait_closed())])
    async with node.http.get(node.url + "/metrics") as metrics:
        assert 'shadowsup_gateway_slow_clients_total{worker="chat"} 1.0' in await metrics.text()


async def _after(engine: StubEngine, asked: asyncio.Task[aiohttp.ClientResponse], request: Submit) -> aiohttp.ClientResponse:
    engine.say(request, "0", (0,), 1)
    return await asked


async def test_a_fault_inside_is_a_500_without_details(
    node: Node, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    await node.serving()
    monkeypatch.setattr("shadowsup.supervisor.gateway.params.chat", lambda body: 1 / 0)
    response = await node.post(CHAT)
    text = await response.text()
    assert response.status == 500 and "division" not in text and "Traceback" not in text
    assert json.loads(text)["error"]["type"] == "server_error"
    assert "division by zero" in caplog.text
