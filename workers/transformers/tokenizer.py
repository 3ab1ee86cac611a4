"""Text to ids and back, and chat templates; kept with the weights, so that an engine that attaches opens no tokenizer file."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from shadowsup.workers.errors import WorkerError

_STATE = "tokenizer.json"
_CONFIG = "tokenizer_config.json"
_TEMPLATE = "chat_template.jinja"

Messages = Sequence[Mapping[str, Any]]


class PromptError(ValueError):
    """The client's messages or prompt cannot be made into ids; the text is for the client. ``param``: which parameter."""

    def __init__(self, message: str, param: str) -> None:
        super().__init__(message)
        self.param = param


class Codec(Protocol):
    """What an engine needs of a tokenizer."""

    def encode(self, text: str) -> list[int]:
        """Return ids of a plain prompt, with the special tokens that the tokenizer adds. Raises PromptError."""

    def chat(self, messages: Messages) -> list[int]:
        """Return ids of a conversation, ready for the assistant's turn. Raises PromptError."""

    def decode(self, ids: Sequence[int]) -> str:
        """Return text; special tokens come out as nothing."""

    def extras(self) -> dict[str, bytes]:
        """Return what `from_extras` needs."""


class HubCodec:
    """A fast tokenizer of transformers. ``special``: names and texts of its special tokens, for the template."""

    def __init__(self, state: str, special: Mapping[str, Any], template: str | None) -> None:
        # Imported here: the gateway's and the supervisor's tests of references do not need a tokenizer.
        from tokenizers import Tokenizer
        from transformers import PreTrainedTokenizerFast

        self._state = state
        self._special = dict(special)
        self._template = template
        self._backend = Tokenizer.from_str(state)
        self._renderer = PreTrainedTokenizerFast(tokenizer_object=self._backend, **self._special)

    def encode(self, text: str) -> list[int]:
        return self._ids(text, "prompt", special=True)

    def chat(self, messages: Messages) -> list[int]:
        if self._template is None:
            raise PromptError("this model has no chat template: use /v1/completions, or set args.chat_template of the worker", "messages")
        try:
            text = self._renderer.apply_chat_template(
                flatten(messages), chat_template=self._template, tokenize=False, add_generation_prompt=True
            )
        except PromptError:
            raise
        except Exception as error:  # a template may raise whatever it likes
            raise PromptError(f"the chat template does not accept these messages: {error}", "messages") from error
        # The template has written the special tokens itself.
        return self._ids(text, "messages", special=False)

    def _ids(self, text: str, param: str, *, special: bool) -> list[int]:
        try:
            return list(self._backend.encode(text, add_special_tokens=special).ids)
        except (TypeError, UnicodeError) as error:
            raise PromptError("the text has half a UTF-16 pair, which is no character", param) from error

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._backend.decode(ids, skip_special_tokens=True))

    def extras(self) -> dict[str, bytes]:
        files = {_STATE: self._state.encode(), _CONFIG: json.dumps({"special": self._special}).encode()}
        if self._template is not None:
            files[_TEMPLATE] = self._template.encode()
        return files


class ByteCodec:
    """For models without a tokenizer: ids 0 to 255 are bytes of UTF-8, others come out as their number.

    Raises:
        WorkerError: (fatal) the vocabulary has no room for the bytes.
    """

    def __init__(self, vocabulary: int) -> None:
        if vocabulary < 256:
            raise WorkerError(f"a model without tokenizer needs a vocabulary of 256 or more, not {vocabulary}", fatal=True)
        self._vocabulary = vocabulary

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8", "surrogatepass"))

    def chat(self, messages: Messages) -> list[int]:
        lines = [f"{message.get('role', 'user')}: {message.get('content') or ''}\n" for message in flatten(messages)]
        return self.encode("".join(lines) + "assistant: ")

    def decode(self, ids: Sequence[int]) -> str:
        parts = (bytes((token,)) if token < 256 else f" {token}".encode() for token in ids)
        return b"".join(parts).decode("utf-8", "replace")

    def extras(self) -> dict[str, bytes]:
        return {_CONFIG: json.dumps({"bytes": self._vocabulary}).encode()}


def flatten(messages: Messages) -> list[dict[str, Any]]:
    """Return messages with their content as one string.

    Raises:
        PromptError: a part is not text, or a message is not an object with a role.
    """
    flat = []
    for at, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise PromptError(f"message {at} has no role", f"messages[{at}].role")
        content = message.get("content")
        if isinstance(content, (list, tuple)):
            texts = []
            for part in content:
                if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
                    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
                    raise PromptError(f"message {at} has a part of type {kind!r}: this model takes text only", f"messages[{at}].content")
                texts.append(part["text"])
            content = "".join(texts)
        elif content is not None and not isinstance(content, str):
            raise PromptError(f"message {at}: content must be text", f"messages[{at}].content")
        flat.append({**message, "content": content})
    return flat


def from_files(folder: Path, gguf: str | None) -> HubCodec:
    """Read a tokenizer (seconds, for a GGUF file).

    Raises:
        WorkerError: (fatal) there is none, or it has no fast form.
    """
    from transformers import AutoTokenizer

    options = {"gguf_file": gguf} if gguf is not None else {}
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False, **options)
    except (OSError, ValueError, ImportError) as error:
        raise WorkerError(
            f"the model's tokenizer cannot be read: {error}", "check the tokenizer files beside the model", fatal=True
        ) from error
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise WorkerError("the model's tokenizer has no fast form (tokenizer.json)", "convert it with transformers", fatal=True)
    template = tokenizer.chat_template
    if isinstance(template, dict):  # several by name: a conversation uses the default one
        template = template.get("default")
    return HubCodec(
        backend.to_str(), {name: str(text) for name, text in tokenizer.special_tokens_map.items() if isinstance(text, str)}, template
    )


def from_extras(extras: Mapping[str, bytes], chat_template: str | None = None) -> Codec:
    """Build the codec that `Codec.extras` described. ``chat_template``: a Jinja template, or the path of one, instead of the model's.

    Raises:
        WorkerError: (fatal) the template's file cannot be read.
    """
    config = json.loads(extras[_CONFIG])
    if "bytes" in config:
        return ByteCodec(config["bytes"])
    template = extras[_TEMPLATE].decode() if _TEMPLATE in extras else None
    return HubCodec(extras[_STATE].decode(), config["special"], read_template(chat_template) or template)


def read_template(chat_template: str | None) -> str | None:
    """Return the template that ``chat_template`` is or names."""
    if chat_template is None or "{" in chat_template or "\n" in chat_template:
        return chat_template
    try:
        return Path(chat_template).expanduser().read_text(encoding="utf-8")
    except OSError as error:
        raise WorkerError(
            f"chat_template {chat_template}: {error.strerror}", "name a file, or write the template itself", fatal=True
        ) from error
