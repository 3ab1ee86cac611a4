"""The transformers engine: `shadowsup.workers.api.Engine` over a transformers causal LM, paged KV and continuous batching of our own."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence

import torch

from shadowsup.memkeeper.ledger import Follower, LedgerReader, LedgerWriter
from shadowsup.wire.engine import EngineSpec, KvCounts, Phase
from shadowsup.wire.link import Rejected, Sampling, Submit
from shadowsup.workers.api import Engine, KvGeometry, StepResult
from shadowsup.workers.arena import KvArena
from shadowsup.workers.detokenize import Detokenizer
from shadowsup.workers.errors import WorkerError
from shadowsup.workers.faults import Faults
from shadowsup.workers.foreseen import Foreseen, ForeseenPrompts
from shadowsup.workers.kv_pool import IndexMirror, KvPool
from shadowsup.workers.requests import Request
from shadowsup.workers.sampling import Row, sample
from shadowsup.workers.scheduler import Chunk, Limits, Scheduler
from shadowsup.workers.transformers import arguments, loader, tensors, warming
from shadowsup.workers.transformers.attention import LAYOUT, KvCache
from shadowsup.workers.transformers.batch import Piece
from shadowsup.workers.transformers.executor import Executor
from shadowsup.workers.transformers.tokenizer import PromptError
from shadowsup.workers.weights import WeightStore

log = logging.getLogger("shadowsup.engine")


class TransformersEngine:
    """See `shadowsup.workers.api.Engine` for the life of one."""

    def __init__(self) -> None:
        self._arguments = arguments.Arguments()
        self._device = torch.device("cpu")
        self._progress: Callable[[str], None] = lambda words: None
        self._hurried = False
        self._loaded: loader.Loaded | None = None
        self._geometry: KvGeometry | None = None
        self._max_context = 0
        self._context_limit = ""
        self._executor: Executor | None = None
        self._mirror: IndexMirror | None = None
        self._follower: tuple[LedgerReader, Follower] | None = None
        self._scheduler: Scheduler | None = None
        self._foreseen: ForeseenPrompts | None = None
        self._salt = b""
        self._epoch = 0
        self._threads = 1
        self._first_step = False
        self._rejected: list[Rejected] = []
        self._faults: Faults | None = None

    # --- up to parked -----------------------------------------------------------------------------------------------------------

    def load(self, spec: EngineSpec, store: WeightStore, progress: Callable[[str], None]) -> None:
        self._arguments = arguments.parse(spec.args, gpu=bool(spec.gpus))
        if spec.world != 1:
            raise WorkerError("this engine runs on one device", "set tensor_parallel: 1", fatal=True)
        self._device = _device(spec)
        self._progress = progress
        # Where no shadow takes over, somebody waits for this very engine: what can be done later is.
        self._hurried = spec.shadows == 0
        threads = self._arguments.thread_count()
        if threads is not None:
            torch.set_num_threads(threads)
        self._loaded = loader.load(spec, self._arguments, store, self._device, self._tell)
        self._faults = Faults.from_environment(self._loaded.codec.decode)
        self._set_geometry(spec, self._loaded)

    def _tell(self, words: str) -> None:
        log.info(words)
        self._progress(words)

    def _set_geometry(self, spec: EngineSpec, loaded: loader.Loaded) -> None:
        shape = loaded.shape
        longest = loaded.positions
        if self._arguments.max_context is not None:
            if self._arguments.max_context > longest:
                raise WorkerError(
                    f"max_context {self._arguments.max_context} is beyond the model's {longest} tokens", "lower it", fatal=True
                )
            longest = self._arguments.max_context
        size = spec.kv.size or self._own_choice(spec, loaded, longest)
        blocks = size // shape.block_bytes
        # By default two blocks a sequence: its tail, and the next one should the fence be late.
        reserve = spec.kv.reserve if spec.kv.reserve is not None else min(2 * self._arguments.max_batch, blocks // 4)
        if blocks - reserve < 2:
            raise WorkerError(
                f"kv.size {size} holds {blocks} blocks of {shape.block_tokens} tokens ({shape.block_bytes} B), {reserve} of them reserve",
                f"make it {(reserve + 16) * shape.block_bytes} or more",
                fatal=True,
            )
        self._geometry = KvGeometry(
            blocks=blocks,
            block_tokens=shape.block_tokens,
            block_bytes=shape.block_bytes,
            reserve=reserve,
            fingerprint=(
                ("kv.layers", str(shape.layers)),
                ("kv.heads", str(shape.heads)),
                ("kv.head_dim", str(shape.head_dim)),
                ("kv.dtype", str(shape.dtype)),
                ("kv.layout", LAYOUT),
            ),
        )
        capacity = (blocks - reserve) * shape.block_tokens
        self._max_context = min(longest, capacity)
        self._context_limit = f"its KV cache holds {capacity}" if capacity < longest else f"its context is {longest}"

    def _own_choice(self, spec: EngineSpec, loaded: loader.Loaded, longest: int) -> int:
        on_gpu = self._device.type == "cuda"
        return arguments.choose_kv(
            self._arguments,
            longest=longest,
            block_tokens=loaded.shape.block_tokens,
            block_bytes=loaded.shape.block_bytes,
            device=torch.cuda.get_device_properties(self._device).total_memory if on_gpu else None,
            weights=loaded.kept.nbytes,
            shadows=spec.shadows,
        )

    @property
    def about(self) -> str:
        return f"attention: {self._executor.kind.value}, {self._executor.graphs} graphs" if self._executor is not None else ""

    @property
    def max_context(self) -> int:
        return self._max_context

    def geometry(self) -> KvGeometry:
        assert self._geometry is not None, "load comes first"
        return self._geometry

    def warm(self, arena: KvArena) -> None:
        loaded, geometry = self._loaded, self._geometry
        assert loaded is not None and geometry is not None, "load comes first"
        # One thread until it is promoted: a second team of threads on the cores of an active engine makes both wait at every barrier, for
        # seconds where a step takes a tenth of one.
        self._threads = torch.get_num_threads()
        torch.set_num_threads(1)
        memory = tensors.as_bytes(arena.address, arena.size, self._device)
        self._executor = Executor(loaded.model, KvCache(memory, loaded.shape, geometry.blocks), self._device)
        self._mirror = IndexMirror(geometry.blocks)
        self._foreseen = ForeseenPrompts(geometry.block_tokens)
        limits = Limits(self._arguments.max_batch, self._arguments.max_batch_tokens)
        if self._device.type == "cuda":
            self._tell("capturing graphs")
            graphs = self._executor.use_graphs(limits.max_batch, self._max_context, capture=not self._hurried)
            log.info("attention: %s, %d graphs", self._executor.kind.value, graphs)
        warming.run(self._executor, limits, geometry, self._max_context, loaded.vocabulary, everything=not self._hurried)
        loaded.codec.decode(loaded.codec.encode("Hello"))
        try:
            loaded.codec.chat([{"role": "user", "content": "Hello"}])  # compiles the template
        except PromptError:
            pass  # there is none, or it wants other roles: a client will be told

    def follow(self, ledger: LedgerReader) -> None:
        assert self._mirror is not None, "warm comes first"
        if self._follower is None or self._follower[0] is not ledger:
            self._follower = (ledger, Follower(ledger))
        self._mirror.follow(self._follower[1])
        if self._foreseen:
            self._foreseen.prepare(ledger.header().salt, self._mirror.index.find)

    def foresee(self, rid: str, prompt_ids: tuple[int, ...]) -> None:
        assert self._foreseen is not None, "warm comes first"
        self._foreseen.add(rid, prompt_ids)

    def forget(self, rid: str) -> None:
        assert self._foreseen is not None, "warm comes first"
        self._foreseen.forget(rid)

    # --- active -----------------------------------------------------------------------------------------------------------------

    def promote(self, ledger: LedgerWriter, *, fenced: bool) -> tuple[int, int]:
        geometry = self.geometry()
        assert self._mirror is not None, "warm comes first"
        mirror, self._mirror, self._follower = self._mirror, None, None
        torch.set_num_threads(self._threads)
        pool = KvPool(
            ledger,
            blocks=geometry.blocks,
            block_tokens=geometry.block_tokens,
            reserve=geometry.reserve,
            fenced=fenced,
            index=mirror.index,
        )
        self._epoch = ledger.epoch
        self._first_step = True
        limits = Limits(self._arguments.max_batch, self._arguments.max_batch_tokens)
        self._salt = ledger.header().salt
        self._scheduler = Scheduler(pool, limits, self._salt)
        return pool.kept, pool.dropped

    def fence(self) -> int:
        return self._active().pool.fence()

    def submit(self, request: Submit) -> None:
        scheduler = self._active()
        if request.rid in scheduler:
            return  # an answer would be taken for the answer to the one that runs
        if request.epoch != self._epoch:
            self._reject(request, 409, f"this engine serves epoch {self._epoch}, not {request.epoch}", retryable=True)
            return
        try:
            prompt, foreseen = self._prompt(request)
        except PromptError as error:
            self._reject(request, 400, str(error), param=error.param)
            return
        if (problem := _bad_number(request.sampling) or self._too_long(request, prompt)) is not None:
            self._reject(request, 400, problem[0], param=problem[1])
            return
        assert self._loaded is not None
        replay, sampling = request.replay, request.sampling
        scheduler.add(
            Request(
                rid=request.rid,
                epoch=request.epoch,
                prompt=prompt,
                output=list(replay.output_ids) if replay is not None else [],
                sampling=sampling,
                text=Detokenizer(
                    self._loaded.codec,
                    stops=sampling.stop,
                    min_tokens=sampling.min_tokens,
                    delivered=replay.delivered_chars if replay is not None else 0,
                ),
                max_total=self._max_context,
                eos=self._loaded.eos,
                replayed=replay is not None,
                known_hashes=foreseen.hashes,
                known_blocks=foreseen.blocks,
            )
        )

    def _prompt(self, request: Submit) -> tuple[tuple[int, ...], Foreseen]:
        """Return the prompt's ids, and what is known of its first blocks."""
        assert self._loaded is not None and self._foreseen is not None
        codec, param, replay, foreseen = self._loaded.codec, "prompt", request.replay, None
        if replay is not None:
            ids: Sequence[int] = replay.prompt_ids
            foreseen = self._foreseen.take(replay.staged, self._salt) if replay.staged else None
            # What was staged another engine has accepted: with long prompts looking at each id again would take longer than the step.
            everything: Sequence[int] = replay.output_ids or (0,) if foreseen is not None else (*ids, *replay.output_ids)
        else:
            if request.messages is not None:
                ids, param = codec.chat(request.messages), "messages"
            elif request.prompt is not None:
                ids = codec.encode(request.prompt)
            else:
                ids = request.prompt_ids or ()
            everything = ids
        if not ids:
            raise PromptError("the prompt has no tokens", param)
        if min(everything) < 0 or max(everything) >= self._loaded.vocabulary:
            wrong = next(token for token in everything if not 0 <= token < self._loaded.vocabulary)
            raise PromptError(f"token id {wrong} is outside the vocabulary of {self._loaded.vocabulary}", param)
        return tuple(ids), foreseen or Foreseen(())

    def _too_long(self, request: Submit, prompt: Sequence[int]) -> tuple[str, str] | None:
        """Return (message, parameter) when the request cannot fit. One that was accepted before runs to the limit instead."""
        limit, asked = self._max_context, request.sampling.max_tokens
        what = f"this model takes {limit} tokens, prompt and output together ({self._context_limit})"
        if len(prompt) >= limit:
            return f"{what}; the prompt has {len(prompt)}", "messages" if request.messages is not None else "prompt"
        if request.replay is None and asked is not None and len(prompt) + asked > limit:
            return f"{what}; the request has {len(prompt) + asked}: {len(prompt)} in the prompt, {asked} of max_tokens", "max_tokens"
        return None

    def _reject(self, request: Submit, status: int, message: str, *, param: str | None = None, retryable: bool = False) -> None:
        self._rejected.append(
            Rejected(rid=request.rid, epoch=request.epoch, status=status, message=message, param=param, retryable=retryable)
        )

    def cancel(self, rid: str) -> None:
        self._active().cancel(rid)

    def step(self) -> StepResult:
        scheduler, result = self._active(), StepResult()
        started = time.perf_counter()
        plan = scheduler.plan()
        if plan:
            planned = time.perf_counter()
            tokens = self._compute(plan)
            computed = time.perf_counter()
            scheduler.commit(plan, tokens)
            if self._first_step:
                self._first_step = False
                count, spent = sum(chunk.count for chunk in plan), (planned - started, computed - planned)
                log.info("first step: %d requests, %d tokens; %.1f ms to plan, %.1f ms to run", len(plan), count, *(1e3 * s for s in spent))
        result.events = [*self._rejected, *scheduler.take_events()]
        self._rejected = []
        result.progressed = bool(plan or result.events)
        return result

    def _compute(self, plan: Sequence[Chunk]) -> list[int]:
        assert self._executor is not None and self._loaded is not None
        if self._faults is not None:
            self._faults.look(chunk.request.tokens for chunk in plan)
        logits = self._executor.forward(
            [
                Piece(chunk.request.tokens[chunk.start : chunk.start + chunk.count], chunk.start, chunk.request.blocks, chunk.samples)
                for chunk in plan
            ]
        )
        rows = [Row(chunk.request.sampling, chunk.request.output, chunk.request.total, self._loaded.eos) for chunk in plan if chunk.samples]
        if rows:
            return sample(logits, rows)  # which waits for the device
        self._executor.finish()  # what is published next must be there
        return []

    # --- what others see ---------------------------------------------------------------------------------------------------------

    @property
    def phase(self) -> Phase:
        """What the next step will do (read before it)."""
        if self._loaded is None:
            return Phase.LOADING
        if self._executor is None:
            return Phase.WARMING
        if self._scheduler is None:
            return Phase.PARKED
        return self._scheduler.phase

    @property
    def inflight(self) -> int:
        return self._scheduler.inflight if self._scheduler is not None else 0

    @property
    def queued(self) -> int:
        """Requests that wait, and answers that only need a step to go out."""
        return self._scheduler.queued + len(self._rejected) if self._scheduler is not None else 0

    @property
    def upcoming(self) -> int:
        """Tokens of the next step, at most."""
        return self._scheduler.upcoming if self._scheduler is not None else 0

    def kv_counts(self) -> KvCounts | None:
        return self._scheduler.pool.counts() if self._scheduler is not None else None

    def account(self) -> dict[str, object]:
        """Return what it was doing and, in bytes, what memory is for what; for the report of a failure."""
        scheduler, loaded, geometry = self._scheduler, self._loaded, self._geometry
        memory = {
            "weights": loaded.kept.nbytes if loaded is not None else 0,
            "kv": geometry.size if geometry is not None else 0,
        }
        if self._device.type == "cuda":
            free, total = torch.cuda.mem_get_info(self._device)
            memory |= {
                "tensors": torch.cuda.memory_allocated(self._device),
                "cached": torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(self._device),
                "device_free": free,
                "device_total": total,
            }
        lengths = scheduler.lengths() if scheduler is not None else []
        return {"batch": len(lengths), "lengths": lengths, "step_tokens": self.upcoming, "memory": memory}

    def close(self) -> None:
        """Drop every tensor over kept memory, then the memory. Idempotent."""
        loaded, self._loaded = self._loaded, None
        self._executor = self._scheduler = self._mirror = self._follower = None
        if loaded is not None:
            kept = loaded.kept
            del loaded
            kept.close()

    def _active(self) -> Scheduler:
        assert self._scheduler is not None, "promote comes first"
        return self._scheduler


