"""Paged attention computes what transformers computes, for each family of models, from tiny random configs; the rest is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from shadowsup.workers.errors import WorkerError
from shadowsup.workers.transformers.attention import NAME, KvCache, KvShape
from shadowsup.workers.transformers.batch import Piece
from shadowsup.workers.transformers.executor import Executor, check_against_plain, refuse_unsupported

CPU = torch.device("cpu")
COMMON: dict[str, Any] = {
    "vocab_size": 120,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
OTHER: dict[str, Any] = {"vocab_size": 120, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": COMMON,
    "qwen2": COMMON,
    "qwen3": {**COMMON, "head_dim": 16},
    "mistral": {**COMMON, "sliding_window": 8},
    "phi3": COMMON,
    "gemma": {**COMMON, "head_dim": 16},
    "gemma2": {**COMMON, "head_dim": 16, "sliding_window": 8, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0},
    "gemma3_text": {**COMMON, "head_dim": 16, "sliding_window": 8},
    "gpt_neox": {**OTHER, "intermediate_size": 96, "max_position_embeddings": 256},
    "gpt2": {"vocab_size": 120, "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 256},
    "granite": {**COMMON, "logits_scaling": 4.0},
    "cohere": COMMON,
    "olmo2": COMMON,
    "mixtral": {**COMMON, "num_local_experts": 4},
    "smollm3": COMMON,
}


def build(family: str, options: dict[str, Any]) -> tuple[Any, Any]:
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **options)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=NAME, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.2)
    return config, model


def shape_of(config: Any, block_tokens: int = 4) -> KvShape:
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    return KvShape(config.num_hidden_layers, block_tokens, getattr(config, "num_key_value_heads", None) or heads, head_dim, torch.float32)


def plain(model: Any, ids: list[int]) -> torch.Tensor:
    """Logits of every position by transformers' own attention."""
    model.set_attn_implementation("eager")
    try:
        with torch.inference_mode():
            logits: torch.Tensor = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
            return logits
    finally:
        model.set_attn_implementation(NAME)


@pytest.mark.parametrize("family", FAMILIES)
def test_chunked_prefill_and_decode_give_the_logits_of_a_plain_forward(family: str) -> None:
    config, model = build(family, FAMILIES[family])
    shape = shape_of(config)
    executor = Executor(model, KvCache(torch.zeros(40 * shape.block_bytes, dtype=torch.uint8), shape, 40), CPU)
    sequences = [[(at * 7 + row * 13 + 3) % 120 for at in range(length)] for row, length in enumerate((27, 5, 14, 33))]
    tables = [[3, 39, 7, 21, 8, 30, 1], [2, 17], [11, 5, 36, 9], [0, 4, 6, 10, 12, 13, 14, 15, 16]]
    expected = [plain(model, ids) for ids in sequences]
    done = [0, 0, 0, 0]
    got: list[dict[int, torch.Tensor]] = [{}, {}, {}, {}]
    steps = [(6, 3, 1, 0), (1, 1, 8, 9), (7, 0, 1, 1), (1, 1, 1, 12), (9, 0, 2, 1), (1, 0, 1, 6), (1, 0, 0, 1), (1, 0, 0, 3)]
    for counts in steps:
        pieces = []
        rows = []
        for row, count in enumerate(counts):
            if count:
                ids = sequences[row][done[row] : done[row] + count]
                samples = (row + done[row]) % 3 != 0
                pieces.append(Piece(ids, done[row], tables[row], samples))
                done[row] += count
                if samples:
                    rows.append(row)
        logits = executor.forward(pieces)
        assert logits.shape == (len(rows), 120)
        for row, values in zip(rows, logits, strict=True):
            got[row][done[row] - 1] = values
    assert done == [27, 5, 14, 33] and sum(map(len, got)) > 12
    for row in range(4):
        for position, values in got[row].items():
            torch.testing.assert_close(values, expected[row][position], rtol=1e-4, atol=1e-4)


def test_a_step_that_samples_nothing_returns_no_logits() -> None:
    config, model = build("llama", COMMON)
    shape = shape_of(config)
    executor = Executor(model, KvCache(torch.zeros(4 * shape.block_bytes, dtype=torch.uint8), shape, 4), CPU)
    assert executor.forward([Piece([5, 6, 7], 0, [1], False)]).shape == (0, 120)


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2"])
def test_a_supported_model_passes_the_check_at_publishing(family: str) -> None:
    config, model = build(family, FAMILIES[family])
    check_against_plain(model, shape_of(config, 16), CPU, 120)


def test_a_model_that_ignores_positions_does_not_pass_the_check() -> None:
    config, model = build("llama", COMMON)
    rotary = model.model.rotary_emb
    inner = rotary.forward
    rotary.forward = lambda x, position_ids: inner(x, torch.arange(x.shape[1])[None])
    with pytest.raises(WorkerError, match="its logits on paged KV are off") as refused:
        check_against_plain(model, shape_of(config, 16), CPU, 120)
    assert refused.value.fatal


@pytest.mark.parametrize(
    ("family", "options", "reason"),
    [
        ("mamba", {"vocab_size": 120, "hidden_size": 64, "num_hidden_layers": 2}, "state of another kind"),
        ("jamba", {**COMMON, "num_experts": 2}, "state of another kind"),
        ("bloom", {"vocab_size": 120, "hidden_size": 64, "n_layer": 2, "n_head": 4}, "attention interface"),
        (
            "deepseek_v3",
            {
                **COMMON,
                "num_key_value_heads": 4,
                "n_routed_experts": 4,
                "n_group": 1,
                "topk_group": 1,
                "num_experts_per_tok": 2,
                "kv_lora_rank": 16,
                "q_lora_rank": 16,
                "qk_rope_head_dim": 8,
                "qk_nope_head_dim": 8,
                "v_head_dim": 16,
                "moe_intermediate_size": 32,
            },
            "latent attention",
        ),
    ],
)
def test_what_cannot_run_on_paged_kv_is_refused_with_the_reason(family: str, options: dict[str, Any], reason: str) -> None:
    config = AutoConfig.for_model(family, **options)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(WorkerError, match=reason) as refused:
        refuse_unsupported(config, model)
    assert refused.value.fatal


def test_attention_with_sinks_is_refused() -> None:
    config, model = build("gpt_oss", {**COMMON, "head_dim": 16, "num_local_experts": 4})
    with pytest.raises(WorkerError, match="s_aux"):
        check_against_plain(model, shape_of(config, 16), CPU, 120)
