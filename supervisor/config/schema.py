"""The JSON Schema of config files, generated from the model: for editors, and committed as ``configs/node.schema.json``."""

from __future__ import annotations

from typing import Any

from pydantic_core import PydanticUndefined

from shadowsup.supervisor.config.model import EngineKind, NodeConfig
from shadowsup.supervisor.config.shape import Shape, shape_of

_REFERENCE = {"type": "string", "pattern": r"\$\{"}


def json_schema() -> dict[str, Any]:
    """Return the schema (draft 2020-12). Where a value may come from a variable, ``${VAR}`` is accepted as text."""
    schema = NodeConfig.model_json_schema(mode="validation")
    definitions = schema["$defs"]
    shapes = {shape.model.__name__: shape for shape in _sections(shape_of(NodeConfig))}
    for name, shape in shapes.items():
        _finish(schema if name == NodeConfig.__name__ else definitions[name], shape)
    schema["patternProperties"] = {"^x-": {"description": "Ignored; a place for anchors."}}
    worker = definitions["WorkerConfig"]
    worker["allOf"] = [
        {
            "if": {"properties": {"engine": {"const": kind.value}}, "required": ["engine"]},
            "then": {"required": list(kind.required_keys), "properties": dict.fromkeys(kind.foreign_keys, False)},
        }
        for kind in EngineKind
    ]
    definitions["ReadySection"] |= {"minProperties": 1, "maxProperties": 1}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "shadowsup node"}


def _sections(shape: Shape) -> list[Shape]:
    return [shape, *(below for child in shape.children.values() if child is not None for below in _sections(child))]


def _finish(section: dict[str, Any], shape: Shape) -> None:
    """Write defaults as the file has them, drop generated titles, allow variables in place of numbers and choices."""
    section.pop("title", None)
    for key, info in shape.model.model_fields.items():
        field = section["properties"][key]
        field.pop("title", None)
        field["description"] = info.description
        below = shape.children[key]
        if below is not None:
            field.pop("default", None)  # its keys have their own
            continue
        if info.default is not PydanticUndefined:
            field["default"] = shape.model.model_construct().model_dump(mode="json", include={key}, warnings=False)[key]
        _allow_variable(field)


def _allow_variable(field: dict[str, Any]) -> None:
    """``max_inflight: ${MAX}`` is text to an editor, and right; where any text or a collection is wanted there is nothing to add."""
    if "anyOf" in field:
        for choice in field["anyOf"]:
            if choice.get("type") == "array":
                _allow_variable(choice["items"])
        if not any(choice.get("type") in ("array", "object") or choice == {"type": "string"} for choice in field["anyOf"]):
            field["anyOf"].append(_REFERENCE)
    elif field.get("type") == "array":
        _allow_variable(field["items"])
    elif field.get("type") != "object" and not (field.get("type") == "string" and "pattern" not in field):
        kind = {name: field.pop(name) for name in list(field) if name not in ("description", "default")}
        field["anyOf"] = [kind, _REFERENCE]
