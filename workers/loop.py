"""Kept memory, shadows and the gateway for a serving loop that you wrote yourself, in PyTorch or numpy. See docs/own-loop.md.

    from shadowsup.workers import loop

    with loop.attach() as engine:
        weights = engine.keep(load, fingerprint="my-model-3")       # load() runs once on this machine, not in every process
        kv = engine.kv(block_bytes=16 * 4096)                       # memory that outlives this process, and what is known of it
        cache = kv.tensor(torch.float32, 16, 1024)
        engine.park()                                               # a shadow waits here until it is its turn
        for batch in engine.steps(tokenizer, vocabulary=50_000):    # requests of the gateway's clients, batched
            batch.finish(batch.sample(forward(weights, cache, batch)))

Configured as ``engine: loop`` with ``command: ["{python}", serve.py]``. Run by hand the same script works alone: private memory, no
shadow, prompts from the standard input.

Everything is to be called on the thread that attached, which is the process's main thread. Attach before anything forks.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

from shadowsup.memkeeper.protocol import Fingerprint
from shadowsup.wire.engine import SPEC_VARIABLE, UNKNOWN_TOKENS, EngineSpec, Phase
from shadowsup.wire.link import Accepted, Cancel, Rejected, Submit, Token
from shadowsup.workers import compiling, loop_tensors, process
from shadowsup.workers.api import KvGeometry
from shadowsup.workers.errors import ExitCode, WorkerError
from shadowsup.workers.leaving import Leave
from shadowsup.workers.life import Life
from shadowsup.workers.loop_blocks import Blocks
from shadowsup.workers.loop_by_hand import ByHand
from shadowsup.workers.loop_front import Front, Inbox
from shadowsup.workers.loop_steps import Batch, Chat, Piece, Serving, Tokenizer
from shadowsup.workers.scheduler import Limits
from shadowsup.workers.weights import WeightStore

__all__ = ["Batch", "Blocks", "Loop", "Piece", "Takeover", "Tokenizer", "attach"]

MAX_BATCH = 8
MAX_BATCH_TOKENS = 512
BLOCKS = 256
"""Where neither the script nor ``kv.size`` says how many."""

Event = Accepted | Token | Rejected

log = logging.getLogger("shadowsup.engine")


def attach(*, device: str = "cpu") -> Loop:
    """Return this process's loop, to be entered with ``with``.

    What leaves the block: a loop that is told to stop ends it silently, and the script goes on behind it (no tensor over kept memory may
    be touched there). An error is reported to the supervisor and logged; then it leaves as the SystemExit of its kind (`ExitCode`).
    Without a supervisor errors leave as they are.

    Args:
        device: of tensors where there is no supervisor: ``cpu`` or ``cuda``. Under one, the worker's ``gpus`` decide.

    Raises:
        WorkerError: the supervisor's spec cannot be read.
    """
    path = os.environ.pop(SPEC_VARIABLE, None)  # it is for this process, not for what this process starts
    if path is None:
        return Loop(None, device)
    try:
        spec = msgspec.json.decode(Path(path).read_bytes(), type=EngineSpec)
    except (OSError, msgspec.MsgspecError) as error:
        raise WorkerError(f"{SPEC_VARIABLE}={path} is no engine spec: {error}", fatal=True) from error
    return Loop(spec, f"cuda:{spec.rank}" if spec.gpus else "cpu")


@dataclass(frozen=True, kw_only=True)
class Takeover:
    """How this engine came to be the active one. ``epoch``: how often the worker's has changed, from 1.

    ``fenced``: whether every predecessor is known to be gone. Until it is, only reserve blocks are written (`Blocks.pool` sees to that).
    """

    epoch: int
    blocks_kept: int
    blocks_dropped: int
    fenced: bool


class Loop:
    """One engine of a worker. Made by `attach`.

    Attributes:
        spec: what the supervisor said; None when there is none.
        device: where tensors go: ``cpu`` or ``cuda:N``.
        args: the worker's ``args``.
    """

    def __init__(self, spec: EngineSpec | None, device: str) -> None:
        self.spec = spec
        self.device = device
        self.args: Mapping[str, object] = dict(spec.args) if spec is not None else {}
        self._life: Life | ByHand = Life(spec) if spec is not None else ByHand()
        self._store: WeightStore | None = None
        self._fingerprint: tuple[tuple[str, str], ...] = ()
        self._front: Front | None = None
        self._blocks: Blocks | None = None
        self._inbox = Inbox()
        self._stack = ExitStack()
        self._interruptible = ExitStack()

    @property
    def supervised(self) -> bool:
        return self.spec is not None

    # --- coming and going ------------------------------------------------------------------------------------------------------

    def __enter__(self) -> Loop:
        if isinstance(self._life, Life) and self.spec is not None:
            process.settle()
            process.set_name(self.spec.engine)
            process.log_to_stderr(force=False)
            self._stack.enter_context(self._life.leaving.signals())
            try:
                self._life.start()
                self._interruptible.enter_context(self._life.leaving.interruptible())
                self._store = self._life.connect()
            except BaseException as error:
                if not self.__exit__(type(error), error, None):
                    raise
                raise SystemExit(ExitCode.STOPPED) from None
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> bool:
        asked = error is None or isinstance(error, Leave) or (isinstance(error, SystemExit) and not error.code)
        try:
            if isinstance(self._life, ByHand):
                self._life.close()
                return isinstance(error, Leave)
            code = self._life.over(Leave() if error is None or asked else error)
        finally:
            self._interruptible.close()
            self._stack.close()
        if isinstance(error, Exception):  # has been told
            raise SystemExit(code) from None
        return isinstance(error, Leave)

    def progress(self, words: str) -> None:
        """Say what goes on while it loads or warms up; ``shadowsup status`` shows it."""
        self._life.progress(words)

    def compiling(self, what: str) -> AbstractContextManager[None]:
        """Say that what follows takes long and makes no step, and is no hang: compiling, saving, evaluating. Up to a minute.

        What ``torch.compile`` does by itself is noticed.
        """
        return compiling.compiling(what)

    # --- memory ----------------------------------------------------------------------------------------------------------------

    def keep(self, load: Callable[[], Mapping[str, Any]], *, fingerprint: str | Mapping[str, str]) -> dict[str, Any]:
        """Return what ``load`` returns, from memory that outlives this process.

        The first process on this machine to ask for ``fingerprint`` runs ``load`` and publishes; any other gets the same bytes, mapped
        read-only, without running it. While somebody else publishes, this waits.

        Args:
            load: returns torch tensors (any device), numpy arrays (only where `device` is ``cpu``) and ``bytes`` (a tokenizer's file, a
                config), by name. All of it is in memory twice for as long as it is copied.
            fingerprint: everything that the bytes depend on: model, revision, dtype, quantisation. Not the same, not shared.

        Returns:
            By name: tensors on `device`, arrays, ``bytes``. Shared and read-only: a write to a tensor is a segmentation fault, to an
            array a ValueError. Without a supervisor: private ones.

        Raises:
            KeeperError, OutOfMemory: the keeper refuses, is gone, or has no room.
            WorkerError: something of another type was loaded, or is not contiguous bytes.
        """
        items = (("fingerprint", fingerprint),) if isinstance(fingerprint, str) else tuple(sorted(fingerprint.items()))
        if self._store is None:
            return loop_tensors.private(load(), self.device)
        rank = f"{self.spec.rank}/{self.spec.world}" if self.spec is not None else "0/1"
        mark = (("layout", loop_tensors.LAYOUT), ("rank", rank), *items)
        kept = loop_tensors.keep(self._store, load, Fingerprint(mark), self.device)
        self._fingerprint += mark
        return kept

    def kv(
        self,
        *,
        block_bytes: int,
        blocks: int | None = None,
        block_tokens: int | None = None,
        reserve: int | None = None,
        layout: str = "",
    ) -> Blocks:
        """Return the worker's blocks: scratch until `park` returns, the real ones after. Once, after every `keep`.

        Kept blocks are those of the same geometry, ``layout`` and fingerprints of `keep`; anything else begins with empty ones.

        Args:
            block_bytes: of one block, all layers, K and V; or of one piece of state.
            blocks: how many; None: what fits the worker's ``kv.size``.
            block_tokens: tokens a block; None: the worker's ``kv.block_tokens``.
            reserve: blocks kept for a successor, which may write no others until the dead engine's GPU work has ended; None: the worker's
                ``kv.reserve``, else 2 for each of 8 requests, at most half of all blocks.
            layout: what else the meaning of the bytes depends on, such as the version of your format.

        Raises:
            KeeperError, OutOfMemory: the keeper refuses, is gone, or has no room.
            WorkerError: not one block fits, or there are blocks already.
        """
        if self._blocks is not None:
            raise WorkerError("the blocks of this worker are there already", "call kv() once", fatal=True)
        geometry = self._geometry(block_bytes, blocks, block_tokens, reserve, layout)
        life = self._life
        life.hold(geometry, Fingerprint(self._fingerprint) if self._fingerprint else None)
        self._blocks = Blocks(geometry, life.reserve(), self.device)
        return self._blocks

    def _geometry(self, block_bytes: int, blocks: int | None, block_tokens: int | None, reserve: int | None, layout: str) -> KvGeometry:
        given = self.spec.kv if self.spec is not None else None
        tokens = block_tokens or (given.block_tokens if given is not None else 16)
        if blocks is None:
            blocks = given.size // block_bytes if given is not None and given.size else BLOCKS
        if blocks < 1:
            raise WorkerError(f"not one block of {block_bytes} bytes fits", "make kv.size larger", fatal=True)
        if reserve is None:
            reserve = given.reserve if given is not None and given.reserve is not None else 2 * MAX_BATCH
        return KvGeometry(
            blocks=blocks,
            block_tokens=tokens,
            block_bytes=block_bytes,
            reserve=min(reserve, blocks // 2),
            fingerprint=(("layout", loop_tensors.LAYOUT), ("loop", layout)),
        )

    # --- taking over -----------------------------------------------------------------------------------------------------------

    def park(self, *, max_context: int | None = None, serves: bool = True) -> Takeover:
        """Wait, warm and following what the active engine publishes, until this engine is the active one. The first one waits too.

        Without a supervisor this returns at once.

        Args:
            max_context: tokens of a request, prompt and output together; at most, and None: what the blocks hold.
            serves: False: this loop takes no requests, it only beats; clients are told so.

        Raises:
            LedgerLost: another engine was faster.
            WorkerError: the blocks cannot be mapped.
        """
        blocks = self._blocks or self.kv(block_bytes=4096, blocks=1, block_tokens=1)  # epochs have their owner in a ledger
        room = (blocks.blocks - blocks.reserve) * blocks.block_tokens
        life, front = self._life, Front(blocks, min(max_context or room, room), self._inbox)
        self._inbox.refuses = not serves
        life.warmed()
        self._interruptible.close()
        self._front = front
        life.park(front)
        writer = life.wait_for_promotion()
        pool = blocks.pool
        return Takeover(epoch=writer.epoch, blocks_kept=pool.kept, blocks_dropped=pool.dropped, fenced=pool.fenced)

    # --- serving ---------------------------------------------------------------------------------------------------------------

    def steps(
        self,
        tokenizer: Tokenizer,
        *,
        vocabulary: int,
        eos: Collection[int] = (),
        chat: Chat | None = None,
        max_batch: int = MAX_BATCH,
        max_batch_tokens: int = MAX_BATCH_TOKENS,
    ) -> Iterator[Batch]:
        """Serve the gateway's clients: yield one `Batch` a step, for ever. Each is computed and finished before the next is asked for.

        Everything around it is done in between: prefixes that are kept are found, blocks are given and published, limits, stop strings
        and replays are seen to, all text of a step goes out in one frame, orders are obeyed, progress is reported.

        Args:
            tokenizer: text to ids and back.
            vocabulary: ids below this are valid; requests with others are refused.
            eos: ids that end an answer.
            chat: makes prompts of messages; None: /v1/chat/completions is refused.
            max_batch: requests that run at once.
            max_batch_tokens: tokens of a step; long prompts come in pieces.

        Raises:
            LedgerLost: another engine owns the ledger.
            WorkerError: not parked before, or a batch was not finished.
        """
        front, life = self._parked(), self._life
        serving = Serving(
            front.blocks,
            tokenizer,
            Limits(max_batch, max_batch_tokens),
            vocabulary=vocabulary,
            eos=frozenset(eos),
            chat=chat,
            max_context=front.max_context,
        )
        front.receiver = serving
        while True:
            life.obey()
            if not life.arrivals():
                continue
            life.stepping(serving.phase, serving.upcoming)
            batch = serving.next()
            if batch is not None:
                yield batch
                if not batch.finished:
                    raise WorkerError("a step was not finished", "call batch.finish(tokens) before the next step", fatal=True)
            events = serving.events()
            life.stepped(events, serving.phase, progressed=batch is not None or bool(events))
            if batch is None and not events:
                life.stalled()

    def receive(self) -> list[Submit | Cancel]:
        """For a loop with a scheduler of its own: return what clients have asked for since the last call, as in `shadowsup.wire.link`.

        Waits while there is nothing and the last `beat` had nothing in flight. Every call is followed by one `beat`, which carries the
        answers. A request with `Submit.replay` goes on where its former engine was; its blocks are found by `Blocks.pool`.

        Raises:
            LedgerLost: another engine owns the ledger.
            WorkerError: not parked before.
        """
        front, life = self._parked(), self._life
        front.receiver = inbox = self._inbox
        while True:
            life.obey()
            if life.arrivals():
                life.stepping(Phase.DECODE, UNKNOWN_TOKENS)
                return inbox.take()

    def beat(self, events: Sequence[Event] = (), *, inflight: int = 1, phase: Phase = Phase.DECODE) -> None:
        """A step has ended: send its ``events`` in one frame, report progress, obey orders. Not within `steps`, which does it itself.

        Args:
            inflight: requests, or other work, in hand. Above 0 the next beat is expected within ``health.hang.ceiling``.

        Raises:
            LedgerLost: another engine owns the ledger; nothing was sent.
            WorkerError: not parked before.
        """
        front, life, inbox = self._parked(), self._life, self._inbox
        front.receiver = inbox
        # Asked to drain, a loop without requests has nothing to finish.
        inbox.inflight = 0 if inbox.refuses and life.draining else inflight
        life.stepped([*inbox.refusals(), *events], phase, next_tokens=UNKNOWN_TOKENS)
        life.obey()
        if inbox.refuses:
            life.arrivals(0.0)
            life.stepping(phase, UNKNOWN_TOKENS)

    def _parked(self) -> Front:
        if self._front is None or self._front.blocks.counts() is None:
            raise WorkerError("this engine is not the active one", "call park() first", fatal=True)
        return self._front
