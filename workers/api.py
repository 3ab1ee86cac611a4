"""What an engine adapter is to the runtime that drives it (`shadowsup.workers.runtime`).

The runtime owns the process: keeper connection, arena, ledger, heartbeats, orders, gateway link. The adapter owns the model: it loads,
warms up, schedules and steps. All methods are called on the step thread (the process's main thread), one at a time.

Life: ``load`` → ``geometry`` → ``warm`` (over scratch) → parked, ``follow`` now and then → ``promote`` → ``step`` … → ``close``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from shadowsup.wire.engine import EngineSpec, KvCounts, Phase
from shadowsup.wire.link import Accepted, Rejected, Submit, Token

if TYPE_CHECKING:
    from shadowsup.memkeeper.ledger import LedgerReader, LedgerWriter
    from shadowsup.workers.arena import KvArena
    from shadowsup.workers.weights import WeightStore


@dataclass(frozen=True, kw_only=True)
class KvGeometry:
    """Shape of the KV arena. ``block_bytes``: all layers, K and V, of one block. ``fingerprint``: pairs beyond the weights' own."""

    blocks: int
    block_tokens: int
    block_bytes: int
    reserve: int
    fingerprint: tuple[tuple[str, str], ...]
    parts: tuple[tuple[str, int], ...] = ()
    """Device (UUID or ``host``) and bytes of each rank's part of every block, for engines whose ranks have arenas of their own."""

    @property
    def size(self) -> int:
        """Bytes of the whole arena."""
        return self.blocks * self.block_bytes


@dataclass(kw_only=True)
class StepResult:
    """``events`` go to the gateway in one frame. ``progressed``: False when there was nothing to do (the runtime then waits)."""

    events: list[Accepted | Token | Rejected] = field(default_factory=list)
    progressed: bool = False


class Served(Protocol):
    """An engine from the time it is parked."""

    @property
    def max_context(self) -> int:
        """Tokens, prompt and output together."""

    @property
    def about(self) -> str:
        """For people, in ``status``: which of several ways it computes in, if there are several."""

    def follow(self, ledger: LedgerReader) -> None:
        """Parked: bring the copy of the index up to date with the owner's (cheap; called every few 10 ms).

        Another ``ledger`` than the last time (compare by identity) belongs to other blocks: what was known of the old ones is void.
        """

    def promote(self, ledger: LedgerWriter, *, fenced: bool) -> tuple[int, int]:
        """The arena now holds the worker's real blocks and ``ledger`` is ours. Restore the prefix index.

        Until ``fenced``, only reserve blocks may be written and nothing may be evicted.

        Returns:
            (blocks kept, blocks dropped).
        """

    def fence(self) -> int:
        """No former engine can write any more. Returns the number of reserve blocks now set aside."""

    def submit(self, request: Submit) -> None:
        """Queue a request. Errors come back as `Rejected` events of the next step, never as exceptions."""

    def cancel(self, rid: str) -> None:
        """Forget a request at the next step boundary; unknown ids are ignored."""

    def foresee(self, rid: str, prompt_ids: tuple[int, ...]) -> None:
        """Parked: a request of this prompt may be replayed here. What can be done beforehand may be done in `follow`.

        The request comes with ``replay.staged`` = ``rid``, and with its ids all the same.
        """

    def forget(self, rid: str) -> None:
        """What was foreseen will not come."""

    @property
    def inflight(self) -> int:
        """Requests that hold blocks."""

    @property
    def queued(self) -> int:
        """Requests that wait, and answers that the next step will give: with both 0 the runtime calls no `step`."""

    def kv_counts(self) -> KvCounts | None: ...

    # May have, too:
    #   upcoming: int        tokens that the next step computes at most; how long it may take is judged by it
    #   canary(request)      a request of the runtime's own, in place of `submit`
    #   account()            what it does and what memory is for what, for the report of a failure: a dict of JSON


class Engine(Served, Protocol):
    """One engine adapter."""

    def load(self, spec: EngineSpec, store: WeightStore, progress: Callable[[str], None]) -> None:
        """Bring the weights up: publish them to ``store`` or map the kept ones.

        Raises:
            WorkerError: no such model, unsupported architecture, does not fit; ``fatal`` set when a retry cannot help.
        """

    def geometry(self) -> KvGeometry: ...

    def warm(self, arena: KvArena) -> None:
        """Run what the first request would pay for. The arena is backed by scratch: any block may be written, nothing is kept.

        Nor is anything distinct: one piece of scratch lies behind many blocks. ``arena.size`` is `KvGeometry.size` rounded up to what the
        device maps. Addresses stay for the life of the process.
        """

    def step(self) -> StepResult:
        """Run one step for all scheduled requests and publish the blocks it completed.

        Raises:
            LedgerLost: another engine owns the ledger (the runtime exits at once).
        """

    @property
    def phase(self) -> Phase:
        """What the next step will do, as far as is known between steps; beats carry it while that step runs."""

    def close(self) -> None: ...


AdapterFactory = Callable[[], Engine]
