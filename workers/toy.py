"""A whole engine without a model, for tests and ``shadowsup bench chaos --toy``: ``kind: shadowsup.workers.toy:create``.

It schedules, keeps KV, publishes and replays exactly as a real one does, over the same pool, ledger, arena and weight store. Only the
model is a toy: the "KV" of a token is a digest of the weights, the KV of the token before it (read back from the arena) and the token,
and the next token is drawn from the last KV. So a wrong block, a lost byte or a shifted position changes everything that follows, and
two runs that agree have agreed on every byte.

``args`` of the spec, all optional:

* ``step_s``: seconds that a step takes at least. ``load_s``, ``warm_s``: likewise.
* ``hold_gil_s``: so long no other thread of it runs while it loads.
* ``context`` (4096), ``max_batch`` (64), ``max_batch_tokens`` (2048), ``token_bytes`` (64 of KV a token), ``weights_bytes`` (64 KiB).
* ``eos_in``: one token in so many ends the sequence (0: none does). ``unicode``: emit two-byte characters as well.
* ``wedge``: path of a file; while it exists, a step does not return; ``wedge_seqs``: only in engines with these K of ``NAME.K``.
* ``fail``: ``load | warm | promote | step``: raise there; ``fail_seqs``: only in engines with these K of ``NAME.K``; ``fatal``: fatally.
"""

from __future__ import annotations

import ctypes
import hashlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from shadowsup.memkeeper.ledger import Follower, LedgerReader, LedgerWriter
from shadowsup.memkeeper.protocol import Fingerprint
from shadowsup.wire.engine import EngineSpec, KvCounts, Phase
from shadowsup.wire.link import Rejected, Submit
from shadowsup.workers.api import KvGeometry, StepResult
from shadowsup.workers.arena import KvArena
from shadowsup.workers.detokenize import Detokenizer
from shadowsup.workers.errors import WorkerError
from shadowsup.workers.faults import Faults
from shadowsup.workers.kv_pool import IndexMirror, KvPool
from shadowsup.workers.requests import Request
from shadowsup.workers.scheduler import Chunk, Limits, Scheduler
from shadowsup.workers.weights import KeptWeights, TensorSpec, WeightStore

EOS = 256
DIGEST = 32
ALPHABET = b"  eeettaaooiinnsshhrrddlluu.,"
LEAD, TRAIL = 0xC3, range(0xA0, 0xC0)
"""UTF-8 bytes of à … ß in lower case."""


class ByteTokenizer:
    """One id a byte; `EOS` has no text."""

    def encode(self, text: str) -> tuple[int, ...]:
        return tuple(text.encode())

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(one for one in ids if one < EOS).decode(errors="replace")

    def chat(self, messages: Sequence[dict[str, Any]]) -> tuple[int, ...]:
        return self.encode("".join(f"<{one['role']}>{one['content']}\n" for one in messages) + "<assistant>")


