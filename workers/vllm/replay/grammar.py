"""Seam: `StructuredOutputManager._create_grammar` (read in 0.26.0 and 0.32.0, run with 0.32.0): the grammar of a JSON schema and the like
is at the place where the output has brought it.

The tokens are put in as the scheduler puts them in, one step each, because with a reasoning parser the grammar begins only where the
reasoning ends.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from shadowsup.workers.vllm.replay import claim as claims

_original: dict[str, Callable[..., Any]] = {}


class GrammarRefused(Exception):
    """Raised when a grammar does not accept what was generated under it. vLLM fails the one request."""


def install() -> None:
    """Idempotent."""
    from vllm.v1.structured_output import StructuredOutputManager

    if _original:
        return
    _original["create"] = StructuredOutputManager._create_grammar
    StructuredOutputManager._create_grammar = _create_grammar


def _create_grammar(manager: Any, request: Any) -> Any:
    grammar = _original["create"](manager, request)
    output = claims.output_of(request.sampling_params)
    if output:
        advance(manager, request, grammar, output)
    return grammar


class _Telling:
    """A request as the manager sees it after each token. (The real one has all of its output already.)"""

    use_structured_output = True
    num_output_placeholders = 0

    def __init__(self, request: Any, grammar: Any) -> None:
        self.request_id = request.request_id
        self.sampling_params = request.sampling_params
        self.prompt_token_ids = request.prompt_token_ids
        self.all_token_ids = list(request.prompt_token_ids or ())
        self.structured_output_request = copy.copy(request.structured_output_request)
        self.structured_output_request.grammar = grammar

    @property
    def num_computed_tokens(self) -> int:
        return len(self.all_token_ids) - 1


def advance(manager: Any, request: Any, grammar: Any, output: list[int]) -> None:
    """Bring ``grammar`` to where ``output`` ends.

    Raises:
        GrammarRefused: it does not accept it.
    """
    telling = _Telling(request, grammar)
    accept = _accept_0_32 if hasattr(manager, "accept_tokens") else _accept_0_26
    if hasattr(manager, "should_fill_bitmask"):
        manager.should_fill_bitmask(telling)  # finds out whether the prompt ends the reasoning
    for at, token in enumerate(output):
        telling.all_token_ids.append(token)
        if not accept(manager, telling, grammar, token):
            raise GrammarRefused(f"the grammar of request {request.request_id} does not accept token {at} of what was generated")
    for name, value in vars(telling.structured_output_request).items():
        if name != "_grammar":
            setattr(request.structured_output_request, name, value)


def _accept_0_32(manager: Any, telling: _Telling, grammar: Any, token: int) -> bool:
    return bool(manager.accept_tokens(telling, [token]))


def _accept_0_26(manager: Any, telling: _Telling, grammar: Any, token: int) -> bool:
    if not manager.should_advance(telling):
        return True
    ids = manager.trim_reasoning_for_advance(telling, [token])
    return not ids or bool(grammar.accept_tokens(telling.request_id, ids))
