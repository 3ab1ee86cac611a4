"""Turns a parsed request body into a `Generation`, strictly: what is not understood is refused by name, never ignored."""

from __future__ import annotations

import difflib
import re
import secrets
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from shadowsup.supervisor.gateway.errors import ApiError, invalid
from shadowsup.wire.link import Sampling

COMPLETION_MAX_TOKENS = 16
"""What OpenAI's legacy completions generate when ``max_tokens`` is absent."""
MAX_STOPS = 16
"""Stop strings a request (OpenAI: 4)."""
_SMALLEST_TOP_P = 1e-6
"""``top_p: 0`` means the likeliest token only; engines divide by it or compare with it, so they get a number above zero."""

_Int64 = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
_Penalty = Annotated[float, Meta(ge=-2.0, le=2.0)]
_Positive = Annotated[int, Meta(ge=1, le=2**31 - 1)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Generation:
    """One validated request. Exactly one of ``messages``, ``prompt`` and ``prompt_ids`` is set."""

    chat: bool
    model: str
    messages: tuple[dict[str, Any], ...] | None
    prompt: str | None
    prompt_ids: tuple[int, ...] | None
    sampling: Sampling
    stream: bool
    include_usage: bool
    return_token_ids: bool = False
    """Extension: each choice carries ``token_ids``, the ids generated since the last; a whole response ``prompt_token_ids``."""


class _StreamOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class _Body(msgspec.Struct, kw_only=True):
    """What both endpoints share. None is the same as absent, as OpenAI has it."""

    model: str
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    max_tokens: _Positive | None = None
    temperature: Annotated[float, Meta(ge=0.0, le=2.0)] | None = None
    top_p: Annotated[float, Meta(ge=0.0, le=1.0)] | None = None
    seed: _Int64 | None = None
    stop: str | list[str] | None = None
    presence_penalty: _Penalty | None = None
    frequency_penalty: _Penalty | None = None
    n: int | None = None
    user: str | None = None
    # Not OpenAI's, but what the engines offer.
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    ignore_eos: bool | None = None
    return_token_ids: bool | None = None
    # Accepted and without effect here.
    metadata: dict[str, str] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None


class _ChatBody(_Body, kw_only=True):
    messages: list[dict[str, Any]]
    max_completion_tokens: _Positive | None = None


class _CompletionBody(_Body, kw_only=True):
    prompt: Any


_Shape = TypeVar("_Shape", bound=_Body)

_SHARED_NEUTRAL: dict[str, tuple[object, ...]] = {
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
    "store": (False,),
    "service_tier": ("auto", "default"),
}
_CHAT_NEUTRAL: dict[str, tuple[object, ...]] = _SHARED_NEUTRAL | {
    "tools": (),
    "tool_choice": ("none",),
    "parallel_tool_calls": (),
    "functions": (),
    "function_call": ("none",),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "reasoning_effort": (),
    "verbosity": (),
    "web_search_options": (),
    "prompt_cache_retention": (),
}
_COMPLETION_NEUTRAL: dict[str, tuple[object, ...]] = _SHARED_NEUTRAL | {
    "best_of": (1,),
    "echo": (False,),
    "logprobs": (),
    "suffix": ("",),
}
"""Parameters that exist but are not supported, with the values that ask for nothing and are therefore accepted."""

_AT_PATH = re.compile(r"^(?P<what>.*?) - at `\$\.(?P<path>.*)`$", re.DOTALL)
_MISSING = re.compile(r"missing required field `(?P<field>\w+)`")


def model_of(body: dict[str, Any]) -> str:
    """Return the model a body asks for.

    Raises:
        ApiError: 400 when there is none.
    """
    model = body.get("model")
    if model is None:
        raise invalid("you must provide a model parameter", "model", "missing_required_parameter")
    if not isinstance(model, str) or not model:
        raise invalid("'model' must be a non-empty string", "model", "invalid_type")
    return model


def chat(body: dict[str, Any]) -> Generation:
    """Validate the body of ``/v1/chat/completions``.

    Raises:
        ApiError: 400 that names the parameter at fault.
    """
    given = _convert(_without_unsupported(body, _ChatBody, _CHAT_NEUTRAL), _ChatBody)
    if given.max_tokens is not None and given.max_completion_tokens not in (None, given.max_tokens):
        raise invalid("'max_tokens' and 'max_completion_tokens' say different things: give one of them", "max_completion_tokens")
    if not given.messages:
        raise invalid("'messages' must hold at least one message", "messages", "empty_array")
    messages = tuple(_message(message, f"messages[{index}]") for index, message in enumerate(given.messages))
    limit = given.max_completion_tokens if given.max_completion_tokens is not None else given.max_tokens
    return _generation(given, limit, chat=True, messages=messages)


def completion(body: dict[str, Any]) -> Generation:
    """Validate the body of ``/v1/completions``.

    Raises:
        ApiError: 400 that names the parameter at fault.
    """
    given = _convert(_without_unsupported(body, _CompletionBody, _COMPLETION_NEUTRAL), _CompletionBody)
    prompt, prompt_ids = _prompt(given.prompt)
    limit = given.max_tokens if given.max_tokens is not None else max(COMPLETION_MAX_TOKENS, given.min_tokens or 0)
    return _generation(given, limit, chat=False, prompt=prompt, prompt_ids=prompt_ids)


def _generation(
    given: _Body,
    max_tokens: int | None,
    *,
    chat: bool,
    messages: tuple[dict[str, Any], ...] | None = None,
    prompt: str | None = None,
    prompt_ids: tuple[int, ...] | None = None,
) -> Generation:
    if given.n not in (None, 1):
        raise invalid(f"'n' must be 1, not {given.n}: send the request {given.n} times", "n", "unsupported_value")
    if given.stream_options is not None and not given.stream:
        raise invalid("'stream_options' is only allowed when 'stream' is true", "stream_options")
    min_tokens = given.min_tokens or 0
    if max_tokens is not None and min_tokens > max_tokens:
        raise invalid(f"'min_tokens' ({min_tokens}) is more than the limit of {max_tokens} tokens", "min_tokens")
    sampling = Sampling(
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        temperature=_or(given.temperature, 1.0),
        top_p=max(_or(given.top_p, 1.0), _SMALLEST_TOP_P),
        top_k=max(given.top_k or 0, 0),
        # Even a request that does not ask for one: after a failover the successor draws as the first engine would have.
        seed=given.seed if given.seed is not None else secrets.randbits(63),
        stop=_stops(given.stop),
        presence_penalty=_or(given.presence_penalty, 0.0),
        frequency_penalty=_or(given.frequency_penalty, 0.0),
        ignore_eos=bool(given.ignore_eos),
    )
    return Generation(
        chat=chat,
        model=given.model,
        messages=messages,
        prompt=prompt,
        prompt_ids=prompt_ids,
        sampling=sampling,
        stream=bool(given.stream),
        include_usage=given.stream_options is not None and bool(given.stream_options.include_usage),
        return_token_ids=bool(given.return_token_ids),
    )


def _or(value: float | None, default: float) -> float:
    return default if value is None else value


def _without_unsupported(body: dict[str, Any], shape: type[_Body], neutral: dict[str, tuple[object, ...]]) -> dict[str, Any]:
    """Return the part of ``body`` that ``shape`` describes; refuse what asks for something we do not do."""
    known = shape.__struct_fields__
    kept = {}
    for key, value in body.items():
        if key in known:
            kept[key] = value
        elif key not in neutral:
            near = difflib.get_close_matches(key, [*known, *neutral], n=1)
            did_you_mean = f" (did you mean '{near[0]}'?)" if near else ""
            raise invalid(f"Unrecognized request argument: '{key}'{did_you_mean}", key, "unknown_parameter")
        elif value is not None and not any(type(value) is type(same) and value == same for same in neutral[key]):
            # The types are compared too: in Python 0 == False, for a client they are not the same request.
            raise invalid(f"'{key}' is not supported by this server", key, "unsupported_parameter")
    return kept


def _convert(body: dict[str, Any], shape: type[_Shape]) -> _Shape:
    try:
        return msgspec.convert(body, shape)
    except msgspec.ValidationError as error:
        raise _from_validation(str(error)) from None


def _from_validation(text: str) -> ApiError:
    """Translate msgspec's ``Expected `int`, got `str` - at `$.max_tokens` `` into an error that names the parameter."""
    if missing := _MISSING.search(text):
        field = missing["field"]
        return invalid(f"Missing required parameter: '{field}'", field, "missing_required_parameter")
    if found := _AT_PATH.match(text):
        path = found["path"].replace("[...]", "")
        what = found["what"].replace("`", "")
        return invalid(f"Invalid value for '{path}': {what[:1].lower()}{what[1:]}", path, "invalid_value")
    return invalid(text.replace("`", "'"))


def _stops(given: str | list[str] | None) -> tuple[str, ...]:
    stops = () if given is None else (given,) if isinstance(given, str) else tuple(given)
    if len(stops) > MAX_STOPS:
        raise invalid(f"'stop' holds {len(stops)} strings; at most {MAX_STOPS} are allowed", "stop", "array_above_max_length")
    if "" in stops:
        raise invalid("'stop' must not hold an empty string", "stop", "empty_string")
    return stops


def _prompt(given: object) -> tuple[str | None, tuple[int, ...] | None]:
    """Return (text, None) or (None, token ids)."""
    if isinstance(given, str):
        return given, None
    if isinstance(given, list) and given:
        if len(given) == 1 and isinstance(given[0], str):
            return given[0], None
        if len(given) == 1 and isinstance(given[0], list):
            return None, _token_ids(given[0])
        if isinstance(given[0], (str, list)):
            raise invalid(f"'prompt' holds {len(given)} prompts; send one request for each", "prompt", "unsupported_value")
        return None, _token_ids(given)
    raise invalid("'prompt' must be a string, a list of one string, or a list of token ids", "prompt", "invalid_type")


def _token_ids(given: list[object]) -> tuple[int, ...]:
    if not given:
        raise invalid("'prompt' holds no token", "prompt", "empty_array")
    for index, token in enumerate(given):
        if type(token) is not int or not 0 <= token < 2**31:
            raise invalid(f"'prompt[{index}]' is not a token id", f"prompt[{index}]", "invalid_type")
    return tuple(given)  # type: ignore[arg-type]  # each was checked above


_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
"""Chat templates know no developer: it is OpenAI's newer name for system."""
_EMPTY_IN_MESSAGE = {"refusal", "audio", "tool_calls", "function_call", "annotations"}
"""Keys of an assistant message as the openai client returns it; sent back without content they mean nothing."""


def _message(message: dict[str, Any], path: str) -> dict[str, Any]:
    """Return a message as a chat template takes it: role, content as one string, perhaps a name."""
    role = message.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        given = "is missing" if role is None else f"must be one of {', '.join(_ROLES)}, not {role!r}"
        raise invalid(f"'{path}.role' {given}", f"{path}.role", "invalid_value")
    for key, value in message.items():
        if key in ("role", "content"):
            continue
        if key == "name" and (value is None or isinstance(value, str)):
            continue
        if key in _EMPTY_IN_MESSAGE and value in (None, []):
            continue
        known = key == "name" or key in _EMPTY_IN_MESSAGE
        what = "must be a string" if key == "name" else "is not supported" if known else "is not a key of a message"
        raise invalid(f"'{path}.{key}' {what}", f"{path}.{key}", "unsupported_parameter" if known else "unknown_parameter")
    cleaned = {"role": _ROLES[role], "content": _content(message.get("content"), f"{path}.content")}
    if message.get("name") is not None:
        cleaned["name"] = message["name"]
    return cleaned


def _content(content: object, path: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise invalid(f"'{path}' must be a string or a list of text parts", path, "invalid_type")
    texts = []
    for index, part in enumerate(content):
        at = f"{path}[{index}]"
        if not isinstance(part, dict):
            raise invalid(f"'{at}' must be an object", at, "invalid_type")
        if part.get("type") != "text":
            raise invalid(f"'{at}.type' must be 'text': other kinds of content are not supported", f"{at}.type", "unsupported_value")
        if not isinstance(part.get("text"), str):
            raise invalid(f"'{at}.text' must be a string", f"{at}.text", "invalid_type")
        if unknown := part.keys() - {"type", "text"}:
            key = min(unknown)
            raise invalid(f"'{at}.{key}' is not a key of a text part", f"{at}.{key}", "unknown_parameter")
        texts.append(part["text"])
    return "\n".join(texts)
