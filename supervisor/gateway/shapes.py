"""The JSON of responses, as OpenAI shapes it. A stream's chunks differ only in their text, so all else is encoded once for each stream."""

from __future__ import annotations

import msgspec

from shadowsup.supervisor.gateway.errors import ApiError
from shadowsup.supervisor.gateway.stream import Stream

_encode = msgspec.json.Encoder().encode

DONE = b"data: [DONE]\n\n"


def usage(stream: Stream) -> dict[str, object]:
    """Return the prompt and the output of the client's request, each counted once, however often it was replayed."""
    return {
        "prompt_tokens": stream.prompt_tokens,
        "completion_tokens": stream.output_tokens,
        "total_tokens": stream.prompt_tokens + stream.output_tokens,
        "prompt_tokens_details": {"cached_tokens": stream.cached_tokens},
    }


def error_event(error: ApiError) -> bytes:
    return b"data: " + error.body() + b"\n\n"


def comment(text: str) -> bytes:
    """Return a server-sent comment: keeps a connection alive, and clients ignore it."""
    return f": {text}\n\n".encode()


def whole(stream: Stream, request_id: str, model: str, created: int, text: str, finish_reason: str) -> bytes:
    """Return the body of a response that is not streamed."""
    choice: dict[str, object] = {"index": 0, "finish_reason": finish_reason, "logprobs": None}
    if stream.generation.chat:
        choice["message"] = {"role": "assistant", "content": text, "refusal": None}
    else:
        choice["text"] = text
    kind = "chat.completion" if stream.generation.chat else "text_completion"
    head: dict[str, object] = {"id": request_id, "object": kind, "created": created, "model": model}
    if stream.generation.return_token_ids:
        head["prompt_token_ids"] = stream.prompt_ids
        choice["token_ids"] = stream.output_ids
    return _encode(head | {"choices": [choice], "usage": usage(stream)})


class Chunks:
    """Encodes the server-sent events of one stream."""

    def __init__(self, stream: Stream, request_id: str, model: str, created: int) -> None:
        chat, include_usage = stream.generation.chat, stream.generation.include_usage
        self._stream = stream
        self._ids_told: int | None = 0 if stream.generation.return_token_ids else None
        kind = "chat.completion.chunk" if chat else "text_completion"
        head = {"id": request_id, "object": kind, "created": created, "model": model}
        self._chat = chat
        self._head = b"data: " + _encode(head)[:-1] + b',"choices":['
        self._tail = b'],"usage":null}\n\n' if include_usage else b"]}\n\n"
        if chat:
            self._before_text = self._head + b'{"index":0,"delta":{"content":'
            self._after_text = b'},"logprobs":null,"finish_reason":null}' + self._tail
        else:
            self._before_text = self._head + b'{"index":0,"text":'
            self._after_text = b',"logprobs":null,"finish_reason":null}' + self._tail

    def opening(self) -> bytes:
        """Return the first chunk of a chat: who speaks."""
        if not self._chat:
            return b""
        delta = b'{"index":0,"delta":{"role":"assistant","content":"","refusal":null},"logprobs":null,"finish_reason":null}'
        return self._head + delta + self._tail

    def text(self, text: str) -> bytes:
        return self._before_text + _encode(text) + self._ids(self._after_text)

    def _ids(self, end: bytes) -> bytes:
        """Put the ids that the client has not been told in front of ``,"logprobs"`` in ``end``, where it asked for them."""
        if self._ids_told is None:
            return end
        ids = self._stream.output_ids[self._ids_told :]
        self._ids_told += len(ids)
        return end.replace(b',"logprobs"', b',"token_ids":' + _encode(ids) + b',"logprobs"', 1)

    def finish(self, reason: str) -> bytes:
        content = b'"delta":{}' if self._chat else b'"text":""'
        choice = b'{"index":0,' + content + self._ids(b',"logprobs":null,"finish_reason":') + _encode(reason) + b"}"
        return self._head + choice + self._tail

    def usage(self, stream: Stream) -> bytes:
        """Return the chunk that ``stream_options.include_usage`` asks for."""
        return self._head + b'],"usage":' + _encode(usage(stream)) + b"}\n\n"