def _device(spec: EngineSpec) -> torch.device:
    if not spec.gpus:
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise WorkerError(
            f"no GPU can be used here, though {', '.join(spec.gpus)} is configured", "check the driver, or set gpus: []", fatal=True
        )
    # Results of float32 must not depend on how a library feels about TF32.
    torch.set_float32_matmul_precision("highest")
    torch.cuda.set_device(spec.rank)
    return torch.device("cuda", spec.rank)


def _bad_number(sampling: Sampling) -> tuple[str, str] | None:
    """Return (message, parameter) for a number that would spoil a step: it would spoil the successor's as well, and so on."""
    wanted = {
        "temperature": (0.0 <= sampling.temperature < math.inf, "0 or more"),
        "top_p": (0.0 < sampling.top_p <= 1.0, "above 0 and at most 1"),
        "top_k": (sampling.top_k >= 0, "0 or more"),
        "presence_penalty": (math.isfinite(sampling.presence_penalty), "a number"),
        "frequency_penalty": (math.isfinite(sampling.frequency_penalty), "a number"),
        "max_tokens": (sampling.max_tokens is None or sampling.max_tokens > 0, "1 or more"),
        "min_tokens": (sampling.min_tokens >= 0, "0 or more"),
    }
    for name, (fine, what) in wanted.items():
        if not fine:
            return f"{name} must be {what}, not {getattr(sampling, name)}", name
    return None


def create() -> Engine:
    """The registry's factory."""
    return TransformersEngine()
