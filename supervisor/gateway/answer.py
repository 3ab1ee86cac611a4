"""One streamed answer, from whichever engines: what the client was given of it, and what in an engine's events is new to the client. Pure.

An engine with a server of its own (vLLM) speaks in events that its parsers have made of the tokens: text, reasoning, pieces of tool calls.
When it dies, its successor is given the ids of what was delivered and says all of it once more, so that the parsers' states are as they
were. `Answer` compares that with what was delivered, event for event and field for field, and lets through what is beyond: the client's
stream goes on with the very next character, and keeps its id and its date.
"""

from __future__ import annotations

import re
from array import array
from typing import Any

import msgspec

from shadowsup.supervisor.gateway import shapes
from shadowsup.supervisor.gateway.answer_events import (
    DEAD_REASONS,
    Choice,
    Event,
    Key,
    Misstep,
    Retelling,
    Said,
    data_of,
    decode,
)
from shadowsup.supervisor.gateway.held_request import Asked, Replay

_FIELDS = ("content", "reasoning", "reasoning_content", "refusal", "text")
_REASONING = ("reasoning", "reasoning_content")
# Inside a JSON string every quote is escaped, so these match keys of the event and nothing in its texts.
_IDS = re.compile(rb'"(prompt_)?token_ids":\s*\[[\d,\s]*\]')
_CREATED = re.compile(rb'"created":\s*\d+')
_ID = re.compile(rb'"id":\s*"[^"]*"')
_NO_DELTA = re.compile(rb'"delta":\s*\{\}')


class EngineFailed(Exception):
    """Raised when an engine says in mid-answer that it failed.

    Args:
        message: what it said.
        code: HTTP status that goes with it.
        event: as it was sent.
    """

    def __init__(self, message: str, code: int, event: bytes) -> None:
        super().__init__(message)
        self.code = code
        self.event = event


_decode_any = msgspec.json.Decoder().decode
_encode = msgspec.json.Encoder().encode


