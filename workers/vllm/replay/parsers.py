"""Seam: `ParserManager.get_parser` (read in 0.26.0 and 0.32.0, run with 0.32.0): vLLM's parsers of reasoning and tool calls, which keep
their state in `parse_delta`.

A replay's output comes as one piece, and a parser that is given at once what it was given token by token before does not say the same (many
emit one tool call a piece at most). So it is given the pieces again in which it was delivered, and what it says of them is put together.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shadowsup.workers.vllm.replay.front import Retold

_original: dict[str, Callable[..., Any]] = {}
_classes: dict[type[Any], type[Any]] = {}


def install() -> None:
    """Idempotent."""
    from vllm.parser.parser_manager import ParserManager

    if _original:
        return
    _original["get"] = ParserManager.get_parser
    ParserManager.get_parser = staticmethod(_get_parser)


def _get_parser(*args: Any, **kwargs: Any) -> Any:
    parser = _original["get"](*args, **kwargs)
    if parser is None:
        return None
    if parser not in _classes:
        _classes[parser] = _retelling(parser)
    return _classes[parser]


def _retelling(parser: type[Any]) -> type[Any]:
    class Retelling(parser):
        def parse_delta(self, delta_text: str, delta_token_ids: list[int], *args: Any, **kwargs: Any) -> Any:
            if not isinstance(delta_text, Retold):
                return super().parse_delta(delta_text, delta_token_ids, *args, **kwargs)
            told = None
            for text, ids in delta_text.pieces:
                told = merged(told, super().parse_delta(text, ids, *args, **kwargs))
            return told

    Retelling.__name__ = Retelling.__qualname__ = parser.__name__
    return Retelling


def merged(told: Any, more: Any) -> Any:
    """Return one DeltaMessage that says both: texts joined, tool calls of the same index joined. Either may be None."""
    if told is None or more is None:
        return more if told is None else told
    for name in more.model_fields_set:
        new = getattr(more, name)
        if name == "tool_calls":
            told.tool_calls = _joined_calls(told.tool_calls or [], new or [])
        elif isinstance(new, str) and name != "role":
            setattr(told, name, (getattr(told, name) or "") + new)
        elif new is not None:
            setattr(told, name, new)
    return told


def _joined_calls(calls: list[Any], more: list[Any]) -> list[Any]:
    known = {call.index: call for call in calls}
    for call in more:
        before = known.setdefault(call.index, call)
        if before is call:
            continue
        if call.id is not None and before.id is None:
            before.id = call.id
        if call.function is None:
            continue
        if before.function is None:
            before.function = call.function
            continue
        for name in ("name", "arguments"):
            new = getattr(call.function, name)
            if new is not None:
                setattr(before.function, name, (getattr(before.function, name) or "") + new)
    return list(known.values())
