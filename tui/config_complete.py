"""Completion in a config that is just being written: where the cursor is, by the text alone, and what the schema allows there. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

ITEM = 0
"""In a path: any item of a list."""
Path = tuple[str | int, ...]
_LINE = re.compile(r"(?P<lead> *)(?P<dashes>(?:- +|-$)*)(?P<rest>.*)")
_KEY = re.compile(r"(?P<key>[A-Za-z_][\w.-]*)\s*:(?:\s+(?P<value>.*)|$)")
_WORD = re.compile(r"[\w.${}:/~+-]*$")


@dataclass(frozen=True)
class Place:
    """Where the cursor is. ``path``: of the mapping (a key is written) or of the value; ``prefix``: what is there of it already."""

    path: Path
    kind: str
    """``key`` or ``value``."""
    prefix: str
    siblings: Mapping[str, str]
    """Keys of the same mapping with their scalar values."""


@dataclass(frozen=True)
class Candidate:
    """``insert`` takes the place of the prefix."""

    label: str
    insert: str
    detail: str = ""


@dataclass(frozen=True)
class _Parsed:
    lead: int
    column: int
    """Of the key."""
    dashes: bool
    key: str
    value: str


def _parse(line: str) -> _Parsed | None:
    """None: blank, or a comment."""
    match = _LINE.match(line)
    assert match is not None
    rest = match["rest"]
    if (not rest.strip() and not match["dashes"]) or rest.startswith("#"):
        return None
    key = _KEY.match(rest)
    lead = len(match["lead"])
    column = lead + len(match["dashes"])
    if match["dashes"].endswith("-"):
        column += 1
    return _Parsed(lead, column, bool(match["dashes"]), key["key"] if key else "", _bare(key["value"] or "") if key else rest)


def _bare(value: str) -> str:
    """The value without a comment behind it, an anchor or a tag before it."""
    value = re.sub(r"(^|\s)#.*$", "", value).strip()
    return re.sub(r"^[&!]\S+\s*", "", value)


def place(lines: Sequence[str], row: int, column: int) -> Place | None:
    """Return where (row, column) is, counted from 0; None where nothing can be completed: in a comment, or inside quotes."""
    head = lines[row][:column]
    if _in_comment_or_quotes(head):
        return None
    match = _LINE.match(head)
    assert match is not None
    if match["dashes"].endswith("-"):
        return None
    rest, lead = match["rest"], len(match["lead"])
    at = lead + len(match["dashes"])
    outer: Path
    if match["dashes"]:
        outer = (*_parents(lines, row, lead, in_list=True), ITEM)
    else:
        outer = _parents(lines, row, lead, in_list=False)
    key = _KEY.match(rest)
    value = (key["value"] or "") if key else rest
    if key is None and not any(c in rest for c in "{["):
        # A key that is not finished, or an item of a list of scalars.
        return Place(outer, "key", rest, _siblings(lines, row, at, dashes=bool(match["dashes"])))
    inside = (*outer, key["key"]) if key else outer
    if key is not None and not rest[key.end("key") :].startswith((": ", ":\t")):
        return None
    return _flow(inside, value)


def _in_comment_or_quotes(head: str) -> bool:
    quote = ""
    for at, char in enumerate(head):
        if quote:
            quote = "" if char == quote else quote
        elif char in "'\"" and (at == 0 or head[at - 1] in " [{,:"):
            quote = char
        elif char == "#" and (at == 0 or head[at - 1] in " \t"):
            return True
    return bool(quote)


def _flow(path: Path, text: str) -> Place:
    """Follow ``{key: value, [`` into the innermost that is open."""
    stack: list[tuple[str, Path]] = []
    word, key = "", ""
    siblings: list[dict[str, str]] = [{}]
    for char in text:
        if char in "{[":
            here: Path = (*path, key) if key else path
            stack.append((char, path))
            path = (*here, ITEM) if char == "[" else here
            siblings.append({})
            word = key = ""
        elif char in "}]" and stack:
            _, path = stack.pop()
            siblings.pop()
            word = key = ""
        elif char == "," and stack:
            if key:
                siblings[-1][key] = word.strip()
            word = key = ""
        elif char == ":" and stack and stack[-1][0] == "{" and not key:
            key, word = word.strip(), ""
        else:
            word += char
    prefix = word.lstrip()
    if stack and stack[-1][0] == "{":
        return Place((*path, key), "value", prefix, siblings[-1]) if key else Place(path, "key", prefix, siblings[-1])
    return Place(path, "value", prefix, siblings[-1])


def _parents(lines: Sequence[str], row: int, column: int, *, in_list: bool) -> Path:
    """Return the path of the mapping (or list) whose members stand at ``column``."""
    path: list[str | int] = []
    for at in range(row - 1, -1, -1):
        if column == 0 and not in_list:
            break
        line = _parse(lines[at])
        if line is None:
            continue
        if line.dashes and line.column == column and not in_list:
            # The first line of the item that we are in.
            path.insert(0, ITEM)
            column, in_list = line.lead, True
            continue
        above = line.column <= column if in_list and not line.dashes else line.column < column
        if line.key and not line.value and above:
            path.insert(0, line.key)
            column, in_list = line.column, False
            if line.dashes:
                path.insert(0, ITEM)
                column, in_list = line.lead, True
    return tuple(path)


def _siblings(lines: Sequence[str], row: int, column: int, *, dashes: bool) -> dict[str, str]:
    found: dict[str, str] = {}
    for step in (-1, 1):
        at = row + step
        if step < 0 and dashes:
            continue
        while 0 <= at < len(lines):
            line = _parse(lines[at])
            at += step
            if line is None:
                continue
            if line.column < column or (step > 0 and line.dashes and line.lead < column):
                break
            if line.column == column and line.key:
                found[line.key] = line.value
                if line.dashes:
                    break
    return found


class Completer:
    """Answers from a JSON Schema as `shadowsup.supervisor.config.schema` makes it."""

    def __init__(self, schema: Mapping[str, Any]) -> None:
        self._schema = schema

    def candidates(self, place: Place) -> list[Candidate]:
        """Return what may stand there, those that begin with the prefix first."""
        found = self._at(place.path)
        if found is None:
            return []
        if place.kind == "key" and found.get("properties"):
            everything = list(self._keys(found, place.siblings))
        else:
            everything = list(self._values(found))
        prefix = place.prefix.lower()
        starts = [c for c in everything if c.label.lower().startswith(prefix)]
        holds = [c for c in everything if prefix and c not in starts and prefix in c.label.lower()]
        return starts + holds

    def describe(self, path: Path) -> str:
        """Return what the schema says about a key."""
        found = self._at(path)
        return str((found or {}).get("description") or "")

    def _at(self, path: Path) -> Mapping[str, Any] | None:
        node: Mapping[str, Any] | None = self._schema
        for part in path:
            node = self._step(self._resolved(node), part)
            if node is None:
                return None
        return self._resolved(node)

    def _resolved(self, node: Mapping[str, Any] | None) -> Mapping[str, Any]:
        """Follow references and take the branch that has structure."""
        found: dict[str, Any] = dict(node or {})
        while "$ref" in found:
            target = self._schema["$defs"][str(found.pop("$ref")).rpartition("/")[2]]
            found = {**target, **found}
        for name in ("anyOf", "oneOf"):
            for branch in found.get(name) or ():
                inner = self._resolved(branch)
                if inner.get("properties") or inner.get("items"):
                    return {**inner, **{key: value for key, value in found.items() if key == "description"}}
        return found

    def _step(self, node: Mapping[str, Any], part: str | int) -> Mapping[str, Any] | None:
        found = node.get("items") if isinstance(part, int) else (node.get("properties") or {}).get(part)
        return found if isinstance(found, Mapping) else None

    def _keys(self, node: Mapping[str, Any], siblings: Mapping[str, str]) -> Iterator[Candidate]:
        foreign = self._foreign(node, siblings)
        required = node.get("required") or []
        names = [*(n for n in required), *(n for n in node["properties"] if n not in required)]
        for name in names:
            if name in siblings or name in foreign:
                continue
            below = self._resolved(node["properties"].get(name))
            nests = bool(below.get("properties") or below.get("items") or below.get("type") in ("object", "array"))
            default = "" if "default" not in below or nests else f" (default {_scalar(below['default'])})"
            yield Candidate(name, f"{name}:" if nests else f"{name}: ", f"{below.get('description') or ''}{default}")

    @staticmethod
    def _foreign(node: Mapping[str, Any], siblings: Mapping[str, str]) -> set[str]:
        """Keys that what is chosen beside rules out (``command`` beside ``engine: vllm``)."""
        out: set[str] = set()
        for rule in node.get("allOf") or ():
            chosen = (rule.get("if") or {}).get("properties") or {}
            if chosen and all(siblings.get(key) == want.get("const") for key, want in chosen.items()):
                out |= {key for key, allowed in ((rule.get("then") or {}).get("properties") or {}).items() if allowed is False}
        return out

    def _values(self, node: Mapping[str, Any]) -> Iterator[Candidate]:
        seen: set[str] = set()
        for value, detail in self._choices(node):
            if value not in seen:
                seen.add(value)
                yield Candidate(value, value, detail)

    def _choices(self, node: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
        node = self._resolved(node)
        if "default" in node and not isinstance(node["default"], dict | list):
            yield _scalar(node["default"]), "the default"
        for value in node.get("enum") or ():
            if not str(value).startswith("SIG"):
                yield _scalar(value), ""
        if "const" in node:
            yield _scalar(node["const"]), ""
        if node.get("type") == "boolean":
            yield from (("true", ""), ("false", ""))
        if node.get("type") == "null":
            yield "null", ""
        for name in ("anyOf", "oneOf"):
            for branch in node.get(name) or ():
                yield from self._choices(branch)


def _scalar(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value)


def word_before(line: str, column: int) -> str:
    """Return what a candidate replaces: the word that ends at ``column``."""
    match = _WORD.search(line[:column])
    return match[0] if match is not None else ""
