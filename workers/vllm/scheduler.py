"""Seam: ``--scheduler-cls`` (0.26, 0.32): progress of the step loop, and the commit rule of the index.

`create` is what the option names. vLLM calls it like a class; it makes a subclass of the scheduler that vLLM would have taken itself,
because only a subclass of AsyncScheduler schedules asynchronously.
"""

from __future__ import annotations

from typing import Any

from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request

from shadowsup.memkeeper.errors import LedgerLost
from shadowsup.memkeeper.ledger import LedgerReader, LedgerWriter
from shadowsup.wire.engine import KvCounts, Phase
from shadowsup.wire.link import Submit
from shadowsup.workers.api import Served
from shadowsup.workers.vllm import current, versions
from shadowsup.workers.vllm.block_pool import Fresh, KeptBlockPool
from shadowsup.workers.vllm.hashing import BlockHasher

MARK = "shadowsup_"
"""Keys of a request's extra arguments that the gateway's replay uses begin with this."""

MOST_RESERVE = 16
"""The reserve is at most this part of all blocks, unless the config names it."""


def create(*args: Any, **kwargs: Any) -> Any:
    """Return the scheduler of this EngineCore."""
    asynchronous = kwargs["vllm_config"].scheduler_config.async_scheduling
    return (KeptAsyncScheduler if asynchronous else KeptScheduler)(*args, **kwargs)


def reserve_of(wanted: int | None, max_num_seqs: int, blocks: int) -> int:
    """Return how many blocks to set aside: as configured, else 2 for each sequence that may run."""
    if wanted is not None:
        return min(wanted, blocks // 2)
    return max(1, min(2 * max_num_seqs, blocks // MOST_RESERVE))


class Kept:
    """What is added to either scheduler. Also what `Life` sees of the engine (`shadowsup.workers.api.Served`)."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.life = current.life()
        spec = self.life.spec
        scheduler: Any = self
        pool = scheduler.kv_cache_manager.block_pool
        self.pool = KeptBlockPool.adopt(
            pool,
            block_tokens=scheduler.block_size,
            reserve=reserve_of(spec.kv.reserve, scheduler.scheduler_config.max_num_seqs, pool.num_gpu_blocks),
        )
        _count_hits_apart(scheduler.kv_cache_manager.coordinator, self.pool)
        self.hasher: BlockHasher | None = None
        """Set by `shadowsup.workers.vllm.core`, which puts it in vLLM's place."""
        self.max_context: int = scheduler.max_model_len
        self._followed: LedgerReader | None = None
        self._steps: dict[int, tuple[Any, list[Fresh]]] = {}
        # What comes before the promotion waits in the queue.
        scheduler.set_pause_state(PauseState.PAUSED_ALL)

    # --- vLLM's ----------------------------------------------------------------------------------------------------------------------

    def add_request(self, request: Any) -> None:
        extra = getattr(request.sampling_params, "extra_args", None)
        if extra and any(str(key).startswith(MARK) for key in extra):
            self.life.resumed += 1
        super().add_request(request)  # type: ignore[misc]

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        try:
            output: Any = super().schedule(*args, **kwargs)  # type: ignore[misc]
            self._steps[id(output)] = (output, self.pool.take_fresh())
            total = output.total_num_scheduled_tokens
            if total:
                self.life.step_begins(Phase.PREFILL if total > len(output.num_scheduled_tokens) else Phase.DECODE, total)
        except LedgerLost as error:
            self.life.leave(error)
        return output

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        outputs: Any = super().update_from_output(scheduler_output, model_runner_output)  # type: ignore[misc]
        _, written = self._steps.pop(id(scheduler_output), (None, []))
        try:
            # Entered while output is taken are blocks that this step, or one before it, has completed.
            self.pool.publish([*written, *self.pool.take_fresh()])
            progressed = scheduler_output.total_num_scheduled_tokens > 0
            if progressed or self.inflight or self.queued:
                tokens = sum(len(one.new_token_ids) for batch in outputs.values() for one in batch.outputs)
                self.life.step_ended(tokens, self._next_phase(), progressed=progressed)
        except LedgerLost as error:
            self.life.leave(error)
        return outputs

    def _next_phase(self) -> Phase:
        if self.inflight:
            return Phase.DECODE
        return Phase.PREFILL if self.queued else Phase.IDLE

    # --- `Life`'s ----------------------------------------------------------------------------------------------------------------------

    def follow(self, ledger: LedgerReader) -> None:
        if ledger is not self._followed and self.hasher is not None:
            # Requests that come ahead of a failover are hashed for the blocks that this engine is to have.
            self._followed, self.hasher.salt = ledger, ledger.header().salt
        self.pool.follow(ledger)

    def promote(self, ledger: LedgerWriter, *, fenced: bool) -> tuple[int, int]:
        if self.life.ranks is not None:
            self.life.ranks.serve()  # before anything is scheduled: all ranks, or the promotion has failed
        kept = self.pool.take(ledger, fenced=fenced)
        if self.hasher is not None:
            self.hasher.salt = self.life.salt
        scheduler: Any = self
        scheduler.set_pause_state(PauseState.UNPAUSED)
        return kept

    def fence(self) -> int:
        return self.pool.fence()

    def submit(self, request: Submit) -> None:
        """Never called: requests come through vLLM's API server."""
        raise NotImplementedError

    def cancel(self, rid: str) -> None:
        """Never called, likewise."""
        raise NotImplementedError

    def foresee(self, rid: str, prompt_ids: tuple[int, ...]) -> None:
        """Never called, likewise."""

    def forget(self, rid: str) -> None:
        """Never called, likewise."""

    def canary(self, request: Submit) -> None:
        """Take a request of the supervisor's own, of one token. The API server does not know it and drops its answer.

        One that is there already is not taken again: vLLM would end the engine over it, and the first is answered, too.
        """
        scheduler: Any = self
        if request.rid in scheduler.requests:
            return
        params = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)
        scheduler.add_request(
            Request(request_id=request.rid, prompt_token_ids=list(request.prompt_ids or (0,)), sampling_params=params, pooling_params=None)
        )

    @property
    def about(self) -> str:
        return f"vLLM {versions.installed()}"

    @property
    def inflight(self) -> int:
        scheduler: Any = self
        return len(scheduler.running)

    @property
    def queued(self) -> int:
        scheduler: Any = self
        return int(scheduler.get_request_counts()[1])

    def kv_counts(self) -> KvCounts:
        return self.pool.counts()


def _count_hits_apart(coordinator: Any, pool: KeptBlockPool) -> None:
    """Have `KVCacheCoordinator.get_num_blocks_to_allocate` (0.26, 0.32) say what `KeptBlockPool.to_hand_out` says."""
    original = coordinator.get_num_blocks_to_allocate

    def counted(*args: Any, new_computed_blocks: Any, **kwargs: Any) -> int:
        return pool.to_hand_out(original(*args, new_computed_blocks=new_computed_blocks, **kwargs), new_computed_blocks)

    coordinator.get_num_blocks_to_allocate = counted


class KeptScheduler(Kept, Scheduler):
    """Schedules a step when the one before it has ended."""


class KeptAsyncScheduler(Kept, AsyncScheduler):
    """Schedules a step while the one before it runs: two are in flight."""


def served(scheduler: Kept) -> Served:
    """Return what `shadowsup.workers.life` sees of the engine."""
    return scheduler
