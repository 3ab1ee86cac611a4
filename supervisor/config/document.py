"""Strict YAML: text → plain data with a position for every key and value, and every problem on the way.

PyYAML scans and composes; what its constructors would decide silently is decided here: a duplicate key is an error, explicit tags are
refused, and a plain scalar that YAML 1.1 and 1.2 read differently (``no``, ``010``, ``1:30``, ``1e3``) must be quoted or written
otherwise. Anchors, aliases and merge keys work within limits. Variables are replaced inside scalars, never in the text of the file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from yaml.composer import Composer
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode
from yaml.parser import Parser
from yaml.reader import Reader
from yaml.resolver import BaseResolver
from yaml.scanner import Scanner

from shadowsup.supervisor.config.interpolate import expand
from shadowsup.supervisor.config.plain import plain, trap
from shadowsup.supervisor.config.scalars import Expanded
from shadowsup.supervisor.config.secrets import is_secret_name
from shadowsup.supervisor.errors import Problem

MAX_NODES = 20_000
"""Values of one document with every alias expanded: stops an alias bomb. A node with 100 workers has about 5,000."""
MAX_DEPTH = 40

Path = tuple[str | int, ...]
_MERGE = "<<"
_STR = "tag:yaml.org,2002:str"


@dataclass(frozen=True, order=True)
class Mark:
    """A position, counted from 1."""

    line: int
    column: int


@dataclass
class Document:
    """``data``: dicts, lists and scalars (`Expanded` where an unquoted scalar held a variable). Paths are keys and indices."""

    file: str
    data: Any = None
    marks: dict[Path, Mark] = field(default_factory=dict)
    """Where each value starts."""
    key_marks: dict[Path, Mark] = field(default_factory=dict)
    raw: dict[Path, str] = field(default_factory=dict)
    """Scalars as they are in the file."""
    secrets: set[Path] = field(default_factory=set)
    """Scalars that hold the value of a variable with a secret name."""
    spoiled: set[Path] = field(default_factory=set)
    """Scalars whose value is not known, because of a problem that was told."""
    problems: list[Problem] = field(default_factory=list)

    def mark(self, path: Path, *, key: bool = False) -> Mark:
        """Return the position of ``path``, or of the nearest thing around it that is in the file."""
        if key and path in self.key_marks:
            return self.key_marks[path]
        while path and path not in self.marks:
            path = path[:-1]
        return self.marks.get(path, Mark(1, 1))

    def problem(self, path: Path, message: str, hint: str = "", *, key: bool = False, mark: Mark | None = None) -> Problem:
        """Record and return a problem at ``path``."""
        at = mark or self.mark(path, key=key)
        found = Problem(file=self.file, line=at.line, column=at.column, path=dotted(path), message=message, hint=hint)
        if found not in self.problems:
            self.problems.append(found)
        return found

    def adopt(self, other: Document, path: Path) -> None:
        """Take over what ``other`` recorded at and below ``path``."""

        def below(at: Path) -> bool:
            return at[: len(path)] == path

        self.marks |= {at: mark for at, mark in other.marks.items() if below(at)}
        self.key_marks |= {at: mark for at, mark in other.key_marks.items() if below(at)}
        self.raw |= {at: text for at, text in other.raw.items() if below(at)}
        self.secrets |= {at for at in other.secrets if below(at)}
        self.spoiled |= {at for at in other.spoiled if below(at)}


def dotted(path: Path) -> str:
    """Return ``workers[0].kv.size``."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text


class Loader(Reader, Scanner, Parser, Composer, BaseResolver):
    """PyYAML up to the node graph, without implicit types: every scalar is text unless it has an explicit tag."""

    def __init__(self, text: str) -> None:
        Reader.__init__(self, text)
        Scanner.__init__(self)
        Parser.__init__(self)
        Composer.__init__(self)
        BaseResolver.__init__(self)


