"""What the files of a model say of its size: headers of GGUF and safetensors files, no weights and no torch.

GGUF: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. safetensors: https://github.com/huggingface/safetensors#format.
"""

from __future__ import annotations

import json
import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shadowsup.workers.errors import WorkerError

_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9
_HEADER_MAX = 100 * 2**20
"""Bytes: no safetensors header is longer, by its own rules."""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """``parameters``: elements of all weight tensors. ``dtype``: what ``dtype: auto`` comes to. Of one token's K or V in one layer:
    ``heads`` × ``head_dim`` elements. ``context``: tokens. ``estimated``: `parameters` is worked out from a config, not read.
    """

    parameters: int
    dtype: str
    layers: int
    heads: int
    head_dim: int
    context: int
    estimated: bool = False


def of_gguf(path: Path) -> Facts:
    """Read the header of a GGUF file.

    Raises:
        WorkerError: (fatal) it is not one, or its header is cut or lacks what is needed.
    """
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            reader = _Gguf(data)
            fields, parameters = reader.read()
    except (OSError, ValueError, struct.error, UnicodeDecodeError) as error:
        raise WorkerError(f"the header of {path} cannot be read: {error}", "download it again", fatal=True) from error
    kind = fields.get("general.architecture")

    def number(name: str, otherwise: int | None = None) -> int:
        value = fields.get(f"{kind}.{name}", otherwise)
        if isinstance(value, list):
            value = max(value, default=None)  # one for each layer
        if not isinstance(value, int):
            raise WorkerError(f"{path} says nothing of its {name}", "is it a language model?", fatal=True)
        return value

    attention = number("attention.head_count")
    return Facts(
        parameters=parameters,
        dtype="float32",  # what the loader makes of a quantised file unless it is told otherwise
        layers=number("block_count"),
        heads=number("attention.head_count_kv", attention),
        head_dim=number("attention.key_length", number("embedding_length") // max(attention, 1)),
        context=number("context_length"),
    )


def of_safetensors(folder: Path) -> Facts:
    """Read ``config.json`` and the headers of all safetensors files in ``folder``.

    Raises:
        WorkerError: (fatal) one of them cannot be read, or lacks what is needed.
    """
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise WorkerError(f"{folder / 'config.json'} cannot be read: {error}", "download it again", fatal=True) from error
    parameters = 0
    for path in sorted(folder.glob("*.safetensors")):
        for name, entry in _safetensors_header(path).items():
            if name == "__metadata__" or (name == "lm_head.weight" and config.get("tie_word_embeddings")):
                continue
            parameters += math.prod(entry["shape"])
    return of_config(config, parameters)


def of_config(config: Mapping[str, Any], parameters: int | None = None) -> Facts:
    """Return the facts of a config as in ``config.json``; without ``parameters`` they are estimated for a plain decoder.

    Raises:
        WorkerError: (fatal) it does not say enough.
    """

    def number(*names: str) -> int:
        for name in names:
            if isinstance(config.get(name), int):
                return int(config[name])
        raise WorkerError(f"the model's config has no {names[0]}", "is it a language model?", fatal=True)

    hidden, layers = number("hidden_size", "n_embd"), number("num_hidden_layers", "n_layer")
    attention = number("num_attention_heads", "n_head")
    heads = config.get("num_key_value_heads") or attention
    head_dim = config.get("head_dim") or hidden // attention
    estimated = parameters is None
    if parameters is None:
        inner = config.get("intermediate_size") or 4 * hidden
        each = 2 * hidden * head_dim * (attention + heads) + 3 * hidden * inner + 2 * hidden
        parameters = number("vocab_size") * hidden * (1 if config.get("tie_word_embeddings") else 2) + layers * each + hidden
    return Facts(
        parameters=parameters,
        dtype=str(config.get("dtype") or config.get("torch_dtype") or "float32"),
        layers=layers,
        heads=int(heads),
        head_dim=int(head_dim),
        context=number("max_position_embeddings", "n_positions"),
        estimated=estimated,
    )


def _safetensors_header(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            (size,) = struct.unpack("<Q", file.read(8))
            if size > min(_HEADER_MAX, path.stat().st_size):
                raise ValueError(f"its header is {size} bytes long")
            header = json.loads(file.read(size))
    except (OSError, ValueError, struct.error) as error:
        raise WorkerError(f"the header of {path} cannot be read: {error}", "download it again", fatal=True) from error
    if not isinstance(header, dict):
        raise WorkerError(f"{path} is not a safetensors file", "download it again", fatal=True)
    return header


class _Gguf:
    """One pass over the header of a mapped file."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._at = 0

    def read(self) -> tuple[dict[str, Any], int]:
        """Return (its fields, elements of all tensors)."""
        if self._data[:4] != b"GGUF":
            raise ValueError("it does not begin with GGUF")
        self._at = 4
        version = self._scalar("<I")
        if version not in (2, 3):
            raise ValueError(f"its version is {version}, not 2 or 3")
        tensors, count = self._scalar("<Q"), self._scalar("<Q")
        fields = {self._text(): self._value(self._scalar("<I")) for _ in range(count)}
        elements = 0
        for _ in range(tensors):
            self._skip_text()
            elements += math.prod(self._scalar("<Q") for _ in range(self._scalar("<I")))
            self._at += 4 + 8  # its type, and where its data is
        return fields, elements

    def _scalar(self, form: str) -> Any:
        (value,) = struct.unpack_from(form, self._data, self._at)
        self._at += struct.calcsize(form)
        return value

    def _text(self) -> str:
        size = self._scalar("<Q")
        start, self._at = self._at, self._at + size
        if self._at > len(self._data):
            raise ValueError("it ends in the middle of its header")
        return self._data[start : self._at].decode()

    def _skip_text(self) -> None:
        self._at += 8 + int(struct.unpack_from("<Q", self._data, self._at)[0])

    def _value(self, kind: int) -> Any:
        """Return a value; of an array of texts (a vocabulary) only that it was there."""
        if kind == _STRING:
            return self._text()
        if kind != _ARRAY:
            return self._scalar(self._form(kind))
        inner, count = self._scalar("<I"), self._scalar("<Q")
        if inner == _STRING:
            for _ in range(count):
                self._skip_text()
            return None
        if inner == _ARRAY:
            return [self._value(_ARRAY) for _ in range(count)]
        form = self._form(inner)
        values = list(struct.unpack_from(f"<{count}{form[1:]}", self._data, self._at))
        self._at += count * struct.calcsize(form)
        return values

    @staticmethod
    def _form(kind: int) -> str:
        if kind not in _SCALARS:
            raise ValueError(f"it has a value of unknown type {kind}")
        return _SCALARS[kind]
