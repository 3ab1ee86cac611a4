"""How a vLLM engine takes in the replays of a failover: ``python benchmarks/vllm_intake.py [--kills N] [--streams N] [--save FILE]``.

A node with real vLLM on the CPU and a parked shadow; 32 chats of 7,700 tokens. The model is so small (one layer) that what is left of a
failover is what the gateway, the API server and EngineCore do with the requests; its vocabulary has the size of an 8B Llama's. By turns the
API server and EngineCore are killed; the clients compare every token with an undisturbed run.

A probe in the engine's processes (a plugin of vLLM's that is only on the path here) notes when each request passes which stage. All times
are ms from the kill. ``SHADOWSUP_VLLM_PYTHON`` names the interpreter with vLLM.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import statistics
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from gpu_vllm import victims
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from shadowsup.supervisor.bench import failover, machine
from shadowsup.supervisor.bench.figures import percentiles
from shadowsup.supervisor.bench.node import Node, running
from shadowsup.supervisor.bench.prompts import _WORDS

VOCABULARY, HIDDEN, HEAD = 128_256, 32, 32
BLOCK = 32
TEMPLATE = (
    "{% for message in messages %}<|start|>{{ message['role'] }}\n{{ message['content'] | trim }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
STAGES = (
    "api: request parsed",
    "api: handed on",
    "core: received",
    "core: waiting",
    "core: scheduling",
    "core: scheduled",
    "api: first output",
)
"""In this order. «parsed»: the body is read, decoded and validated (not of a request that waits there already); «handed on»: rendered, its
prompt known, parameters made; «scheduling»: the scheduler begins with the step that it is part of."""

_ENTRY = "[vllm.general_plugins]\nintake_probe = intake_probe:register\n"
_PROBE = """
import functools, os, time

_file = None

def note(stage, rid, at=None):
    global _file
    if _file is None or _file[0] != os.getpid():
        _file = (os.getpid(), open(os.path.join(os.environ["INTAKE_PROBE"], str(os.getpid())), "a", buffering=1))
    _file[1].write(f"{at or time.monotonic()} {stage}|{rid}\\n")

def before(owner, name, stage, rid):
    original = getattr(owner, name)
    @functools.wraps(original)
    def noted(*args, **kwargs):
        found = rid(*args)
        for one in found if isinstance(found, list) else [found]:
            note(stage, one)
        return original(*args, **kwargs)
    setattr(owner, name, noted)

def register():
    if "INTAKE_PROBE" not in os.environ or globals().get("_done"):
        return
    globals()["_done"] = True
    from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.engine.core_client import AsyncMPClient
    from vllm.v1.engine.output_processor import OutputProcessor
    before(OpenAIServingChat, "create_chat_completion", "api: request parsed", lambda s, r, raw=None: raw.headers.get("x-request-id"))
    before(AsyncMPClient, "add_request_async", "api: handed on", lambda s, r: r.request_id)
    before(EngineCore, "preprocess_add_request", "core: received", lambda s, r: r.request_id)
    before(Scheduler, "add_request", "core: waiting", lambda s, r: r.request_id)
    before(OutputProcessor, "process_outputs", "api: first output", lambda s, o, *more: [one.request_id for one in o])
    schedule = Scheduler.schedule
    @functools.wraps(schedule)
    def noted(self, *args, **kwargs):
        begun = time.monotonic()
        out = schedule(self, *args, **kwargs)
        for new in out.scheduled_new_reqs:
            note("core: scheduling", new.req_id, begun)
            note("core: scheduled", new.req_id)
        return out
    Scheduler.schedule = noted