class Answer:
    """The state of one answer that the gateway follows.

    Args:
        asked: what the client wants to see of it.
    """

    def __init__(self, asked: Asked) -> None:
        self._asked = asked
        self._delivered = Said()
        self._pieces = array("I")
        self._prompt_ids: array[int] | None = None
        self._opened = False
        self._tool_ids: dict[int, str] = {}
        self._first: Event | None = None
        self._first_engine = True
        self._retold: Said | None = None
        """What the present engine has said again; None: all of it, from here on everything is new."""
        self._usage_told = False
        self.finished = False
        """The client has its finish reason."""
        self.done = False
        """The client has all of it."""

    @property
    def begun(self) -> bool:
        """Whether the client has anything of it."""
        return self._first is not None

    @property
    def output_tokens(self) -> int:
        return len(self._delivered.ids)

    def replay(self) -> Replay | None:
        """Return what the next engine must know; None: nothing, it gets the request as the client sent it."""
        if not self._delivered.ids or self._prompt_ids is None:
            return None
        return Replay(self._prompt_ids, self._delivered.ids, self._pieces)

    @property
    def prompt_ids(self) -> array[int] | None:
        """Of the prompt; None: not known yet."""
        return self._prompt_ids

    def since(self, output: int, pieces: int) -> tuple[array[int], array[int]]:
        """Return the ids and the pieces that were delivered after so many."""
        return self._delivered.ids[output:], self._pieces[pieces:]

    def next_engine(self, ahead: Retelling | None = None) -> None:
        """From here on the events are another engine's, or those of another attempt.

        Args:
            ahead: what it has said already.

        Raises:
            Misstep: that is not what was delivered.
        """
        if self.begun:
            self._first_engine = False
        self._retold = (ahead.said if ahead is not None else Said()) if self._delivered.ids else None
        if ahead is not None and len(ahead.said.ids) >= len(self._delivered.ids) and self._beyond(ahead.said):
            raise Misstep("it has said more than was delivered")

    def take(self, event: bytes) -> bytes:
        """Take one event, with the empty line that ends it, and return what of it goes to the client (nothing: empty).

        Raises:
            Misstep: it does not continue what was delivered.
            EngineFailed: the engine says that it failed, or gave the request up.
        """
        payload = data_of(event)
        if payload is None:
            return b"" if self._retold is not None else event  # a comment
        if payload == b"[DONE]":
            if self._retold is not None or not self.finished:
                raise Misstep("it ended before what was delivered")
            self.done = True
            return event
        try:
            said = decode(payload)
        except msgspec.MsgspecError as error:
            raise Misstep(f"an event is not what it should be: {error}") from None
        if said.error is not None:
            raise EngineFailed(said.error.message, said.error.code if isinstance(said.error.code, int) else 500, event)
        if not said.choices:
            if self._retold is not None:
                raise Misstep("its usage came before what was delivered")
            self._usage_told = True
            return self._kept_as_begun(event)
        if len(said.choices) > 1 or said.choices[0].index:
            raise Misstep("it has several choices")
        choice = said.choices[0]
        if choice.finish_reason in DEAD_REASONS:
            raise EngineFailed(f"the request ended with «{choice.finish_reason}»", 503, event)
        self._learn_prompt(said.prompt_token_ids or choice.prompt_token_ids)
        if choice.token_ids is None and choice.delta is not None and choice.delta.role is not None and choice.finish_reason is None:
            return self._opening(said, event)
        if self._retold is not None:
            return self._again(said, choice, event)
        return self._new(said, choice, event)

    def end(self) -> bytes:
        """Return what is missing after the finish reason when the engine died right then: the usage, if it was asked for, and the end."""
        assert self.finished and self._first is not None
        self.done = True
        if self._usage_told or not self._asked.include_usage:
            return shapes.DONE
        prompt, output = len(self._prompt_ids or ()), self.output_tokens
        first = self._first
        usage = {"prompt_tokens": prompt, "total_tokens": prompt + output, "completion_tokens": output}
        head = {"id": first.id, "object": first.object, "created": first.created, "model": first.model}
        return b"data: " + _encode(head | {"choices": [], "usage": usage}) + b"\n\n" + shapes.DONE

    # Inside

    def _learn_prompt(self, ids: list[int] | None) -> None:
        if ids is None:
            return
        told = array("I", ids)
        if told == self._prompt_ids:
            return
        if self._delivered.ids:
            raise Misstep("its prompt is another one")
        self._prompt_ids = told  # an earlier engine may have rendered another one, of which the client has nothing

    def _opening(self, said: Event, event: bytes) -> bytes:
        if self._opened:
            return b""
        self._opened = True
        return self._told(said, event)

    def _new(self, said: Event, choice: Choice, event: bytes) -> bytes:
        self._delivered.add(choice)
        if choice.token_ids:
            self._pieces.append(len(choice.token_ids))
        event = self._with_known_tool_ids(choice, event)
        if choice.finish_reason is not None:
            self.finished = True
        elif self._is_nothing(choice, event):
            return b""
        return self._told(said, event)

    def _again(self, said: Event, choice: Choice, event: bytes) -> bytes:
        assert self._retold is not None
        retold, known = self._retold, len(self._delivered.ids)
        retold.add(choice)
        if len(retold.ids) < known:
            if choice.finish_reason is not None:
                raise Misstep(f"it ended after {len(retold.ids)} of {known} tokens")
            return b""
        rest = self._beyond(retold)
        beyond = retold.ids[known:]
        if not beyond and not rest and choice.finish_reason is None:
            return b""
        # One event spans the seam: its ids and texts beyond what was delivered are an event of their own.
        return self._new(*_cut(event, beyond, rest))

    def _beyond(self, retold: Said) -> dict[Key, str]:
        """All that was delivered has been told again: compare, and return the texts beyond."""
        delivered = self._delivered
        if retold.ids[: len(delivered.ids)] != delivered.ids:
            raise Misstep("it says other tokens than were delivered")
        rest: dict[Key, str] = {}
        for key in retold.fields.keys() | delivered.fields.keys():
            before, now = delivered.text(key), retold.text(key)
            if not now.startswith(before):
                raise Misstep(f"its {key[0]} is not what was delivered")
            if len(now) > len(before):
                rest[key] = now[len(before) :]
        self._retold = None
        return rest

    def _with_known_tool_ids(self, choice: Choice, event: bytes) -> bytes:
        """A tool call that began with another engine keeps the id that it has for the client."""
        changed: dict[int, str] = {}
        for call in (choice.delta.tool_calls or ()) if choice.delta is not None else ():
            if call.id is not None and self._tool_ids.setdefault(call.index, call.id) != call.id and not self._first_engine:
                changed[call.index] = self._tool_ids[call.index]
        if not changed:
            return event
        value = _decode_any(_payload(event))
        for call in value["choices"][0]["delta"]["tool_calls"]:
            if call.get("index", 0) in changed and call.get("id") is not None:
                call["id"] = changed[call.get("index", 0)]
        return _event(value)

    def _is_nothing(self, choice: Choice, event: bytes) -> bool:
        """Whether an event is there only because the gateway asked for the ids: the engine holds its text back."""
        return not self._asked.wants_ids and bytes(choice.logprobs) == b"null" and _NO_DELTA.search(event) is not None

    def _told(self, said: Event, event: bytes) -> bytes:
        """Return the event as the client gets it."""
        if self._first is None:
            self._first = said
        event = self._kept_as_begun(event)
        if self._asked.hides_reasoning and self._asked.chat:
            event = _without_reasoning(event)
        return event if self._asked.wants_ids else _IDS.sub(_null_ids, event)

    def _kept_as_begun(self, event: bytes) -> bytes:
        if self._first_engine or self._first is None:
            return event
        event = _ID.sub(b'"id":' + _encode(self._first.id).replace(b"\\", b"\\\\"), event, count=1)
        return _CREATED.sub(b'"created":%d' % self._first.created, event, count=1)


