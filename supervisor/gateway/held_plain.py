"""What the gateway reads of an engine's answers that it does not follow: errors, and signs that the engine went away under a request."""

from __future__ import annotations

import msgspec
from multidict import CIMultiDict

from shadowsup.supervisor.gateway.answer import EngineFailed
from shadowsup.supervisor.gateway.answer_events import DEAD_REASONS
from shadowsup.supervisor.gateway.errors import ApiError


class EngineError(Exception):
    """Raised when an engine answered with an error status: as it answered, for the client if it comes to that."""

    def __init__(self, status: int, headers: CIMultiDict[str], body: bytes) -> None:
        super().__init__(f"status {status}")
        self.status = status
        self.headers = headers
        self.body = body


class _Error(msgspec.Struct):
    message: str = ""
    code: int | str | None = None


class _Choice(msgspec.Struct):
    finish_reason: str | None = None


class _Usage(msgspec.Struct):
    completion_tokens: int | None = None


class _Answer(msgspec.Struct):
    error: _Error | None = None
    choices: list[_Choice] = []
    usage: _Usage | None = None


_decode = msgspec.json.Decoder(_Answer).decode


class AnsweredError(ApiError):
    """An engine's error, which the client gets as it came.

    Args:
        error: the engine's answer.
        worker: name of its worker.
    """

    def __init__(self, error: EngineError, worker: str) -> None:
        self.told = f"status {error.status}"
        try:
            said = _decode(error.body).error
        except msgspec.MsgspecError:
            said = None
        if said is not None and said.message:
            self.told += f", {said.message[:500]}"
        retry_after_s = 1.0 if error.status in (429, 503) else None
        super().__init__(error.status, f"The worker {worker} answered with {self.told}", retry_after_s=retry_after_s)
        self._body = error.body if said is not None else b""

    def body(self) -> bytes:
        return self._body or super().body()

    def event(self) -> bytes:
        """Return it as an event of a stream that has begun."""
        return b"data: " + b" ".join(self.body().splitlines()) + b"\n\n"


def check_event(event: bytes) -> None:
    """Check an event of a stream that is passed on as it comes.

    Raises:
        EngineFailed: the engine failed, or gave the request up.
    """
    # Only looked into when it may be one: these are other people's bytes, and there are many.
    if b'"error"' in event or b'"abort"' in event:
        _check(event[len(b"data:") :], event)


def tokens_in(body: bytes) -> int:
    """Return how many tokens an answer of one piece has, as far as it says so.

    Raises:
        EngineFailed: the engine gave the request up.
    """
    answer = _check(body, body)
    return (answer.usage.completion_tokens or 0) if answer is not None and answer.usage is not None else 0


def _check(payload: bytes, event: bytes) -> _Answer | None:
    try:
        answer = _decode(payload)
    except msgspec.MsgspecError:
        return None
    if answer.error is not None:
        code = answer.error.code if isinstance(answer.error.code, int) else 500
        raise EngineFailed(answer.error.message, code, event)
    for choice in answer.choices:
        if choice.finish_reason in DEAD_REASONS:
            raise EngineFailed(f"the request ended with «{choice.finish_reason}»", 503, event)
    return answer
