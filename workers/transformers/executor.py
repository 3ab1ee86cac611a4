"""Runs the model over one step's batch and a paged KV cache, and refuses models that would compute something else that way."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from inspect import signature

import torch

from shadowsup.workers.errors import WorkerError
from shadowsup.workers.transformers.attention import NAME, GatherAttention, KvCache, KvShape, Step, StepAttention, attending
from shadowsup.workers.transformers.attention_cuda import KernelAttention, Kind, choose
from shadowsup.workers.transformers.batch import Piece, StepBatch
from shadowsup.workers.transformers.paging import paging_of
from shadowsup.workers.transformers.step_graphs import Size, StepGraphs

_TOLERANCE = {torch.float32: 2e-4, torch.bfloat16: 8e-2, torch.float16: 2e-2}
"""Of the largest logit: how far paged and plain logits may lie apart for the model to count as the same."""

log = logging.getLogger("shadowsup.engine")


class Executor:
    """A model over a KV cache. ``model``: a transformers causal LM whose attention implementation is ours."""

    def __init__(self, model: torch.nn.Module, cache: KvCache, device: torch.device) -> None:
        self.model = model
        self.cache = cache
        self.device = device
        self._heads = int(model.config.num_attention_heads)
        self.kind = choose(cache.shape, self._heads, device)
        self._graphs: StepGraphs | None = None

    def use_graphs(self, max_batch: int, max_context: int, *, capture: bool) -> int:
        """Use graphs for small steps from now on; returns how many there are. None without the kernels.

        The cache may have scratch behind it, or blocks that matter: capturing writes nothing to it.

        Args:
            capture: all of them now; else each when it is needed for the second time.
        """
        if self.kind is not Kind.KERNELS:
            return 0
        self._graphs = StepGraphs(self.model, self.cache, self._heads, self.device, max_batch=max_batch, max_context=max_context)
        if capture:
            try:
                self._graphs.capture()
            except Exception as error:
                self._without_graphs(error)
        return self._graphs.count if self._graphs is not None else 0

    @property
    def graphs(self) -> int:
        """How many CUDA graphs there are now."""
        return self._graphs.count if self._graphs is not None else 0

    def _ready(self, size: Size) -> bool:
        try:
            return self._graphs is not None and self._graphs.ready(size)
        except Exception as error:
            self._without_graphs(error)
            return False

    def _without_graphs(self, error: Exception) -> None:
        """A model that asks the device something in the middle of a forward cannot be captured."""
        log.warning("%s cannot be captured as CUDA graphs: it runs without (%s)", type(self.model).__name__, error)
        self._graphs = None

    @torch.inference_mode()
    def forward(self, pieces: Sequence[Piece]) -> torch.Tensor:
        """Compute ``pieces``: writes their K and V, returns logits (S, vocabulary) of the pieces that sample, in their order.

        On a GPU the work has only been queued. The logits are good until the next call.

        Raises:
            WorkerError: (fatal) the model cannot run on paged KV.
        """
        size = self._graphs.size_of(pieces) if self._graphs is not None else None
        if size is not None and self._ready(size):
            assert self._graphs is not None
            return self._graphs.run(size, pieces)
        shape = self.cache.shape
        batch = StepBatch(pieces, shape.block_tokens, device=self.device, dtype=shape.dtype)
        attention: StepAttention
        if self.kind is Kind.KERNELS:
            paging = paging_of(
                batch.pieces, shape.block_tokens, heads=self._heads, kv_heads=shape.heads, dtype=shape.dtype, device=self.device
            )
            attention = KernelAttention(self.cache, batch.slots, paging)
        else:
            attention = GatherAttention(batch, self.cache)
        step = Step(batch.tokens, shape, attention)
        with attending(step):
            # An index for logits_to_keep: the head runs over the rows that sample, with all that the model does around it (scaling, caps).
            out = self.model(
                input_ids=batch.input_ids,
                position_ids=batch.position_ids,
                use_cache=False,
                logits_to_keep=batch.sample_rows if len(batch.sample_rows) else 1,
            )
        if step.seen != shape.layers:
            raise WorkerError(
                f"{type(self.model).__name__} cannot run on paged KV: {step.seen} of its {shape.layers} layers attend through it",
                "use another model",
                fatal=True,
            )
        return out.logits[0, : len(batch.sample_rows)]

    def finish(self) -> None:
        """Wait until everything that was queued has been done."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()


def refuse_unsupported(config: object, model: torch.nn.Module) -> None:
    """Refuse what is known not to work, with the reason, before anything is loaded. ``model`` may be on meta.

    Raises:
        WorkerError: (fatal).
    """
    name = type(model).__name__

    def refuse(why: str) -> None:
        raise WorkerError(f"{name} is not supported: {why}", "supported are decoder-only text models with plain attention", fatal=True)

    if getattr(config, "is_encoder_decoder", False):
        refuse("it is an encoder-decoder")
    text = getattr(config, "get_text_config", lambda: config)()
    if text is not config or getattr(config, "vision_config", None) is not None or getattr(config, "audio_config", None) is not None:
        refuse("it is multimodal")
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if kinds or getattr(model, "_is_stateful", False):
        refuse(f"its layers keep a state of another kind than K and V ({', '.join(sorted(kinds)) or 'recurrent'})")
    if getattr(config, "kv_lora_rank", None):
        refuse("multi-head latent attention keeps K and V of different shapes")
    if not getattr(model, "_supports_attention_backend", False):
        refuse("it does not call attention through transformers' attention interface")
    missing = {"position_ids", "logits_to_keep", "use_cache"} - set(signature(model.forward).parameters)
    if missing:
        refuse(f"its forward does not take {', '.join(sorted(missing))}")


@torch.inference_mode()
def check_against_plain(model: torch.nn.Module, shape: KvShape, device: torch.device, vocabulary: int) -> None:
    """Compare a chunked, packed, paged run with transformers' own attention; costs two short forwards.

    It catches what no attribute tells: positions that are not taken from ``position_ids``, biases in a mask, states beside K and V.

    Raises:
        WorkerError: (fatal) they differ.
    """
    size = shape.block_tokens
    first = [(7 * at + 3) % vocabulary for at in range(size + 4)]
    second = [(11 * at + 5) % vocabulary for at in range(3)]
    with torch.inference_mode():
        model.set_attn_implementation("eager")  # the one that every architecture has
        plain = [model(input_ids=torch.tensor([ids], device=device), use_cache=False).logits[0, -1] for ids in (first, second)]
        model.set_attn_implementation(NAME)
    blocks = 4
    cache = KvCache(torch.zeros(blocks * shape.block_bytes, dtype=torch.uint8, device=device), shape, blocks)
    executor = Executor(model, cache, device)
    executor.forward([Piece(first[:5], 0, [2], False), Piece(second[:2], 0, [1], False)])
    executor.forward([Piece(first[5:-1], 5, [2, 0], False)])
    paged = executor.forward([Piece(first[-1:], len(first) - 1, [2, 0], True), Piece(second[-1:], 2, [1], True)])
    for expected, got in zip(plain, paged, strict=True):
        error = float((expected.float() - got.float()).abs().max() / expected.float().abs().max().clamp_min(1e-6))
        if not error <= _TOLERANCE.get(shape.dtype, 2e-4):
            raise WorkerError(
                f"{type(model).__name__} is not supported: its logits on paged KV are off by {error:.1e} of the largest",
                "use another model",
                fatal=True,
            )
