"""The events in which an engine with a server of its own tells an answer, and what they say together. Pure."""

from __future__ import annotations

from array import array

import msgspec

DEAD_REASONS = ("abort", "error")
"""Finish reasons that say that the engine went away under the request, or failed. A client's own abort has no reader."""


class Misstep(Exception):
    """Raised when an engine's replay is not what was delivered: there is no way to go on from it."""


class Function(msgspec.Struct):
    name: str | None = None
    arguments: str | None = None


class ToolCall(msgspec.Struct):
    index: int = 0
    id: str | None = None
    function: Function | None = None


class Delta(msgspec.Struct):
    role: str | None = None
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None
    tool_calls: list[ToolCall] | None = None


class Choice(msgspec.Struct):
    index: int = 0
    delta: Delta | None = None
    text: str | None = None
    logprobs: msgspec.Raw = msgspec.Raw(b"null")
    finish_reason: str | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None


class Error(msgspec.Struct):
    message: str = ""
    code: int | str | None = None


class Event(msgspec.Struct):
    id: str = ""
    object: str = ""
    created: int = 0
    model: str = ""
    choices: list[Choice] = []
    prompt_token_ids: list[int] | None = None
    error: Error | None = None


decode = msgspec.json.Decoder(Event).decode

Key = tuple[str, int]
"""A field whose text grows: its name, and the index of its tool call (0 for those that belong to none)."""


class Said:
    """Ids and text of one telling of the answer."""

    __slots__ = ("fields", "ids")

    def __init__(self) -> None:
        self.ids = array("I")
        self.fields: dict[Key, list[str]] = {}

    def add(self, choice: Choice) -> None:
        if choice.token_ids:
            self.ids.extend(choice.token_ids)
        for key, text in texts_of(choice):
            self.fields.setdefault(key, []).append(text)

    def text(self, key: Key) -> str:
        return "".join(self.fields.get(key, ()))


class Retelling:
    """What a parked engine says of an answer ahead of the failover that makes it the one that goes on.

    Args:
        prompt_ids: of the answer.
    """

    def __init__(self, prompt_ids: array[int]) -> None:
        self._prompt_ids = prompt_ids
        self.said = Said()
        self.begun = False

    def take(self, event: bytes) -> None:
        """Take one event.

        Raises:
            Misstep: it is nothing that can be said ahead, or the prompt is another one.
        """
        payload = data_of(event)
        if payload is None:
            return
        try:
            told = decode(payload)
        except msgspec.MsgspecError as error:
            raise Misstep(f"an event is not what it should be: {error}") from None
        if told.error is not None or len(told.choices) != 1 or told.choices[0].finish_reason is not None:
            raise Misstep("it ended ahead of time")
        choice = told.choices[0]
        prompt = told.prompt_token_ids or choice.prompt_token_ids
        if prompt is not None and array("I", prompt) != self._prompt_ids:
            raise Misstep("its prompt is another one")
        self.begun = True
        self.said.add(choice)


def texts_of(choice: Choice) -> list[tuple[Key, str]]:
    texts: list[tuple[Key, str]] = []
    if choice.text:
        texts.append((("text", 0), choice.text))
    delta = choice.delta
    if delta is not None:
        if delta.content:
            texts.append((("content", 0), delta.content))
        if delta.reasoning:
            texts.append((("reasoning", 0), delta.reasoning))
        if delta.reasoning_content:
            texts.append((("reasoning_content", 0), delta.reasoning_content))
        if delta.refusal:
            texts.append((("refusal", 0), delta.refusal))
        for call in delta.tool_calls or ():
            if call.function is not None and call.function.name:
                texts.append((("name", call.index), call.function.name))
            if call.function is not None and call.function.arguments:
                texts.append((("arguments", call.index), call.function.arguments))
    return texts


def data_of(event: bytes) -> bytes | None:
    """Return the data of an event; None when it has none (a comment)."""
    if event.startswith(b"data:"):
        return event[5:].strip()
    return None
