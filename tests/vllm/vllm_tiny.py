"""A Llama of 1.6 million random parameters that vLLM loads like any other: config, byte tokenizer with a chat template, safetensors."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

HIDDEN, INNER, LAYERS, HEADS, KV_HEADS, HEAD = 256, 512, 2, 4, 2, 64
VOCABULARY = 512
TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if tools %}{{ tools | length }} tools\n{% endif %}{% if add_generation_prompt %}assistant: {% endif %}"
)
MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
"""What vLLM's parsers look for, one token each."""


def write(folder: Path) -> Path:
    """Write the model, with weights of seed 0, to ``folder``."""
    folder.mkdir()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = {text: number for number, text in enumerate([*alphabet, "<s>", "</s>", *MARKS])}
    tokens |= {f"w{number}": number for number in range(len(tokens), VOCABULARY)}
    tokenizer = Tokenizer(models.BPE(vocab=tokens, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in ("<s>", "</s>")])
    tokenizer.add_tokens([AddedToken(text, special=False) for text in MARKS])
    tokenizer.save(str(folder / "tokenizer.json"))
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    kind = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps({**kind, **special}))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": tokens["<s>"],
        "eos_token_id": tokens["</s>"],
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))
    write_weights(folder, seed=0)
    return folder


def write_weights(folder: Path, seed: int) -> None:
    """Write (other) random weights of the same names and shapes."""
    rng = np.random.default_rng(seed)
    shapes = {"model.embed_tokens.weight": (VOCABULARY, HIDDEN), "lm_head.weight": (VOCABULARY, HIDDEN), "model.norm.weight": (HIDDEN,)}
    for layer in range(LAYERS):
        of = f"model.layers.{layer}"
        shapes |= {
            f"{of}.self_attn.q_proj.weight": (HEADS * HEAD, HIDDEN),
            f"{of}.self_attn.k_proj.weight": (KV_HEADS * HEAD, HIDDEN),
            f"{of}.self_attn.v_proj.weight": (KV_HEADS * HEAD, HIDDEN),
            f"{of}.self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD),
            f"{of}.mlp.gate_proj.weight": (INNER, HIDDEN),
            f"{of}.mlp.up_proj.weight": (INNER, HIDDEN),
            f"{of}.mlp.down_proj.weight": (HIDDEN, INNER),
            f"{of}.input_layernorm.weight": (HIDDEN,),
            f"{of}.post_attention_layernorm.weight": (HIDDEN,),
        }
    made = {
        name: np.ones(shape, np.float32) if len(shape) == 1 else rng.normal(0, 0.08, shape).astype(np.float32)
        for name, shape in shapes.items()
    }
    save_file(made, folder / "model.safetensors", metadata={"format": "pt"})