class Walk:
    """Turns a node graph into the data of ``document``. ``text``: what was composed; ``position`` maps its places to the file's."""

    def __init__(self, document: Document, text: str, environ: Mapping[str, str], position: Callable[[int], Mark]) -> None:
        self._doc = document
        self._text = text
        self._environ = environ
        self._position = position
        self._nodes = 0
        self._open: list[int] = []
        self._overflow = False

    def value(self, node: Node, path: Path) -> Any:
        """Return the data of ``node`` and record its positions."""
        mark = self._mark(node)
        self._doc.marks[path] = mark
        self._nodes += 1
        if self._nodes > MAX_NODES or len(self._open) > MAX_DEPTH:
            if not self._overflow:
                deep = len(self._open) > MAX_DEPTH
                what = f"is nested more than {MAX_DEPTH} deep" if deep else f"has more than {MAX_NODES} values with its aliases expanded"
                self._doc.problem(path, f"the document {what}")
            self._overflow = True
            return None
        if id(node) in self._open:
            self._doc.problem(path, "an alias refers to what contains it")
            return None
        if isinstance(node, ScalarNode):
            return self._scalar(node, path)
        if node.tag not in ("tag:yaml.org,2002:map", "tag:yaml.org,2002:seq"):
            self._doc.problem(path, f"tag {node.tag} is not allowed", "remove it")
        self._open.append(id(node))
        try:
            if isinstance(node, SequenceNode):
                return [self.value(item, (*path, index)) for index, item in enumerate(node.value)]
            assert isinstance(node, MappingNode)
            return self._mapping(node, path)
        finally:
            self._open.pop()

    def _mapping(self, node: MappingNode, path: Path) -> dict[str, Any]:
        result: dict[str, Any] = {}
        merges: list[Node] = []
        for key_node, value_node in node.value:
            key_mark = self._mark(key_node)
            if not isinstance(key_node, ScalarNode):
                self._doc.problem(path, "a key must be plain text", mark=key_mark)
                continue
            key = str(key_node.value)
            if key == _MERGE and key_node.style is None:
                merges.append(value_node)
                continue
            at = (*path, key)
            if key in result:
                first = self._doc.key_marks[at]
                self._doc.problem(at, f"duplicate key {key!r}; the first is at line {first.line}, column {first.column}", mark=key_mark)
                self._apart(value_node, at)  # for its own problems; the first one stays
                continue
            self._doc.key_marks[at] = key_mark
            result[key] = self.value(value_node, at)
        for merge in merges:
            self._merge(merge, path, result)
        return result

    def _merge(self, node: Node, path: Path, into: dict[str, Any]) -> None:
        sources = node.value if isinstance(node, SequenceNode) else [node]
        for source in sources:
            if not isinstance(source, MappingNode):
                self._doc.problem(path, "<< takes a mapping, or a list of mappings", mark=self._mark(source))
                continue
            if id(source) in self._open:
                self._doc.problem(path, "an alias refers to what contains it", mark=self._mark(node))
                continue
            merged, apart = self._apart(source, path)
            for key, value in (merged or {}).items():
                if key in into:
                    continue
                into[key] = value
                at = (*path, key)
                self._doc.adopt(apart, at)

    def _apart(self, node: Node, path: Path) -> tuple[Any, Document]:
        """Walk ``node`` without recording its positions in the document, but its problems."""
        apart = Document(self._doc.file)
        walk = Walk(apart, self._text, self._environ, self._position)
        walk._nodes, walk._open, walk._overflow = self._nodes, self._open, self._overflow
        value = walk.value(node, path)
        self._nodes, self._overflow = walk._nodes, walk._overflow
        self._doc.problems += [problem for problem in apart.problems if problem not in self._doc.problems]
        return value, apart

    def _scalar(self, node: ScalarNode, path: Path) -> Any:
        text = str(node.value)
        self._doc.raw[path] = text
        if node.tag != _STR:
            self._doc.problem(path, f"tag {node.tag} is not allowed", "remove it; write text in quotes and numbers without")
            return text
        result = expand(text, self._environ)
        begin = node.start_mark.index
        for fault in result.faults:
            found = self._text.find(fault.token, begin, node.end_mark.index)
            if found >= 0:
                begin = found + 1
            mark = self._position(found) if found >= 0 else None
            self._doc.problem(path, f"{dotted(path)}: {fault.message}", fault.hint, mark=mark)
            self._doc.spoiled.add(path)
        if any(is_secret_name(name) for name in result.variables):
            self._doc.secrets.add(path)
        if node.style is not None:
            return result.text
        if result.touched:
            if result.text == "":
                return None  # as if nothing were written there
            return Expanded(result.text)
        if text and (found_trap := trap(text)) is not None:
            self._doc.problem(path, f"{dotted(path)}: {text} without quotes is {found_trap[0]}", found_trap[1])
            self._doc.spoiled.add(path)
            return Expanded(text)
        return plain(text)

    def _mark(self, node: Node) -> Mark:
        return self._position(node.start_mark.index)
