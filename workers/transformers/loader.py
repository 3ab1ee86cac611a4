"""From a model reference to a running model over kept weights: the first engine publishes, every other one attaches.

Both end the same way, with a model built on meta whose parameters are views of the kept set; so the publisher holds its weights once,
and what serves is what was kept.
"""

from __future__ import annotations

import ctypes
import gc
import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig
from transformers.utils import logging as transformers_logging

from shadowsup.memkeeper.protocol import Fingerprint
from shadowsup.wire.engine import EngineSpec
from shadowsup.workers.errors import WorkerError
from shadowsup.workers.transformers import hub, tensors, tokenizer
from shadowsup.workers.transformers.arguments import Arguments
from shadowsup.workers.transformers.attention import NAME, KvShape
from shadowsup.workers.transformers.executor import check_against_plain, refuse_unsupported
from shadowsup.workers.transformers.model_ref import ModelFiles, RefKind, resolve
from shadowsup.workers.weights import KeptWeights, WeightStore

LAYOUT = "transformers-parameters-1"
"""Id of what the kept tensors are and how they are named. It does not name a version of transformers, so that an upgrade keeps them."""

_CONFIG, _GENERATION, _TIES = "config.json", "generation_config.json", "ties.json"
_SCALED_ROPE = ("dynamic", "longrope")
"""Rotary embeddings whose frequencies follow the longest sequence of a batch once it is beyond the original context."""

log = logging.getLogger("shadowsup.engine")

Progress = Callable[[str], None]


@dataclass(slots=True)
class Loaded:
    """``eos``: end-of-sequence ids. ``positions``: the longest context that the model computes right. ``kept``: to be closed last."""

    model: torch.nn.Module
    shape: KvShape
    codec: tokenizer.Codec
    eos: frozenset[int]
    positions: int
    vocabulary: int
    kept: KeptWeights


def load(spec: EngineSpec, args: Arguments, store: WeightStore, device: torch.device, progress: Progress) -> Loaded:
    """Bring the model of ``spec`` up.

    Raises:
        WorkerError: no such model, not supported, or it does not fit.
    """
    transformers_logging.disable_progress_bar()
    files = resolve(spec.model, spec.revision, hub.cached)
    if files.kind is RefKind.DUMMY and (args.load_format != "dummy" or args.config is None):
        raise WorkerError(
            f"model {spec.model} has no files", "give args: {load_format: dummy, config: {model_type: …}}, or name a model", fatal=True
        )
    progress("looking for kept weights")
    mark = fingerprint(spec, args, files)
    kept = store.attach(mark)
    if kept is None:
        progress("loading weights")
        kept = _publish(spec, args, files, store, mark, device, progress)
    try:
        progress("building the model")
        return _attach(spec, args, kept, device, progress)
    except BaseException:
        kept.close()
        raise


def fingerprint(spec: EngineSpec, args: Arguments, files: ModelFiles) -> Fingerprint:
    """Return what the bytes of the kept weights depend on."""
    config = json.dumps(args.config, sort_keys=True) if args.config is not None else ""
    return Fingerprint(
        (
            ("model", spec.model),
            ("revision", files.revision or ""),
            ("files", files.digest()),
            ("load_format", args.load_format),
            ("config", config),
            ("dtype", spec.dtype),
            ("quantization", "none"),
            ("rank", str(spec.rank)),
            ("world", str(spec.world)),
            ("layout", LAYOUT),
        )
    )


# --- publish ------------------------------------------------------------------------------------------------------------------


def _publish(
    spec: EngineSpec, args: Arguments, files: ModelFiles, store: WeightStore, mark: Fingerprint, device: torch.device, progress: Progress
) -> KeptWeights:
    config = _read_config(args, files)
    if getattr(config, "quantization_config", None) is not None:
        raise WorkerError(f"model {files.ref} is quantised, which is not supported", "use an unquantised or a GGUF one", fatal=True)
    with torch.device("meta"):
        refuse_unsupported(config, _build(config, None))
    dtype = _dtype(spec.dtype, config)
    dummy = args.load_format == "dummy"
    model = _build_dummy(config, dtype) if dummy else _read_model(files, dtype)
    codec: tokenizer.Codec
    if files.folder is not None and (not dummy or (files.folder / "tokenizer.json").exists() or files.gguf):
        progress("reading the tokenizer")
        codec = tokenizer.from_files(files.folder, files.gguf)
    else:
        codec = tokenizer.ByteCodec(config.vocab_size)
    kept, ties = tensors.collect(model)
    extras = {
        **codec.extras(),
        _CONFIG: _config_json(model.config, dtype),
        _GENERATION: json.dumps(model.generation_config.to_diff_dict() if model.generation_config is not None else {}).encode(),
        _TIES: json.dumps(ties).encode(),
    }
    progress("publishing weights")
    writer = store.publish(tensors.plan(kept), extras, mark)
    try:
        if dummy:
            deviation = float(getattr(config, "initializer_range", 0.02) or 0.02)
            tensors.fill_random(kept, lambda key: tensors.view(writer.tensors[key], device), deviation)
        else:
            tensors.copy(kept, lambda key: tensors.view(writer.tensors[key], device))
    except BaseException:
        writer.abort()
        raise
    del model, kept
    _give_back_memory()
    return writer.seal()


