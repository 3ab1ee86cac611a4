"""What of an engine's events is new to the client, event by event."""

from __future__ import annotations

import json
from typing import Any

import pytest

from shadowsup.supervisor.gateway.answer import Answer, EngineFailed
from shadowsup.supervisor.gateway.answer_events import Misstep
from shadowsup.supervisor.gateway.errors import ApiError
from shadowsup.supervisor.gateway.held_request import Asked, obstacle
from shadowsup.supervisor.gateway.sse import EventSplitter
from shadowsup.wire.seal import SEAL


def answer(**body: Any) -> Answer:
    return Answer(Asked(True, {"model": "m", "messages": [], "stream": True} | body, b""))


def event(ids: list[int] | None = None, finish: str | None = None, created: int = 1, **delta: Any) -> bytes:
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish, "token_ids": ids}
    return _event({"id": "a", "object": "o", "created": created, "model": "m", "choices": [choice]})


def _event(value: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(value, separators=(",", ":")).encode() + b"\n\n"


def delta(told: bytes) -> dict[str, Any]:
    got: dict[str, Any] = json.loads(told.removeprefix(b"data: "))["choices"][0]
    return got


def opening() -> bytes:
    return _event(
        {"id": "a", "created": 1, "prompt_token_ids": [7], "choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}
    )


def begun(**body: Any) -> Answer:
    told = answer(**body)
    told.next_engine()
    told.take(opening())
    told.take(event([1], content="ab"))
    told.take(event([2], content="cd"))
    told.next_engine()
    return told


def test_an_event_across_the_seam_gives_what_is_beyond_it() -> None:
    told = begun()
    assert told.take(opening()) == b""
    new = delta(told.take(event([1, 2, 3, 4], content="abcdef", created=9)))
    assert new["delta"] == {"content": "ef"} and new["token_ids"] is None
    replay = told.replay()
    assert replay is not None and replay.output_ids.tolist() == [1, 2, 3, 4] and replay.pieces.tolist() == [1, 1, 2]


def test_the_prompt_is_that_of_the_engine_that_the_first_token_came_from() -> None:
    told = answer()
    told.next_engine()
    told.take(opening())
    first = told.prompt_ids
    told.next_engine()
    told.take(opening().replace(b"[7]", b"[8, 9]"))
    assert told.prompt_ids is not first
    told.take(event([1], content="ab"))
    replay = told.replay()
    assert replay is not None and replay.prompt_ids.tolist() == [8, 9]


def test_a_replay_may_come_in_pieces() -> None:
    told = begun(return_token_ids=True)
    assert told.take(event([1], content="ab")) == b"" and told.take(event([2], content="cd")) == b""
    new = delta(told.take(event([3], "length", content="e")))
    assert (new["delta"], new["token_ids"], new["finish_reason"]) == ({"content": "e"}, [3], "length")


def test_logprobs_of_an_event_across_the_seam_are_those_of_its_new_tokens() -> None:
    told = answer(logprobs=True, return_token_ids=True)
    told.take(event([1], content="a"))
    told.next_engine()
    value = json.loads(event([1, 2, 3], content="abc").removeprefix(b"data: "))
    value["choices"][0]["logprobs"] = {"content": [{"token": t} for t in "abc"]}
    new = delta(told.take(_event(value)))
    assert new["delta"] == {"content": "bc"} and [t["token"] for t in new["logprobs"]["content"]] == ["b", "c"]


def test_a_tool_call_across_the_seam_is_cut_in_its_arguments() -> None:
    def call(arguments: str, **more: Any) -> list[dict[str, Any]]:
        return [{"index": 0, "function": {"arguments": arguments} | more, "id": "x" if more else None}]

    told = answer()
    told.take(event([1], tool_calls=call('{"a"', name="f")))
    told.next_engine()
    new = delta(told.take(event([1, 2], tool_calls=call('{"a": 1}', name="f"))))
    assert new["delta"] == {"tool_calls": [{"index": 0, "function": {"arguments": ": 1}"}}]}


@pytest.mark.parametrize(
    "wrong",
    [
        event([1, 3], content="abcd"),
        event([1, 2], content="abXd"),
        event([1, 2], content="abc"),
        event([1], "stop", content="ab"),
        _event({"choices": [], "usage": {}}),
        b"data: [DONE]\n\n",
        b"data: {nonsense\n\n",
        _event({"prompt_token_ids": [8], "choices": [{"index": 0, "delta": {"role": "assistant"}}]}),
        _event({"choices": [{"index": 1, "delta": {"content": "ab"}, "token_ids": [1]}]}),
    ],
    ids=["other ids", "other text", "less text", "an early end", "early usage", "early done", "no JSON", "other prompt", "other choice"],
)
def test_a_replay_of_something_else_is_a_misstep(wrong: bytes) -> None:
    with pytest.raises(Misstep):
        begun().take(wrong)


def test_an_engine_that_gives_up_is_no_end() -> None:
    for last in (event([3], "abort", content="x"), event([], "error"), _event({"error": {"message": "dead", "code": 500}})):
        told = begun()
        with pytest.raises(EngineFailed):
            told.take(last)
        assert not told.finished


def test_what_is_missing_after_the_finish_reason_is_made_up_for() -> None:
    told = begun(stream_options={"include_usage": True})
    told.take(event([1, 2], content="abcd"))
    told.take(event([3], "stop"))
    usage, done, _ = told.end().split(b"\n\n")
    value = json.loads(usage.removeprefix(b"data: "))
    assert (value["id"], value["created"], value["choices"]) == ("a", 1, [])
    assert value["usage"] == {"prompt_tokens": 1, "completion_tokens": 3, "total_tokens": 4}
    assert done == b"data: [DONE]" and told.done


def test_texts_that_look_like_ours_are_left_alone() -> None:
    text = '"token_ids":[1,2] "delta":{} "created":5'
    told = answer()
    assert delta(told.take(event([1], content=text)))["delta"]["content"] == text
    told.next_engine()
    assert told.take(event([1], content=text, created=9)) == b""
    new = told.take(event([2], content=text, created=9))
    assert delta(new)["delta"]["content"] == text and json.loads(new[6:])["created"] == 1


def test_the_body_keeps_what_the_client_wrote() -> None:
    body = {"model": "m", "messages": [], "stream": True, "seed": 2**70, "x": [0.1, "ä"], "vllm_xargs": {"mine": 1}}
    sent = json.loads(Asked(True, dict(body), b"").written_for("r", 3, None))
    assert sent["vllm_xargs"].pop(SEAL)
    assert sent == body | {"return_token_ids": True, "vllm_xargs": {"mine": 1, "shadowsup_request": "r", "shadowsup_epoch": 3}}
    with pytest.raises(ApiError):
        Asked(True, body | {"vllm_xargs": {"shadowsup_epoch": 1}}, b"")
    assert obstacle({"n": 1, "prompt": [1, 2], "echo": False, "messages": [{"content": [{"type": "text", "text": "a"}]}]}) == ""


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
def test_events_are_whole_however_they_arrive(size: int, end: bytes) -> None:
    data = (b"data: 1\n\n: a comment\n\ndata: two\ndata: lines\n\ndata: half").replace(b"\n", end)
    splitter = EventSplitter()
    got = [whole for at in range(0, len(data), size) for whole in splitter.feed(data[at : at + size])]
    assert got == [b"data: 1\n\n", b": a comment\n\n", b"data: two\ndata: lines\n\n"]
