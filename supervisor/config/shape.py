"""The tree of keys of the schema, for did-you-mean, for the JSON Schema and for tests of the reference."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, get_args

from pydantic import BaseModel


@dataclass
class Shape:
    """One section: its keys, and the sections below. ``many``: a list of them."""

    model: type[BaseModel]
    children: dict[str, Shape | None] = field(default_factory=dict)
    many: bool = False

    def at(self, path: tuple[str | int, ...]) -> Shape | None:
        """Return the section at ``path``; None where there is none, or any key is allowed."""
        shape: Shape | None = self
        for part in path:
            if isinstance(part, int):
                continue
            shape = shape.children.get(part) if shape is not None else None
        return shape

    def walk(self, prefix: str = "") -> Iterator[str]:
        """Yield every key as ``workers[].kv.size``, sections before what is in them."""
        for key, child in self.children.items():
            name = f"{prefix}{key}{'[]' if child is not None and child.many else ''}"
            yield name
            if child is not None:
                yield from child.walk(f"{name}.")

    def places(self, key: str) -> list[str]:
        """Return where ``key`` is known, as `walk` writes it."""
        return [name for name in self.walk() if name.rpartition(".")[2].removesuffix("[]") == key]


def _section(annotation: Any) -> tuple[type[BaseModel], bool] | None:
    from shadowsup.supervisor.config.model import Rate, Section

    if isinstance(annotation, type) and issubclass(annotation, Section):
        return None if annotation is Rate else (annotation, False)
    for argument in get_args(annotation):
        found = _section(argument)
        if found is not None:
            return found[0], found[1] or getattr(annotation, "__origin__", None) in (tuple, list)
    return None


@functools.cache
def shape_of(model: type[BaseModel]) -> Shape:
    """Return the tree of ``model``."""
    shape = Shape(model)
    for key, info in model.model_fields.items():
        found = _section(info.annotation)
        if found is None:
            shape.children[key] = None
        else:
            below = shape_of(found[0])
            shape.children[key] = Shape(below.model, below.children, found[1])
    return shape