def _read_config(args: Arguments, files: ModelFiles) -> Any:
    if args.config is not None:
        given = dict(args.config)
        kind = given.pop("model_type", None)
        if not isinstance(kind, str):
            raise WorkerError("args.config has no model_type", "for example model_type: llama", fatal=True)
        try:
            return AutoConfig.for_model(kind, **given)
        except (ValueError, TypeError) as error:
            raise WorkerError(f"args.config: {error}", "write what a config.json of that model has", fatal=True) from error
    options = {"gguf_file": files.gguf} if files.gguf else {}
    try:
        return AutoConfig.from_pretrained(str(files.folder), local_files_only=True, trust_remote_code=False, **options)
    except (OSError, ValueError, KeyError) as error:
        raise WorkerError(
            f"the config of model {files.ref} cannot be read: {error}", "is transformers new enough for it?", fatal=True
        ) from error


def _read_model(files: ModelFiles, dtype: torch.dtype) -> Any:
    options: dict[str, Any] = {"gguf_file": files.gguf} if files.gguf else {"use_safetensors": True}
    try:
        model = AutoModelForCausalLM.from_pretrained(
            str(files.folder), dtype=dtype, local_files_only=True, trust_remote_code=False, attn_implementation=NAME, **options
        )
    except Exception as error:  # readers of several formats, each with errors of its own
        memory = isinstance(error, (MemoryError, torch.OutOfMemoryError))
        hint = "free memory, or use a smaller model" if memory else "check its files"
        raise WorkerError(f"model {files.ref} cannot be loaded: {error}", hint, fatal=not memory) from error
    return model


def _build_dummy(config: Any, dtype: torch.dtype) -> Any:
    from accelerate import init_empty_weights  # type: ignore[import-untyped]

    # Parameters on meta, buffers computed: those cannot be made up.
    with init_empty_weights(include_buffers=False):
        model = _build(config, dtype)
    model.tie_weights()  # each parameter has been replaced by one of its own
    return model


def _build(config: Any, dtype: torch.dtype | None) -> Any:
    options = {"dtype": dtype} if dtype is not None else {}
    try:
        return AutoModelForCausalLM.from_config(config, attn_implementation=NAME, trust_remote_code=False, **options)
    except (ValueError, KeyError) as error:
        raise WorkerError(
            f"model type {getattr(config, 'model_type', '?')} is not supported: {str(error).splitlines()[0]}",
            "supported are decoder-only text models with plain attention",
            fatal=True,
        ) from error


def _config_json(config: Any, dtype: torch.dtype) -> bytes:
    kept = config.to_dict()
    kept.pop("quantization_config", None)
    kept["dtype"] = str(dtype).removeprefix("torch.")
    return json.dumps(kept).encode()


def _dtype(name: str, config: Any) -> torch.dtype:
    named = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if name in named:
        return named[name]
    if name != "auto":
        raise WorkerError(f"dtype {name!r} is unknown", f"use auto, {', '.join(named)}", fatal=True)
    own = getattr(config, "dtype", None)
    return own if isinstance(own, torch.dtype) else torch.float32


def _give_back_memory() -> None:
    """The loaded copy is gone; without this the allocator keeps its pages and the engine weighs twice as much."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except AttributeError:  # not glibc
        log.debug("no malloc_trim here")


# --- attach -------------------------------------------------------------------------------------------------------------------


def _attach(spec: EngineSpec, args: Arguments, kept: KeptWeights, device: torch.device, progress: Progress) -> Loaded:
    described = json.loads(kept.extras[_CONFIG])
    config = type(AutoConfig.for_model(described["model_type"])).from_dict(described)
    dtype = _dtype(described["dtype"], config)
    with torch.device("meta"):
        model = _build(config, dtype).eval()
    tensors.assemble(model, kept.tensors, json.loads(kept.extras[_TIES]), device)
    shape = _kv_shape(config, spec.kv.block_tokens, dtype)
    if kept.published:
        progress("checking the model")
        check_against_plain(model, shape, device, config.vocab_size)
    codec = tokenizer.from_extras(kept.extras, args.chat_template)
    generation = GenerationConfig.from_dict(json.loads(kept.extras[_GENERATION]))
    return Loaded(model, shape, codec, _eos(config, generation), _positions(config), config.vocab_size, kept)


def _kv_shape(config: Any, block_tokens: int, dtype: torch.dtype) -> KvShape:
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    return KvShape(config.num_hidden_layers, block_tokens, kv_heads, head_dim, dtype)


def _eos(config: Any, generation: Any) -> frozenset[int]:
    found: set[int] = set()
    for ids in (generation.eos_token_id, getattr(config, "eos_token_id", None)):
        found.update([ids] if isinstance(ids, int) else ids or ())
    return frozenset(found)


def _positions(config: Any) -> int:
    longest = int(getattr(config, "max_position_embeddings", None) or 2**20)
    given: Mapping[str, Any] = getattr(config, "rope_parameters", None) or {}
    # One set for all layers, or one for each kind of layer.
    for rope in (given, *(one for one in given.values() if isinstance(one, Mapping))):
        if rope.get("rope_type") in _SCALED_ROPE:
            # Beyond it one long sequence would change the frequencies of all others in its batch, and of the KV kept of it.
            original = rope.get("original_max_position_embeddings") or getattr(config, "original_max_position_embeddings", None)
            longest = min(longest, int(original)) if original else longest
    return longest
