"""Which metrics and labels a PromQL expression names. No evaluator: a reader of selectors, enough to find what does not exist."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

_TOKEN = re.compile(
    r"""\s+|(?P<string>"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')|(?P<range>\[[^\]]*\])|(?P<name>[a-zA-Z_:][a-zA-Z0-9_:]*)
    |(?P<number>\d+(?:\.\d+)?(?:[eE][+-]?\d+)?[smhdwy]?)|(?P<op>=~|!~|!=|==|<=|>=|[-+*/%^<>=(){},@])""",
    re.VERBOSE,
)
_GROUPING = {"by", "without", "on", "ignoring", "group_left", "group_right"}
_WORDS = {"and", "or", "unless", "bool", "offset", "inf", "nan"}
_FUNCTIONS = {
    *("sum", "min", "max", "avg", "count", "topk", "bottomk", "quantile", "stddev", "group", "count_values"),
    *(
        "rate",
        "irate",
        "increase",
        "delta",
        "changes",
        "resets",
        "histogram_quantile",
        "time",
        "abs",
        "ceil",
        "floor",
        "round",
        "clamp_min",
    ),
    *("min_over_time", "max_over_time", "avg_over_time", "sum_over_time", "last_over_time", "absent", "vector", "scalar", "label_replace"),
}


@dataclass
class Selector:
    """One metric of an expression. ``matchers``: (label, operator, value)."""

    metric: str
    matchers: list[tuple[str, str, str]] = field(default_factory=list)


@dataclass
class Expression:
    selectors: list[Selector] = field(default_factory=list)
    groupings: set[str] = field(default_factory=set)


def read(text: str) -> Expression:
    """Raises ValueError: it is not PromQL as far as this reader knows it."""
    tokens = list(_tokens(text))
    _balanced(tokens, text)
    found, at = Expression(), 0
    while at < len(tokens):
        kind, word = tokens[at]
        following = tokens[at + 1][1] if at + 1 < len(tokens) else ""
        if kind != "name" or word.lower() in _WORDS:
            at += 1
        elif word in _GROUPING and following == "(":
            at += 2
            while tokens[at][1] != ")":
                if tokens[at][0] == "name":
                    found.groupings.add(tokens[at][1])
                at += 1
        elif following == "(" or word in _FUNCTIONS:
            if word not in _FUNCTIONS:
                raise ValueError(f"no function {word} in {text!r}")
            at += 1
            # The grouping may come first: sum by (x) (…)
        else:
            selector = Selector(word)
            found.selectors.append(selector)
            at += 1
            if following == "{":
                at = _matchers(tokens, at + 1, selector, text)
    return found


def _tokens(text: str) -> Iterator[tuple[str, str]]:
    at = 0
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None:
            raise ValueError(f"{text[at : at + 20]!r} in {text!r}")
        at = match.end()
        if match.lastgroup is not None:
            yield match.lastgroup, match[0]


def _balanced(tokens: list[tuple[str, str]], text: str) -> None:
    depth: list[str] = []
    for kind, word in tokens:
        if kind == "op" and word in "({":
            depth.append(word)
        elif kind == "op" and word in ")}" and (not depth or depth.pop() + word not in ("()", "{}")):
            raise ValueError(f"unbalanced: {text!r}")
    if depth:
        raise ValueError(f"unbalanced: {text!r}")


def _matchers(tokens: list[tuple[str, str]], at: int, selector: Selector, text: str) -> int:
    while tokens[at][1] != "}":
        (kind, label), (_, operator), (string, value) = tokens[at : at + 3]
        if kind != "name" or operator not in ("=", "!=", "=~", "!~") or string != "string":
            raise ValueError(f"no matcher at {label!r} in {text!r}")
        selector.matchers.append((label, operator, value[1:-1]))
        at += 3
        if tokens[at][1] == ",":
            at += 1
    return at + 1
