"""Paged attention by kernels against attention in float64, and graphs of decode steps against the same steps without graphs."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")
pytest.importorskip("triton")

# torch warns of this and that as it is imported.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]

PAGE = 16
TINY: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 320,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.1,
}

Lengths = Sequence[tuple[int, int]]
"""Of each sequence: tokens that are there already, new tokens."""


def wanted(query: Any, keys: Any, values: Any, pieces: Sequence[Any], window: int | None, softcap: float | None) -> Any:
    """Return (T, heads, dim) float64."""
    out, row = [], 0
    for piece in pieces:
        count, context = len(piece.tokens), piece.context
        slots = torch.tensor([piece.blocks[at // PAGE] * PAGE + at % PAGE for at in range(context)], device="cuda")
        group = query.shape[1] // keys.shape[1]
        key, value = (cache[slots].double().repeat_interleave(group, 1) for cache in (keys, values))
        scores = torch.einsum("thd,khd->htk", query[row : row + count].double(), key) * query.shape[2] ** -0.5
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        at, to = torch.arange(piece.start, context, device="cuda")[:, None], torch.arange(context, device="cuda")
        seen = to <= at
        if window is not None:
            seen &= to > at - window
        out.append(torch.einsum("htk,khd->thd", scores.masked_fill(~seen, -torch.inf).softmax(-1), value))
        row += count
    return torch.cat(out)


def pieces_of(lengths: Lengths, spare: int) -> tuple[list[Any], int]:
    """Return (pieces over scattered blocks, blocks in all)."""
    from shadowsup.workers.transformers.batch import Piece

    needed = [-(-(start + count) // PAGE) for start, count in lengths]
    ids = list(range(sum(needed) + spare))
    random.Random(3).shuffle(ids)
    made = [
        Piece([0] * count, start, [ids.pop() for _ in range(blocks)], True) for (start, count), blocks in zip(lengths, needed, strict=True)
    ]
    return made, sum(needed) + spare


DECODE: Lengths = [(37, 1), (0, 1), (1500, 1), (15, 1), (16, 1)]
TAILS: Lengths = [(16 * n, 1 + n % 16) for n in range(1, 40)]
MIXED: Lengths = [(200, 1), (33, 1), (0, 70), (64, 300), (5, 2)]


@pytest.fixture(scope="module", autouse=True)
def _context() -> None:
    """The driver opens descriptors of its own at a process's first call and keeps them."""
    torch.cuda.synchronize()


@pytest.mark.parametrize("lengths", [DECODE, TAILS, MIXED, [(4000, 1)], [(0, 1000)], [(900, 1)] * 64], ids=str)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("heads", [(32, 8, 128), (9, 3, 64), (4, 4, 80)], ids=str)
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (50, 20.0)])
def test_kernels_attend_as_defined(
    lengths: Lengths, dtype: str, heads: tuple[int, int, int], window: int | None, softcap: float | None
) -> None:
    from shadowsup.workers.transformers.attention import How, KvCache, KvShape
    from shadowsup.workers.transformers.attention_cuda import KernelAttention
    from shadowsup.workers.transformers.paging import paging_of

    if (window is not None or heads != (32, 8, 128)) and lengths is not MIXED and lengths is not DECODE:
        pytest.skip("the long ones with one shape only")
    count, kv_heads, dim = heads
    kind = getattr(torch, dtype)
    pieces, blocks = pieces_of(lengths, 2)
    shape = KvShape(1, PAGE, kv_heads, dim, kind)
    memory = torch.empty(blocks * shape.block_bytes, dtype=torch.uint8, device="cuda")
    cache = KvCache(memory, shape, blocks)
    torch.manual_seed(1)
    for tensor in cache.tokens[0]:
        tensor.normal_()
    before = [tensor.clone() for tensor in cache.tokens[0]]
    tokens = sum(new for _, new in lengths)
    query = torch.randn(count, tokens, dim, device="cuda").to(kind)
    key, value = (torch.randn(kv_heads, tokens, dim, device="cuda").to(kind) for _ in range(2))
    slots = torch.tensor([p.blocks[at // PAGE] * PAGE + at % PAGE for p in pieces for at in range(p.start, p.context)], device="cuda")
    paging = paging_of(pieces, PAGE, heads=count, kv_heads=kv_heads, dtype=kind, device=torch.device("cuda"))
    attention = KernelAttention(cache, slots, paging)
    attention.store(0, key, value)
    for there, was, new in zip(cache.tokens[0], before, (key, value), strict=True):
        was[slots] = new.transpose(0, 1)
        assert torch.equal(there, was), "written elsewhere, or not written"
    got = attention.attend(0, query, key, value, How(dim**-0.5, window, softcap)).double()
    expected = wanted(query.transpose(0, 1), *cache.tokens[0], pieces, window, softcap)
    error = float((got - expected).norm() / expected.norm())
    assert error < (2e-6 if kind is torch.float32 else 8e-3)


def model_of(dtype: str) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    from shadowsup.workers.transformers.attention import NAME

    config = AutoConfig.for_model(TINY["model_type"], **{name: value for name, value in TINY.items() if name != "model_type"})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=NAME, dtype=getattr(torch, dtype))
    return model.to("cuda").eval()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("everything", [True, False])
def test_a_graph_computes_and_writes_what_the_step_itself_does(dtype: str, everything: bool) -> None:
    from shadowsup.workers.transformers.attention import KvCache, KvShape
    from shadowsup.workers.transformers.attention_cuda import Kind
    from shadowsup.workers.transformers.batch import Piece
    from shadowsup.workers.transformers.executor import Executor

    model, blocks = model_of(dtype), 64
    shape = KvShape(3, PAGE, 2, 32, getattr(torch, dtype))
    memories = [torch.zeros(blocks * shape.block_bytes, dtype=torch.uint8, device="cuda") for _ in range(2)]
    plain, fast = (Executor(model, KvCache(memory, shape, blocks), torch.device("cuda")) for memory in memories)
    assert plain.kind is Kind.KERNELS
    assert fast.use_graphs(12, 300, capture=everything) == (9 if everything else 0)
    assert not memories[1].any(), "capturing wrote to blocks"
    tolerance = 1e-4 if dtype == "float32" else 5e-2
    lists = [[5 * row + at for at in range(5)] for row in range(11)]
    lengths = [0] * 11
    rng = random.Random(1)
    for step in range(24):
        # Rows come and go, so that rows of the graph are filled anew; prompts beside single tokens, or single tokens alone.
        rows = [row for row in range(11) if (row + step) % 4]
        counts = {row: rng.choice((1, 1, 9)) if step % 3 == 1 and lengths[row] < 50 else 1 for row in rows}
        pieces = [Piece([(7 * row + 3 * step + at) % 320 for at in range(counts[row])], lengths[row], lists[row], row != 5) for row in rows]
        logits = [executor.forward(pieces).float() for executor in (plain, fast)]
        torch.cuda.synchronize()
        assert logits[0].shape == logits[1].shape
        assert float((logits[0] - logits[1]).abs().max() / logits[0].abs().max()) < tolerance
        for row in rows:
            lengths[row] += counts[row]
    assert fast._graphs is not None and fast._graphs.count > 2
    others = torch.ones(blocks, dtype=torch.bool, device="cuda")
    others[[block for of_row in lists for block in of_row]] = False
    assert not memories[1].view(3, 2, blocks, -1)[:, :, others].any(), "a row of nobody wrote to a block"
    one, other = (memory.view(getattr(torch, dtype)).float() for memory in memories)
    assert float((one - other).abs().max() / one.abs().max()) < tolerance
