"""A serving loop of one's own: a small attention model on bytes, batched, streamed through the gateway, and indifferent to kill -9.

With a supervisor: shadowsup start configs/own-loop.yaml      By hand: echo "Once upon a time" | python docs/examples/own_loop.py
"""

import time

import torch

from shadowsup.workers import loop

WIDTH, VOCABULARY, BLOCK_TOKENS, PAUSE_S = 64, 128, 16, 0.01


class Ascii:
    """One id a character."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode("ascii", "replace"))

    def decode(self, ids: list[int]) -> str:
        return bytes(ids).decode("ascii")


def load() -> dict[str, torch.Tensor]:
    """Make the weights. A real model reads them from a disk for minutes; a shadow never does."""
    print("loading the weights", flush=True)
    made = torch.Generator().manual_seed(1)
    shapes = {"embedding": (VOCABULARY, WIDTH), "q": (WIDTH, WIDTH), "k": (WIDTH, WIDTH), "v": (WIDTH, WIDTH), "out": (WIDTH, 27)}
    return {name: torch.randn(shape, generator=made) * (WIDTH**-0.5 if name != "embedding" else 1) for name, shape in shapes.items()}


def forward(w: dict[str, torch.Tensor], cache: torch.Tensor, piece: loop.Piece) -> torch.Tensor:
    """Write K and V of the piece's tokens into the kept blocks, attend to all before them; return the last token's logits."""
    k, v = cache[:, 0], cache[:, 1]  # (slots, WIDTH) each
    slots = torch.from_numpy(piece.slots)
    place = torch.arange(piece.start, piece.end)[:, None] * torch.logspace(0, -3, WIDTH)
    x = w["embedding"][torch.tensor(piece.ids)] + torch.sin(place)
    k[slots[piece.start :]], v[slots[piece.start :]] = x @ w["k"], x @ w["v"]
    scores = (x[-1] @ w["q"]) @ k[slots].T / WIDTH**0.5
    hidden = x[-1] + torch.softmax(scores, dim=0) @ v[slots]
    logits = torch.full((VOCABULARY,), -torch.inf)
    logits[torch.tensor([32, *range(97, 123)])] = hidden @ w["out"]  # a space, a … z
    return logits


with loop.attach() as engine:
    weights = engine.keep(load, fingerprint="attention-toy-1")
    kv = engine.kv(block_bytes=BLOCK_TOKENS * 2 * WIDTH * 4, block_tokens=BLOCK_TOKENS)
    cache = kv.tensor(torch.float32, BLOCK_TOKENS, 2, WIDTH).view(-1, 2, WIDTH)
    # Here a real model warms up: kernels, graphs. Until park() returns the blocks are scratch and may be written.
    takeover = engine.park()
    print(f"active in epoch {takeover.epoch}, {takeover.blocks_kept} blocks kept", flush=True)
    for batch in engine.steps(Ascii(), vocabulary=VOCABULARY):
        rows = [forward(weights, cache, piece) for piece in batch]
        batch.finish(batch.sample([row for row, piece in zip(rows, batch, strict=True) if piece.samples]))
        time.sleep(PAUSE_S)  # a toy is too fast to be killed in mid-sentence
