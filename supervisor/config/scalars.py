"""The field types of the schema: how text from a config file becomes sizes, durations, paths and numbers.

A size or a duration must carry a unit when it comes from a file (validation context ``{"file": True}``); programs may give plain bytes
and seconds. Dumped for JSON each type returns to the form that the file has.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PlainSerializer, Strict, ValidationInfo, WithJsonSchema

from shadowsup.supervisor.config import units


class Expanded(str):
    """A plain scalar that held ``${VAR}``: text that may still become a number or a boolean, as it would have been without it.

    ``variables``: names that were read.
    """

    variables: tuple[str, ...] = ()
    secret: bool = False


def from_file(info: ValidationInfo) -> bool:
    """Tell whether the value comes from a config file."""
    return bool(info.context and info.context.get("file"))


def _number(value: Any) -> Any:
    if isinstance(value, Expanded):
        try:
            return int(value)
        except ValueError:
            return str(value)
    return value


def _flag(value: Any) -> Any:
    if isinstance(value, Expanded):
        return {"true": True, "false": False}.get(str(value), value)
    return value


def _size(value: Any, info: ValidationInfo) -> Any:
    if isinstance(value, str):
        return units.parse_size(value)
    if from_file(info) and isinstance(value, int | float) and not isinstance(value, bool):
        return units.parse_size(str(value))
    return value


def _duration(value: Any, info: ValidationInfo) -> Any:
    if isinstance(value, str):
        return units.parse_duration(value)
    if from_file(info) and isinstance(value, int | float) and not isinstance(value, bool):
        return units.parse_duration(str(value))
    return value


def _or_auto(parse: Any) -> Any:
    def read(value: Any, info: ValidationInfo) -> Any:
        if value == "auto" and isinstance(value, str):
            return None
        if value is None and from_file(info):
            raise ValueError("null is not a value here; write auto")
        return parse(value, info)

    return read


def _auto_text(form: Any) -> Any:
    return lambda value: "auto" if value is None else form(value)


def _path(value: Any, info: ValidationInfo) -> Any:
    if not isinstance(value, str | Path):
        return value
    try:
        path = Path(value).expanduser()
    except RuntimeError:
        raise ValueError(f"{str(value)!r}: there is no such user") from None
    base = info.context.get("base") if info.context else None
    return str(base / path if base is not None else path)


def _program(value: Any, info: ValidationInfo) -> Any:
    return value if isinstance(value, str) and "/" not in value and not value.startswith("~") else _path(value, info)


def _model(value: Any, info: ValidationInfo) -> Any:
    if not isinstance(value, str) or value.startswith("package:"):
        return value
    path = _path(value, info)
    # A hub id looks like a relative path; what is there under that name comes first, as it does in the engines' own loaders.
    return path if value.startswith(("./", "../", "~")) or (from_file(info) and Path(path).exists()) else value


_SIZE_SCHEMA = {"type": "string", "pattern": units.SIZE_PATTERN}
_DURATION_SCHEMA = {"type": "string", "pattern": units.DURATION_PATTERN}
_AUTO_SCHEMA: dict[str, Any] = {"const": "auto"}

ModelText = Annotated[str, Strict(), BeforeValidator(_model)]
"""A relative path to something that is there becomes absolute; all else stays as it is."""

ProgramPath = Annotated[Path, BeforeValidator(_program), PlainSerializer(str, when_used="json"), WithJsonSchema({"type": "string"})]
"""A path as `FilePath`, or a bare name, which is looked up in PATH."""

Text = Annotated[str, Strict()]
NUMBER = BeforeValidator(_number)
"""Goes last in the annotation of a whole number: ``Annotated[int, Strict(), Field(ge=1), NUMBER]``."""

Always = Annotated[Literal[True], BeforeValidator(_flag)]
"""A switch that can only be given as ``true``."""

Size = Annotated[
    int, Strict(), Field(ge=0), BeforeValidator(_size), PlainSerializer(units.format_size, when_used="json"), WithJsonSchema(_SIZE_SCHEMA)
]
"""Bytes."""

Duration = Annotated[
    float,
    Field(ge=0),
    BeforeValidator(_duration),
    PlainSerializer(units.format_duration, when_used="json"),
    WithJsonSchema(_DURATION_SCHEMA),
]
"""Seconds."""

AutoSize = Annotated[
    Annotated[int, Strict(), Field(gt=0)] | None,
    BeforeValidator(_or_auto(_size)),
    PlainSerializer(_auto_text(units.format_size), when_used="json"),
    WithJsonSchema({"anyOf": [_AUTO_SCHEMA, _SIZE_SCHEMA]}),
]
"""Bytes; None = ``auto``."""

AutoDuration = Annotated[
    Annotated[float, Field(gt=0)] | None,
    BeforeValidator(_or_auto(_duration)),
    PlainSerializer(_auto_text(units.format_duration), when_used="json"),
    WithJsonSchema({"anyOf": [_AUTO_SCHEMA, _DURATION_SCHEMA]}),
]
"""Seconds; None = ``auto``."""


AutoCount = Annotated[
    Annotated[int, Strict(), Field(ge=0, le=1_000_000)] | None,
    BeforeValidator(_or_auto(lambda value, _info: _number(value))),
    PlainSerializer(_auto_text(int), when_used="json"),
    WithJsonSchema({"anyOf": [_AUTO_SCHEMA, {"type": "integer", "minimum": 0, "maximum": 1_000_000}]}),
]
"""A whole number; None = ``auto``."""

AutoPort = Annotated[
    Annotated[int, Strict(), Field(ge=1, le=65535)] | None,
    BeforeValidator(_or_auto(lambda value, _info: _number(value))),
    PlainSerializer(_auto_text(int), when_used="json"),
    WithJsonSchema({"anyOf": [_AUTO_SCHEMA, {"type": "integer", "minimum": 1, "maximum": 65535}]}),
]
"""A TCP port; None = ``auto``."""

FilePath = Annotated[Path, BeforeValidator(_path), PlainSerializer(str, when_used="json"), WithJsonSchema({"type": "string"})]
"""``~`` is expanded; a relative path counts from the folder of the config file."""
