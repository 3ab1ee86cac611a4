"""Loops of one's own, as programs: ``python loop_scripts.py NAME``. Each appends a line to the file ``args.trace`` for what it does."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from shadowsup.memkeeper.hashing import chain_all
from shadowsup.wire.link import Accepted, Cancel, Rejected, Submit, Token
from shadowsup.workers import loop
from shadowsup.workers.errors import WorkerError
from shadowsup.workers.kv_pool import Filled

BLOCK = 4
"""Tokens a block."""
STEP_S = 0.02
"""The streams of one that is killed in mid-stream must not be over before that, on a machine that does other things as well."""


def say(engine: loop.Loop, words: str) -> None:
    with Path(str(engine.args["trace"])).open("a") as trace:
        trace.write(words + "\n")


class Bytes:
    def encode(self, text: str) -> list[int]:
        if "poison" in text:
            raise ValueError("it is poison")
        return list(text.encode())

    def decode(self, ids: list[int]) -> str:
        return bytes(ids).decode("latin-1")


# --- programs -----------------------------------------------------------------------------------------------------------------------


def kinds() -> None:
    """Keep a tensor of several kinds, an array and bytes; say what came back."""
    with loop.attach() as engine:

        def load() -> dict[str, object]:
            say(engine, "load")
            return {
                "half": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3).T,
                "scalar": torch.tensor(7),
                "empty": torch.empty(0, 3),
                "array": np.arange(5, dtype="<i2")[::-1],
                "bytes": b"config",
            }

        kept = engine.keep(load, fingerprint={"model": "kinds", "revision": "1"})
        other = engine.keep(lambda: {"more": np.ones(3)}, fingerprint="more")
        array = kept["array"]
        try:
            array[0] = 1
        except ValueError:
            say(engine, "read-only")
        half, scalar, empty = kept["half"], kept["scalar"], kept["empty"]
        found = (half.tolist(), str(half.dtype), int(scalar), tuple(empty.shape), array.tolist(), array.dtype.str, kept["bytes"])
        say(engine, repr(found) + repr(other["more"].tolist()))
        engine.park()
        for _ in engine.steps(Bytes(), vocabulary=256):
            pass


def summing() -> None:
    """Serve with a scheduler of its own: the KV of a token is the sum of all until it, the next token is that sum modulo 26."""
    with loop.attach() as engine:
        kv = engine.kv(block_bytes=8 * BLOCK, blocks=128, block_tokens=BLOCK, layout="sums-1")
        sums = kv.array.view(np.int64).reshape(-1)
        sums[:] = -1  # scratch: nothing stays
        engine.park(max_context=200)
        running: dict[str, tuple[Submit, list[int], list[int]]] = {}
        while True:
            events: list[Accepted | Token | Rejected] = []
            for message in engine.receive():
                if isinstance(message, Cancel):
                    kv.pool.release(running.pop(message.rid)[2])
                    say(engine, f"cancelled {message.rid}")
                    continue
                prompt = message.replay.prompt_ids if message.replay else tuple((message.prompt or "").encode())
                tokens = [*prompt, *(message.replay.output_ids if message.replay else ())]
                hits = kv.pool.match(chain_all(kv.salt, tokens[:-1], BLOCK))
                kv.pool.acquire(hits)
                running[message.rid] = (message, tokens, hits)
                events.append(Accepted(rid=message.rid, epoch=message.epoch, prompt_ids=prompt, cached_tokens=len(hits) * BLOCK))
                _extend(kv, sums, tokens, hits, len(hits) * BLOCK)
            for rid, (request, tokens, blocks) in list(running.items()):
                last = blocks[(len(tokens) - 1) // BLOCK] * BLOCK + (len(tokens) - 1) % BLOCK
                token = 97 + int(sums[last]) % 26
                tokens.append(token)
                _extend(kv, sums, tokens, blocks, len(tokens) - 1)
                prompt_length = len(request.replay.prompt_ids) if request.replay else len(request.prompt or "")
                made = len(tokens) - prompt_length
                done = made == request.sampling.max_tokens
                events.append(
                    Token(rid=rid, epoch=request.epoch, ids=(token,), text=chr(token), chars=made, finish_reason="length" if done else None)
                )
                if done:
                    kv.pool.release(running.pop(rid)[2])
            time.sleep(STEP_S)
            engine.beat(events, inflight=len(running))


def _extend(kv: loop.Blocks, sums: np.ndarray, tokens: list[int], blocks: list[int], start: int) -> None:
    """Compute from ``start`` on and publish the blocks that this fills."""
    for at in range(start, len(tokens)):
        if at // BLOCK == len(blocks):
            taken = kv.pool.allocate(1)
            assert taken is not None
            blocks += taken
        before = sums[blocks[(at - 1) // BLOCK] * BLOCK + (at - 1) % BLOCK] if at else 0
        sums[blocks[at // BLOCK] * BLOCK + at % BLOCK] = before + tokens[at]
    hashes = chain_all(kv.salt, tokens, BLOCK)
    kv.pool.publish([Filled(blocks[at], hashes[at]) for at in range(start // BLOCK, len(hashes))])


def training() -> None:
    """No requests: a state that goes on where it was."""
    with loop.attach() as engine:
        kv = engine.kv(block_bytes=16 * 8, blocks=8, block_tokens=1, reserve=2, layout="state-1")
        states = kv.tensor(torch.float64, 16)
        engine.park(serves=False)
        newest = kv.newest()
        state = torch.zeros(16, dtype=torch.float64) if newest is None else states[newest].clone()
        say(engine, f"from {int(state[0])}")
        while True:
            state += 1
            saved = kv.save(f"step {int(state[0])}", state)
            if saved:
                found = kv.find(f"step {int(state[0])}")
                assert found is not None and torch.equal(states[found], state)
            time.sleep(0.002)
            engine.beat()


def failing() -> None:
    """Fail as told in ``args.how``."""
    with loop.attach() as engine:
        how = engine.args["how"]
        if how == "load":
            raise RuntimeError("no such file")
        if how == "fatal":
            raise WorkerError("no such model", "name another", fatal=True)
        if how == "slow load":
            say(engine, "loading")
            time.sleep(600)
        engine.kv(block_bytes=1024, blocks=16)
        if how == "early":
            engine.beat()
        engine.park()
        for _ in engine.steps(Bytes(), vocabulary=256):
            if how == "unfinished":
                continue
            raise RuntimeError("step failed")


def echo() -> None:
    """Answer with the first letter of the prompt, again and again."""
    with loop.attach() as engine:
        engine.kv(block_bytes=64, blocks=32, block_tokens=BLOCK)
        engine.park()
        for batch in engine.steps(Bytes(), vocabulary=256, eos=[33], chat=lambda messages: list(messages[-1]["content"].encode())):
            logits = torch.zeros(len(batch.sampling), 256)
            for row, piece in zip(logits, batch.sampling, strict=True):
                assert len(piece.slots) == piece.end and piece.samples
                row[46 if len(piece.output) < 3 else 33] = 9.0
            batch.finish(batch.sample(logits))
    print("left", flush=True)


def on_device() -> None:
    """Wherever the memory is: the KV of a token follows from that of the token before it, the next token from the last KV."""
    with loop.attach() as engine:
        device = torch.device(engine.device)
        kept = engine.keep(lambda: {"table": torch.arange(97, 123).flip(0), "by": torch.tensor(31)}, fingerprint="on-device")
        say(engine, f"{kept['table'].device.type} {kept['table'].tolist()[:3]}")
        kv = engine.kv(block_bytes=8 * BLOCK, blocks=2048, block_tokens=BLOCK, reserve=64, layout="on-device-1")
        cache = kv.tensor(torch.int64, BLOCK).view(-1)
        cache.fill_(-1)
        engine.park(max_context=512)
        note = kv.find("note")
        say(engine, "nothing" if note is None else bytes(kv.tensor(torch.uint8, 8 * BLOCK)[note][:4].tolist()).decode())
        engine.beat()  # a client that is there already waits for steps()
        while not kv.save("note", torch.tensor(list(b"kept"), dtype=torch.uint8, device=device)):
            engine.beat()
        for batch in engine.steps(Bytes(), vocabulary=256):
            for piece in batch:
                slots = torch.from_numpy(piece.slots).to(device)
                value = cache[slots[piece.start - 1]] if piece.start else torch.zeros((), dtype=torch.int64, device=device)
                for at, token in enumerate(piece.ids, piece.start):
                    value = (value * kept["by"] + token) % 9973
                    cache[slots[at]] = value
            ends = torch.tensor([piece.slots[-1] for piece in batch.sampling], dtype=torch.int64, device=device)
            batch.finish(kept["table"][cache[ends] % 26].tolist())
            time.sleep(STEP_S)


PROGRAMS: dict[str, Callable[[], None]] = {program.__name__: program for program in (kinds, summing, training, failing, echo, on_device)}

if __name__ == "__main__":
    PROGRAMS[sys.argv[1]]()