def _cut(event: bytes, ids: array[int], rest: dict[Key, str]) -> tuple[Event, Choice, bytes]:
    """Return ``event`` with only ``ids`` and the texts ``rest``."""
    value = _decode_any(_payload(event))
    choice = value["choices"][0]
    choice["token_ids"] = ids.tolist()
    if choice.get("logprobs"):
        choice["logprobs"] = _last_logprobs(choice["logprobs"], len(ids))
    if "text" in choice:
        choice["text"] = rest.get(("text", 0), "")
    if isinstance(choice.get("delta"), dict):
        delta = {key: value for key, value in choice["delta"].items() if key not in (*_FIELDS, "role", "tool_calls")}
        delta |= {name: rest[name, 0] for name in _FIELDS if (name, 0) in rest}
        calls = []
        for call in choice["delta"].get("tool_calls") or ():
            index, function = call.get("index", 0), {}
            for name in ("name", "arguments"):
                if (name, index) in rest:
                    function[name] = rest[name, index]
            if "name" in function:
                calls.append(call | {"function": function})
            elif function:
                calls.append({"index": index, "function": function})
        if calls:
            delta["tool_calls"] = calls
        choice["delta"] = delta
    encoded = _event(value)
    said = decode(_payload(encoded))
    return said, said.choices[0], encoded


def _last_logprobs(logprobs: dict[str, Any], count: int) -> dict[str, Any]:
    """Return the entries of the last ``count`` tokens, in either endpoint's form."""
    return {
        key: (value[len(value) - count :] if isinstance(value, list) and len(value) >= count else value) for key, value in logprobs.items()
    }


def _without_reasoning(event: bytes) -> bytes:
    value = _decode_any(_payload(event))
    choice = value["choices"][0]
    delta = choice.get("delta") or {}
    had = [delta.pop(name) for name in _REASONING if name in delta]
    if choice.get("logprobs") is not None:
        choice["logprobs"] = None
    if choice.get("token_ids") is not None:
        choice["token_ids"] = None  # they would tell it, too
    if any(had) and not any(delta.values()) and choice.get("finish_reason") is None:
        return b""
    return _event(value)


def _null_ids(match: re.Match[bytes]) -> bytes:
    return b'"prompt_token_ids":null' if match.group(1) else b'"token_ids":null'


def _payload(event: bytes) -> bytes:
    payload = data_of(event)
    assert payload is not None
    return payload


def _event(value: object) -> bytes:
    return b"data: " + _encode(value) + b"\n\n"
