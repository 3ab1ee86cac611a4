"""Data → `NodeConfig`, with every violation of the schema as a problem in plain words.

Validation goes on after an error: what is wrong is cut out (or replaced, where the schema wants something) and validated again, so that
the checks across fields can run on the rest. `Outcome.broken` has the paths that were cut.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass, field
from pathlib import Path as FilePath
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from shadowsup.supervisor.config.document import Document, Path, dotted
from shadowsup.supervisor.config.model import NodeConfig
from shadowsup.supervisor.config.secrets import is_secret_name
from shadowsup.supervisor.config.shape import shape_of

_ROUNDS = 6
"""Each round cuts what the last one found; placeholders need one more. The schema is not deeper than this."""


@dataclass
class Outcome:
    """``config`` is None when not even the rest of the file makes one."""

    config: NodeConfig | None = None
    broken: set[Path] = field(default_factory=set)

    def spoils(self, path: Path, about: tuple[Path, ...]) -> bool:
        """Tell whether a finding at ``path`` that depends on ``about`` rests on something that was cut."""
        return any(
            path[: len(cut)] == cut or any(other[: len(cut)] == cut or cut[: len(other)] == other for other in about)
            for cut in self.broken
            if cut
        )


def validate(document: Document, base: FilePath) -> Outcome:
    """Validate ``document.data`` (changed on the way) and record problems in ``document``."""
    outcome = Outcome()
    if not isinstance(document.data, dict):
        document.problem((), "a config is a mapping: version, node, workers, …")
        return outcome
    data = {key: value for key, value in document.data.items() if not key.startswith("x-")}
    for _round in range(_ROUNDS):
        try:
            outcome.config = NodeConfig.model_validate(data, context={"file": True, "base": base})
            return outcome
        except ValidationError as error:
            details = error.errors(include_url=False)
        # A list whose items are all wrong is "too short" to pydantic as well.
        details = [detail for detail in details if not (detail["type"] == "too_short" and detail["input"])]
        found = [(_locate(detail["loc"], data), detail) for detail in details]
        for path, detail in found:
            if path not in outcome.broken and path not in document.spoiled:
                _tell(document, path, detail)
        for path, _detail in found:
            outcome.broken.add(path)
            if not _cut(data, path):
                return outcome
    return outcome


def _locate(loc: tuple[int | str, ...], data: Any) -> Path:
    """Return the path in the data; pydantic puts names of union members and ``[key]`` in between."""
    path: list[int | str] = []
    at = data
    for position, part in enumerate(loc):
        last = position == len(loc) - 1
        if isinstance(at, dict) and isinstance(part, str) and (part in at or (last and part != "[key]")):
            at = at.get(part)
        elif isinstance(at, list) and isinstance(part, int) and part < len(at):
            at = at[part]
        else:
            continue
        path.append(part)
    return tuple(path)


def _cut(data: Any, path: Path) -> bool:
    """Remove what is at ``path``, or put a placeholder where the schema wants something. Return False when nothing is left to validate."""
    if path == ("version",):
        data["version"] = 1
        return True
    if not path or path == ("workers",):
        return False
    if len(path) == 2 and path[0] == "workers":
        data["workers"][path[1]] = {"name": f"worker-{path[1]}", "engine": "transformers"}
        return True
    key = path[-1]
    if len(path) == 3 and path[0] == "workers" and key in ("name", "engine"):
        data["workers"][path[1]][key] = "transformers" if key == "engine" else f"worker-{path[1]}"
        return True
    at = data
    for position, part in enumerate(path[:-1]):
        if isinstance(at, dict) and part not in at:
            return True  # the list that it was in went with another of its items
        following = at[part]
        if position > 0 and isinstance(following, list):
            at.pop(part)  # an item cannot go without moving the others
            return True
        at = following
    at.pop(path[-1], None)
    return True


def _tell(document: Document, path: Path, detail: ErrorDetails) -> None:
    kind = detail["type"]
    if kind == "extra_forbidden":
        _unknown_key(document, path)
    elif kind == "missing":
        document.problem(path[:-1], f"{_named(path[:-1])} has no {path[-1]}", _missing_hint(path))
    else:
        message, hint = _words(detail, path, document)
        document.problem(path, f"{dotted(path) or 'the config'}: {message}", hint, key="[key]" in detail["loc"])


def _named(path: Path) -> str:
    return dotted(path) if path else "the config"


def _missing_hint(path: Path) -> str:
    return {"version": "version: 1", "engine": "engine: transformers, or command"}.get(str(path[-1]), "")


def _unknown_key(document: Document, path: Path) -> None:
    root = shape_of(NodeConfig)
    key = str(path[-1])
    here = root.at(path[:-1])
    known = sorted(here.children) if here is not None else []
    lowered = {name.lower(): name for name in known}
    near = difflib.get_close_matches(key.lower().replace("-", "_"), list(lowered), n=1, cutoff=0.6)
    elsewhere = root.places(key)
    message = f"unknown key {key!r} in {_named(path[:-1])}"
    hint = ""
    if near:
        message += f"; did you mean {lowered[near[0]]!r}?"
    elif elsewhere:
        hint = f"it belongs to {' or '.join(elsewhere[:2])}"
    elif known:
        hint = f"known here: {', '.join(known)}"
    document.problem(path, message, hint, key=True)


_PLAIN_TYPES = {
    str: "text",
    bool: "true or false",
    int: "a number",
    float: "a number",
    dict: "a mapping",
    list: "a list",
    type(None): "null",
}
_WANTED = {
    "string_type": "text",
    "string_sub_type": "text",
    "int_type": "a whole number",
    "int_parsing": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a duration, like 30s",
    "float_parsing": "a duration, like 30s",
    "bool_type": "true or false",
    "dict_type": "a mapping",
    "model_type": "a mapping",
    "model_attributes_type": "a mapping",
    "tuple_type": "a list",
    "list_type": "a list",
}


def _is(value: Any) -> str:
    for kind, name in _PLAIN_TYPES.items():
        if isinstance(value, kind) and not (kind is int and isinstance(value, bool)):
            return name
    return "something else"


def _words(detail: ErrorDetails, path: Path, document: Document) -> tuple[str, str]:
    """Return (message, hint) for one error of pydantic. A value under a secret name is not shown."""
    kind, value = detail["type"], detail["input"]
    context: dict[str, Any] = detail.get("ctx") or {}
    secret = path in document.secrets or (("env" in path or "args" in path) and is_secret_name(str(path[-1])))
    raw = document.raw.get(path, "")
    shown = "this value" if secret else raw if raw and len(raw) <= 60 else _is(value)
    if kind == "value_error":
        return ("the value is not right here" if secret else str(context.get("error", detail["msg"]))), ""
    if kind in _WANTED:
        wanted = _WANTED[kind]
        if wanted == "text" and isinstance(value, int | float):
            return f"{shown} without quotes is {_is(value)}, but text is wanted", "" if secret else f'write "{raw}"'
        if value is None:
            return f"it is empty, but {wanted} is wanted", "remove the key, or give it a value"
        return f"{shown} is {_is(value)}, but {wanted} is wanted" if shown != _is(value) else f"{wanted} is wanted, not {shown}", ""
    if kind in ("enum", "literal_error"):
        allowed = [part.strip().strip("'") for part in str(context.get("expected", "")).replace(" or ", ", ").split(",")]
        near = difflib.get_close_matches(str(value), allowed, n=1, cutoff=0.6)
        known = f"use {', '.join(allowed)}" if len(allowed) > 1 else f"write {allowed[0]}"
        return f"{shown} is not known here" + (f"; did you mean {near[0]!r}?" if near else ""), known
    if kind in ("greater_than_equal", "greater_than", "less_than_equal", "less_than"):
        limit = next(iter(context.values()))
        words = {"greater_than_equal": "at least", "greater_than": "above", "less_than_equal": "at most", "less_than": "below"}[kind]
        return f"{shown} is out of range; it must be {words} {limit}", ""
    if kind == "string_pattern_mismatch":
        if path[-1] == "name":
            return f"{shown!r} is not a name", "up to 32 letters, digits, - and _, the first a letter or digit"
        return f"{shown!r} does not fit {context.get('pattern')}", "letters, digits and _, the first not a digit" if "env" in path else ""
    if kind in ("too_short", "string_too_short"):
        return "it must not be empty", ""
    return str(detail["msg"]), ""