class FakeEngine:
    """See `shadowsup.workers.api.Engine`."""

    def __init__(self) -> None:
        self.tokenizer = ByteTokenizer()
        self.loads = 0
        """Model files "read" by this process: 0 in one that attached."""
        self._weights: KeptWeights
        self._memory: memoryview
        self._mirror: IndexMirror
        self._follower: tuple[LedgerReader, Follower] | None = None
        self._scheduler: Scheduler | None = None
        self._rejected: list[Rejected] = []
        self._phase = Phase.IDLE
        self._faults = Faults.from_environment(self.tokenizer.decode)

    # --- coming up -------------------------------------------------------------------------------------------------------------

    def load(self, spec: EngineSpec, store: WeightStore, progress: Callable[[str], None]) -> None:
        self._spec = spec
        args: dict[str, Any] = dict(spec.args)
        self._step_s = float(args.get("step_s", 0.0))
        self._warm_s = float(args.get("warm_s", 0.0))
        self._context = int(args.get("context", 4096))
        self._limits = Limits(int(args.get("max_batch", 64)), int(args.get("max_batch_tokens", 2048)))
        self._token_bytes = int(args.get("token_bytes", 64))
        self._eos_in = int(args.get("eos_in", 0))
        self._unicode = bool(args.get("unicode", False))
        wedges = "wedge" in args and spec.seq in args.get("wedge_seqs", (spec.seq,))
        self._wedge = Path(str(args["wedge"])) if wedges else None
        self._args = args
        progress("loading fake weights")
        time.sleep(float(args.get("load_s", 0.0)))
        if held_s := float(args.get("hold_gil_s", 0.0)):
            ctypes.PyDLL(None).usleep(int(1e6 * held_s))  # PyDLL: called with the GIL held
        self._fail_if_told("load")
        size = int(args.get("weights_bytes", 64 * 1024))
        fingerprint = Fingerprint((("layout", "fake-1"), ("model", spec.model), ("dtype", spec.dtype), ("bytes", str(size))))
        kept = store.attach(fingerprint)
        if kept is None:
            self.loads += 1
            plan = [TensorSpec("mix", "uint8", (DIGEST,), DIGEST), TensorSpec("rest", "uint8", (size,), size)]
            writer = store.publish(plan, {"config.json": spec.model.encode()}, fingerprint)
            writer.array("mix")[:] = np.frombuffer(hashlib.blake2b(spec.model.encode(), digest_size=DIGEST).digest(), np.uint8)
            writer.array("rest")[:] = np.arange(size, dtype=np.uint64).astype(np.uint8)
            kept = writer.seal()
        self._weights = kept

    @property
    def about(self) -> str:
        return ""

    @property
    def max_context(self) -> int:
        return self._context

    def geometry(self) -> KvGeometry:
        kv = self._spec.kv
        block_bytes = kv.block_tokens * self._token_bytes
        reserve = 2 * self._limits.max_batch if kv.reserve is None else kv.reserve
        blocks = (kv.size or 4096 * block_bytes) // block_bytes
        return KvGeometry(
            blocks=blocks,
            block_tokens=kv.block_tokens,
            block_bytes=block_bytes,
            reserve=min(reserve, blocks // 2),
            fingerprint=(("fake.token_bytes", str(self._token_bytes)),),
        )

    def warm(self, arena: KvArena) -> None:
        self._memory = arena.view().data
        self._mirror = IndexMirror(self.geometry().blocks)
        arena.view()[: 2**20] = 0xA5
        arena.view()[-(2**12) :] = 0xA5
        time.sleep(self._warm_s)
        self._fail_if_told("warm")

    def follow(self, ledger: LedgerReader) -> None:
        if self._follower is None or self._follower[0] is not ledger:
            self._follower = (ledger, Follower(ledger))
        self._mirror.follow(self._follower[1])

    def promote(self, ledger: LedgerWriter, *, fenced: bool) -> tuple[int, int]:
        self._fail_if_told("promote")
        shape = self.geometry()
        pool = KvPool(
            ledger,
            blocks=shape.blocks,
            block_tokens=shape.block_tokens,
            reserve=shape.reserve,
            fenced=fenced,
            index=self._mirror.index,
        )
        self._scheduler = Scheduler(pool, self._limits, ledger.header().salt)
        return pool.kept, pool.dropped

    def fence(self) -> int:
        return self._active.pool.fence()

    # --- serving ---------------------------------------------------------------------------------------------------------------

    def submit(self, request: Submit) -> None:
        sampling = request.sampling
        if request.replay is not None:
            prompt, output, delivered = request.replay.prompt_ids, list(request.replay.output_ids), request.replay.delivered_chars
        else:
            output, delivered = [], 0
            if request.messages is not None:
                prompt = self.tokenizer.chat(request.messages)
            else:
                prompt = request.prompt_ids if request.prompt_ids is not None else self.tokenizer.encode(request.prompt or "")
        if not prompt or len(prompt) >= self._context:
            words = f"the prompt has {len(prompt)} tokens, this model takes 1 to {self._context - 1}"
            self._rejected.append(Rejected(rid=request.rid, epoch=request.epoch, status=400, message=words, param="prompt"))
            return
        text = Detokenizer(self.tokenizer, stops=sampling.stop, min_tokens=sampling.min_tokens, delivered=delivered)
        self._active.add(
            Request(
                rid=request.rid,
                epoch=request.epoch,
                prompt=tuple(prompt),
                output=output,
                sampling=sampling,
                text=text,
                max_total=self._context,
                eos=(EOS,),
                replayed=request.replay is not None,
            )
        )

    def foresee(self, rid: str, prompt_ids: tuple[int, ...]) -> None: ...

    def forget(self, rid: str) -> None: ...

    def cancel(self, rid: str) -> None:
        self._active.cancel(rid)

    def step(self) -> StepResult:
        scheduler = self._active
        self._fail_if_told("step")
        while self._wedge is not None and self._wedge.exists():
            time.sleep(0.01)
        plan = scheduler.plan()
        if plan:
            if self._faults is not None:
                self._faults.look(chunk.request.tokens for chunk in plan)
            self._phase = Phase.PREFILL if any(chunk.count > 1 for chunk in plan) else Phase.DECODE
            started = time.monotonic()
            sampled = [token for chunk in plan if (token := self._compute(chunk)) is not None]
            time.sleep(max(0.0, self._step_s - (time.monotonic() - started)))
            scheduler.commit(plan, sampled)
        rejected, self._rejected = self._rejected, []
        if not scheduler.inflight:
            self._phase = Phase.IDLE
        return StepResult(events=[*rejected, *scheduler.take_events()], progressed=bool(plan))

    @property
    def phase(self) -> Phase:
        return self._phase

    @property
    def inflight(self) -> int:
        return self._scheduler.inflight if self._scheduler is not None else 0

    @property
    def queued(self) -> int:
        return len(self._rejected) + (self._scheduler.queued if self._scheduler is not None else 0)

    @property
    def upcoming(self) -> int:
        """Tokens of the next step, at most."""
        return self._scheduler.upcoming if self._scheduler is not None else 0

    def kv_counts(self) -> KvCounts | None:
        return self._scheduler.pool.counts() if self._scheduler is not None else None

    def account(self) -> dict[str, object]:
        """See `shadowsup.workers.api`."""
        lengths = self._scheduler.lengths() if self._scheduler is not None else []
        return {"batch": len(lengths), "lengths": lengths, "memory": {"kv": self.geometry().size}}

    def close(self) -> None:
        if hasattr(self, "_memory"):
            self._memory.release()
        if hasattr(self, "_weights"):
            self._weights.close()

    # --- the toy model ---------------------------------------------------------------------------------------------------------

    def _compute(self, chunk: Chunk) -> int | None:
        """Write the KV of a chunk's tokens; return the next token where it samples."""
        request, memory = chunk.request, self._memory
        mix = self._weights.tensors["mix"].array().tobytes()
        state = self._kv(request, chunk.start - 1) if chunk.start else b""
        for at in range(chunk.start, chunk.start + chunk.count):
            state = hashlib.blake2b(mix + state + request.tokens[at].to_bytes(4, "little"), digest_size=DIGEST).digest()
            where = self._slot(request, at)
            memory[where : where + DIGEST] = state
        return self._sample(request, state) if chunk.samples else None

    def _sample(self, request: Request, state: bytes) -> int:
        sampling = request.sampling
        if sampling.temperature > 0:
            noise = f"{sampling.seed}:{len(request.output)}:{sampling.temperature}".encode()
            state = hashlib.blake2b(state, key=hashlib.blake2b(noise, digest_size=32).digest(), digest_size=DIGEST).digest()
        value = int.from_bytes(state[:8], "little")
        if request.tokens[-1] == LEAD:
            return TRAIL[value % len(TRAIL)]
        if self._unicode and state[8] < 64:
            return LEAD
        if self._eos_in and len(request.output) + 1 >= sampling.min_tokens and int.from_bytes(state[9:13], "little") % self._eos_in == 0:
            return EOS
        return ALPHABET[value % len(ALPHABET)]

    def _kv(self, request: Request, at: int) -> bytes:
        where = self._slot(request, at)
        return bytes(self._memory[where : where + DIGEST])

    def _slot(self, request: Request, at: int) -> int:
        size = self._spec.kv.block_tokens
        return (request.blocks[at // size] * size + at % size) * self._token_bytes

    @property
    def _active(self) -> Scheduler:
        if self._scheduler is None:
            raise AssertionError("not promoted")
        return self._scheduler

    def _fail_if_told(self, stage: str) -> None:
        seqs: Sequence[int] = self._args.get("fail_seqs", ())
        if self._args.get("fail") == stage and (not seqs or self._spec.seq in seqs):
            raise WorkerError(f"told to fail in {stage}", "this is a test", fatal=bool(self._args.get("fatal", False)))


def create() -> FakeEngine:
    return FakeEngine()