"""


def write_model(folder: Path) -> Path:
    """Write a Llama of one layer with a byte-pair tokenizer in which each word of the prompts is made by merges."""
    folder.mkdir(parents=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = {text: number for number, text in enumerate([*alphabet, "<s>", "</s>", "<|start|>", "<|end|>"])}
    merges: list[tuple[str, str]] = []
    for word in _WORDS:
        left = "Ġ"
        for letter in word:
            if left + letter not in tokens:
                tokens[left + letter] = len(tokens)
                merges.append((left, letter))
            left += letter
    tokens |= {f"w{number}": number for number in range(len(tokens), VOCABULARY)}
    tokenizer = Tokenizer(models.BPE(vocab=tokens, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in ("<s>", "</s>", "<|start|>", "<|end|>")])
    tokenizer.save(str(folder / "tokenizer.json"))
    kind = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": TEMPLATE, "bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(kind))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": HIDDEN,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": HEAD,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 16384,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "bos_token_id": tokens["<s>"],
        "eos_token_id": tokens["</s>"],
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))
    rng = np.random.default_rng(0)
    of = "model.layers.0"
    parts = [*(f"self_attn.{one}_proj" for one in "qkvo"), *(f"mlp.{one}_proj" for one in ("gate", "up", "down"))]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCABULARY, HIDDEN), "model.norm.weight": (HIDDEN,)}
    shapes |= {f"{of}.{name}.weight": (HIDDEN, HIDDEN) for name in parts}
    shapes |= {f"{of}.{name}.weight": (HIDDEN,) for name in ("input_layernorm", "post_attention_layernorm")}
    made = {
        name: np.ones(shape, np.float32) if len(shape) == 1 else rng.normal(0, 0.2, shape).astype(np.float32)
        for name, shape in shapes.items()
    }
    save_file(made, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def config(model: Path, probe: Path, python: str, shadows: int) -> dict[str, Any]:
    env = {
        "OMP_NUM_THREADS": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "DO_NOT_TRACK": "1",
        "TORCH_COMPILE_DISABLE": "1",
        "INTAKE_PROBE": str(probe / "out"),
        "PYTHONPATH": str(probe),
    }
    args = {"max_model_len": 9000, "max_num_batched_tokens": 8192, "max_num_seqs": 64, "enforce_eager": True}
    worker = {
        "name": "chat",
        "engine": "vllm",
        "python": python,
        "model": str(model),
        "dtype": "float32",
        "shadows": shadows,
        "kv": {"size": "128MiB", "block_tokens": BLOCK},
        "args": args | {"enable_prompt_tokens_details": True},
        "env": env,
        "health": {"hang": {"ceiling": "60s"}},
    }
    return {"version": 1, "workers": [worker]}


def write_probe(folder: Path) -> Path:
    info = folder / "intake_probe-1.dist-info"
    info.mkdir(parents=True)
    (folder / "out").mkdir()
    (folder / "intake_probe.py").write_text(_PROBE)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: intake-probe\nVersion: 1\n")
    (info / "entry_points.txt").write_text(_ENTRY)
    return folder


def stages(out: Path, killed_s: float, streams: int) -> dict[str, dict[str, float]]:
    """Return of each stage when the first, the median and the last replay passed it after ``killed_s``, in ms from there. What comes after
    so many requests asks the finished prompts again."""
    found: dict[str, dict[str, float]] = {stage: {} for stage in STAGES}
    for file in out.iterdir():
        for line in file.read_text().splitlines():
            at, _, rest = line.partition(" ")
            stage, _, rid = rest.partition("|")
            if float(at) > killed_s:
                found[stage].setdefault(rid, round((float(at) - killed_s) * 1e3, 1))
    replays = {stage: sorted(at.values())[:streams] for stage, at in found.items() if at}
    return {stage: {"first": at[0], "p50": round(statistics.median(at), 1), "last": at[-1]} for stage, at in replays.items()}


@contextlib.contextmanager
def noting(kills: list[float]) -> Any:
    """Have the moments of the kills noted."""
    original = os.kill

    def kill(pid: int, number: int) -> None:
        kills.append(failover.time.monotonic())
        original(pid, number)

    failover.os.kill = kill  # type: ignore[attr-defined]
    try:
        yield
    finally:
        failover.os.kill = original  # type: ignore[attr-defined]


async def run(options: argparse.Namespace) -> dict[str, Any]:
    python = os.environ.get("SHADOWSUP_VLLM_PYTHON", sys.executable)
    plan = failover.Plan(
        kills=1, streams=options.streams, prompt_words=options.words, output_tokens=options.output, model="chat", block_tokens=BLOCK
    )
    rows: list[dict[str, Any]] = []
    async with a_node(python) as (node, out):
        for number in range(options.kills):
            which = ("core", "api")[number % 2]
            moments: list[float] = []
            with victims(which), noting(moments):
                result = await failover.measure(node, replace(plan, seed=options.seed + number), lambda text: print(text, file=sys.stderr))
            row = {"killed": which, "client": result["client"], "node_ms": result["node_ms"], "wrong": result["wrong"]}
            row |= {"cached_share_min": result["cached_share_min"], "stages_ms": stages(out, moments[0], options.streams)}
            rows.append(row)
            for file in out.iterdir():
                file.write_text("")
            print(json.dumps(row), file=sys.stderr)
    each = [row["client"]["each_stream_ms"] for row in rows]
    return {
        "setting": {"kills": options.kills, "streams": options.streams, "prompt_tokens": result["prompt_tokens"][0]},
        "each_stream_ms": {
            "p50": percentiles([one["p50"] for one in each]),
            "max": percentiles([one["max"] for one in each]),
        },
        "kills": rows,
    }


@contextlib.asynccontextmanager
async def a_node(python: str) -> AsyncIterator[tuple[Node, Path]]:
    with tempfile.TemporaryDirectory(prefix="intake-") as name:
        folder = Path(name)
        probe = write_probe(folder / "probe")
        content = config(write_model(folder / "model"), probe, python, shadows=1)
        async with running(content, timeout_s=300) as node:
            yield node, probe / "out"


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description="How a vLLM engine takes in the replays of a failover.")
    parser.add_argument("--kills", type=int, default=4)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--words", type=int, default=7660, help="of each prompt; a word is a token")
    parser.add_argument("--output", type=int, default=64, help="tokens of each answer")
    parser.add_argument("--seed", type=int, default=random.randrange(1000))
    parser.add_argument("--save", type=Path)
    options = parser.parse_args(arguments)
    load = machine.load()
    document = machine.document("vllm_intake", load, asyncio.run(run(options)))
    text = json.dumps(document, indent=1) + "\n"
    if options.save is not None:
        options.save.write_text(text)
    print(text)
    return 1 if any(row["wrong"] for row in document["kills"]) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
