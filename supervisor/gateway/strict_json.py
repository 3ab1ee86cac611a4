"""JSON that means one thing only: duplicate keys, NaN, infinities and broken strings are errors that say where."""

from __future__ import annotations

import json
import math
import re
from typing import Any

from shadowsup.supervisor.gateway.errors import ApiError, invalid

_ESCAPED_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


class _Fault:
    """Stands in the parsed value where something is wrong, so that a walk can say where that is."""

    def __init__(self, what: str) -> None:
        self.what = what


class _FaultyObject(dict[str, Any]):
    """An object with a duplicate key."""

    fault: str


def parse(body: bytes) -> dict[str, Any]:
    """Return the JSON object in ``body``.

    Raises:
        ApiError: 400; the message names line and column, or the path of the value at fault.
    """
    faults = 0

    def an_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        nonlocal faults
        value = dict(pairs)
        if len(value) == len(pairs):
            return value
        faults += 1
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        faulty = _FaultyObject(value)
        faulty.fault = f"the key {json.dumps(twice)} is there twice"
        return faulty

    def a_constant(name: str) -> _Fault:
        nonlocal faults
        faults += 1
        return _Fault(f"{name} is not JSON")

    def a_float(text: str) -> float | _Fault:
        nonlocal faults
        value = float(text)
        if math.isinf(value):
            faults += 1
            return _Fault(f"the number {text[:20]} is out of range")
        return value

    try:
        text = body.decode()
    except UnicodeDecodeError as error:
        raise _malformed(f"byte {error.start} is not UTF-8") from None
    try:
        value = json.loads(text, object_pairs_hook=an_object, parse_constant=a_constant, parse_float=a_float)
    except json.JSONDecodeError as error:
        raise _malformed(f"{error.msg} at line {error.lineno} column {error.colno}") from None
    except RecursionError:
        raise _malformed("it is nested too deeply") from None
    except ValueError:  # an integer of more digits than Python converts
        raise _malformed("a number in it has too many digits") from None
    if not isinstance(value, dict):
        raise invalid(f"The request body must be a JSON object, not {_name(value)}", code="invalid_json")
    if faults or _ESCAPED_SURROGATE.search(body):
        _refuse_faults(value, "")
    return value


def _refuse_faults(value: object, path: str) -> None:
    """Raise for the first fault in ``value``, depth first (the parser has bounded the depth)."""
    if isinstance(value, _Fault):
        raise _malformed(f"{value.what} (at {path})")
    if isinstance(value, _FaultyObject):
        raise _malformed(f"{value.fault}{f' (in {path})' if path else ''}")
    if isinstance(value, dict):
        for key, item in value.items():
            _refuse_faults(key, path)
            _refuse_faults(item, f"{path}.{key}" if path else key)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            _refuse_faults(item, f"{path}[{index}]")
    elif isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            raise _malformed(f"half a surrogate pair in a string (at {ascii(path)[1:-1]})") from None


def _malformed(why: str) -> ApiError:
    return invalid(f"The request body is not valid JSON: {why}", code="invalid_json")


def _name(value: object) -> str:
    if value is None:
        return "null"
    names: dict[type, str] = {list: "an array", str: "a string", bool: "a boolean", int: "a number", float: "a number"}
    return names.get(type(value), "this")
