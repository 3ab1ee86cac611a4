"""Inputs that are nearly right: messages of a protocol with something wrong in them. ``HYPOTHESIS_PROFILE=long`` tries 100,000 a test."""

from __future__ import annotations

import enum
import os
import types
import typing
from pathlib import Path
from typing import Any

import msgspec
from hypothesis import strategies as st

SMALL = 65_536
HUGE = (2**40, 2**62, 2**63 - 1, 2**64 - 1)

words = st.sampled_from(["", "chat", "chat.1", "host", "a/b", "../x", "\0", "é" * 40, "x" * 300])
# Never a size that a machine could really give: the keeper would, and fill it.
numbers = st.one_of(st.integers(-3, SMALL), st.sampled_from(HUGE), st.just(-(2**63)))
anything = st.recursive(
    st.one_of(st.none(), st.booleans(), numbers, st.floats(allow_nan=False), words, st.binary(max_size=20)),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(words, inner, max_size=4)),
    max_leaves=8,
)


def values(kind: Any) -> st.SearchStrategy[Any]:
    """Return values of a type as they go over the wire (builtins)."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return st.one_of([st.none() if one is type(None) else values(one) for one in arguments])
    if origin in (tuple, list):
        if origin is tuple and arguments[-1] is not Ellipsis:
            return st.tuples(*map(values, arguments)).map(list)
        return st.lists(values(arguments[0]), max_size=4)
    if origin is dict:
        return st.dictionaries(values(arguments[0]), values(arguments[1]), max_size=3)
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return structs(kind)
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return st.sampled_from([one.value for one in kind])
    simple = {int: numbers, str: words, bool: st.booleans(), float: st.floats(allow_nan=False), bytes: st.binary(max_size=40)}
    return simple.get(kind, anything)


def structs(kind: type[msgspec.Struct]) -> st.SearchStrategy[Any]:
    """Return instances of a struct, as they go over the wire."""
    fields = msgspec.structs.fields(kind)
    config = kind.__struct_config__
    if config.array_like:
        made = st.tuples(*(values(field.type) for field in fields)).map(list)
        return made if config.tag is None else made.map(lambda items: [config.tag, *items])
    required = {field.encode_name: values(field.type) for field in fields if field.required}
    optional = {field.encode_name: values(field.type) for field in fields if not field.required}
    made_dict = st.fixed_dictionaries(required, optional=optional)
    return made_dict if config.tag is None else made_dict.map(lambda items: {config.tag_field: config.tag, **items})


@st.composite
def spoiled(draw: st.DrawFn, messages: st.SearchStrategy[Any]) -> Any:
    """Return a message, mostly with one value replaced by whatever, one taken out, or one too many."""
    message = draw(messages)
    if isinstance(message, dict) and message:
        how = draw(st.integers(0, 4))
        key = draw(st.sampled_from(sorted(message)))
        if how == 1:
            message = {**message, key: draw(anything)}
        elif how == 2:
            message = {name: value for name, value in message.items() if name != key}
        elif how == 3:
            message = {**message, "surplus": draw(anything)}
    elif isinstance(message, list) and message and draw(st.booleans()):
        at = draw(st.integers(0, len(message) - 1))
        message = [*message[:at], draw(anything), *message[at + draw(st.integers(0, 1)) :]]
    return message


def of_union(union: Any) -> st.SearchStrategy[Any]:
    """Return messages of any kind in a union of structs."""
    kinds = typing.get_args(union) or (union,)
    return st.one_of([structs(kind) for kind in kinds])


@st.composite
def payloads(draw: st.DrawFn, messages: st.SearchStrategy[Any], encode: Any = msgspec.msgpack.encode) -> bytes:
    """Return a payload: mostly a (spoiled) message, at times with bytes changed or cut, at times any bytes."""
    how = draw(st.integers(0, 9))
    if how == 0:
        return draw(st.binary(max_size=64))
    try:
        data = bytes(encode(draw(spoiled(messages))))
    except (OverflowError, TypeError, ValueError):  # an int beyond msgpack's 64 bits
        return b""
    if how == 1:
        return data[: draw(st.integers(0, len(data)))]
    if how == 2 and data:
        at = draw(st.integers(0, len(data) - 1))
        return data[:at] + draw(st.binary(min_size=1, max_size=3)) + data[at + 1 :]
    return data


def open_fds() -> int:
    """Return how many files this process has open."""
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def resident() -> int:
    """Return this process's resident memory, bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
